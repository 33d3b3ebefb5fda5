"""Interface of rollout engines, which sample replies for one or several adapters.

Each engine has its own file, with a configuration (`RolloutEngineConfig`) that builds it and the
engine itself (`RolloutEngine`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import SINGLE_PROCESS, Queries
from firm.federation.processes import Team


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """B prompts to reply to with one adapter, each at its preference if there are any."""

    queries: Queries
    """The prompts, with their preferences for a conditioned policy."""
    config: RolloutConfig
    """Length and temperature of the replies."""
    end_ids: Sequence[int]
    """Tokens that end a reply; the only other end is the maximum length."""
    adapter: Mapping[str, torch.Tensor] | None = None
    """Trained parameters of the adapter, by `adapter_parameters`' names; None for those in the
    policy's slot."""
    generator: torch.Generator | None = None
    """Generator of the samples' random numbers; None for torch's global one."""
    team: Team = SINGLE_PROCESS
    """Processes that share the rows, all of which request them."""
    on_token: Callable[[int], None] = lambda _: None
    """Progress callback with the number of tokens per reply so far; engines need not call it."""


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Sampled replies to the prompts of a request."""

    token_ids: torch.Tensor
    """Token ids of prompts and replies on the prompts' device, [B, Q + T]; after the end of a
    reply, negative or padding that follows an end token."""
    logprobs: torch.Tensor | None
    """Log-probabilities of the replies' tokens under the tempered sampling distribution, [B, T];
    None if the engine has none."""
    versions: list[str] | None = None
    """Version of the adapter with which each row was sampled, for engines with copies of adapters;
    equal adapters have equal versions."""


class RolloutEngine(Protocol):
    """Samples replies from the policy with the adapters that are requested."""

    def sample(self, requests: list[SampleRequest]) -> Sequence[SampledTokens]:
        """Returns the samples of each request, in one batch if the engine can.

        Raises:
            RolloutError: When an adapter cannot be used. An engine never falls back to another one
                or to the base model.
        """
        ...

    def close(self) -> None:
        """Stops the processes that the engine started; a later `sample` starts them again."""


class BackgroundEngine(RolloutEngine, Protocol):
    """Also samples while this process trains."""

    def begin(self, requests: list[SampleRequest]) -> Sequence[Callable[[], SampledTokens]]:
        """Begins to sample, and returns a function for each request that waits for its samples.

        The samples are those of the adapters at the call, which may change meanwhile.

        Raises:
            RolloutError: When an adapter cannot be used; also the returned functions.
        """
        ...
