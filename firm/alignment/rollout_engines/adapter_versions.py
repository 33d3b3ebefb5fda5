"""Adapters as an engine with a copy of the base model takes them: ordinary LoRA, named by content.

Every version of an adapter, at each preference for a conditioned one, is an ordinary LoRA adapter
of its own. Equal versions have equal names, and other contents never take a name again: such
engines cache prompts by the adapter's name.
"""

import hashlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from firm.alignment.adapter_files import lora_state
from firm.alignment.adapters.conditioned import fold, is_conditioned
from firm.alignment.rollout_engines.engine import SampledTokens, SampleRequest
from firm.alignment.sequences import INVALID_LOGPROB

Reply: TypeAlias = tuple[list[int], list[float]]
"""Tokens of a reply, and their log-probabilities."""


@dataclass(frozen=True, eq=False)
class Row:
    """A prompt to reply to with a version of an adapter."""

    at: int
    """Index of its request."""
    request: SampleRequest
    version: str
    prompt: list[int]
    """Tokens without padding."""
    preference: torch.Tensor | None
    """The row's preference for a conditioned policy, [1, M]."""
    seed: int


def rows_of(
    policy: Any,
    requests: Sequence[SampleRequest],
    states: MutableMapping[str, Mapping[str, torch.Tensor]],
    *,
    suffix: str = "",
) -> list[Row]:
    """Returns this process's rows of requests, and adds the matrices of their versions to `states`.

    Args:
        policy: The policy.
        requests: Requests of a team, all of whose processes draw the seeds of all rows.
        states: Matrices by version.
        suffix: End of the versions' names.
    """
    rows = []
    for at, request in enumerate(requests):
        generator, num_rows = request.generator, request.queries.num_rows
        device = generator.device if generator else request.queries.device
        drawn = torch.randint(2**31, (num_rows,), generator=generator, device=device)
        share = request.team.share(num_rows)
        seeds = drawn[share].tolist()
        queries = request.queries.rows(share)
        lora = {n: v.detach().cpu() for n, v in lora_state(policy, request.adapter).items()}
        is_plain = not any(map(is_conditioned, lora))
        versions: dict[tuple[float, ...], str] = {}
        for row in range(queries.num_rows):
            own = None if queries.preferences is None else queries.preferences[row : row + 1]
            shares = () if own is None or is_plain else tuple(own[0].tolist())
            if shares not in versions:
                state = {n: v for n, v in lora.items() if not is_conditioned(n)}
                state = fold(lora, shares) if shares else state
                versions[shares] = name = _digest(state) + suffix
                states[name] = state
            ids = queries.token_ids[row, queries.token_ids.size(1) - int(queries.lengths[row]) :]
            rows.append(Row(at, request, versions[shares], ids.tolist(), own, seeds[row]))
    return rows


def _digest(state: Mapping[str, torch.Tensor]) -> str:
    """Returns a name of an adapter's content."""
    digest = hashlib.sha256()
    for name, values in state.items():
        digest.update(name.encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def to_samples(
    requests: Sequence[SampleRequest], rows: Sequence[Row], replies: Sequence[Reply]
) -> list[SampledTokens]:
    """Returns the replies of all processes to each request, padded to its longest one."""
    (team,) = {request.team for request in requests}
    own = [(row.at, row.version, *reply) for row, reply in zip(rows, replies, strict=True)]
    every = [entry for part in team.gather(own) for entry in part]
    samples = []
    for at, request in enumerate(requests):
        queries, found = request.queries, [entry[1:] for entry in every if entry[0] == at]
        length = max((len(ids) for _, ids, _ in found), default=0)
        tokens = torch.full((queries.num_rows, length), -1)  # [B, T]
        logprobs = torch.full((queries.num_rows, length), INVALID_LOGPROB)
        for row, (_, ids, values) in enumerate(found):
            tokens[row, : len(ids)] = torch.tensor(ids)
            logprobs[row, : len(ids)] = torch.tensor(values)
        tokens = torch.cat([queries.token_ids, tokens.to(queries.device)], dim=1)
        versions = [version for version, _, _ in found]
        samples.append(SampledTokens(tokens, logprobs.to(queries.device), versions))
    return samples
