"""The rollout engine `vllm`: samples with a copy of the base model in vLLM.

vLLM runs in a child process, because in this one it would seed the global random generators, pin
the threads and initialise `torch.distributed`. Every version of an adapter, at each preference for
a conditioned one, is an ordinary LoRA adapter of its own for vLLM, so that rows of several clients
and preferences share a batch. It is handed over as a folder in shared memory.

Versions are named by their content, and no name or id is used again: vLLM scales B in place when it
loads an adapter, caches prompts by the adapter's name, and ignores a new folder under an old id.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from firm.alignment.adapter_files import save_state
from firm.alignment.policy_config import is_gguf
from firm.alignment.rollout_config import (
    RolloutConfig,
    VLLMConfig,
    check_temperature,
    max_lora_rank,
)
from firm.alignment.rollout_engines.adapter_versions import Reply, Row, rows_of, to_samples
from firm.alignment.rollout_engines.engine import SampledTokens, SampleRequest
from firm.base.errors import RolloutError
from firm.base.sanitize import first_line
from firm.base.user_code import INTERRUPTIONS

SHARED_MEMORY = Path("/dev/shm")

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # a fork may hang after torch started threads
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # pinned threads would share cores with the trainer's
}
"""Environment variables of vLLM that are set unless the user has set them."""


_VISIBLE = "CUDA_VISIBLE_DEVICES"


class VLLMEngine:
    """Samples from a policy with vLLM; implements `RolloutEngine`.

    Args:
        config: Limits of the engine.
        policy: A `PeftModel` with one adapter slot, whose base model is stored at its path.
        rollout: Lengths of prompts and replies.

    Raises:
        ValueError: When the base model is a GGUF file, or the adapter's rank or the temperature is
            larger than vLLM supports.
    """

    def __init__(self, config: VLLMConfig, policy: Any, rollout: RolloutConfig) -> None:
        settings = policy.peft_config["default"]
        self._path = str(settings.base_model_name_or_path)
        if is_gguf(self._path):
            raise ValueError(
                "policy.path must be a folder or a name on the hub with rollout.engine.name vllm, "
                f"got the GGUF file {self._path}."
            )
        self._max_rank = max_lora_rank(settings.r)
        check_temperature(config, rollout)
        self.config = config
        self._policy, self._rollout = policy, rollout
        self._llm: Any = None
        self._folder = Path()
        self._ids: dict[str, int] = {}  # of loaded versions, the one used last at the end
        self._num_versions = 0
        self._stop: Callable[[], object] = lambda: None

    def sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        """Returns the samples of each request; see `RolloutEngine`.

        Rows of all requests share a batch, unless they have more than `max_loras` adapters.
        """
        try:
            return self._sample(requests)
        except INTERRUPTIONS:  # vLLM would return the replies of this batch with the next one's
            self.close()
            raise

    def _sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        self._start()
        states: dict[str, Mapping[str, torch.Tensor]] = {}
        rows = rows_of(self._policy, requests, states)
        replies: list[Any] = [None] * len(rows)  # in the order of the requests' rows
        names = list(states)
        for start in range(0, len(names), self.config.max_loras):
            part = names[start : start + self.config.max_loras]
            self._load({name: states[name] for name in part})
            places = [at for at, row in enumerate(rows) if row.version in part]
            for at, output in zip(places, self._outputs([rows[at] for at in places]), strict=True):
                replies[at] = _reply(output)
        return to_samples(requests, rows, replies)

    def _start(self) -> None:
        """Starts vLLM with the base model, unless it is running."""
        if self._llm is not None:
            return
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        vllm: Any = import_module("vllm")
        dtype = self._policy.get_input_embeddings().weight.dtype
        arguments = {
            "model": self._path,
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,  # prompts and replies are tokens
            "generation_config": "vllm",  # not the sampling defaults of the checkpoint
            "logprobs_mode": "processed_logprobs",  # of the tempered distribution
            "max_model_len": self._rollout.max_prompt_tokens + self._rollout.max_new_tokens,
            "enable_lora": True,
            "max_lora_rank": self._max_rank,
            "max_loras": self.config.max_loras,
            "max_cpu_loras": self.config.max_loras,
            "kv_cache_memory_bytes": int(self.config.cache_gb * 2**30),
            "enforce_eager": self._policy.device.type == "cpu",  # compiling takes minutes there
        }
        devices = self.config.devices
        if devices is None and self._policy.device.type == "cuda":
            devices = [self._policy.device.index or 0]
        if devices is not None:
            if dtype not in (torch.float16, torch.bfloat16):
                raise RolloutError(
                    "policy.dtype must be bfloat16 or float16 with rollout.engine.name vllm on a "
                    f"GPU, whose kernels for LoRA take no other, got {arguments['dtype']}."
                )
            arguments["tensor_parallel_size"] = len(devices)
            # vLLM would otherwise need nearly all of a GPU free, of which it takes `cache_gb` alone
            arguments["gpu_memory_utilization"] = 0.01
        with _visible(devices):
            try:
                self._llm = vllm.LLM(**{**arguments, **self.config.options})
            except INTERRUPTIONS:
                raise
            except Exception as error:
                raise RolloutError(
                    f"vLLM cannot start ({first_line(error)}): change rollout.engine.cache_gb or "
                    "options, or use rollout.engine.name transformers."
                ) from error
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = Path(tempfile.mkdtemp(prefix="firm-vllm-", dir=parent))
        self._stop = weakref.finalize(self, _close, self._llm, self._folder)

    def close(self) -> None:
        """Stops vLLM; a later `sample` starts it again."""
        self._stop()
        self._llm, self._ids = None, {}

    def _load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Loads versions of adapters into vLLM, in place of those used least recently."""
        engine = self._llm.llm_engine
        for version in states:
            if version in self._ids:
                self._ids[version] = self._ids.pop(version)  # to the end: used last
        missing = [version for version in states if version not in self._ids]
        num_kept = self.config.max_loras - len(missing)  # before the missing ones are loaded
        for version in list(self._ids)[: max(0, len(self._ids) - num_kept)]:
            engine.remove_lora(self._ids.pop(version))
            shutil.rmtree(self._folder / version)
        for version in missing:
            save_state(self._policy, self._folder / version, states[version])
            self._num_versions += 1
            request = self._request(version, self._num_versions)
            try:
                engine.add_lora(request)
            except INTERRUPTIONS:
                raise
            except Exception as error:
                raise RolloutError(
                    f"vLLM cannot load the adapter ({error}): use other policy.lora settings, or "
                    "rollout.engine.name transformers."
                ) from error
            self._ids[version] = self._num_versions
        self._check_loaded(states)

    def _check_loaded(self, versions: Iterable[str]) -> None:
        """Raises ``RolloutError`` unless vLLM has these versions of adapters."""
        loaded = self._llm.llm_engine.list_loras()
        missing = [version for version in versions if self._ids[version] not in loaded]
        if missing:
            raise RolloutError(
                f"vLLM no longer has the adapters {', '.join(missing)}, so that replies would come "
                "from another policy: raise rollout.engine.max_loras, or use rollout.engine.name "
                "transformers."
            )

    def _outputs(self, rows: Sequence[Row]) -> list[Any]:
        """Returns vLLM's outputs for rows."""
        requests = [self._request(row.version, self._ids[row.version]) for row in rows]
        found = self._llm.generate(
            [{"prompt_token_ids": row.prompt} for row in rows],
            [_sampling(row) for row in rows],
            lora_request=requests,
            use_tqdm=False,
        )
        for request, output in zip(requests, found, strict=True):
            used = output.lora_request and output.lora_request.lora_name
            if used != request.lora_name:
                raise RolloutError(
                    f"vLLM sampled with the adapter {used}, but {request.lora_name} was requested: "
                    "use another release of vLLM, or rollout.engine.name transformers."
                )
        self._check_loaded({row.version for row in rows})
        return [output.outputs[0] for output in found]

    def _request(self, version: str, number: int) -> Any:
        lora: Any = import_module("vllm.lora.request")
        return lora.LoRARequest(version, number, str(self._folder / version))


@contextmanager
def _visible(devices: Sequence[int] | None) -> Iterator[None]:
    """Shows only these GPUs to new processes; None: all that this process sees.

    Raises:
        ValueError: This process does not see one of them.
    """
    shown = os.environ.get(_VISIBLE)
    if devices is None:
        yield
        return
    names = shown.split(",") if shown is not None else [*map(str, range(max(devices) + 1))]
    if max(devices) >= len(names):
        raise ValueError(
            f"rollout.engine.devices has the index {max(devices)}, but {_VISIBLE} shows "
            f"{len(names)} GPUs: {shown}."
        )
    os.environ[_VISIBLE] = ",".join(names[index] for index in devices)
    try:
        yield
    finally:
        if shown is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = shown


def _sampling(row: Row) -> Any:
    """Returns the sampling parameters of a row."""
    vllm: Any = import_module("vllm")
    return vllm.SamplingParams(
        temperature=row.request.config.temperature,
        max_tokens=row.request.config.max_new_tokens,
        stop_token_ids=list(row.request.end_ids),
        ignore_eos=True,  # the end tokens include it
        seed=row.seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
    )


def _reply(output: Any) -> Reply:
    """Returns the tokens of vLLM's output, with their log-probabilities."""
    ids = list(output.token_ids)
    return ids, [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]


def _close(llm: Any, folder: Path) -> None:
    """Stops vLLM's processes and removes the adapters' folders."""
    llm.llm_engine.engine_core.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
