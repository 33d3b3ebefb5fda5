"""All objectives' gradients from one backward pass, if they differ by a factor per sequence.

The gradient of a linear layer's weight is δᵀx, of the layer's input x and its output's gradient δ.
Autograd sums it over the batch at once; kept separate by sequence, δ_bᵀ x_b serves every objective.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from firm.gradients.jacobian import (
    Parameters,
    check_finite_rows,
    check_losses,
    check_parameters,
    has_values,
    jacobian,
    jacobian_buffer,
)

MAX_PRODUCT_ENTRIES = 2**20
"""Entries of δ_bᵀ x_b held at a time (at least one sequence's): 4 MB in float32, which fits into a
CPU's cache. With 64 MB, the products of 64 sequences at a 512 x 512 layer take two to five times as
long."""

INSTEAD = "use firm.gradients.jacobian, with one backward pass per objective."


def taken_rows(tensors: Sequence[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
    """Returns the rows [B, ...] of tensors [D, ...] at an index [B], with their gradients."""
    return [tensor[index.to(tensor.device)] for tensor in tensors]


class PerSequenceGradients:
    """Computes the gradients of M losses L_j = Σ_b c_jb ℓ_b in one backward pass of Σ_b ℓ_b.

    Inside the `with` block, forward passes also store the inputs that the backward pass needs;
    their outputs do not change. The rows equal those of `jacobian` up to rounding. On the CPU, a
    forward and backward pass of a LoRA Llama with M = 8 takes 1.1 times as long as with one
    objective, the loop 4.8 times (`benchmarks/per_sequence.py`)::

        with PerSequenceGradients(policy, adapter_parameters) as gradients:
            losses = -log_probs_of_responses(policy, batch)  # [B]
            rows = gradients.jacobian(losses, coefficients)  # [M, d]

    It supports weights and biases of `torch.nn.Linear`, such as peft's LoRA layers, called with the
    sequences along the first dimension, once or several times, with dropout, autocast and
    non-reentrant gradient checkpointing. Torch raises an error if such a layer's output is modified
    in place.

    It applies if objectives differ by one factor per sequence: REINFORCE, RLOO and GRPO with one
    advantage per response, and PPO as long as no ratio is clipped (clipping depends on each
    advantage's sign, and hence masks tokens by objective). It does not apply to advantages per
    token, such as GAE with a critic per objective, nor to a KL term in only one objective's loss.
    Sequences must not interact in the forward pass, nor change places in it: ℓ_b may depend only on
    row b of each layer. Batch normalisation in training mode is rejected. Rows that are reordered
    inside the model, sequences packed into a row, or a loss that balances experts over the batch
    give wrong rows without an error: call `check_independence` on a small batch of a new model.

    Args:
        model: The module that computes the losses.
        parameters: Weights and biases of the model's `torch.nn.Linear` modules, or a mapping of
            names to them; their order is the order of the columns.
        checks_once: Whether all losses of equal sizes from equal calls of layers are built alike,
            as in a trainer's steps. Then only the first of their graphs is walked, which takes
            longer than a backward pass on an accelerator. By default every graph is checked for
            uses of parameters that the rows would miss.

    Raises:
        ValueError: When there is no parameter, one is listed twice, does not require grad or
            belongs to another kind of module; or the model has trainable parameters in other kinds
            of modules.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: Parameters, *, checks_once: bool = False
    ) -> None:
        self._model = model
        self._checks_once = checks_once
        self._parameters = check_parameters(parameters)
        self._columns: dict[torch.Tensor, slice] = {}
        start = 0
        for index, parameter in enumerate(self._parameters):
            if parameter in self._columns:
                raise ValueError(f"Parameter {index} is listed a second time; list each once.")
            self._columns[parameter] = slice(start, start + parameter.numel())
            start += parameter.numel()
        self._names = _linear_layers(model)
        self._layers = [
            layer
            for layer in self._names
            if not self._columns.keys().isdisjoint(layer.parameters(recurse=False))
        ]
        own = ((layer.weight, layer.bias) for layer in self._layers)
        # a weight that is computed from parameters is not covered by them
        covered = {p for pair in own for p in pair if isinstance(p, torch.nn.Parameter)}
        for index, parameter in enumerate(self._parameters):
            if parameter not in covered:
                raise ValueError(
                    f"Parameter {index} of shape {list(parameter.shape)} is no weight or bias of a "
                    f"torch.nn.Linear in this model: leave it out, or {INSTEAD}"
                )
        self._handles: list[Any] = []
        self._calls: list[tuple[torch.nn.Module, int | None]] = []
        """Layers called in this block, with the rows of their inputs; None without rows."""
        self._num_jacobians = 0
        self._checked: set[Any] = set()
        """Graphs that passed the check, by the block's calls that built them."""
        self._target: tuple[torch.Tensor, torch.Tensor] | None = None
        self._left_out: torch.Tensor | None = None  # bool [B], during `check_independence`
        self._shared: SharedRows | None = None
        # a leaf that requires grad: differentiating with respect to it alone makes autograd compute
        # each layer's output gradient, but skip the weight gradients summed over the sequences
        self._anchor = torch.zeros((), requires_grad=True)

    def __enter__(self) -> Self:
        """Adds the hooks; raises if batch normalisation mixes sequences."""
        if self._handles:
            raise RuntimeError(
                "PerSequenceGradients is already active; leave its with block first."
            )
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and (
                module.training or module.running_mean is None
            ):
                raise ValueError(
                    f"{name or type(module).__name__} normalises over the batch, so that losses "
                    f"depend on several sequences: put it in eval mode, or {INSTEAD}"
                )
        self._calls, self._num_jacobians = [], 0
        # before other hooks, which may replace the output: δ is the gradient of the layer's own one
        self._handles = [
            layer.register_forward_hook(self._tap, prepend=True, with_kwargs=True)
            for layer in self._layers
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._shared = None

    def expand(self, tensors: Sequence[torch.Tensor], index: torch.Tensor) -> list[torch.Tensor]:
        """Returns the rows of tensors [D, ...] at an index [B], for sequences that share rows.

        Replies to one prompt share its keys and values, for example: layers before see D rows,
        layers after them B. The gradients of layers before need further backward passes through
        these: M, or as many as the most groups of sequences that share a row if that is less; see
        `jacobian`.

        May be called once in the block.

        Args:
            tensors: What sequences share, with rows along the first dimension.
            index: Row of each sequence, [B].
        """
        if self._shared is not None:
            raise RuntimeError("expand was called in this with block before; call it once.")
        if not any(tensor.requires_grad for tensor in tensors):
            return taken_rows(tensors, index)
        self._shared = SharedRows.of(tensors, index)
        return list(self._shared.copies)

    def jacobian(
        self,
        losses: torch.Tensor,
        coefficients: torch.Tensor,
        *,
        groups: torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> torch.Tensor:
        """Returns the gradient of each Σ_b c_jb ℓ_b; leaves parameters and grads unchanged.

        Args:
            losses: The sequences' losses ℓ, computed inside the block, shape [B].
            coefficients: The factors c, constant in the parameters, shape [M, B], or by group of
                sequences, [M, G].
            groups: Group of each sequence, shape [B], such as the pair of a reply: its factors are
                those of its group. By default each has its own.
            retain_graph: Whether to keep the graph.

        Returns:
            As in `jacobian`.

        Raises:
            ValueError: When shapes do not match, a loss, coefficient or gradient is not finite, the
                losses' graph is missing, was built outside the block or by reentrant checkpointing,
                or a layer's input has no sequence dimension; names which.
            RuntimeError: When called outside the block.
        """
        if not self._handles:
            raise RuntimeError(
                "PerSequenceGradients is not active; compute losses and rows inside its with block."
            )
        check_sequences(losses, coefficients, groups)
        shared = self._shared
        self._check_graphs(losses)
        rows = jacobian_buffer(len(coefficients), self._parameters).zero_()
        coefficients = by_sequence(coefficients.detach().to(rows), groups)
        leaves = [self._anchor] if shared is None else [self._anchor, *shared.copied]
        _, *gradients = self._fold_backward(
            (rows, coefficients), [losses], [torch.ones_like(losses)], leaves, retain_graph
        )
        if shared is not None:
            passes = shared.passes(gradients, coefficients, groups)
            for at, (own, own_coefficients, outputs) in enumerate(passes):
                is_kept = retain_graph or at < len(passes) - 1
                target = rows[own], own_coefficients
                self._fold_backward(target, shared.tensors, outputs(), [self._anchor], is_kept)
        check_finite_rows(rows)
        return rows

    def _fold_backward(
        self,
        target: tuple[torch.Tensor, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        retain_graph: bool,
    ) -> Sequence[torch.Tensor | None]:
        """Runs a backward pass that adds to rows by coefficients; returns the leaves' gradients."""
        self._target = target
        try:
            return torch.autograd.grad(
                outputs,
                leaves,
                grad_outputs=gradients,
                retain_graph=retain_graph,
                allow_unused=True,
            )
        finally:
            self._target = None

    def check_independence(self, losses: torch.Tensor) -> None:
        """Raises ``ValueError`` if a loss has a gradient at another sequence's row of a layer.

        Takes 2 ⌈log₂ B⌉ backward passes and keeps the graph, so use few and short sequences. Any
        two of them differ in a bit of their numbers; for each bit, each half of the batch must have
        no gradient from the other half's losses.

        Args:
            losses: The sequences' losses, computed inside the block, shape [B].
        """
        _check_losses(losses)
        numbers = torch.arange(len(losses), device=losses.device)
        for bit in range((len(losses) - 1).bit_length()):
            for value in (0, 1):
                self._left_out = (numbers >> bit) & 1 == value
                try:
                    torch.autograd.grad(
                        losses,
                        self._anchor,
                        grad_outputs=(~self._left_out).to(losses),
                        retain_graph=True,
                        allow_unused=True,
                    )
                finally:
                    self._left_out = None

    def _tap(
        self, layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        inputs = args[0] if args else kwargs["input"]
        self._calls.append((layer, len(inputs) if inputs.ndim > 1 else None))
        return Tap.apply(output, inputs.detach(), self._anchor, self, layer)

    def fold(self, layer: torch.nn.Linear, inputs: torch.Tensor, deltas: torch.Tensor) -> None:
        """Adds a layer's columns to the rows, given its input [B, ..., in] and output gradient.

        Called by the backward pass; has no effect in passes that `jacobian` did not start.
        """
        if self._left_out is not None and deltas[self._left_out.to(deltas.device)].any():
            raise ValueError(
                f"{self._names[layer]} gets a gradient from the losses of other sequences than its "
                f"rows': they interact, or change places, inside the model; {INSTEAD}"
            )
        if self._target is None:
            return
        rows, coefficients = self._target
        num_sequences = len(inputs)
        inputs = inputs.reshape(num_sequences, -1, inputs.shape[-1])  # [B, T, in]
        deltas = deltas.reshape(num_sequences, -1, deltas.shape[-1])  # [B, T, out]
        if (columns := self._columns.get(layer.weight)) is not None:
            own = rows[:, columns]
            if own.device != deltas.device:  # of a model on several devices
                own = torch.zeros_like(own, device=deltas.device)
            group = own[None], coefficients[None].to(own)
            add_weight_gradients_(*group, inputs[None], deltas[None])
            if own.device != rows.device:
                rows[:, columns] += own.to(rows)
        if layer.bias is not None and (columns := self._columns.get(layer.bias)) is not None:
            sums = deltas.sum(dim=1, dtype=rows.dtype)
            rows[:, columns].addmm_(coefficients, sums.to(rows.device))

    def _check_graphs(self, losses: torch.Tensor) -> None:
        """Checks the graphs of losses; with `checks_once`, one for each sequence of calls."""
        shared = self._shared
        built = len(losses), shared and shared.num_rows, self._num_jacobians, *self._calls
        self._num_jacobians += 1
        if built in self._checked:
            return
        num_taps = self._check_graph([losses], len(losses))
        if shared is not None:
            num_taps += self._check_graph(shared.tensors, shared.num_rows)
        if not num_taps:
            raise ValueError(
                "The losses depend on no layer called inside the with block: run the model's "
                "forward pass there."
            )
        if self._checks_once and self._calls:  # a graph of an earlier block has none in this one
            self._checked.add(built)

    def _check_graph(self, outputs: Sequence[torch.Tensor], num_sequences: int) -> int:
        """Returns the number of taps in the outputs' graph.

        Raises unless every use of the parameters in it goes through a tap.
        """
        uses: Counter[torch.Tensor] = Counter()
        taps: Counter[torch.Tensor] = Counter()
        for node, following in _graph(outputs):
            if getattr(node, "route", None) is self:
                self._check_sequences(node.layer, node.inputs_shape, num_sequences)
                taps.update(node.layer.parameters(recurse=False))
            elif type(node).__name__ == "CheckpointFunctionBackward":
                raise ValueError(
                    "Reentrant gradient checkpointing hides the layers from per-sequence "
                    "gradients: checkpoint with use_reentrant=False."
                )
            uses.update(
                leaf for n in following if (leaf := getattr(n, "variable", None)) is not None
            )
        for layer in self._layers:
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter in self._columns and uses[parameter] > taps[parameter]:
                    raise ValueError(
                        f"The losses use {_full_name(self._names[layer], name)} {uses[parameter]} "
                        f"times, but only {taps[parameter]} times through its layer's calls inside "
                        "the with block: compute the losses there, or, if the model uses the "
                        f"parameter directly, {INSTEAD}"
                    )
        return taps.total()

    def _check_sequences(
        self, layer: torch.nn.Linear, inputs_shape: torch.Size, num_sequences: int
    ) -> None:
        if len(inputs_shape) < 2 or inputs_shape[0] != num_sequences:
            raise ValueError(
                f"{self._names[layer]} got an input of shape {list(inputs_shape)} for "
                f"{num_sequences} losses; its first dimension must be the sequences: keep that "
                f"dimension, or {INSTEAD}"
            )


@dataclass(frozen=True)
class SharedRows:
    """Rows that sequences share, and the copies at which a backward pass stops."""

    tensors: list[torch.Tensor]
    """Those that have a gradient, [D, ...]."""
    copied: list[torch.Tensor]
    """Their copies by sequence, leaves [B, ...]."""
    copies: list[torch.Tensor]
    """All copies, in the order given."""
    index: torch.Tensor
    """Row of each sequence, [B]."""
    num_rows: int
    """Number of rows, D."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], index: torch.Tensor) -> Self:
        """Copies the rows of the sequences."""
        taken = taken_rows([each.detach() for each in tensors], index)
        pairs = zip(taken, tensors, strict=True)
        copies = [copy.requires_grad_(each.requires_grad) for copy, each in pairs]
        return cls(
            [each for each in tensors if each.requires_grad],
            [copy for copy in copies if copy.requires_grad],
            copies,
            index,
            len(tensors[0]),
        )

    def passes(
        self,
        gradients: Sequence[torch.Tensor | None],
        coefficients: torch.Tensor,
        groups: torch.Tensor | None = None,
    ) -> list[tuple[slice, torch.Tensor, Callable[[], list[torch.Tensor]]]]:
        """Returns the backward passes through the rows.

        Each has the objectives, the rows' coefficients for them, and a function that returns the
        gradients of the `tensors`.

        Args:
            gradients: Those of the copies, by sequence.
            coefficients: Factors of the sequences, [M, B].
            groups: Group of each sequence, [B], if those of a group have equal factors.
        """
        num_objectives = len(coefficients)
        index, own = self.index, torch.arange(len(self.index), device=self.index.device)
        # a row's sequences of one group make up a part, as their factors are equal
        group = own if groups is None else groups.to(index.device)
        parts, part = (index * (group.max() + 1) + group).unique(return_inverse=True)  # by row
        first = torch.zeros_like(parts).scatter_reduce(0, part, own, "amin", include_self=False)
        counts = index[first].bincount(minlength=self.num_rows)  # parts of each row
        most = int(counts.max())
        if num_objectives <= most:  # a pass per objective, of the sums over sequences
            of_row = index == torch.arange(self.num_rows, device=index.device)[:, None]
            largest = coefficients.abs().amax(1).clamp(min=torch.finfo(coefficients.dtype).tiny)
            return [
                (
                    slice(j, j + 1),
                    largest[j].expand(1, self.num_rows),
                    partial(
                        self._sums,
                        gradients,
                        of_row.to(coefficients) * (coefficients[j] / largest[j]),
                    ),
                )
                for j in range(num_objectives)
            ]
        # a pass per part of a row, for all objectives
        factors = coefficients[:, first.to(coefficients.device)]
        starts = counts.cumsum(0) - counts
        found = []
        for k in range(most):
            # the part of each row, [D], or one of another row if there are no more
            chosen = (starts + k).clamp(max=len(parts) - 1)
            of_part = (part == chosen[:, None]) & (counts > k)[:, None]  # [D, B]
            each = factors[:, chosen.to(factors.device)]
            found.append((slice(None), each, partial(self._sums, gradients, of_part)))
        return found

    def _sums(
        self, gradients: Sequence[torch.Tensor | None], factors: torch.Tensor
    ) -> list[torch.Tensor]:
        """Returns each row's sum of its sequences' gradients with factors [D, B], by tensor."""
        return [  # no index_add, whose sums on a GPU are in any order
            torch.zeros_like(tensor)
            if gradient is None
            else (factors.to(gradient) @ gradient.flatten(1)).view_as(tensor)
            for tensor, gradient in zip(self.tensors, gradients, strict=True)
        ]


class BackwardPasses:
    """Drop-in for `PerSequenceGradients` with M backward passes, for parameters of any module.

    Args:
        parameters: Tensors, or a mapping of names to tensors, as in `jacobian`.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = check_parameters(parameters)

    def __enter__(self) -> Self:
        """Returns itself; the forward pass needs no hooks."""
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    expand = staticmethod(taken_rows)

    def jacobian(
        self,
        losses: torch.Tensor,
        coefficients: torch.Tensor,
        *,
        groups: torch.Tensor | None = None,
        retain_graph: bool = False,
    ) -> torch.Tensor:
        """Returns the gradient of each Σ_b c_jb ℓ_b; see `PerSequenceGradients`."""
        check_sequences(losses, coefficients, groups)
        sums = by_sequence(coefficients.detach().to(losses), groups) @ losses
        return jacobian(sums, self._parameters, retain_graph=retain_graph)


class Tap(torch.autograd.Function):
    """Identity on a layer's output; its backward pass hands the gradient to the route.

    That is an object with a method `fold`, which receives the layer, its input and the gradient of
    its output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        inputs: torch.Tensor,
        anchor: torch.Tensor,
        route: Any,
        layer: Any,
    ) -> torch.Tensor:
        """Returns the output and saves the input for the backward pass."""
        ctx.save_for_backward(inputs)
        ctx.inputs_shape = inputs.shape
        ctx.route = route
        ctx.layer = layer
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the output's gradient after passing it to the route."""
        (deltas,) = gradients
        ctx.route.fold(ctx.layer, ctx.saved_tensors[0], deltas)
        return deltas, None, None, None, None


def add_weight_gradients_(
    rows: torch.Tensor, coefficients: torch.Tensor, inputs: torch.Tensor, deltas: torch.Tensor
) -> None:
    """Adds Σ_b c_jb δ_bᵀ x_b to row j of a linear layer's weight, for C groups of sequences.

    Chooses the method with fewer multiplications: one product per sequence, then combined for each
    objective; or, with about one token per sequence or a single objective, one product per
    objective.

    Args:
        rows: The weight's columns of each group's Jacobian, shape [C, M, out · in].
        coefficients: Factors c in the rows' dtype, shape [C, M, B].
        inputs: The layer's input x, any float dtype, shape [C, B, T, in].
        deltas: The gradient δ of its output, shape [C, B, T, out].
    """
    inputs = inputs.to(deltas.dtype)  # as autocast does before the layer's own product
    num_groups, num_objectives, num_entries = rows.shape
    num_tokens = inputs.shape[2]
    if num_tokens + num_objectives < num_tokens * num_objectives:
        num_held = max(1, MAX_PRODUCT_ENTRIES // (num_groups * num_entries))
        for factors, x, delta in zip(
            coefficients.split(num_held, dim=2),
            inputs.split(num_held, dim=1),
            deltas.split(num_held, dim=1),
            strict=True,
        ):
            products = torch.matmul(delta.mT, x)  # [C, b, out, in]
            rows.baddbmm_(factors, products.flatten(2).to(rows.dtype))
    else:
        x = inputs.flatten(1, 2).to(rows.dtype)  # [C, B T, in]
        for row, factors in zip(rows.unbind(1), coefficients.unbind(1), strict=True):
            weighted = (deltas * factors[..., None, None]).flatten(1, 2).to(rows.dtype)
            row.view(num_groups, deltas.shape[-1], -1).baddbmm_(weighted.mT, x)


def _linear_layers(model: torch.nn.Module) -> dict[torch.nn.Linear, str]:
    """Returns the names of the model's linear layers; raises if any other module is trainable."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward:
            layers[module] = name or type(module).__name__
            continue
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                raise ValueError(
                    f"{_full_name(name, own_name)} of a {type(module).__name__} is trainable, and "
                    "per-sequence gradients cover weights and biases of torch.nn.Linear only: "
                    f"freeze it, or {INSTEAD}"
                )
    return layers


def _graph(outputs: Sequence[torch.Tensor]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields every node of the outputs' autograd graph once, with its successors."""
    waiting = [node for node in {each.grad_fn for each in outputs} if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        following = [after for after, _ in node.next_functions if after is not None]
        yield node, following
        new = set(following) - seen
        waiting.extend(new)
        seen |= new


def by_sequence(coefficients: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    """Returns the factors of sequences [M, B], given those of their groups [M, G], if any."""
    return coefficients if groups is None else coefficients[:, groups.to(coefficients.device)]


def check_sequences(
    losses: torch.Tensor, coefficients: torch.Tensor, groups: torch.Tensor | None = None
) -> None:
    """Raises ``ValueError`` unless losses [B] and coefficients [M, B] match and are finite.

    With the group of each sequence [B], coefficients have shape [M, G].
    """
    _check_losses(losses)
    if groups is None:
        _check_coefficients(coefficients, len(losses), "sequence")
        return
    if groups.shape != losses.shape:
        raise ValueError(
            f"groups must have shape [{len(losses)}], a group per sequence, got "
            f"{list(groups.shape)}."
        )
    _check_coefficients(coefficients, int(groups.max()) + 1, "group")


def _check_losses(losses: torch.Tensor) -> None:
    if losses.ndim != 1 or len(losses) == 0:
        raise ValueError(
            f"losses must have shape [B], one loss per sequence, got {list(losses.shape)}."
        )
    check_losses(losses, "sequence")


def _check_coefficients(coefficients: torch.Tensor, count: int, unit: str) -> None:
    if coefficients.ndim != 2 or len(coefficients) == 0 or coefficients.shape[1] != count:
        raise ValueError(
            f"coefficients must have shape [M, {count}], one per objective and {unit}, got "
            f"{list(coefficients.shape)}."
        )
    bad = (~coefficients.isfinite()).nonzero().tolist() if has_values(coefficients) else []
    if bad:
        objective, place = bad[0]
        raise ValueError(
            f"The coefficient of objective {objective} and {unit} {place} is not finite; "
            "look for NaN or infinity in its rewards."
        )


def _full_name(module_name: str, name: str) -> str:
    return f"{module_name}.{name}" if module_name else name
