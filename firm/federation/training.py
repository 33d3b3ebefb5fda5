"""Local training: a client's part of a round of Algorithm 1 of FIRM (Nourzad et al.)."""

import time
from typing import Any

import torch

from firm.federation.client import Client, State, Update
from firm.federation.diagnostics import beta_effect, cosines, gradient_norms
from firm.federation.tasks import task
from firm.gradients import gram_matrix
from firm.solvers import firm_weights, fixed_weights

WEIGHTINGS = {"firm": firm_weights, "fixed": fixed_weights}
"""Functions from a Gram matrix [M, M] and options to weights [M], by the name that travels."""


@task("local_training")
def local_training(client: Client, payload: State) -> Update:
    """Returns a client's update after K local steps from the server's adapter.

    In each local step the client draws a batch and passes over its minibatches; in each pass the
    gradients of all objectives are combined by weights that their own Gram matrix gives.

    Args:
        client: Who trains.
        payload: "adapter", "num_local_steps" (K), "weighting" (a name in ``WEIGHTINGS``),
            "weighting_options", and "solve_per": "minibatch", or "batch" for weights that come
            from the whole batch's gradients once and hold for all its minibatches; "share_gram":
            whether the mean of the solves' Gram matrices is sent along, as "gram".
    """
    client.load(payload["adapter"])
    num_steps, solves = 0, []
    weights = torch.empty(0)
    for batch in client.batches(payload["num_local_steps"]):
        num_steps += 1
        if payload["solve_per"] == "batch":
            weights, solve = _solve(client.gradients(batch.whole).jacobian, payload)
            solves.append(solve)
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            if payload["solve_per"] == "minibatch":
                weights, solve = _solve(gradients.jacobian, payload)
                solves.append(solve)
            client.step(gradients, weights)
    metrics = client.metrics()
    seconds = {stage: sum(solve.pop(stage) for solve in solves) for stage in ("gram", "solve")}
    gram = torch.stack([solve.pop("gram_matrix") for solve in solves]).mean(dim=0)
    metrics = {
        **metrics,
        **({"gram": gram.tolist()} if payload["share_gram"] else {}),
        **{key: [solve[key] for solve in solves] for key in solves[0]},
        "num_steps": num_steps,
        "seconds": {**metrics.get("seconds", {}), **seconds},
    }
    return Update(client.name, client.adapter(), client.num_examples, metrics)


def _solve(jacobian: torch.Tensor, payload: State) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the weights [M] of a Jacobian [M, d], and what is worth keeping of the solve."""
    start = time.perf_counter()
    gram = gram_matrix(jacobian).cpu()
    gram_end = time.perf_counter()
    weights = WEIGHTINGS[payload["weighting"]](gram, **payload["weighting_options"])
    solve_end = time.perf_counter()
    return weights, {
        "weights": weights.tolist(),
        "gradient_norms": gradient_norms(gram).tolist(),
        "cosines": cosines(gram).tolist(),
        "beta_effect": beta_effect(weights, firm_weights(gram, beta=0.0)),
        "gram_matrix": gram,
        "gram": gram_end - start,
        "solve": solve_end - gram_end,
    }
