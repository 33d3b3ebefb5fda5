"""A joint pass over rows of several clients, each multiplied by its client's matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from firm.alignment.head import Head
from firm.alignment.sequences import (
    Queries,
    TokenScores,
    response_logits,
    scores_of_logits,
    scores_of_states,
)
from firm.gradients.jacobian import jacobian_buffer
from firm.gradients.per_sequence import SharedRows, Tap, add_weight_gradients_


@dataclass(frozen=True, eq=False)
class ClientPart:
    """One client's rows in a joint pass."""

    rows: Any
    """`Sequences`, or `Queries` for generation."""
    adapter: Mapping[str, torch.nn.Parameter] | None
    """Parameters of the client's adapter; None for the base model."""
    is_training: bool = False
    """True if dropout is active."""
    has_gradient: bool = False
    """True if a graph for backward passes is built."""
    is_tapped: bool = False
    """True if the backward pass separates gradients by row (`Weighted`)."""
    generator: torch.Generator | None = None
    """Generator of the client's random numbers."""
    temperature: float = 1.0

    @property
    def leaves(self) -> list[torch.nn.Parameter]:
        """The adapter's parameters."""
        assert self.adapter is not None
        return list(self.adapter.values())

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids of prompts [b, Q], or of prompts and responses [b, Q + T]."""
        return self.rows.token_ids if isinstance(self.rows, Queries) else self.rows.query_responses

    @property
    def mask(self) -> torch.Tensor:
        """Mask of the tokens of prompts and responses, bool of the same shape."""
        return self.rows.mask if isinstance(self.rows, Queries) else self.rows.attention_mask

    @property
    def preferences(self) -> torch.Tensor | None:
        """Shares of the objectives by row, [b, M]; None without a conditioned policy."""
        queries = self.rows if isinstance(self.rows, Queries) else self.rows.queries
        return queries.preferences

    @property
    def context_length(self) -> int:
        """Q, the column at which responses start."""
        if isinstance(self.rows, Queries):
            return self.token_ids.size(1)
        return self.rows.context_length


@dataclass(frozen=True, eq=False)
class PassPosition:
    """Position of a client's rows in a pass."""

    joint: "Pass"
    index: int

    @property
    def part(self) -> ClientPart:
        """The rows."""
        return self.joint.parts[self.index]


class Pass:
    """A batch of several clients' rows, with minimal padding; implements `PassRows`.

    Args:
        parts: Rows of each client.
        names: Names of the slot's trained parameters, in whose place each part uses its own.
        prompts: A pass over the prompts of these parts, with the same parameters, which this one
            continues with their responses.
    """

    is_overwritten = False  # as `PassRows` has it

    def __init__(
        self,
        parts: Sequence[ClientPart],
        names: Mapping[torch.nn.Parameter, str],
        prompts: "Pass | None" = None,
    ) -> None:
        self.parts = parts
        self.anchor = torch.zeros((), requires_grad=True)
        self.targets: list[JacobianGroup] = []
        """Jacobians to be filled by the backward pass."""
        self.stacked: dict[str, torch.Tensor] = {}
        """All clients' values of each parameter, shape [C, ...]; empty for the base model."""
        self.shared: tuple[Pass, SharedRows] | None = None
        """The pass over the prompts and what its rows share, if a tapped pass continues it."""
        self._continues = prompts is not None
        self._names = names
        self._columns: dict[str, slice] = {}
        self._waiting = set(range(len(parts)))
        asked = [own for part in parts if (own := part.preferences) is not None]
        self.preferences = torch.cat(asked) if asked else None
        start = 0
        for name in names.values() if parts[0].adapter is not None else ():
            own = [part.adapter[name].detach() for part in parts if part.adapter is not None]
            self.stacked[name] = torch.stack(own) if prompts is None else prompts.stacked[name]
            self.stacked[name].requires_grad_(parts[0].has_gradient)
            self._columns[name] = slice(start, start + own[0].numel())
            start += own[0].numel()
        self.counts = [len(part.token_ids) for part in parts]
        # columns before and after the start of the responses
        sides = [_widths(part.mask, part.context_length) for part in parts]
        self.context = max(left for left, _ in sides)
        right = max(right for _, right in sides)
        if self._continues:  # a pass over responses takes place if it does for any part alone
            most = max(part.token_ids.size(1) - part.context_length for part in parts)
            right = max(right, min(2, most))
        self.length = self.context + right
        self.token_ids = torch.cat([self._placed(p.token_ids, p, fill=0) for p in parts])
        self.mask = torch.cat([self._placed(part.mask, part, fill=False) for part in parts])
        self._arrange()

    @property
    def members(self) -> torch.Tensor | None:
        """The part of each row, [N]; None if all have equally many; see `PassRows`."""
        return None if self._is_even else self._members

    @property
    def is_wanted(self) -> bool:
        """True if some clients' gradients are still pending."""
        return bool(self._waiting)

    def finish(self, places: "Sequence[PassPosition]") -> None:
        """Marks parts as needing no further gradients of this pass."""
        self._waiting -= {place.index for place in places}

    def _arrange(self) -> None:
        self._is_even = len(set(self.counts)) == 1
        counts = torch.tensor(self.counts)
        members = torch.arange(len(counts)).repeat_interleave(counts)
        self._members = members.to(self.token_ids.device)
        ends = list(accumulate(self.counts))
        self._spans = [slice(end - own, end) for end, own in zip(ends, self.counts, strict=True)]

    def _placed(self, values: torch.Tensor, part: ClientPart, *, fill: float) -> torch.Tensor:
        """Aligns a part's values [b, L, ...] to the common start of the responses."""
        before = self.context - part.context_length
        return _fitted(values, before, self.length - before, fill)

    def restrict(self, kept: list[torch.Tensor]) -> torch.Tensor:
        """Keeps the rows of each part at these indices; returns their indices in the batch."""
        rows = torch.cat([self.span(index).start + own for index, own in enumerate(kept)])
        self.counts = [len(own) for own in kept]
        if self.preferences is not None:
            self.preferences = self.preferences[rows]
        self._arrange()
        return rows

    def span(self, index: int) -> slice:
        """Returns the slice of a part's rows."""
        return self._spans[index]

    def of_part(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Aligns values [b, L, ...] of a part's rows to the part; zero at its padding."""
        part = self.parts[index]
        before = part.context_length - self.context
        width = part.token_ids.size(1)
        if before <= 0 and width - before <= self.length:
            return values[:, -before : width - before]  # a plain slice, without padding
        return _fitted(values, before, width - before, 0.0)

    def is_base(self, layer: Any) -> bool:
        """Returns whether the parts use the base model; see `PassRows`."""
        return not self.stacked

    def product(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        """Returns x Wᵀ with the W of each row's client, for x [N, ..., in]; see `PassRows`."""
        matrix = getattr(layer, name)["default"].weight
        if (parameter := self._names.get(matrix)) is None:  # frozen, so all clients share it
            return torch.nn.functional.linear(x, matrix)
        weight = self.stacked[parameter]
        rows = x.flatten(1, -2)  # multi-head latent attention has layers on [N, 1, L, in]
        if self._is_even:
            joint = rows.reshape(len(weight), -1, rows.size(-1))
            output = torch.bmm(joint, weight.mT).view(*rows.shape[:-1], -1)
        else:
            output = torch.bmm(rows, weight[self._members].mT)
        if self.parts[0].is_tapped:
            output = Tap.apply(output, rows.detach(), self.anchor, self, parameter)
        return output.view(*x.shape[:-1], -1)

    def dropped(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns x [N, ..., in] after dropout, with the same masks as if each part ran alone.

        On a GPU the masks differ from those of torch's dropout kernel; see `PassRows`.
        """
        dropout = layer.lora_dropout["default"]
        probability = getattr(dropout, "p", 0.0)
        if not (dropout.training and probability > 0):
            return x
        masks = [self._kept(x, 1 - probability, part) for part in self.parts]
        return x * torch.cat(masks).div_(1 - probability).view_as(x)

    def _kept(self, x: torch.Tensor, probability: float, part: ClientPart) -> torch.Tensor:
        """Draws a part's mask of the inputs x [N, ..., in] that are kept, [b, ..., in]."""
        num_rows, width = part.token_ids.shape
        if self._continues:
            width = max(0, width - part.context_length - 1)  # the last token is not passed
        mask = x.new_empty(num_rows, width, x.size(-1))
        mask.bernoulli_(probability, generator=part.generator)
        if self._continues:
            return _fitted(mask, 0, self.length - self.context - 1, 1.0)
        return self._placed(mask, part, fill=1.0)

    def fold(self, name: str, inputs: torch.Tensor, deltas: torch.Tensor) -> None:
        """Adds a parameter's columns to the rows of all targets; called by the backward pass."""
        columns = self._columns[name]
        for target in self.targets:
            own = target.rows[..., columns], target.coefficients
            add_weight_gradients_(*own, target.of_groups(inputs), target.of_groups(deltas))

    def add_targets(self, wanted: "Mapping[int, torch.Tensor]") -> dict[int, torch.Tensor]:
        """Returns Jacobians [M, d] by part, to be filled by the next backward pass.

        Args:
            wanted: Coefficients [M, b] by part. Parts with coefficients of the same shape share
                their products.
        """
        alike: dict[torch.Size, list[int]] = {}
        for index, coefficients in sorted(wanted.items()):
            alike.setdefault(coefficients.shape, []).append(index)
        jacobians = {}
        for shape, indices in alike.items():
            leaves = self.parts[indices[0]].leaves
            rows = jacobian_buffer(len(indices) * shape[0], leaves).zero_()
            rows = rows.view(len(indices), shape[0], -1)
            coefficients = torch.stack([wanted[index].detach() for index in indices]).to(rows)
            spans = None if len(indices) == len(self.parts) else [self.span(i) for i in indices]
            self.targets.append(JacobianGroup(rows, coefficients, spans))
            jacobians.update(zip(indices, rows, strict=True))
        return jacobians


@dataclass(frozen=True, eq=False)
class JacobianGroup:
    """Jacobians of several parts with the same numbers of rows and objectives."""

    rows: torch.Tensor
    """Jacobians, [C, M, d]."""
    coefficients: torch.Tensor
    """Coefficients of the losses, [C, M, b]."""
    spans: list[slice] | None
    """Slices of the parts' rows; None for all rows."""

    def of_groups(self, values: torch.Tensor) -> torch.Tensor:
        """Extracts the parts' rows [C, b, ...] from values [N, ...]."""
        if self.spans is None:
            return values.unflatten(0, (len(self.rows), -1))
        return torch.stack([values[span] for span in self.spans])


class Output:
    """The model's output for the rows of one part, with the part's padding.

    Args:
        place: The part's position.
        head: The model's head, if `forward` knows it; the logits are then empty.
        logits: Logits of the part's rows, [b, L, V].
        hidden: Hidden states of the last layer, [b, L, H].
    """

    def __init__(
        self, place: PassPosition, head: Head | None, logits: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        self.place = place
        self._head, self._logits, self._hidden = head, logits, hidden

    @property
    def hidden_states(self) -> tuple[torch.Tensor]:
        """Hidden states of the last layer, [b, Q + T, H], zero at padding."""
        return (self.place.joint.of_part(self._hidden, self.place.index),)

    def token_scores(self, temperature: float) -> TokenScores:
        """Returns log-probabilities and entropies of the responses' tokens, each [b, T]."""
        joint, part = self.place.joint, self.place.part
        width = part.token_ids.size(1) - part.context_length
        responses = part.token_ids[:, part.context_length :]
        if self._head is not None:
            states = self._hidden[:, joint.context - 1 : -1][:, :width]
            states = torch.nn.functional.pad(states, (0, 0, 0, width - states.size(1)))
            return scores_of_states(self._head, states, responses, temperature)
        logits = response_logits(self._logits, joint.context, temperature)[:, :width]
        logits = torch.nn.functional.pad(logits, (0, 0, 0, width - logits.size(1)))
        return scores_of_logits(logits, responses)


class RepliesOutput(Output):
    """The model's output for the replies of one part, without that for their prompts.

    Args:
        place: The part's position.
        head: The model's head.
        states: Its inputs, from which the replies' tokens are predicted, [b, T', H].
    """

    def __init__(self, place: PassPosition, head: Head, states: torch.Tensor) -> None:
        self.place, self._head, self._states = place, head, states

    def token_scores(self, temperature: float) -> TokenScores:
        """Returns log-probabilities and entropies of the responses' tokens, each [b, T]."""
        responses = self.place.part.rows.responses
        width = responses.size(1)
        states = self._states[:, :width]
        states = torch.nn.functional.pad(states, (0, 0, 0, width - states.size(1)))
        return scores_of_states(self._head, states, responses, temperature)


def _widths(mask: torch.Tensor, context_length: int) -> tuple[int, int]:
    """Returns the numbers of columns with tokens before and after the start of the responses."""
    columns = mask.any(0).nonzero()[:, 0].tolist()
    first = columns[0] if columns else context_length - 1
    last = columns[-1] + 1 if columns else context_length
    return max(1, context_length - first), max(0, last - context_length)


def _fitted(values: torch.Tensor, before: int, length: int, fill: float) -> torch.Tensor:
    """Shifts values [b, L, ...] right by `before` columns, and cuts or pads them to a length.

    `length` counts from the first column of the values.
    """
    widths = (0, 0) * (values.ndim - 2)
    return torch.nn.functional.pad(values, (*widths, before, length - values.size(1)), value=fill)
