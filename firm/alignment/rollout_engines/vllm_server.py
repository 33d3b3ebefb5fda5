"""The rollout engine `vllm_server`: samples with servers of vLLM, on this machine or on others.

Each version of an adapter is written to a folder that the servers see, loaded into every server by
a name that no other contents have, and unloaded when it is no longer needed. Rows go to whichever
server is free. A server that fails is left out, and its rows go to the others.

The servers are compared with the policy when they are first used: tokens, log-probabilities of the
base model, and those of sampled tokens. Each version that a server loads is compared with the base
model and with the policy's own passes, because vLLM serves the base model, without an error, where
no name of an adapter's matrices matches a layer.
"""

import json
import logging
import re
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from firm.alignment.adapter_files import save_state
from firm.alignment.policy import adapter_parameters, copy_adapter, load_adapter_, set_mode
from firm.alignment.rollout_config import (
    MAX_TEMPERATURE,
    RolloutConfig,
    VLLMServerConfig,
    check_temperature,
)
from firm.alignment.rollout_engines.adapter_versions import Reply, Row, rows_of, to_samples
from firm.alignment.rollout_engines.engine import SampledTokens, SampleRequest
from firm.alignment.sequences import set_preferences
from firm.base.errors import DivergedError, RolloutError
from firm.base.sanitize import printable
from firm.base.servers import JsonServer, ServerLost, error_text

logger = logging.getLogger(__name__)

PROBE = "The quick brown fox jumps over the lazy dog, and 12 others ask: why does it do that?"
"""Text whose tokens and log-probabilities are compared."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature at which vLLM samples; below, replies are the most likely ones."""
MAX_DIFFERENCE = {torch.float32: 0.01, torch.float64: 0.01}
"""Largest root mean square difference of the base models' log-probabilities in nats, by dtype."""
MAX_ROUNDING = 0.2
"""The same in lower precision."""
Read = TypeVar("Read")

KEY = "VLLM_API_KEY"
"""Environment variable with the servers' key, if they ask for one."""


class Server(JsonServer):
    """A server of vLLM, and what it has.

    Args:
        url: Its address.
        config: Limits.
    """

    def __init__(self, url: str, config: VLLMServerConfig) -> None:
        super().__init__(
            url,
            key=KEY,
            timeout_s=config.timeout_s,
            num_retries=config.num_retries,
            num_requests=config.num_requests,
        )
        self.model = ""
        """Name of the base model; empty until the server has been checked."""
        self.base: torch.Tensor | None = None
        """Log-probabilities of the probe under the base model."""
        self.versions: dict[str, None] = {}
        """Loaded versions, the one used last at the end."""
        self.lost = ""
        """Reason why the server is left out of the current batch."""

    def complete(self, **content: Any) -> Mapping[str, Any]:
        """Returns the only choice of a completion of tokens.

        Raises:
            ServerLost: There is no answer.
            RolloutError: The server refuses the request, or answers with another model.
        """
        answer = self.ask("/v1/completions", {"add_special_tokens": False, **content})
        if answer.status_code != 200:
            hint = ""
            if answer.status_code == 404:
                hint = (
                    "; it has forgotten the adapter, or several servers answer at this address: "
                    "list each of them in rollout.engine.urls"
                )
            raise RolloutError(f"{self.url} refuses a request: {error_text(answer)}{hint}.")
        model, choice = self.read(answer, lambda found: (found["model"], dict(found["choices"][0])))
        if model != content["model"]:
            raise RolloutError(
                f"{self.url} answered with the model {printable(model)}, but {content['model']} "
                "was requested: use another release of vLLM, or another rollout engine."
            )
        return choice

    def models(self) -> list[dict[str, Any]]:
        """Returns the base model and the adapters, as the server lists them.

        Raises:
            ServerLost: There is no answer.
            RolloutError: The answer is no such list.
        """
        return self.read(self.ask("/v1/models"), lambda found: [dict(own) for own in found["data"]])

    def read(self, answer: httpx.Response, take: Callable[[Any], Read]) -> Read:
        """Returns what is taken from an answer's JSON, which may come from any program.

        Raises:
            RolloutError: It is not there.
        """
        try:
            return take(answer.json())
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"{self.url} does not answer as vLLM does (status {answer.status_code}, "
                f"{type(error).__name__}: {printable(error, max_length=200)}): use vLLM 0.32 or "
                "newer, at this address."
            ) from error


class VLLMServerEngine:
    """Samples from a policy with servers of vLLM; implements `RolloutEngine`.

    Args:
        config: Addresses, and limits.
        policy: A `PeftModel` with one adapter slot.
        tokenizer: Its tokenizer.
        rollout: Lengths of prompts and replies.

    Raises:
        ValueError: When the adapter's rank or the temperature is larger than vLLM supports.
    """

    def __init__(
        self,
        config: VLLMServerConfig,
        policy: Any,
        tokenizer: PreTrainedTokenizerBase,
        rollout: RolloutConfig,
    ) -> None:
        self.config = config
        self._policy, self._tokenizer, self._rollout = policy, tokenizer, rollout
        settings = policy.peft_config["default"]
        check_temperature(config, rollout)
        self._num_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
        dtype = policy.get_input_embeddings().weight.dtype
        self._max_difference = MAX_DIFFERENCE.get(dtype, MAX_ROUNDING)
        self._command = config.command(
            str(settings.base_model_name_or_path),
            str(dtype).removeprefix("torch."),
            settings.r,
            self._num_tokens,
        )
        self._servers = [Server(url, config) for url in config.urls]
        # processes load and unload independently, so that names of one are not those of another
        self._process = uuid4().hex[:8]
        self._folder = Path(config.shared_folder).expanduser().absolute() / f"firm-{self._process}"
        # also at the end of a process whose run did not close its engines
        weakref.finalize(self, _close, self._servers, self._folder)
        self._probe: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        self._probe = self._probe[: max(2, self._num_tokens - 1)]
        self._thread = ThreadPoolExecutor(1, "rollout")
        self._spreading: Future[list[Reply]] = Future()
        self._spreading.set_result([])
        self._base: torch.Tensor | None = None  # the policy's log-probabilities without adapter

    def sample(self, requests: list[SampleRequest]) -> list[SampledTokens]:
        """Returns the samples of each request; see `RolloutEngine`.

        Rows of all requests are sampled at a time. Each process of a team asks for its share.

        Raises:
            RolloutError: A server does not fit the policy, or none is left.
        """
        return [finish() for finish in self.begin(requests)]

    def begin(self, requests: list[SampleRequest]) -> list[Callable[[], SampledTokens]]:
        """Loads versions and begins to sample; see `BackgroundEngine`."""
        team, states = requests[0].team, dict[str, Mapping[str, torch.Tensor]]()
        rows = rows_of(self._policy, requests, states, suffix=f"-{self._process}")
        with team.unanimous():
            wait([self._spreading])  # an earlier batch that nobody waited for
            self._prepare(states, {row.version: row for row in reversed(rows)})
        spreading = self._spreading = self._thread.submit(self._spread, rows)

        @cache
        def finish() -> list[SampledTokens]:
            with team.unanimous():
                replies = spreading.result()
            return to_samples(requests, rows, replies)

        return [lambda at=at: finish()[at] for at in range(len(requests))]

    def close(self) -> None:
        """Unloads all adapters and removes their folders; the servers stay."""
        wait([self._spreading])
        _close(self._servers, self._folder)

    # --- Servers and their adapters --------------------------------------------------------------

    def _prepare(
        self,
        states: Mapping[str, Mapping[str, torch.Tensor]],
        rows: Mapping[str, Row],
    ) -> None:
        """Checks new servers, and loads versions, each with one of its rows, into all of them.

        A server that was left out is tried again.
        """
        for name, state in states.items():
            if not (self._folder / name).exists():
                save_state(self._policy, self._folder / name, state)
        own: dict[str, torch.Tensor] = {}
        for server in self._servers:
            server.lost = ""
            try:
                if is_new := not server.model:
                    self._check(server)
                for name in states:
                    if name not in server.versions:
                        self._load(server, rows[name], own)
                    server.versions[name] = server.versions.pop(name, None)  # to the end: used last
                if is_new:
                    self._check_room(server)
                num_needless = max(
                    0, len(server.versions) - max(self.config.max_loras, len(states))
                )
                for name in list(server.versions)[:num_needless]:
                    _unload(server, name)
            except ServerLost as error:
                self._leave_out(server, error)
        self._check_left()
        for folder in self._folder.glob("*"):  # none yet, where a process has no rows
            if not any(folder.name in server.versions for server in self._servers):
                shutil.rmtree(folder, ignore_errors=True)

    def _leave_out(self, server: Server, error: ServerLost) -> None:
        """Leaves a server out of the current batch; when it answers again, it is checked again."""
        server.lost, server.model, server.versions = str(error), "", {}
        logger.warning("rollout server %s is left out of this batch: %s", server.url, error)

    def _check_left(self) -> None:
        """Raises ``RolloutError`` if no server is left."""
        if all(server.lost for server in self._servers):
            reasons = "; ".join(f"{server.url}: {server.lost}" for server in self._servers)
            raise RolloutError(
                f"no rollout server is left ({reasons}). Start one, then resume: {self._command}"
            )

    def _check(self, server: Server) -> None:
        """Compares a server with the policy.

        Raises:
            ServerLost: It does not answer.
            RolloutError: It serves another model, or in another way than it must.
        """
        base = next((model for model in server.models() if not model.get("parent")), {})
        name, length = base.get("id"), base.get("max_model_len")
        if not isinstance(name, str) or not isinstance(length, int | None):
            raise self._unfit(server, "lists no base model")
        if length is not None and length < self._num_tokens:
            raise self._unfit(server, f"takes {length} tokens, fewer than {self._num_tokens}")
        content = {"model": name, "prompt": PROBE, "add_special_tokens": False}
        answer = server.ask("/tokenize", content)
        if answer.status_code == 200:
            ids = server.read(answer, lambda found: list(found["tokens"]))
            if ids[: len(self._probe)] != self._probe:
                raise self._unfit(server, "has another tokenizer than the policy")
        server.base = self._probe_of(server, name)
        if self._base is None:
            self._base = self._own_probe(None, None, is_base=True)
        difference = _rms(server.base - self._base)
        if not difference <= self._max_difference:
            raise self._unfit(
                server,
                "has another base model or dtype than the policy: log-probabilities differ by "
                f"{difference:.2g} nats per token",
            )
        self._check_tempered(server, name)
        server.model = name

    def _check_tempered(self, server: Server, name: str) -> None:
        """Checks that log-probabilities are those of the tempered distribution."""
        choice = server.complete(
            model=name, prompt=self._probe, max_tokens=1, temperature=MAX_TEMPERATURE, seed=0,
            logprobs=0, return_token_ids=True, ignore_eos=True,
        )  # fmt: skip
        (token,), (logprob,) = _reply(server, choice, 1)
        with self._policy.disable_adapter(), torch.no_grad():
            logits = self._logits()[-1].float()
        tempered, raw = (
            (logits / temperature).log_softmax(-1)[token].item()
            for temperature in (MAX_TEMPERATURE, 1.0)
        )
        if abs(logprob - tempered) > abs(logprob - raw):
            raise self._unfit(server, "gives log-probabilities before tempering")

    def _check_room(self, server: Server) -> None:
        """Checks how many adapters a server takes, which it tells once it has one."""
        found = re.search(r'lora_requests_info\{[^}]*max_lora="(\d+)"', server.ask("/metrics").text)
        if found and int(found[1]) < self.config.max_loras:
            raise self._unfit(
                server,
                f"has --max-loras {found[1]}, fewer than rollout.engine.max_loras, "
                f"{self.config.max_loras}",
            )

    def _unfit(self, server: Server, reason: str) -> RolloutError:
        return RolloutError(f"{server.url} {reason}. Start it as follows: {self._command}")

    def _load(self, server: Server, row: Row, own: dict[str, torch.Tensor]) -> None:
        """Loads a row's version into a server, and compares it with the policy's own passes."""
        name = row.version
        if name not in own:
            own[name] = self._own_probe(row.request.adapter, row.preference)
        if not own[name].isfinite().all():
            raise DivergedError("the policy's log-probabilities")
        folder = Path(self.config.folder_on_servers or self._folder.parent)
        path = folder / self._folder.name / name
        try:
            content = {"lora_name": name, "lora_path": str(path)}
            answer = server.ask("/v1/load_lora_adapter", content)
        except ServerLost as error:
            if not str(error).startswith("status 500"):
                raise
            self._probe_of(server, server.model)  # raises unless it is the adapter that fails
            reason = f"cannot load the adapter {path} ({error})"
            raise self._unfit(server, reason) from error
        if answer.status_code == 404 and name not in answer.text:
            raise self._unfit(server, "does not load adapters while it runs")
        # by an earlier try, whose answer was lost
        is_loaded = answer.status_code == 400 and "already" in error_text(answer)
        if answer.status_code != 200 and not is_loaded:
            raise self._unfit(server, f"cannot load the adapter {path} ({error_text(answer)})")
        if not any(model.get("id") == name for model in server.models()):
            raise RolloutError(
                f"{server.url} does not list the adapter that it loaded, so several servers answer "
                "at this address: list each of them in rollout.engine.urls."
            )
        found = self._probe_of(server, name)
        assert server.base is not None
        assert self._base is not None
        rounding = _rms(server.base - self._base)
        effect, difference = _rms(own[name] - self._base), _rms(found - own[name])
        if difference > self._max_difference + rounding or (
            effect > 4 * rounding + 1e-4 and difference > effect / 2
        ):
            is_base = _rms(found - server.base) < effect / 4
            raise RolloutError(
                f"{server.url} loaded the adapter {name}, but "
                + ("serves the base model" if is_base else "serves another one")
                + f": log-probabilities differ by {difference:.2g} nats per token from the "
                f"policy's, of which the adapter changes {effect:.2g}. vLLM may not know the "
                "layers in policy.lora.target_modules; use others, or another rollout engine."
            )

    # --- Log-probabilities of the probe ----------------------------------------------------------

    def _probe_of(self, server: Server, name: str) -> torch.Tensor:
        """Returns a server's log-probabilities of the probe's tokens but the first."""
        choice = server.complete(
            model=name, prompt=self._probe, max_tokens=1, temperature=1.0, prompt_logprobs=0
        )
        try:
            values = torch.tensor(
                [
                    float(step[str(token)]["logprob"])
                    for step, token in zip(
                        choice["prompt_logprobs"][1:], self._probe[1:], strict=True
                    )
                ]
            )
        except (KeyError, TypeError, ValueError):
            values = torch.tensor([torch.nan])
        if not values.isfinite().all():  # a comparison with NaN would find no difference
            raise RolloutError(
                f"{server.url} must give a finite log-probability for each of a prompt's tokens, "
                f"and gives others for {name}: use vLLM 0.32 or newer."
            )
        return values

    @torch.no_grad()
    def _own_probe(
        self,
        adapter: Mapping[str, torch.Tensor] | None,
        preference: torch.Tensor | None,
        *,
        is_base: bool = False,
    ) -> torch.Tensor:
        """Returns the policy's log-probabilities of the same tokens."""
        slot = adapter_parameters(self._policy)
        kept = copy_adapter(slot)
        try:
            if adapter is not None:
                load_adapter_(slot, dict(adapter))
            set_preferences(self._policy, preference)
            with self._policy.disable_adapter() if is_base else nullcontext():
                logits = self._logits()[:-1].float()
        finally:
            load_adapter_(slot, kept)
            set_preferences(self._policy, None)
        ids = torch.tensor(self._probe[1:], device=logits.device)
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu()

    def _logits(self) -> torch.Tensor:
        """Returns the policy's logits for the probe, [N, V]."""
        set_mode(self._policy, is_training=False)
        ids = torch.tensor([self._probe], device=self._policy.device)
        return self._policy(input_ids=ids, use_cache=False).logits[0]

    # --- Rows ------------------------------------------------------------------------------------

    def _spread(self, rows: Sequence[Row]) -> list[Reply]:
        """Returns the reply of each row; each server takes the next row when it is free."""
        waiting, replies, lock = deque(enumerate(rows)), dict[int, Reply](), threading.Lock()

        def work(server: Server) -> None:
            while not server.lost:
                try:
                    at, row = waiting.popleft()
                except IndexError:  # other threads have the last ones
                    return
                try:
                    replies[at] = self._reply_to(server, row)
                except ServerLost as error:
                    waiting.append((at, row))
                    with lock:
                        if not server.lost:
                            self._leave_out(server, error)
                except BaseException:
                    waiting.clear()  # so that the others stop
                    raise

        while waiting:  # again, if a server is lost after others have ended
            self._check_left()
            left = [server for server in self._servers if not server.lost]
            num_each = min(self.config.num_requests, len(waiting))
            with ThreadPoolExecutor(num_each * len(left), "rollout") as pool:
                # in turn, so that few rows are spread over all servers
                futures = [pool.submit(work, server) for _ in range(num_each) for server in left]
            for future in futures:
                future.result()
        return [replies[at] for at in range(len(rows))]

    @staticmethod
    def _reply_to(server: Server, row: Row) -> Reply:
        config = row.request.config
        is_greedy = config.temperature < MIN_TEMPERATURE
        choice = server.complete(
            model=row.version,
            prompt=row.prompt,
            max_tokens=config.max_new_tokens,
            temperature=0.0 if is_greedy else config.temperature,
            seed=row.seed,
            stop_token_ids=list(row.request.end_ids),
            ignore_eos=True,  # the end tokens include it
            logprobs=0,  # of the sampled token alone
            return_token_ids=True,
            skip_special_tokens=False,
        )
        ids, logprobs = _reply(server, choice, config.max_new_tokens)
        return ids, [0.0] * len(ids) if is_greedy else logprobs  # the others are untempered


def _unload(server: Server, name: str) -> None:
    server.versions.pop(name, None)
    try:
        server.ask("/v1/unload_lora_adapter", {"lora_name": name})
    except ServerLost as error:
        logger.warning("rollout server %s did not unload %s: %s", server.url, name, error)


def _close(servers: Sequence[Server], folder: Path) -> None:
    """Unloads all adapters, closes connections and removes the adapters' folders."""
    for server in servers:
        for name in [*server.versions]:
            _unload(server, name)
        server.close()
        server.model = ""
    shutil.rmtree(folder, ignore_errors=True)


def _reply(server: Server, choice: Mapping[str, Any], max_tokens: int) -> Reply:
    """Returns the tokens and log-probabilities of a choice, which may come from any program."""
    ids: Any = choice.get("token_ids")
    logprobs: Any = (choice.get("logprobs") or {}).get("token_logprobs")
    is_whole = (
        isinstance(ids, list)
        and isinstance(logprobs, list)
        and 0 < len(ids) == len(logprobs) <= max_tokens
        and all(isinstance(each, int) and each >= 0 for each in ids)
        and all(isinstance(each, int | float) and -1e9 < each <= 1e-3 for each in logprobs)
    )
    if not is_whole:
        got = json.dumps({"token_ids": ids, "logprobs": logprobs})[:200]
        raise RolloutError(
            f"{server.url} must answer with 1 to {max_tokens} tokens and a log-probability for "
            f"each, got {got}: use vLLM 0.32 or newer."
        )
    return ids, logprobs


def _rms(values: torch.Tensor) -> float:
    return values.float().square().mean().sqrt().item()
