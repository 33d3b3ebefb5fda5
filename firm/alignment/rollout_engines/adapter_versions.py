"""Adapters as an engine with a copy of the base model takes them: ordinary LoRA, named by content.

Every version of an adapter, at each preference for a conditioned one, is an ordinary LoRA adapter
of its own. Equal versions have equal names, and other contents never take a name again: such
engines cache prompts by the adapter's name.
"""

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch

from firm.alignment.adapter_files import lora_state
from firm.alignment.adapters.conditioned import fold, is_conditioned
from firm.alignment.rollout_engines.engine import SampledTokens, SampleRequest
from firm.alignment.sequences import INVALID_LOGPROB

Reply: TypeAlias = tuple[list[int], list[float]]
"""Tokens of a reply, and their log-probabilities."""


def row_versions(
    policy: Any, request: SampleRequest, states: MutableMapping[str, Mapping[str, torch.Tensor]]
) -> list[str]:
    """Returns the version of each row's adapter, and adds its matrices to `states`."""
    lora = {n: v.detach().cpu() for n, v in lora_state(policy, request.adapter).items()}
    preferences = request.queries.preferences
    asked: Sequence[Any] = [()] * request.queries.num_rows
    if preferences is not None and any(map(is_conditioned, lora)):
        asked = [tuple(row) for row in preferences.tolist()]
    versions = {}
    for preference in dict.fromkeys(asked):
        state = {n: v for n, v in lora.items() if not is_conditioned(n)}
        if preference:
            state = fold(lora, preference)
        versions[preference] = _digest(state)
        states[versions[preference]] = state
    return [versions[preference] for preference in asked]


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    """Returns a name of an adapter's content."""
    digest = hashlib.sha256()
    for name, values in state.items():
        digest.update(name.encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def row_seeds(request: SampleRequest) -> list[int]:
    """Returns a seed for each row, from the request's generator."""
    generator = request.generator
    device = generator.device if generator else "cpu"
    size = (request.queries.num_rows,)
    return torch.randint(2**31, size, generator=generator, device=device).tolist()


def to_samples(
    request: SampleRequest, versions: list[str], replies: Sequence[Reply]
) -> SampledTokens:
    """Returns the replies to a request's prompts, padded to the longest of them."""
    queries = request.queries
    length = max((len(ids) for ids, _ in replies), default=0)
    tokens = torch.full((queries.num_rows, length), -1)  # [B, T]
    logprobs = torch.full((queries.num_rows, length), INVALID_LOGPROB)
    for row, (ids, own) in enumerate(replies):
        tokens[row, : len(ids)] = torch.tensor(ids)
        logprobs[row, : len(ids)] = torch.tensor(own)
    tokens = torch.cat([queries.token_ids, tokens.to(queries.device)], dim=1)
    return SampledTokens(tokens, logprobs.to(queries.device), versions)
