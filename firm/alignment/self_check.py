"""Checks that a model gives the same tokens the same probabilities in every pass.

Policy gradients compare probabilities of one text across passes: alone or beside longer ones, token
by token through a cache or at once, in a rollout or in an update. Where these differ for a policy
that was not updated, ratios and KL mean nothing, and nothing else would tell.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from firm.alignment.policy import set_mode
from firm.federation.outside import first_line

LENGTH, SHORTER, NEW = 12, 7, 3
"""Tokens of two texts that stand in one batch, and of what is generated after them."""

TOLERANCE = 0.01
"""Root mean square of differing log-probabilities in nats; float32's rounding gives some 1e-5."""
TOLERANCE_BELOW_FLOAT32 = 0.25
"""The same for models in bfloat16 and float16, whose rounding gives up to 0.1."""


@torch.no_grad()
def check_passes(policy: Any, path: str) -> None:
    """Checks a policy's base model on a few tokens; takes six short passes.

    Args:
        policy: A `PeftModel`; it is left in evaluation mode.
        path: What messages call the model.

    Raises:
        ValueError: Log-probabilities depend on masked tokens, on the cache, or on chance, or the
            model cannot generate.
    """
    embedding, device = policy.get_input_embeddings().weight, policy.device
    ids = torch.randint(len(embedding), (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    start = torch.tensor([[LENGTH - SHORTER], [0]], device=device)
    mask = torch.arange(LENGTH, device=device) >= start  # the first row is padded on the left

    with policy.disable_adapter():
        set_mode(policy, is_training=True)
        update = _logprobs(policy, ids, mask)
        set_mode(policy, is_training=False)
        together = _logprobs(policy, ids, mask)
        alone = _logprobs(policy, ids[:1, -SHORTER:], mask[:1, -SHORTER:])
        try:
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
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise ValueError(
                f"policy.path: {path} cannot generate ({first_line(error)}): give a causal "
                "language model."
            ) from error
        mask = torch.cat([mask, mask.new_ones(2, NEW)], dim=1)
        at_once = _logprobs(policy, generated.sequences, mask)[:, -NEW - 1 : -1]
    by_token = torch.stack(generated.logits, dim=1).float().log_softmax(-1)

    tolerance = TOLERANCE if embedding.dtype.itemsize >= 4 else TOLERANCE_BELOW_FLOAT32
    for one, other, reason in (
        (update, together, "two passes over the same tokens differ, so it draws random numbers"),
        (together[:1, -SHORTER:], alone, "padding on the left changes it, although it is masked"),
        (by_token, at_once, "generation token by token and one forward pass differ"),
    ):
        difference = _difference(one, other)
        if not difference <= tolerance:  # or NaN
            raise ValueError(
                f"policy.path: the log-probabilities of {path} are not those that it samples with: "
                f"{reason}, by {difference:.2g} nats, where rounding explains {tolerance}; give "
                "another model."
            )


def _logprobs(policy: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns log-probabilities [B, L, V], with positions that count the real tokens alone."""
    logits = policy(
        input_ids=ids,
        attention_mask=mask,
        position_ids=mask.cumsum(1) - mask.long(),
        use_cache=False,
    ).logits
    return logits.float().log_softmax(-1)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the root mean square of a difference; tokens that both rule out do not count."""
    is_possible = (one > -torch.inf) | (other > -torch.inf)
    return float((one - other)[is_possible].square().mean().sqrt())
