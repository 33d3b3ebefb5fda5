"""Local training: a client's part of a round, as a task that is requested by name.

The task "local_training" implements Algorithm 1 of FIRM (Nourzad et al.) and, with fixed weights,
every algorithm whose server chooses the weights.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Interval, Len
from pydantic import PlainValidator, ValidationInfo

from firm.base.quantities import Quantity, register
from firm.base.registry import OneOf
from firm.base.schema import Finite, Named, NonNegative, PerObjective
from firm.federation.aggregation import flat
from firm.federation.client import Batch, Client, Gradients
from firm.federation.diagnostics import cosines, gradient_norms, served_beta_effect, step_parts
from firm.federation.messages import (
    MAX_CLIENTS,
    Answer,
    Count,
    OptionsByKey,
    Request,
    Sizes,
    Steps,
    Update,
)
from firm.federation.schema import (
    Invalid,
    Text,
    context,
    read_fields,
)
from firm.federation.tasks import task
from firm.gradients.jacobian import gram_matrix
from firm.solvers.fixed import fixed_weights
from firm.solvers.weightings import OPTION_TYPES, STATEFUL, WEIGHTINGS

SkippedBatches = Annotated[int, Interval(ge=0, le=100)]
RoundSeed = Annotated[int, Interval(ge=0, le=2**64)]
MAX_STAGES = 50
"""Maximum number of stages that a client times."""


def _options(value: Any, info: ValidationInfo) -> dict[str, Any]:
    return read_fields(OPTION_TYPES, value, context(info), path="")


WeightingOptions = Annotated[dict[str, Any], PlainValidator(_options)]


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Request):
    """Requests an update after K local steps, or E local epochs, from the server's adapter."""

    task: ClassVar[str] = "local_training"
    answer: ClassVar[type[Answer]] = Update

    num_local_steps: Steps
    """Local steps K."""
    num_local_epochs: Steps | None = None
    """Local epochs E, instead of K."""
    weighting: Annotated[str, OneOf(WEIGHTINGS)]
    """Name of the function in ``WEIGHTINGS`` that computes the weights."""
    weighting_options: WeightingOptions = field(default_factory=dict)
    """Keyword arguments of the weighting."""
    options_by_client: Annotated[dict[Text, WeightingOptions], Len(0, MAX_CLIENTS)] = field(
        default_factory=dict
    )
    """Keyword arguments by client, for clients that differ."""
    solve_per: Literal["minibatch", "batch"] = "minibatch"
    """Scope of a solve for weights: each minibatch, or once per batch from its whole
    gradients."""
    share_gram: bool = False
    """Send the Gram matrix of the first solve, at θ_t, as "gram"."""
    share_losses: bool = False
    """Send the losses at θ_t, as "start_losses"."""
    proximal: NonNegative = 0.0
    """Strength μ of the proximal term μ/2 ‖θ - θ_t‖² in the local loss."""
    skipped_batches: SkippedBatches = 0
    """Batches to draw and skip first."""
    factors: PerObjective[NonNegative] | None = None
    """Factor of each objective's fixed weight, shape [M]."""
    seed: RoundSeed = 0
    """Seed of the round, for options that draw random numbers at the clients."""
    options: OptionsByKey = field(default_factory=dict)
    """Options that clients apply, by key; the first is the innermost wrapper of the training."""

    @property
    def num_trainings(self) -> int:
        """Returns 1."""
        return 1

    @property
    def takes_whole_batches(self) -> bool:
        """Returns whether the weights are solved once per batch."""
        return self.weighting != "fixed" and self.solve_per == "batch"

    def num_solves(self, num_passes: int) -> int:
        """Returns how often a client solves for weights; 0 if they are fixed."""
        return 0 if self.weighting == "fixed" else self._num_weights(num_passes)

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the size of the update's parameters in bytes."""
        return next(iter(self._sizes(num_parameters)), adapter_bytes)

    def weighting_options_of(self, client: str) -> dict[str, Any]:
        """Returns the keyword arguments of a client's weighting."""
        return self.options_by_client.get(client, self.weighting_options)

    def is_uniform_at_large_beta(self, client: str) -> bool:
        """Returns whether β moves a client's weights towards uniform ones.

        A preference takes β's place, and a norm power or constraints lead elsewhere.
        """
        options = self.weighting_options_of(client)
        leads_elsewhere = ("preference", "norm_power", "constraints")
        return self.weighting == "firm" and not any(map(options.get, leads_elsewhere))

    def _num_weights(self, num_passes: int) -> int:
        return self.num_local_steps if self.solve_per == "batch" else num_passes

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an update with the metrics of every solve; see ``Request``."""
        count, digits = len(self.objectives), 1 / 3  # 1/3 has 18 digits in JSON, as most metrics do
        solve = {
            "weights": [digits] * count,
            "gradient_norms": [digits] * count,
            "cosines": [[digits] * count] * count,
            **({"beta_effect": digits} if self.is_uniform_at_large_beta(client) else {}),
        }
        num_weights = self._num_weights(sizes.num_passes)
        metrics = {
            **{name: [value] * num_weights for name, value in solve.items()},
            **sizes.metrics,
            **({"gram": [[digits] * count] * count} if self.share_gram else {}),
        }
        # an update in an option's sent form has no parameter names
        return Update(client, {} if self._sizes(1) else self.adapter, 1000, metrics)

    def _sizes(self, num_parameters: int) -> list[int]:
        """Returns the size of an update's parameters in bytes under each option that changes it."""
        sizes = (option.num_bytes(num_parameters) for option in self.options.values())
        return [size for size in sizes if size is not None]

    def of(self, *clients: str) -> "LocalTraining":
        """Returns the part of the request that concerns some clients."""
        options = self.options_by_client
        own = {name: options[name] for name in clients if name in options}
        parts = {key: option.of(clients) for key, option in self.options.items()}
        return replace(super().of(*clients), options_by_client=own, options=parts)

    def trained(self, client: str) -> torch.Tensor | None:
        """Returns a mask of the parameters that a client trains, bool [d]; None for all."""
        masks = (option.trained(self.adapter, client) for option in self.options.values())
        return next((mask for mask in masks if mask is not None), None)

    def received(self, content: Any, client: str) -> Any:
        """Returns an update with the full adapter reconstructed from its sent form."""
        if not isinstance(content, Update):
            return content
        for option in reversed(self.options.values()):
            content = option.received(content, self)
        if not isinstance(content.adapter, dict):
            form = type(content.adapter).__name__
            raise Invalid(f"its update must be an adapter, got a {form}")
        return content

    def to_network(self, *clients: str) -> "LocalTraining":
        """Returns the request without settings that each site decides for itself."""
        own = self.of(*clients)
        options = {key: option.to_network() for key, option in own.options.items()}
        return replace(own, options=options)


register(
    Quantity("num_steps", type=Count),
    Quantity("seconds", type=Annotated[Named[NonNegative], Len(0, MAX_STAGES)]),
    Quantity("start_losses", type=PerObjective[Finite]),
)


@task(LocalTraining)
def local_training(client: Client, request: LocalTraining) -> Update:
    """Returns a client's update after K local steps, or E epochs, from the server's adapter.

    In each local step the client draws a batch and iterates over its minibatches. For each
    minibatch it combines the gradients of all objectives with weights computed from their Gram
    matrix. Fixed weights need no Gram matrix, and a client with the capability
    "weighted_gradients" needs no Jacobian either. A client that serves only some of the objectives
    computes weights for those only.

    The request's options wrap this function, the first option innermost.
    """
    is_direct = request.weighting == "fixed" and not request.share_gram
    is_sum = request.factors is not None or (
        is_direct and "weighted_gradients" in client.capabilities
    )
    train = _train_on_sum if is_sum else _train_on_solves
    for option in request.options.values():
        train = option.wrap(train)
    return train(client, request)


def _train_on_solves(client: Client, request: LocalTraining) -> Update:
    """Takes K steps with weights computed from the gradients."""
    shared = _start(client, request)
    options = request.weighting_options_of(client.name)
    find, served = partial(WEIGHTINGS[request.weighting], **options), served_objectives(client)
    if request.weighting in STATEFUL:
        find = partial(find, memory=client.carried)
    gradients_of = client.gradients
    if client.is_conditioned and "preference" in options:  # a separate problem for each preference
        gradients_of = client.gradients_by_preference
    num_steps, solves = 0, []
    for batch in _batches(client, request):
        num_steps += 1
        if request.solve_per == "batch":
            solves.append(_solve(client.gradients(batch.whole), find, served))
        for minibatch in batch.minibatches():
            if request.solve_per == "batch":
                gradients = client.weighted_gradients(minibatch, solves[-1].weights)
                factors = torch.ones(1)
            else:
                gradients = gradients_of(minibatch)
                solves.append(_solve(gradients, find, served))
                factors = solves[-1].weights
            client.step(_with_proximal_term(gradients, client, request), factors)
            del gradients  # or the next minibatch needs memory for a second Jacobian
    metrics = client.metrics()
    grams = torch.stack([solve.gram for solve in solves])
    weights = torch.stack([solve.mean for solve in solves])
    if request.weighting != "firm":
        weights = _as_shares(weights)
    metrics = {
        **metrics,
        **({"gram": grams[0].tolist()} if request.share_gram else {}),
        "weights": weights.tolist(),
        "gradient_norms": gradient_norms(grams).tolist(),
        "cosines": cosines(grams).tolist(),
        "step_share": _step_share(
            client, request.objectives, torch.stack([solve.parts for solve in solves]).sum(0)
        ),
        "num_steps": num_steps,
        "seconds": {
            **metrics.get("seconds", {}),
            "gram": sum(solve.gram_seconds for solve in solves),
            "solve": sum(solve.solve_seconds for solve in solves),
        },
        **shared,
    }
    if request.is_uniform_at_large_beta(client.name) and not client.is_conditioned:
        effects = [
            served_beta_effect(solve.mean, solve.gram, solve.served)
            for solve in solves
            if len(solve.served) > 1
        ]
        metrics |= {"beta_effect": effects} if effects else {}
    return Update(client.name, client.adapter(), client.num_examples, metrics)


def _train_on_sum(client: Client, request: LocalTraining) -> Update:
    """Takes K steps on a weighted sum of the objectives, whose weights are known."""
    shared = _start(client, request)
    metrics = {**train_on_sum(client, request), **shared}
    return Update(client.name, client.adapter(), client.num_examples, metrics)


def _start(client: Client, request: LocalTraining) -> dict[str, Any]:
    """Loads θ_t, and returns the metrics there that the request asks for."""
    client.load(request.adapter, request.round)
    return {"start_losses": start_losses(client)} if request.share_losses else {}


def train_on_sum(client: Client, request: LocalTraining) -> dict[str, Any]:
    """Takes K steps on a weighted sum of the objectives, and returns their metrics."""
    count = len(client.objectives)
    weights = fixed_weights(
        torch.eye(count, dtype=torch.float64), weights=request.weighting_options["weights"]
    )
    factors = torch.tensor(request.factors or [1.0] * count, dtype=torch.float64)
    num_steps, num_passes = 0, 0
    if request.skipped_batches == 0:
        num_steps = num_passes = client.weighted_steps(
            _num_steps(client, request), weights * factors, proximal=request.proximal
        )
    for batch in _batches(client, request) if num_steps == 0 else ():
        num_steps += 1
        for minibatch in batch.minibatches():
            num_passes += 1
            gradients = client.weighted_gradients(minibatch, weights * factors)
            client.step(_with_proximal_term(gradients, client, request), torch.ones(1))
            del gradients  # as in `_train_on_solves`
    return {**client.metrics(), "weights": [weights.tolist()] * num_passes, "num_steps": num_steps}


def _batches(client: Client, request: LocalTraining) -> Iterator[Batch]:
    return drawn_batches(client, _num_steps(client, request), skipped=request.skipped_batches)


def _num_steps(client: Client, request: LocalTraining) -> int:
    """Returns K, or the number of steps in E epochs."""
    if request.num_local_epochs is None:
        return request.num_local_steps
    return request.num_local_epochs * client.batches_per_epoch


def _with_proximal_term(gradients: Gradients, client: Client, request: LocalTraining) -> Gradients:
    """Returns the gradients with that of the proximal term, μ(θ - θ_t), added to every row."""
    if request.proximal == 0:
        return gradients
    pull = request.proximal * (flat(client.adapter()) - flat(request.adapter))
    rows = gradients.jacobian
    return replace(gradients, jacobian=rows + pull.to(rows))


class _Solve(NamedTuple):
    """Result of a solve for weights."""

    weights: torch.Tensor
    """Weights of the Jacobian's rows, [M] or [K M]."""
    mean: torch.Tensor
    """Mean weights of the objectives over preferences, [M]."""
    gram: torch.Tensor
    """Gram matrix of the objectives' total gradients, [M, M]."""
    parts: torch.Tensor
    """Each objective's part of the step's squared length, [M]."""
    served: Sequence[int]
    """Indices of the weighted objectives; with preferences, of those of the client."""
    gram_seconds: float
    solve_seconds: float


def _solve(
    gradients: Gradients, find: Callable[..., torch.Tensor], served: Sequence[int]
) -> _Solve:
    """Returns the weights of a Jacobian's rows.

    If the gradients are separated by preference, each preference has a separate problem. A problem
    covers the objectives that the gradients serve, by default ``served``; if there are none, all
    weights are 0.
    """
    start = time.perf_counter()
    gram = gram_matrix(gradients.jacobian).cpu()
    gram_end = time.perf_counter()
    if gradients.preferences is None:
        (served,) = gradients.served or [served]
        mean = weights = find(gram, served=served) if served else gram.new_zeros(len(gram))
    else:
        count, size = gradients.preferences.shape
        blocks = gram.view(count, size, count, size)
        rows = [
            find(blocks[k, :, k], served=own, preference=preference)
            if own
            else gram.new_zeros(size)
            for k, (preference, own) in enumerate(
                zip(
                    gradients.preferences.tolist(),
                    gradients.served or [served] * count,
                    strict=True,
                )
            )
        ]
        weights, mean = torch.cat(rows), torch.stack(rows).mean(0)
    solve_seconds = time.perf_counter() - gram_end
    parts = step_parts(gram, weights).view(-1, len(mean)).sum(0)  # over preferences, [M]
    total = gram.view(-1, len(mean), len(gram) // len(mean), len(mean)).sum((0, 2))  # [M, M]
    return _Solve(weights, mean, total, parts, served, gram_end - start, solve_seconds)


def _step_share(
    client: Client, objectives: Sequence[str], parts: torch.Tensor
) -> dict[str, float | None]:
    """Returns each served objective's share of the squared length of all steps, with sum 1.

    None if all steps have length 0, and for objectives that the client does not serve.
    """
    total = parts.sum()
    return {
        name: (parts[j] / total).item() if j in client.served and total > 0 else None
        for j, name in enumerate(objectives)
    }


def _as_shares(weights: torch.Tensor) -> torch.Tensor:
    """Returns weights [S, M] of other methods as they are logged: absolute, with sum 1 or 0."""
    sizes = weights.abs()
    total = sizes.sum(1, keepdim=True)
    return sizes / total.where(total > 0, 1.0)


def served_objectives(client: Client) -> tuple[int, ...]:
    """Returns the indices of the objectives that a client serves.

    Raises:
        ValueError: When there are none, or an index is out of range.
    """
    count = len(client.objectives)
    served = client.served
    if not served or not set(served) <= set(range(count)):
        raise ValueError(
            f"{client.name} must serve some of the objectives 0 to {count - 1}, got {served}."
        )
    return served


def start_losses(client: Client) -> list[float]:
    """Returns the client's losses at the loaded adapter, shape [M]; 0 for those not served."""
    served = served_objectives(client)
    return [float(loss) if j in served else 0.0 for j, loss in enumerate(client.losses())]


def drawn_batches(client: Client, count: int, *, skipped: int) -> Iterator[Batch]:
    """Returns ``count`` batches of a client, after drawing and discarding ``skipped`` batches."""
    return islice(client.batches(skipped + count), skipped, None)
