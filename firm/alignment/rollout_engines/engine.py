"""Interface of rollout engines, which sample replies for one or several adapters.

Each engine has its own file, with a configuration (`RolloutEngineConfig`) that builds it and the
engine itself (`RolloutEngine`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.sequences import SINGLE_PROCESS, Queries, SingleProcess
from firm.base.fields import NOT_IN_PAPER, Hint, PositiveFloat, configuration
from firm.base.registry import Registry
from firm.federation.engines.processes import Team

if TYPE_CHECKING:  # its default is the configuration of an engine
    from firm.alignment.generation import RolloutConfig


@dataclass(frozen=True, eq=False)
class SampleRequest:
    """B prompts to reply to with one adapter, each at its preference if there are any."""

    queries: Queries
    """The prompts, with their preferences for a conditioned policy."""
    config: "RolloutConfig"
    """Length and temperature of the replies."""
    end_ids: Sequence[int]
    """Tokens that end a reply; the only other end is the maximum length."""
    adapter: Mapping[str, torch.Tensor] | None = None
    """Trained parameters of the adapter, by `adapter_parameters`' names; None for those in the
    policy's slot."""
    generator: torch.Generator | None = None
    """Generator of the samples' random numbers; None for torch's global one."""
    team: Team | SingleProcess = SINGLE_PROCESS
    """Processes that share the rows, all of which request them."""
    on_token: Callable[[int], None] = lambda _: None
    """Progress callback with the number of tokens per reply so far; engines need not call it."""


@dataclass(frozen=True, eq=False)
class Samples:
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

    def sample(self, requests: list[SampleRequest]) -> Sequence[Samples]:
        """Returns the samples of each request, in one batch if the engine can.

        Raises:
            RuntimeError: When an adapter cannot be used. An engine never falls back to another one
                or to the base model.
        """
        ...

    def close(self) -> None:
        """Stops the processes that the engine started; a later `sample` starts them again."""
        ...


@configuration(source=NOT_IN_PAPER)
class RolloutEngineConfig(ABC):
    """Settings of a rollout engine; subclasses set the default of `name`."""

    samples_itself: ClassVar[bool] = False
    """True if the engine has its own copy of the policy, whose log-probabilities differ from the
    policy's. Training then takes those of the policy's own forward pass."""

    name: str = ""
    """Rollout engine."""

    @classmethod
    def forms(cls) -> list[type["RolloutEngineConfig"]]:
        """Returns the registered configurations, distinguished by `name`."""
        return [form for _, form in sorted(ROLLOUT_ENGINES.items()) if issubclass(form, cls)]

    @abstractmethod
    def engine(
        self, policy: Any, tokenizer: PreTrainedTokenizerBase, config: "RolloutConfig"
    ) -> RolloutEngine:
        """Returns an engine for a policy with one adapter slot, which may start when it samples."""

    def stacked(
        self, engine: RolloutEngine, joint: Callable[[list[SampleRequest]], Sequence[Samples]]
    ) -> RolloutEngine:
        """Returns the engine for requests with adapters, given the policy's own joint passes."""
        return engine

    @property
    def own_devices(self) -> tuple[str, ...]:
        """Names of the devices of the engine's copy; empty if it shares the policy's."""
        return ()

    def num_bytes(self, policy_bytes: int, adapter_bytes: int) -> int:
        """Returns the bytes that the engine takes for itself.

        Args:
            policy_bytes: Bytes of the frozen policy.
            adapter_bytes: Bytes of an adapter.
        """
        return 0

    def importance_weights(self, log_ratios: torch.Tensor) -> torch.Tensor | None:
        """Returns weights that correct for samples from a copy of the policy; None for no weights.

        Args:
            log_ratios: Log-probabilities under the policy minus those under the copy, any shape.
        """
        return None

    def check_mismatch(self, mismatch: float) -> None:  # noqa: B027
        """Checks the root mean square difference of log-probabilities per token, in nats."""


@configuration(source=NOT_IN_PAPER)
class SeparateEngineConfig(RolloutEngineConfig):
    """Settings common to engines with their own copy of the policy."""

    samples_itself: ClassVar[bool] = True

    importance_cap: Annotated[PositiveFloat | None, Hint("null for no weights")] = 2.0
    """Largest importance weight of a token, the ratio of the policy's probability to the engine's
    (truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456). Weights multiply
    the tokens' terms of policy gradients."""
    max_mismatch: PositiveFloat = 0.5
    """A batch is an error if log-probabilities of the engine and the policy differ by more nats per
    token (root mean square): rounding is far below, another model or adapter usually above."""

    def importance_weights(self, log_ratios: torch.Tensor) -> torch.Tensor | None:
        """Returns ratios of probabilities, at most `importance_cap`; see `RolloutEngineConfig`."""
        if self.importance_cap is None:
            return None
        return log_ratios.exp().clamp(max=self.importance_cap)

    def check_mismatch(self, mismatch: float) -> None:
        """Raises ``RuntimeError`` if the mismatch exceeds `max_mismatch`, or is NaN."""
        if not mismatch <= self.max_mismatch:
            raise RuntimeError(
                f"rollout.engine {self.name}: log-probabilities of the engine and of the policy "
                f"differ by {mismatch:.2g} nats per token (root mean square), more than "
                f"rollout.engine.max_mismatch, {self.max_mismatch:g}: the engine has another base "
                "model, adapter or precision. Check policy.path and policy.dtype, or use "
                "rollout.engine.name transformers."
            )


ROLLOUT_ENGINES: Registry[str, type[RolloutEngineConfig]] = Registry("rollout engine")
"""Configurations of all rollout engines, by name."""

Config = TypeVar("Config", bound=type[RolloutEngineConfig])


def register_rollout_engine(config: Config) -> Config:
    """Registers a rollout engine by its configuration; a class decorator.

    Raises:
        ValueError: When the name is taken or missing.
    """
    return ROLLOUT_ENGINES.add(config.__dataclass_fields__["name"].default, config)
