"""A small server with the protocol of vLLM's, and the faults that real ones have."""

import json
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.json_server import serving

BASE = "base"


@dataclass
class SmallServer:
    """A model with adapters, its limits, and what goes wrong."""

    path: str
    max_loras: int = 16
    max_lora_rank: int = 64
    max_model_len: int = 512
    loads_adapters: bool = True
    serves_base: bool = False
    """Adapters are loaded and have no effect, as if no name of a layer matched."""
    forgets: bool = False
    """Loads reach a replica that does not answer the next request."""
    is_tempered: bool = True
    shift: int = 0
    """Added to token ids of texts, as by another tokenizer."""
    scale: float = 1.0
    """Factor of logits, as of another base model."""
    other_name: str = ""
    broken: Any = None
    """Answer in place of a completion's choice."""
    nan_probes: bool = False
    """Log-probabilities of prompts under adapters are NaN."""
    answers: dict[str, Any] = field(default_factory=dict)
    """Answers in place of all others, by path."""
    fails_after: int | None = None
    """Number of replies after which every request fails."""
    names: dict[str, str] = field(default_factory=dict)
    """Paths of loaded adapters."""
    unloaded: list[str] = field(default_factory=list)
    num_replies: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._base: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        self._base.eval()
        self._model: Any = None
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.path)

    def answer(self, path: str, content: dict[str, Any]) -> tuple[int, Any]:
        """Returns status and content of an answer."""
        if self.fails_after is not None and self.num_replies >= self.fails_after:
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        own = {
            "/v1/models": self._models,
            "/metrics": self._metrics,
            "/tokenize": self._tokens,
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
            "/v1/completions": self._complete,
        }
        if path in self.answers:
            return 200, self.answers[path]
        if "lora_adapter" in path and not self.loads_adapters:
            return 404, {"detail": "Not Found"}
        with self._lock:
            return own[path](content)

    def _models(self, content: dict[str, Any]) -> tuple[int, Any]:
        base = {"id": BASE, "parent": None, "max_model_len": self.max_model_len}
        return 200, {"data": [base, *({"id": name, "parent": BASE} for name in self.names)]}

    def _metrics(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, f'vllm:lora_requests_info{{max_lora="{self.max_loras}"}} 1.0' * bool(self.names)

    def _tokens(self, content: dict[str, Any]) -> tuple[int, Any]:
        ids = self._tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]
        return 200, {"tokens": [each + self.shift for each in ids]}

    def _load(self, content: dict[str, Any]) -> tuple[int, Any]:
        name, path = content["lora_name"], content["lora_path"]
        if name in self.names:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        with open(f"{path}/adapter_config.json", encoding="utf-8") as file:
            rank = json.load(file)["r"]
        if rank > self.max_lora_rank:
            text = f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            return 500, _error(text)  # as vLLM 0.32 does
        # the run in this process goes on with the same random numbers
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(action="ignore", category=FutureWarning),  # PEFT's own
        ):
            if self._model is None:
                self._model = PeftModel.from_pretrained(self._base, path, adapter_name=name)
            else:
                self._model.load_adapter(path, adapter_name=name)
        if not self.forgets:
            self.names[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, content: dict[str, Any]) -> tuple[int, Any]:
        self.unloaded.append(content["lora_name"])
        del self.names[content["lora_name"]]
        return 200, "Success"

    @torch.no_grad()
    def _logits(self, name: str, ids: list[int]) -> torch.Tensor:
        model = self._base if self._model is None else self._model
        tokens = torch.tensor([ids])
        if self._model is None or name == BASE or self.serves_base:
            with self._model.disable_adapter() if self._model is not None else nullcontext():
                return self.scale * model(input_ids=tokens).logits[0]
        model.set_adapter(name)
        return self.scale * model(input_ids=tokens).logits[0]

    def _complete(self, content: dict[str, Any]) -> tuple[int, Any]:
        name, ids = content["model"], list(content["prompt"])
        if name != BASE and name not in self.names:
            return 404, _error(f"The model `{name}` does not exist.")
        if content["temperature"] > 2:
            return 400, _error("temperature must be in [0, 2]")
        self.num_replies += 1
        temperature = content["temperature"]
        before = None
        if "prompt_logprobs" in content:
            rows = self._logits(name, ids).log_softmax(-1)
            own = [{str(n): {"logprob": row[n].item()}} for n, row in zip(ids[1:], rows)]  # noqa: B905
            if self.nan_probes and name != BASE:
                own = [{token: {"logprob": float("nan")} for token in step} for step in own]
            before = [None, *own]
        generator = torch.Generator().manual_seed(content.get("seed") or 0)
        tokens, logprobs = [], []
        while len(tokens) < content["max_tokens"]:
            logits = self._logits(name, ids + tokens)[-1]
            tempered = (logits / (temperature or 1e-6)).log_softmax(-1)
            token = int(torch.multinomial(tempered.exp(), 1, generator=generator))
            tokens.append(token)
            told = tempered if self.is_tempered else logits.log_softmax(-1)
            logprobs.append(told[token].item())
            if token in content.get("stop_token_ids", []):
                break
        choice = {
            "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
            "prompt_logprobs": before,
        }
        is_reply = "prompt_logprobs" not in content
        choices = [self.broken if self.broken is not None and is_reply else choice]
        return 200, {"model": self.other_name or name, "choices": choices}


def served(server: SmallServer) -> AbstractContextManager[str]:
    """Serves at a free port of this machine; yields the address."""
    return serving(lambda path, content: server.answer(path, content))


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError"}}
