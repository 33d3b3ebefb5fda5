"""Log-probabilities of chosen tokens from hidden states, without logits [B, T, V].

The log-probability of a token y under the logits z = f(W h + b) / τ, and its gradient in h,

    log p = z_y - log Σ_v exp z_v,    g = ∂ log p / ∂h = Wᵀ (f'(W h + b) ⊙ (e_y - p)) / τ,

are computed for some positions at a time and only log p, the entropy and g [B, T, H] are kept. All
losses of a pass depend on h through log p, so that M backward passes share g, in place of M passes
through the head, whose cost grows with the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor

LARGE_VOCABULARY = 8192
"""Smaller heads go the plain way: their logits cost less than the layers."""
MAX_ENTRIES = 2**23
"""Entries of logits held at a time: 32 MB in float32."""
NUM_CHECKED = 3
"""Tokens of the text on which a head's formula is compared with its model."""


@dataclass(frozen=True, eq=False)
class Head:
    """A language model's head z = f(W h + b), with f a scale and a soft cap c tanh(z / c)."""

    module: torch.nn.Linear
    scale: float = 1.0
    cap: float | None = None

    def logits(self, states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits [n, V] of hidden states [n, H], at least in float32.

        Args:
            states: Hidden states.
            out: Where to write the logits; new memory by default.
        """
        weight, bias = self.module.weight, self.module.bias
        dtype = torch.promote_types(states.dtype, torch.float32)
        if out is None:
            out = states.new_empty(len(states), len(weight), dtype=dtype)
        if bias is None and states.dtype == dtype:
            torch.mm(states, weight.mT, out=out)
        else:
            out.copy_(torch.nn.functional.linear(states, weight, bias))
        if self.scale != 1:
            out *= self.scale
        if self.cap is not None:
            out.div_(self.cap).tanh_().mul_(self.cap)
        return out


_formulas: WeakKeyDictionary[torch.nn.Module, tuple[float, float | None] | None]
_formulas = WeakKeyDictionary()
"""Scale and cap of heads by module; None for those that go the plain way."""


def head_of(model: Any) -> Head | None:
    """Returns the head of a language model, or None if its logits must be computed in full.

    That is so for small vocabularies, for heads that are trained or no linear layer, and for models
    that do anything else to their logits: the formula is compared with the model on a few tokens,
    once. `check_passes` does this when a policy is loaded, since later passes may have set
    preferences or adapters for other rows.
    """
    module = model.get_output_embeddings()
    if module is None:
        return None
    if module not in _formulas:  # compared once per head, not per pass
        head = _find_head(model, module)
        _formulas[module] = None if head is None else (head.scale, head.cap)
    formula = _formulas[module]
    return None if formula is None else Head(module, *formula)


def _find_head(model: Any, module: torch.nn.Module) -> Head | None:
    if type(module) is not torch.nn.Linear:  # a subclass may compute something else
        return None
    weight = module.weight
    if (
        type(weight.data) not in (torch.Tensor, FakeTensor)  # a shard, or quantised
        or weight.size(0) < LARGE_VOCABULARY
        or any(parameter.requires_grad for parameter in module.parameters())
    ):
        return None
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (
        getattr(config, "logits_scaling", None) or 1.0
    )
    head = Head(module, scale, getattr(config, "final_logit_softcapping", None))
    if isinstance(weight.data, FakeTensor) or weight.is_meta or _agrees(model, head):
        return head
    return None


@torch.no_grad()
def _agrees(model: Any, head: Head) -> bool:
    """Returns whether a head's formula gives a model's logits, up to rounding."""
    ids = torch.arange(1, NUM_CHECKED + 1, device=model.get_input_embeddings().weight.device)[None]
    with head_inputs(model) as states:
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
    if len(states) != 1 or states[0].shape[:2] != ids.shape:
        return False
    expected, own = logits[0].float(), head.logits(states[0][0]).float().to(logits.device)
    rounding = 16 * torch.finfo(logits.dtype).eps * expected.abs().max()  # a few last digits
    return own.shape == expected.shape and bool((own - expected).abs().max() <= rounding)


@contextmanager
def head_inputs(
    model: Any, select: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[list[torch.Tensor]]:
    """Yields a list of the head's inputs in passes inside the context; empty without a head.

    The head itself gets those that `select` returns, by default all.
    """
    module, states = model.get_output_embeddings(), []

    def keep(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        states.append(inputs[0])
        return None if select is None else (select(inputs[0]), *inputs[1:])

    with nullcontext() if module is None else module.register_forward_pre_hook(keep):
        yield states


def no_positions(states: torch.Tensor) -> torch.Tensor:
    """Returns hidden states [B, L, H] without positions, for which a head computes no logits."""
    return states[:, :0]


def chosen_logprobs(
    head: Head, states: torch.Tensor, token_ids: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log-probabilities and entropies of tokens in nats, each [B, T].

    Only the log-probabilities have a gradient, and only in the hidden states: the head is frozen.

    Args:
        head: The head.
        states: Hidden states from which the tokens are predicted, [B, T, H].
        token_ids: Tokens, [B, T]. Ids outside the vocabulary are padding, with arbitrary values.
        temperature: Temperature τ > 0.
    """
    vocabulary = head.module.weight.size(0)
    ids = token_ids.to(states.device).clamp(max=vocabulary - 1)  # a head may be on another device
    rows = states.flatten(0, 1), ids.flatten()
    found = _Chosen.apply(*rows, head, temperature)  # type: ignore[misc]
    logprobs, entropies = (each.view_as(token_ids).to(token_ids.device) for each in found)
    return logprobs, entropies


class _Chosen(torch.autograd.Function):
    """Log-probabilities [N] and entropies [N] of tokens, with the gradient of the former."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, ids: torch.Tensor, head: Head, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary = head.module.weight.size(0)
        size = max(1, min(MAX_ENTRIES // vocabulary, len(states)))
        # for all parts: in fresh memory, finding pages takes as long as the arithmetic
        dtype = torch.promote_types(states.dtype, torch.float32)
        scratch = states.new_empty(2, size, vocabulary, dtype=dtype)
        has_gradient = ctx.needs_input_grad[0]
        known = {"head": head, "temperature": temperature, "has_gradient": has_gradient}
        part = partial(_part, scratch, **known)
        parts = [part(*each) for each in zip(states.split(size), ids.split(size), strict=True)]
        logprobs, entropies, gradients = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(entropies)  # they are logged only
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gradients,) = ctx.saved_tensors  # [N, H]
        return (grad_outputs[0].unsqueeze(1) * gradients).to(gradients.dtype), None, None, None


def _part(
    scratch: torch.Tensor,
    states: torch.Tensor,
    ids: torch.Tensor,
    *,
    head: Head,
    temperature: float,
    has_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns log-probabilities [n], entropies [n] and gradients [n, H], or [n, 0] without.

    The memory `scratch` [2, n or more, V] is overwritten.
    """
    logits, logprobs = scratch[:, : len(states)]  # [n, V]
    head.logits(states, out=logits)
    slopes = None
    if has_gradient and head.cap is not None:
        slopes = 1 - (logits / head.cap).square()  # derivative of c tanh(z / c), by its value
    logits /= temperature
    torch.log_softmax(logits, dim=-1, out=logprobs)
    probabilities = torch.exp(logprobs, out=logits)
    entropies = -torch.bmm(probabilities.unsqueeze(1), logprobs.unsqueeze(2)).flatten()
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)  # [n]
    if not has_gradient:
        return chosen, entropies, states.new_empty(len(states), 0)
    # p - e_y, from which the gradient is -Wᵀ (p - e_y) / τ
    probabilities.scatter_add_(1, ids.unsqueeze(1), -torch.ones_like(chosen).unsqueeze(1))
    if slopes is not None:
        probabilities *= slopes
    weight = head.module.weight
    gradients = probabilities.to(weight.dtype) @ weight  # [n, H]
    return chosen, entropies, gradients.mul_(-head.scale / temperature)
