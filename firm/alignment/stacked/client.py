"""A client's policy and sampler on a stacked model, with passes batched over all clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch

from firm.alignment.estimators.estimator import Policy
from firm.alignment.rollout import Sampler
from firm.alignment.rollout_engines import BackgroundEngine, SampledTokens, SampleRequest
from firm.alignment.sequences import Expand, Queries, Sequences, TokenScores
from firm.alignment.stacked.model import Losses, StackedModel, Weighted
from firm.alignment.stacked.passes import ClientPart, Output, PassPosition
from firm.base.devices import copy_of_generator, set_generator
from firm.base.errors import DivergedError
from firm.federation.lockstep import together
from firm.gradients.per_sequence import taken_rows


@dataclass
class _Latest:
    """The latest forward pass of a client's policy."""

    place: PassPosition | None = None
    is_tapped: bool = False


@dataclass(frozen=True)
class StackedPolicy(Policy):
    """The policy with one client's adapter; its passes are batched with those of other clients."""

    stack: StackedModel = field(kw_only=True)
    adapter: Mapping[str, torch.nn.Parameter] = field(kw_only=True)
    _latest: _Latest = field(default_factory=_Latest, kw_only=True)

    def forward(self, rows: Sequences, model: Any = None, *, expand: Expand = taken_rows) -> Any:
        """Returns the output of the policy in a joint pass, or of another model separately.

        The joint pass copies what replies share by itself, not by `expand`.
        """
        if model not in (None, self.model):
            return super().forward(rows, model)
        is_training, has_gradient = self.model.training, torch.is_grad_enabled()
        is_tapped = self._latest.is_tapped and has_gradient
        generator = copy_of_generator(self.model.device)
        part = ClientPart(
            rows,
            self.adapter,
            is_training=is_training,
            has_gradient=has_gradient,
            is_tapped=is_tapped,
            generator=generator,
        )
        key = is_training, has_gradient, is_tapped
        output = together(self.stack.forward, part, key=key, size=rows.num_rows)
        set_generator(generator)
        if has_gradient:
            self._latest.place = output.place
        return output

    def token_scores(self, output: Any, rows: Sequences) -> TokenScores:
        """Returns log-probabilities and entropies of the responses' tokens, each [b, T]."""
        if isinstance(output, Output):
            return output.token_scores(self.config.temperature)
        return super().token_scores(output, rows)

    def jacobian(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the gradients of the latest pass's M losses in this client's adapter."""
        place = self._place(losses)
        key = id(place.joint), len(losses)
        return together(self.stack.jacobian, Losses(place, losses), key=key, is_urgent=True)

    def per_sequence(self, weights: torch.Tensor | None = None) -> Any:
        """Returns a context for computing all M gradients in one backward pass; see `Policy`."""
        return _PerSequence(self, is_tapped=weights is None)

    def _place(self, losses: torch.Tensor) -> PassPosition:
        if self._latest.place is None or not losses.requires_grad:
            raise ValueError("The losses have no gradient; compute them by the policy's forward.")
        return self._latest.place


class _PerSequence:
    """A client's `PerSequenceGradients` in joint passes."""

    def __init__(self, policy: StackedPolicy, *, is_tapped: bool) -> None:
        self._policy, self._is_tapped = policy, is_tapped

    def __enter__(self) -> Self:
        self._policy._latest.is_tapped = self._is_tapped
        return self

    def __exit__(self, *exception: object) -> None:
        self._policy._latest.is_tapped = False

    expand = staticmethod(taken_rows)

    def jacobian(
        self,
        losses: torch.Tensor,
        coefficients: torch.Tensor,
        *,
        groups: torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> torch.Tensor:
        """Returns the gradient of each Σ_b c_jb ℓ_b, shape [M, d]."""
        policy = self._policy
        place = policy._place(losses)
        wanted = Weighted(place, losses, coefficients, retain_graph, groups)
        key = id(place.joint), retain_graph
        return together(policy.stack.per_sequence_jacobian, wanted, key=key, is_urgent=True)


@dataclass(frozen=True)
class StackedSampler(Sampler):
    """A client's rollouts in joint passes."""

    policy: StackedPolicy = field(kw_only=True)

    def generate(
        self, queries: Queries, *, on_token: Callable[[int], None] = lambda _: None
    ) -> SampledTokens:
        """Returns samples of replies to the prompts; see `Sampler`.

        `on_token` is never called, since a joint pass samples for several clients.
        """
        assert self.engine is not None
        return self._together(self.engine.sample, queries)

    def begin(self, queries: Queries) -> Callable[[], SampledTokens]:
        """Begins to sample replies to the prompts; see `Sampler`."""
        return self._together(cast("BackgroundEngine", self.engine).begin, queries)

    def _together(
        self, work: Callable[[list[SampleRequest]], Sequence[Any]], queries: Queries
    ) -> Any:
        adapter = self.policy.adapter.values()
        sums = [own.detach().sum().to(self.model.device) for own in adapter]
        if not torch.stack(sums).isfinite().all():  # one wait for the device
            raise DivergedError("the adapter's parameters")  # of this client, not of the batch
        generator = copy_of_generator(self.model.device)
        request = SampleRequest(
            queries, self.config, self.end_ids, adapter=self.policy.adapter, generator=generator
        )
        # an engine with its own copy of the policy takes all rows at a time
        size = 1 if self.config.engine.samples_itself else queries.num_rows
        result = together(work, request, size=size)
        set_generator(generator)
        return result

    def logprobs(self, sequences: Sequences, *, of_reference: bool) -> torch.Tensor:
        """Returns the responses' log-probabilities; see `Sampler`."""
        adapter = None if of_reference else self.policy.adapter
        work, temperature = self.policy.stack.logprobs, self.config.temperature
        parts = [
            ClientPart(rows, adapter, temperature=temperature)
            for rows in sequences.split(self.config.forward_batch_size)
        ]
        return torch.cat([together(work, p, key=of_reference, size=p.rows.num_rows) for p in parts])
