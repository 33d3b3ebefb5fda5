"""A policy with one adapter per client, and forward passes shared by clients.

Each row of a joint batch belongs to a client, and adapted layers multiply it by that client's
matrices. Since a client's loss does not depend on another's matrices, M backward passes of Σ_c L_cj
give the gradients of all clients; if objectives differ by one factor per reply, a single backward
pass does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from firm.alignment.adapters.forward import cast_once, forward_of
from firm.alignment.compiled import compiles, sample_compiled
from firm.alignment.decoding import SamplingPart, SamplingState, decode_, prefill
from firm.alignment.head import head_of
from firm.alignment.policy import adapter_parameters, set_mode
from firm.alignment.rollout_engines import SampledTokens, SampleRequest
from firm.alignment.sequences import (
    cached_pass,
    cached_states,
    forward,
    forward_options,
    new_cache,
    shares_prompts,
    states_of_replies,
    takes_attention_masks,
)
from firm.alignment.stacked.passes import ClientPart, Output, Pass, PassPosition, RepliesOutput
from firm.federation.lockstep import outcome_of
from firm.gradients.jacobian import check_losses, jacobian_buffer
from firm.gradients.per_sequence import SharedRows, by_sequence, check_sequences, taken_rows


class StackedModel:
    """A policy that applies a different client's adapter to each row of a batch.

    Outside of joint passes the policy uses its own adapter slot.

    Args:
        policy: A `PeftModel` with one adapter.
        prompts_once: Pass equal prompts of a client once, as `Policy.prompts_once`.

    Raises:
        ValueError: When the model has no key-value cache, as state-space models; or when gradient
            checkpointing would draw different dropout masks in the backward pass.
    """

    def __init__(self, policy: Any, *, prompts_once: bool = False) -> None:
        self.policy = policy
        self._prompts_once = prompts_once
        self._slot = adapter_parameters(policy)
        if "past_key_values" not in forward_options(policy):
            base = type(policy.get_base_model()).__name__
            raise ValueError(
                f"engine must be local with a {base}, which has no key-value cache, got stacked."
            )
        self._forward = forward_of(policy)
        self._forward.install_(policy)
        is_checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in policy.modules())
        if is_checkpointed and policy.peft_config["default"].lora_dropout > 0:
            raise ValueError(
                "a stacked policy does not support gradient checkpointing together with dropout of "
                "the adapter, whose masks would differ on recomputation; disable one of them."
            )

    def new_adapter(self) -> dict[str, torch.nn.Parameter]:
        """Returns new adapter parameters for a client, initialised from the policy's slot."""
        return {
            name: torch.nn.Parameter(parameter.detach().clone())
            for name, parameter in self._slot.items()
        }

    # --- Passes -----------------------------------------------------------------------------------

    def forward(self, parts: list[ClientPart]) -> list[Any]:
        """Returns the output of each part's rows, from one forward pass over all of them."""
        set_mode(self.policy, is_training=parts[0].is_training)
        if self._prompts_once:
            return self._forward_prompts_once(parts)
        joint = self._pass(parts)
        with self._forward.of(joint), torch.set_grad_enabled(parts[0].has_gradient):
            output = forward(self.policy, joint.token_ids, joint.mask)
            # one gradient of all rows; slices would each have one, zero at the other parts' rows
            logits = output.logits.split(joint.counts)
            hidden = output.hidden_states[-1].split(joint.counts)
        return [
            Output(PassPosition(joint, i), output.head, logits[i], hidden[i])
            for i in range(len(parts))
        ]

    def _forward_prompts_once(self, parts: list[ClientPart]) -> list[Any]:
        """Returns the output of each part's rows from a pass over prompts and one over replies."""
        found = [part.rows.queries.distinct() for part in parts]
        own = [
            replace(part, rows=part.rows.queries.rows(first))
            for part, (first, _) in zip(parts, found, strict=True)
        ]
        prompts = self._pass(own)
        joint = self._pass(parts, prompts)
        index = torch.cat([prompts.span(at).start + rows for at, (_, rows) in enumerate(found)])
        passes = iter((prompts, joint))

        def run(token_ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
            with self._forward.of(next(passes)):
                return cached_states(self.policy, token_ids, mask, cache)

        def expand(tensors: Sequence[torch.Tensor], index: torch.Tensor) -> Sequence[torch.Tensor]:
            if not parts[0].is_tapped:
                return taken_rows(tensors, index)
            joint.shared = prompts, (shared := SharedRows.of(tensors, index))
            return shared.copies

        with torch.set_grad_enabled(parts[0].has_gradient):
            hidden = states_of_replies(
                run,
                new_cache(self.policy),
                (prompts.token_ids, prompts.mask),
                (joint.token_ids[:, prompts.length :], joint.mask),
                index,
                expand,
            )
        head, each = head_of(self.policy), hidden.split(joint.counts)
        assert head is not None
        return [RepliesOutput(PassPosition(joint, i), head, each[i]) for i in range(len(parts))]

    def jacobian(self, wanted: "list[Losses]") -> Sequence[Any]:
        """Returns each part's Jacobian [M, d] in its own adapter, or the error of its losses.

        All parts belong to one pass and have M losses, so there are M backward passes.
        """
        joint = wanted[0].place.joint
        errors = [outcome_of(check_losses, each.losses) for each in wanted]
        good = [(at, each) for at, each in enumerate(wanted) if errors[at] is None]
        if not good:
            return errors
        leaves = list(joint.stacked.values())
        rows = {at: jacobian_buffer(len(e.losses), e.place.part.leaves) for at, e in good}
        joint.finish([each.place for each in wanted])
        count = len(wanted[0].losses)
        for j in range(count):
            with self._forward.of(joint):
                gradients = torch.autograd.grad(
                    torch.stack([each.losses[j] for _, each in good]).sum(),
                    leaves,
                    retain_graph=j < count - 1 or joint.is_wanted,
                    materialize_grads=True,
                )
            for at, each in good:
                own = [gradient[each.place.index].reshape(-1) for gradient in gradients]
                torch.cat(own, out=rows[at][j])
        return [error or rows[at] for at, error in enumerate(errors)]

    def per_sequence_jacobian(self, wanted: "list[Weighted]") -> Sequence[Any]:
        """Returns the gradients of each part's Σ_b c_jb ℓ_b, from one joint backward pass.

        Prompts that replies share take further ones; see `SharedRows`.
        """
        joint = wanted[0].place.joint
        errors = [
            outcome_of(check_sequences, each.losses, each.coefficients, each.groups)
            for each in wanted
        ]
        good = [(at, each) for at, each in enumerate(wanted) if errors[at] is None]
        if not good:
            return errors
        joint.finish([each.place for each in wanted if not each.retain_graph])
        rows = joint.add_targets({each.place.index: each.by_sequence for _, each in good})
        losses = torch.cat([each.losses for _, each in good])
        copied = [] if joint.shared is None else joint.shared[1].copied
        gradients = self._folded(
            joint, [losses], [torch.ones_like(losses)], copied, retain_graph=joint.is_wanted
        )
        if joint.shared is not None:
            self._add_prompts_(joint, good, gradients, rows)
        return [error or rows[e.place.index] for error, e in zip(errors, wanted, strict=True)]

    def _folded(
        self,
        joint: Pass,
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor] = (),
        *,
        retain_graph: bool,
    ) -> Sequence[torch.Tensor | None]:
        """Runs a backward pass that fills a pass's targets; returns the leaves' gradients."""
        try:
            with self._forward.of(joint):
                _, *found = torch.autograd.grad(
                    outputs,
                    [joint.anchor, *leaves],
                    grad_outputs=gradients,
                    retain_graph=retain_graph,
                    allow_unused=True,
                )
        finally:
            joint.targets.clear()
        return found

    def _add_prompts_(
        self,
        joint: Pass,
        good: "Sequence[tuple[int, Weighted]]",
        gradients: Sequence[torch.Tensor | None],
        rows: dict[int, torch.Tensor],
    ) -> None:
        """Adds what each part's losses owe to its prompts' rows, given its replies' gradients."""
        assert joint.shared is not None
        prompts, shared = joint.shared
        wanted = {each.place.index: each.by_sequence for _, each in good}
        most = max(len(own) for own in wanted.values())
        coefficients = torch.zeros(most, len(joint.mask), device=joint.mask.device)
        groups = torch.arange(len(joint.mask), device=joint.mask.device)
        for _, each in good:
            span = joint.span(each.place.index)
            own = wanted[each.place.index]
            coefficients[: len(own), span] = own.detach().to(coefficients)
            if each.groups is not None:  # no other part has these prompts
                groups[span] = each.groups.to(groups)
        passes = shared.passes(gradients, coefficients, groups)
        for at, (objectives, factors, outputs) in enumerate(passes):
            targets = {
                index: factors[: len(own[objectives]), prompts.span(index)]
                for index, own in wanted.items()
                if len(own[objectives])
            }
            found = prompts.add_targets(targets)
            is_kept = joint.is_wanted or at < len(passes) - 1
            self._folded(prompts, shared.tensors, outputs(), retain_graph=is_kept)
            for index, own in found.items():
                rows[index][objectives] += own

    @torch.no_grad()
    def logprobs(self, parts: list[ClientPart]) -> list[torch.Tensor]:
        """Returns the log-probabilities [b, T] of each part's responses."""
        return [
            output.token_scores(part.temperature).logprobs
            for part, output in zip(parts, self.forward(parts), strict=True)
        ]

    @torch.no_grad()
    def sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        """Samples replies to each request's prompts with its adapter; see `RolloutEngine`.

        Equal prompts of a part take one row of the first pass. Each part draws the same random
        numbers from its generator as it would alone, and ends with its last reply. Finished replies
        are dropped from the batch once there are enough of them (`decode_`).
        """
        set_mode(self.policy, is_training=False)
        adapters: Any = [request.adapter for request in requests]
        parts = zip(requests, adapters, strict=True)
        joint = self._pass([ClientPart(each.queries, adapter) for each, adapter in parts])
        every = [SamplingPart.of(request) for request in requests]
        prompts, index = self._prompts(joint)
        prepares_masks = takes_attention_masks(self.policy)  # its own passes are of other rows
        with cast_once(self.policy, adapters):
            first = prefill(self._cached_pass, prompts, index)
            results = None
            if compiles(self.policy, requests[0].config):
                results = sample_compiled(
                    self.policy,
                    first,
                    every,
                    mask=joint.mask,
                    preferences=joint.preferences,
                    adapters=adapters,
                    is_base=not joint.stacked,
                )
            if results is None:
                replies = SamplingState(every)
                decode_(self._cached_pass, first, joint, replies, prepares_masks=prepares_masks)
                results = replies.results()
        return [SampledTokens(*own) for own in results]

    def _prompts(self, joint: Pass) -> tuple[Pass, torch.Tensor | None]:
        """Returns a pass over each part's distinct prompts, and the row of every prompt in it.

        If it is over all prompts, it is the joint pass itself, with None instead of rows.
        """
        if not shares_prompts(self.policy):
            return joint, None
        found = [part.rows.distinct() for part in joint.parts]
        if sum(len(first) for first, _ in found) == sum(joint.counts):
            return joint, None
        pairs = zip(joint.parts, found, strict=True)
        prompts = self._pass([replace(p, rows=p.rows.rows(first)) for p, (first, _) in pairs])
        rows = [prompts.span(at).start + index for at, (_, index) in enumerate(found)]
        return prompts, torch.cat(rows)

    def _cached_pass(
        self,
        joint: Pass,
        token_ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Any,
    ) -> Any:
        """Returns the output of a pass over the next tokens, with logits of the last ones."""
        with self._forward.of(joint):
            return cached_pass(self.policy, token_ids, mask, positions, cache)

    def _pass(self, parts: list[ClientPart], prompts: Pass | None = None) -> Pass:
        return Pass(parts, {parameter: name for name, parameter in self._slot.items()}, prompts)


@dataclass(frozen=True, eq=False)
class Losses:
    """A client's losses [M] to differentiate."""

    place: PassPosition
    losses: torch.Tensor


@dataclass(frozen=True, eq=False)
class Weighted:
    """Losses [b] by row, and coefficients of the sums to differentiate.

    These are by row, [M, b], or by group of rows, [M, G], as in `PerSequenceGradients.jacobian`.
    """

    place: PassPosition
    losses: torch.Tensor
    coefficients: torch.Tensor
    retain_graph: bool
    groups: torch.Tensor | None = None

    @property
    def by_sequence(self) -> torch.Tensor:
        """Coefficients by row, [M, b]."""
        return by_sequence(self.coefficients, self.groups)
