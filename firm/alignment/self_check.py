"""Checks that a model assigns the same probabilities to the same tokens in every pass.

Policy gradients compare probabilities of a text across passes: alone or batched with longer texts,
token by token through a cache or in one pass, in a rollout or an update. If these differ for a
policy that was not updated, ratios and KL are meaningless, and no other check would reveal it.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from firm.alignment.adapters.forward import forward_of
from firm.alignment.head import head_of
from firm.alignment.policy import adapter_parameters, set_mode
from firm.alignment.sequences import forward, takes_attention_masks
from firm.base.sanitize import first_line
from firm.gradients.per_sequence import PerSequenceGradients

LENGTH, SHORTER, NEW = 12, 7, 3
"""Lengths in tokens of the two texts in the batch, and number of generated tokens."""

ROW_STARTS, ROW_ENDS = (2, 0, 3, 0), (11, 12, 10, 10)
"""Columns of the tokens of four rows that must be independent. Their lengths differ, and are in
neither ascending nor descending order, so that a model that sorts its rows by length moves them."""

ROUNDING = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.07}
"""Largest relative difference of log-probabilities that counts as rounding.

This is the root mean square of the difference, divided by the standard deviation of the
log-probabilities: in an untrained model they are so close together (0.1 nats) that errors in nats
would be small, too. Among 65 architectures that pass, untrained and with larger weights, and
SmolLM2-135M, the largest is 3e-6 in float32, 0.003 in float16 and 0.014 in bfloat16. Among 14 that
fail (bidirectional masks such as RoBERTa's, RWKV, RecurrentGemma) the smallest is 0.0016. An
untrained bidirectional model in half precision therefore passes; one with larger weights (0.3) or
RecurrentGemma (0.086) fails.
"""


@torch.no_grad()
def check_passes(policy: Any, path: str) -> None:
    """Checks a policy's base model on a few tokens, with six short passes.

    Args:
        policy: A `PeftModel`; in evaluation mode afterwards.
        path: Name of the model in messages.

    Raises:
        ValueError: When log-probabilities depend on masked tokens, the cache or random numbers, or
            the model cannot generate.
    """
    embedding, device = policy.get_input_embeddings().weight, policy.device
    ids = torch.randint(len(embedding), (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    start = torch.tensor([[LENGTH - SHORTER], [0]], device=device)
    mask = torch.arange(LENGTH, device=device) >= start  # the first row is padded on the left

    try:
        with policy.disable_adapter():
            head_of(policy)  # compares the head now, while no rows have preferences or adapters
            set_mode(policy, is_training=True)
            update = _logprobs(policy, ids, mask)  # as in an update
            set_mode(policy, is_training=False)
            takes_attention_masks(policy)  # compares masks now, as well
            together = _logprobs(policy, ids, mask)
            # the first row without padding
            alone = _logprobs(policy, ids[:1, -SHORTER:], mask[:1, -SHORTER:])
            generated = policy.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                generation_config=GenerationConfig(
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    do_sample=False,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                ),
            )
            mask = torch.cat([mask, mask.new_ones(2, NEW)], dim=1)
            at_once = _logprobs(policy, generated.sequences, mask)[:, -NEW - 1 : -1]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"policy.path: {path} does not run as a causal language model "
            f"({first_line(error).rstrip('.')}): choose another model."
        ) from error
    by_token = torch.stack(generated.logits, dim=1).float().log_softmax(-1).cpu()

    rounding = _rounding(embedding.dtype)
    for one, other, reason in (
        (update, together, "two passes over the same tokens differ, so it uses random numbers"),
        (together[:1, -SHORTER:], alone, "padding on the left has an effect although it is masked"),
        (by_token, at_once, "generation token by token and one forward pass differ"),
    ):
        difference = _difference(one, other)
        if not difference <= rounding:  # or NaN
            raise ValueError(
                f"policy.path: the log-probabilities of {path} do not match its sampling "
                f"distribution: {reason}, by {difference:.2g} of their spread, of which rounding "
                f"explains {rounding:g}; choose another model."
            )


def check_rows(policy: Any, path: str) -> None:
    """Checks that the rows of a batch do not interact or change places inside the model.

    One backward pass for all objectives (`PerSequenceGradients`) depends on it, and so do clients
    that share a pass, each row with its client's adapter: both give wrong gradients in silence
    otherwise. Takes a pass and four backward passes on a few tokens.

    Args:
        policy: A `PeftModel`, whose adapter is made of matrices.
        path: Name of the model in messages.

    Raises:
        ValueError: A row's loss has a gradient at another row of a layer.
    """
    if not forward_of(policy).kind.is_linear:
        return
    generator = torch.Generator().manual_seed(0)
    size = len(policy.get_input_embeddings().weight)
    ids = torch.randint(size, (len(ROW_STARTS), LENGTH), generator=generator)
    columns = torch.arange(LENGTH)
    mask = columns >= torch.tensor(ROW_STARTS)[:, None]
    mask &= columns < torch.tensor(ROW_ENDS)[:, None]
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    parameters = list(adapter_parameters(policy).values())
    with PerSequenceGradients(policy, parameters) as gradients:
        output = forward(policy, ids, mask)
        if output.head is None:  # a sharded model's backward pass must begin at its output
            values = output.logits[..., 0]
        else:  # without logits: the head sees positions one by one, and lets no rows interact
            states = output.hidden_states[0]
            values = states @ torch.randn(states.size(-1), generator=generator).to(states)
        try:
            gradients.check_independence(values.masked_fill(~mask.to(values.device), 0).sum(1))
        except ValueError as error:
            raise ValueError(
                f"policy.path: the rows of a batch of {path} are not independent "
                f"({first_line(error).rstrip('.')}): give another model, or --estimator.name ppo "
                "with --engine local."
            ) from error


def _logprobs(policy: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities [B, L, V] on the CPU, with positions that skip padding."""
    logits = policy(
        input_ids=ids,
        attention_mask=mask,
        position_ids=mask.cumsum(1) - mask.long(),
        use_cache=False,
    ).logits
    return logits.float().log_softmax(-1).cpu()  # a large vocabulary's are tens of megabytes


def _rounding(dtype: torch.dtype) -> float:
    """Returns the limit in `ROUNDING` for a dtype; TF32 has the precision of float16."""
    matmul = torch.backends.cuda.matmul
    # new in torch 2.9, which rejects mixing it with allow_tf32
    precision = getattr(matmul, "fp32_precision", None)
    is_tf32 = matmul.allow_tf32 if precision is None else precision == "tf32"
    own = torch.float16 if is_tf32 and dtype == torch.float32 else dtype
    return ROUNDING.get(own, ROUNDING[torch.float32])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the root mean square difference, in standard deviations of the second argument.

    Tokens with probability 0 on both sides are excluded.
    """
    is_possible = (one > -torch.inf) | (other > -torch.inf)
    spread = other[other > -torch.inf].std().clamp(min=torch.finfo(other.dtype).tiny)
    return float((one - other)[is_possible].square().mean().sqrt() / spread)
