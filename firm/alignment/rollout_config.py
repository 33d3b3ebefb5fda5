"""Configurations of sampling, and of all rollout engines.

They are read without torch, so that methods import what computes with it.
"""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field
from importlib.util import find_spec
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Interval

from firm.base.errors import DivergedError, RolloutError
from firm.base.extras import install_command
from firm.base.fields import (
    NOT_IN_PAPER,
    Hint,
    NumTokens,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.registry import Registry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from firm.alignment.rollout_engines.engine import RolloutEngine, SampledTokens, SampleRequest


@configuration(source=NOT_IN_PAPER)
class RolloutEngineConfig(ABC):
    """Settings of a rollout engine; subclasses set the default of `name`."""

    samples_itself: ClassVar[bool] = False
    """True if the engine has its own copy of the policy, whose log-probabilities differ from the
    policy's. Training then takes those of the policy's own forward pass."""
    serves_processes: ClassVar[bool] = True
    """Whether the engine can be used by each of several processes."""

    name: str = ""
    """Rollout engine."""

    @classmethod
    def forms(cls) -> list[type["RolloutEngineConfig"]]:
        """Returns the registered configurations, distinguished by `name`."""
        return [form for _, form in sorted(ROLLOUT_ENGINES.items()) if issubclass(form, cls)]

    @abstractmethod
    def engine(
        self, policy: Any, tokenizer: "PreTrainedTokenizerBase", config: "RolloutConfig"
    ) -> "RolloutEngine":
        """Returns an engine for a policy with one adapter slot, which may start when it samples."""

    def stacked(
        self,
        engine: "RolloutEngine",
        joint: "Callable[[list[SampleRequest]], Sequence[SampledTokens]]",
    ) -> "RolloutEngine":
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

    def importance_weights(self, log_ratios: "torch.Tensor") -> "torch.Tensor | None":
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
    samples_meanwhile: ClassVar[bool] = False
    """Whether the engine is a `BackgroundEngine`."""

    importance_cap: Annotated[PositiveFloat | None, Hint("null for no weights")] = 2.0
    """Largest importance weight of a token, the ratio of the policy's probability to the engine's
    (truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456). Weights multiply
    the tokens' terms of policy gradients."""
    max_mismatch: PositiveFloat = 0.5
    """A batch is an error if log-probabilities of the engine and the policy differ by more nats per
    token (root mean square): rounding is far below, another model or adapter usually above."""

    def importance_weights(self, log_ratios: "torch.Tensor") -> "torch.Tensor | None":
        """Returns ratios of probabilities, at most `importance_cap`; see `RolloutEngineConfig`."""
        if self.importance_cap is None:
            return None
        return log_ratios.exp().clamp(max=self.importance_cap)

    def check_mismatch(self, mismatch: float) -> None:
        """Raises ``RolloutError`` if the mismatch exceeds `max_mismatch`, or is NaN."""
        if isnan(mismatch):
            what = f"the log-probabilities of the policy or of rollout.engine {self.name}"
            raise DivergedError(what)
        if mismatch > self.max_mismatch:
            raise RolloutError(
                f"rollout.engine {self.name}: log-probabilities of the engine and of the policy "
                f"differ by {mismatch:.2g} nats per token (root mean square), more than "
                f"rollout.engine.max_mismatch, {self.max_mismatch:g}: the engine has another base "
                "model, adapter or precision. Check policy.path and policy.dtype, raise it, or use "
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


@register_rollout_engine
@configuration(source=NOT_IN_PAPER)
class TransformersConfig(RolloutEngineConfig):
    """The policy's own passes."""

    name: Literal["transformers"] = "transformers"
    """Rollout engine."""

    def engine(
        self, policy: Any, tokenizer: "PreTrainedTokenizerBase", config: "RolloutConfig"
    ) -> "RolloutEngine":
        """Returns the engine; see `RolloutEngineConfig`."""
        from firm.alignment.rollout_engines.transformers import TransformersEngine

        return TransformersEngine(policy, tokenizer)

    def stacked(
        self,
        engine: "RolloutEngine",
        joint: "Callable[[list[SampleRequest]], Sequence[SampledTokens]]",
    ) -> "RolloutEngine":
        """Returns an engine that samples by joint passes; see `RolloutEngineConfig`."""
        from firm.alignment.rollout_engines.transformers import JointEngine

        return JointEngine(joint)


@register_rollout_engine
@configuration(source=NOT_IN_PAPER)
class VLLMConfig(SeparateEngineConfig):
    """A copy of the base model in vLLM, which takes the adapters of many rows in one batch."""

    serves_processes: ClassVar[bool] = False

    name: Literal["vllm"] = "vllm"
    """Rollout engine."""
    max_loras: Annotated[int, Interval(ge=1, le=1024)] = 16
    """Largest number of adapters in a batch of vLLM, which reserves memory for each. An adapter at
    each of several preferences counts as several."""
    cache_gb: PositiveFloat = 1.0
    """Memory of vLLM's key-value cache in GiB."""
    devices: list[Annotated[int, Interval(ge=0, le=1023)]] | None = None
    """GPUs on which vLLM samples, by index, with each layer divided among several; null: the
    policy's. Others than the policy's keep its memory free for training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`, such as {max_num_seqs: 64}."""

    def __post_init__(self) -> None:
        devices = self.devices
        if devices is not None and not 0 < len(devices) == len({*devices}):
            raise ValueError(
                f"rollout.engine.devices must be distinct indices of GPUs, or null, got {devices}."
            )

    @property
    def own_devices(self) -> tuple[str, ...]:
        """Names of the GPUs on which vLLM samples; see `RolloutEngineConfig`."""
        return tuple(f"cuda:{index}" for index in self.devices or ())

    def num_bytes(self, policy_bytes: int, adapter_bytes: int) -> int:
        """Returns the bytes of the copy, of the cache and of `max_loras` adapters."""
        return policy_bytes + int(self.cache_gb * 2**30) + self.max_loras * adapter_bytes

    def engine(
        self, policy: Any, tokenizer: "PreTrainedTokenizerBase", config: "RolloutConfig"
    ) -> "RolloutEngine":
        """Returns the engine, which starts vLLM when it first samples.

        Raises:
            ValueError: When vLLM is not installed, or does not support the policy.
        """
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine.name vllm needs the package vllm, which is not installed: "
                f"{install_command('vllm')}, or use rollout.engine.name transformers."
            )
        from firm.alignment.rollout_engines.vllm import VLLMEngine

        return VLLMEngine(self, policy, config)


@register_rollout_engine
@configuration(source=NOT_IN_PAPER)
class VLLMServerConfig(SeparateEngineConfig):
    """Servers of vLLM, on any machines, which get adapters alone."""

    samples_meanwhile: ClassVar[bool] = True

    name: Literal["vllm_server"] = "vllm_server"
    """Rollout engine."""
    urls: list[str] = field(default_factory=list)
    """Address of each server, such as http://node7:8000. Replicas behind one address do not work:
    adapters are loaded into every server."""
    shared_folder: str = ""
    """Folder for adapters, in storage that this machine and the servers see."""
    folder_on_servers: str | None = None
    """The same folder's path on the servers; null: the same path."""
    max_loras: Annotated[int, Interval(ge=1, le=1024)] = 16
    """Adapters that a server has at a time, as its `--max-loras`. An adapter at each of several
    preferences counts as several."""
    num_requests: Annotated[int, Interval(ge=1, le=4096)] = 64
    """Replies that each server samples at a time."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait for an answer; a server that gives none is left out until the next batch."""
    num_retries: Annotated[int, Interval(ge=0, le=100)] = 2
    """Further tries of a request, before a server is left out."""

    def __post_init__(self) -> None:
        is_url = [url.startswith(("http://", "https://")) for url in self.urls]
        if not self.urls or not all(is_url) or len({*self.urls}) < len(self.urls):
            raise ValueError(
                "rollout.engine.urls must be one or several different addresses, such as "
                f"[http://node7:8000], got {self.urls}."
            )
        if not self.shared_folder:
            raise ValueError(
                "rollout.engine.shared_folder must be a folder that the servers see, got none."
            )

    def command(self, path: str, dtype: str, rank: int, num_tokens: int, port: int = 8000) -> str:
        """Returns the command that starts a server.

        Args:
            path: Base model.
            dtype: Its dtype, such as "bfloat16".
            rank: Rank of the adapters.
            num_tokens: Maximum tokens of prompt and reply together.
            port: Port of the server.
        """
        options = {
            "dtype": dtype,
            "max-model-len": num_tokens,
            "max-loras": self.max_loras,
            "max-cpu-loras": self.max_loras,
            "max-lora-rank": max_lora_rank(rank),
            "logprobs-mode": "processed_logprobs",  # of the tempered distribution
            "generation-config": "vllm",  # not the sampling defaults of the checkpoint
            "port": port,
        }
        words = ["vllm", "serve", path, "--enable-lora"]
        words += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {shlex.join(words)}"

    def engine(
        self, policy: Any, tokenizer: "PreTrainedTokenizerBase", config: "RolloutConfig"
    ) -> "RolloutEngine":
        """Returns the engine, which asks the servers when it first samples.

        Raises:
            ValueError: The adapters' rank or the temperature is larger than vLLM supports.
        """
        from firm.alignment.rollout_engines.vllm_server import VLLMServerEngine

        return VLLMServerEngine(self, policy, tokenizer, config)


RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM supports."""


def max_lora_rank(rank: int) -> int:
    """Returns the least maximum rank of vLLM for adapters of a rank.

    Raises:
        ValueError: The rank is larger than vLLM supports.
    """
    if rank > RANKS[-1]:
        raise ValueError(
            f"policy.lora.r must be at most {RANKS[-1]} with vLLM as rollout engine, got {rank}."
        )
    return next(own for own in RANKS if own >= rank)


MAX_TEMPERATURE = 2.0
"""Largest temperature at which vLLM samples."""


def check_temperature(engine: RolloutEngineConfig, rollout: "RolloutConfig") -> None:
    """Raises ``ValueError`` if an engine of vLLM does not sample at the temperature."""
    if rollout.temperature > MAX_TEMPERATURE:
        raise ValueError(
            f"rollout.temperature must be at most {MAX_TEMPERATURE:g} with rollout.engine.name "
            f"{engine.name}, got {rollout.temperature:g}."
        )


@configuration
class RolloutConfig:
    """Sampling of responses, and where they end."""

    max_new_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 128
    """Maximum length of a response in tokens."""
    temperature: Annotated[
        PositiveFloat, Hint("PPO needs samples, not the greedy reply"), NOT_IN_PAPER
    ] = 0.7
    """Sampling temperature."""
    max_prompt_tokens: Annotated[NumTokens, NOT_IN_PAPER] = 256
    """Maximum length of a prompt in tokens; longer prompts lose their oldest turns, but keep system
    messages."""
    stop_strings: Annotated[list[str] | None, NOT_IN_PAPER] = None
    """A response ends before any of these strings, so that a policy that goes on to write the next
    human turn is not scored for it. null uses the human tag of HH-RLHF for prompts in that form,
    and none with a chat template or plain prompts, whose replies may contain such a string."""
    end_tokens: Annotated[list[str], NOT_IN_PAPER] = field(default_factory=list)
    """Tokens that end a response, in addition to the tokenizer's EOS and the end tokens in the
    model's generation_config.json, as spelled by the tokenizer."""
    forward_batch_size: PositiveInt = 64
    """Batch size of generation and of the models' forward passes, to limit memory."""
    cache: Annotated[Literal["dynamic", "static"], NOT_IN_PAPER] = "dynamic"
    """Key-value cache: dynamic grows with each token; static is allocated at the maximum length, so
    that transformers compiles the steps on a GPU, which takes a minute for each batch size."""
    compile: Annotated[bool | Literal["auto"], NOT_IN_PAPER] = "auto"
    """Sample by steps that are compiled once per bucket of rows and lengths. Python starts a token
    with one call instead of a thousand, which pays on a GPU; compiling takes up to a minute per
    bucket. auto compiles on CUDA devices in runs of many tokens."""
    logprobs: Annotated[Literal["generation", "forward"] | None, NOT_IN_PAPER] = None
    """Source of the sampling policy's log-probabilities: generation, the cached steps that
    generated the response (as in TRL); or forward, a forward pass of the same shape as the
    reference's, so that rounding does not add to their KL. null uses generation for policies in
    float32, where the two agree to about 1e-6, and forward in lower precision and for engines with
    their own copy of the policy."""
    engine: Annotated[RolloutEngineConfig, NOT_IN_PAPER] = field(default_factory=TransformersConfig)
    """Engine that samples the responses."""
    max_staleness: Annotated[Literal[0, 1], NOT_IN_PAPER] = 0
    """Local steps by which the adapter that samples a batch may be older than the one that trains
    on it. With 1, servers sample the next batch of a round while this one trains, and importance
    weights correct for it, at most `rollout.engine.importance_cap`. A round's first batch, and any
    with 0, is sampled by the adapter that trains on it."""

    def __post_init__(self) -> None:
        if self.max_staleness:
            self._check_staleness()
        if self.compile is True and self.cache == "static":
            raise ValueError(
                "rollout.cache must be dynamic with rollout.compile true, whose steps have a cache "
                "of their own, got static."
            )
        if self.engine.samples_itself and self.logprobs == "generation":
            raise ValueError(
                f"rollout.logprobs must be forward or null with rollout.engine.name "
                f"{self.engine.name}, whose log-probabilities are not the policy's, got generation."
            )
        if "" in (self.stop_strings or ()):
            raise ValueError(
                f"rollout.stop_strings must not contain an empty string, got {self.stop_strings}: "
                "every reply would be empty."
            )

    def _check_staleness(self) -> None:
        engine, needs = self.engine, f"with rollout.max_staleness {self.max_staleness}"
        if not (isinstance(engine, SeparateEngineConfig) and engine.samples_meanwhile):
            raise ValueError(
                f"rollout.engine.name must be vllm_server {needs}, got {engine.name}: no other "
                "engine samples while this process trains."
            )
        if engine.importance_cap is None:
            raise ValueError(
                f"rollout.engine.importance_cap must be a number {needs}, got null: replies of an "
                "older adapter need importance weights."
            )
