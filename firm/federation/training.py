"""Local training: a client's part of a round, as tasks that travel by name.

"local_training" is that of Algorithm 1 of FIRM (Nourzad et al.) and, with fixed weights, that of
every algorithm that decides on the server; "objective_training" that of FMGDA and FSMGDA (Yang et
al. 2023, arXiv:2310.09866).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from firm.federation.aggregation import flat
from firm.federation.client import Client, Gradients, State, Update
from firm.federation.diagnostics import beta_effect, cosines, gradient_norms
from firm.federation.privacy import PrivacyConfig, errors_kept_back, protected
from firm.federation.sharing import (
    drawn_batches,
    served_objectives,
    shared_columns,
    start_losses,
)
from firm.federation.tasks import task
from firm.gradients import combine, gram_matrix
from firm.solvers import firm_weights, fixed_weights

WEIGHTINGS = {"firm": firm_weights, "fixed": fixed_weights}
"""Functions from a Gram matrix [M, M] and options to weights [M], by the name that travels."""


@task("local_training")
def local_training(client: Client, payload: State) -> Update:
    """Returns a client's update after K local steps from the server's adapter.

    In each local step the client draws a batch and passes over its minibatches; in each pass the
    gradients of all objectives are combined by weights that their own Gram matrix gives. Fixed
    weights need no Gram matrix, and a client with ``weighted_gradients`` no Jacobian either. A
    client that serves some of the objectives finds the weights of these alone.

    Args:
        client: Who trains.
        payload: "adapter", "num_local_steps" (K), "weighting" (a name in ``WEIGHTINGS``),
            "weighting_options", and "solve_per": "minibatch", or "batch" for weights that come
            from the whole batch's gradients once and hold for all its minibatches; "share_gram":
            whether the mean of the solves' Gram matrices is sent along, as "gram". Optional:
            "options_by_client" (the weighting's options of clients that have their own),
            "proximal" (μ, for a local loss with + μ/2 ‖θ - θ_t‖²), "share_losses" (whether the
            losses at θ_t are sent along, as "start_losses"), "skipped_batches" (how many are drawn
            and left before the first), "factors" (what each objective's fixed weight is
            multiplied by, shape [M]) and "privacy" (the fields of a ``PrivacyConfig``; what it
            lets out, and no more, is returned).
    """
    privacy = PrivacyConfig(**payload["privacy"]) if payload.get("privacy") else None
    with errors_kept_back(privacy):
        update = _trained(client, payload)
    if privacy is None:
        return update
    return protected(update, payload["adapter"], privacy, payload["round"])


def _trained(client: Client, payload: State) -> Update:
    client.load(payload["adapter"])
    shared = start_losses(client) if payload.get("share_losses") else {}
    weighted = getattr(client, "weighted_gradients", None)
    factors = payload.get("factors")
    is_direct = payload["weighting"] == "fixed" and not payload["share_gram"]
    if factors is not None or (is_direct and weighted is not None):
        metrics = _train_on_sum(client, payload)
    else:
        metrics = _train_on_solves(client, payload)
    return Update(client.name, client.adapter(), client.num_examples, {**metrics, **shared})


@task("objective_training")
def objective_training(client: Client, payload: State) -> State:
    """Returns one update per objective that the client serves, each trained from θ_t alone.

    All start from the same state of the client, so that they see the same batches: the sample
    ξ_i^{t,k} of FSMGDA has no index of the objective. What the client carries on from there (an
    optimizer's moments, where it keeps some) is that of the last one.

    Args:
        client: Who trains; serves the objectives in its attribute ``served``, or all.
        payload: "adapter" and "num_local_steps" (K).

    Returns:
        "updates": adapter by objective; "num_examples"; "num_shared": how many parameters, the
        first ones, all objectives share; "metrics", those of each training under "by_objective".

    Raises:
        ValueError: When the client serves no objective.
    """
    start = client.state()
    served = served_objectives(client)
    updates, metrics = {}, {}
    for objective in served:
        name = client.objectives[objective]
        client.restore(start)
        client.load(payload["adapter"])
        weights = [float(other == objective) for other in range(len(client.objectives))]
        metrics[name] = _train_on_sum(
            client, {**payload, "weighting_options": {"weights": weights}}
        )
        updates[name] = client.adapter()
    return {
        "updates": updates,
        "num_examples": client.num_examples,
        "num_shared": shared_columns(client, payload["adapter"]).stop,
        "metrics": {
            **_own_losses(metrics),
            "by_objective": metrics,
            "num_steps": sum(each["num_steps"] for each in metrics.values()),
        },
    }


def _train_on_solves(client: Client, payload: State) -> dict[str, Any]:
    """Returns the metrics of K steps whose weights come from the gradients themselves."""
    options = payload.get("options_by_client", {}).get(client.name, payload["weighting_options"])
    find = partial(WEIGHTINGS[payload["weighting"]], **options)
    served = list(served_objectives(client))
    if payload["weighting"] == "firm" and len(served) < len(client.objectives):
        find = partial(_served_weights, served, options)
    num_steps, solves = 0, []
    weights = torch.empty(0)
    for batch in drawn_batches(client, payload, count=payload["num_local_steps"]):
        num_steps += 1
        if payload["solve_per"] == "batch":
            weights, solve = _solve(client.gradients(batch.whole).jacobian, find)
            solves.append(solve)
        for minibatch in batch.minibatches():
            gradients = client.gradients(minibatch)
            if payload["solve_per"] == "minibatch":
                weights, solve = _solve(gradients.jacobian, find)
                solves.append(solve)
            client.step(_pulled_back(gradients, client, payload), weights)
    metrics = client.metrics()
    seconds = {stage: sum(solve.pop(stage) for solve in solves) for stage in ("gram", "solve")}
    gram = torch.stack([solve.pop("gram_matrix") for solve in solves]).mean(dim=0)
    return {
        **metrics,
        **({"gram": gram.tolist()} if payload["share_gram"] else {}),
        **{key: [solve[key] for solve in solves] for key in solves[0]},
        "num_steps": num_steps,
        "seconds": {**metrics.get("seconds", {}), **seconds},
    }


def _train_on_sum(client: Client, payload: State) -> dict[str, Any]:
    """Returns the metrics of K steps on a weighted sum of the objectives that is known before."""
    count = len(client.objectives)
    weights = fixed_weights(
        torch.eye(count, dtype=torch.float64), weights=payload["weighting_options"]["weights"]
    )
    factors = torch.tensor(payload.get("factors") or [1.0] * count, dtype=torch.float64)
    sum_gradients = getattr(client, "weighted_gradients", None) or _combined(client)
    num_steps, num_passes = 0, 0
    for batch in drawn_batches(client, payload, count=payload["num_local_steps"]):
        num_steps += 1
        for minibatch in batch.minibatches():
            num_passes += 1
            gradients = sum_gradients(minibatch, weights * factors)
            client.step(_pulled_back(gradients, client, payload), torch.ones(1))
    return {
        **client.metrics(),
        "weights": [weights.tolist()] * num_passes,
        "num_steps": num_steps,
    }


def _combined(client: Client) -> Callable[[Any, torch.Tensor], Gradients]:
    """Returns what ``weighted_gradients`` would be, for a client that has none."""

    def weighted_gradients(minibatch: Any, weights: torch.Tensor) -> Gradients:
        gradients = client.gradients(minibatch)
        return replace(gradients, jacobian=combine(gradients.jacobian, weights)[None])

    return weighted_gradients


def _pulled_back(gradients: Gradients, client: Client, payload: State) -> Gradients:
    """Returns the gradients with the proximal term's, μ(θ - θ_t), added to every row."""
    strength = payload.get("proximal", 0.0)
    if strength == 0:
        return gradients
    pull = strength * (flat(client.adapter()) - flat(payload["adapter"]))
    rows = gradients.jacobian
    return replace(gradients, jacobian=rows + pull.to(rows))


def _own_losses(metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each objective's losses in its own training, where the client tells losses by objective."""
    losses = {
        name: each["losses"][name]
        for name, each in metrics.items()
        if isinstance(each.get("losses"), dict)
    }
    return {"losses": losses} if losses else {}


def _served_weights(served: list[int], options: State, gram: torch.Tensor) -> torch.Tensor:
    """FIRM's weights [M] of the served objectives' own problem, 0 for the others.

    A zero gradient is the shortest of all: left in, its objective would get all the weight.
    """
    own = dict(options)
    if own.get("preference") is not None:
        own["preference"] = [own["preference"][j] for j in served]
    if own.get("constraints"):
        own["constraints"] = [[*(row[j] for j in served), row[-1]] for row in own["constraints"]]
    weights = torch.zeros(len(gram), dtype=gram.dtype)
    weights[served] = firm_weights(gram[served][:, served], **own)
    return weights


def _solve(
    jacobian: torch.Tensor, find: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the weights [M] of a Jacobian [M, d], and what is worth keeping of the solve."""
    start = time.perf_counter()
    gram = gram_matrix(jacobian).cpu()
    gram_end = time.perf_counter()
    weights = find(gram)
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
