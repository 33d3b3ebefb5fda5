"""llama.cpp's server with all adapters of an exported front, whose scales each request sets."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx

from firm.base.extras import install_command
from firm.serving.front import ServedFront

OnChunk = Callable[[dict[str, Any]], bool]
"""Receives a part of a reply; returns True to stop."""


def import_llama() -> Any:
    """Returns the package xllamacpp.

    Raises:
        ModuleNotFoundError: When it is not installed.
    """
    try:
        return import_module("xllamacpp")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"serving needs llama.cpp: {install_command('serve')}.", name="xllamacpp"
        ) from None


class LlamaEngine:
    """Replies with llama.cpp, in this process.

    Several requests are answered at once, one per slot. Prompts are cached within a slot as long as
    its scales stay the same.

    Args:
        folder: Folder of `firm export --to gguf`.
        base: GGUF file of the base model; by default the one in the folder.
        num_slots: Number of requests that are answered at once.
        context: Tokens of a prompt with its reply; at most the model's own length.
        num_threads: CPU threads.

    Raises:
        ValueError: When a file is missing, or llama.cpp cannot load it.
        ModuleNotFoundError: When xllamacpp is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base: Path | None = None,
        num_slots: int = 4,
        context: int = 2048,
        num_threads: int = 2,
    ) -> None:
        xllamacpp = import_llama()
        self.served = ServedFront.load(folder)
        if base is None and not self.served.base_file:
            raise ValueError(
                f"{folder} has no GGUF file of the base model {self.served.base_model}: pass one "
                "as --base."
            )
        model = base or folder / self.served.base_file
        places = {name: folder / place for name, place in self.served.adapters.items()}
        if missing := [str(place) for place in (model, *places.values()) if not place.is_file()]:
            raise ValueError(f"there is no GGUF file {missing[0]}: export with --to gguf.")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        self.num_slots = num_slots
        params.n_parallel, params.n_ctx = num_slots, num_slots * context
        params.n_batch = params.n_ubatch  # a reply can be stopped between batches of its prompt
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        params.chat_template = self.served.chat_template
        params.verbosity = 0
        # the cache across slots ignores scales: https://github.com/ggml-org/llama.cpp/issues/26207
        params.cache_ram_mib = 0
        # its own web server, which cannot be left out, then refuses everyone
        key = token_hex(32)
        params.api_keys, params.ui, params.endpoint_slots = [key], False, False
        adapters = []
        for place in places.values():
            adapter = xllamacpp.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = str(place), 0.0
            adapters.append(adapter)
        params.lora_adapters, params.lora_init_without_apply = adapters, True
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ValueError(f"llama.cpp cannot load {model} ({error}).") from error
        # only its web server tells, and a file's metadata may take half a minute to read
        known = httpx.get(
            f"{self._server.listening_address}/v1/models",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60.0,  # of a busy machine
            trust_env=False,
        ).json()
        self.max_context: int = known["data"][0]["meta"]["n_ctx_train"]
        self.context = min(context, self.max_context)  # as llama.cpp does, silently

    def reply(
        self, body: Mapping[str, Any], scales: Mapping[str, float], on_chunk: OnChunk | None = None
    ) -> dict[str, Any] | None:
        """Returns the reply to a chat request, or None if it is passed to `on_chunk` in parts.

        Args:
            body: OpenAI's request, with `stream` if `on_chunk` is given.
            scales: Scale of each objective's adapter.
            on_chunk: Receives the parts of a streamed reply.

        Raises:
            ValueError: When llama.cpp refuses the request.
        """
        lora = [{"id": at, "scale": scales[name]} for at, name in enumerate(self.served.adapters)]
        try:
            return self._server.handle_chat_completions({**body, "lora": lora}, on_chunk)
        except (RuntimeError, TypeError) as error:  # of its parser, its templates and its binding
            raise ValueError(str(error)) from None
