"""Serves a conditioned run at any preference, by llama.cpp, with OpenAI's chat endpoint."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from firm.alignment.policy_config import PolicyConfig
from firm.alignment.rollout_config import RolloutConfig
from firm.base.fields import Hint, NumTokens, NumWorkers, Port, configuration
from firm.base.sanitize import legible
from firm.jobs.export import ExportConfig, export
from firm.jobs.pick import conditioned_front
from firm.run.errors import UserError
from firm.run.files import read_text
from firm.serving.llama import LlamaEngine, import_llama
from firm.serving.local import check_host, family_of
from firm.serving.requests import model_at

if TYPE_CHECKING:
    from firm.serving.endpoint import Endpoint


@configuration
class ServeConfig:
    """An endpoint; settings of `run` are the defaults, followed by the defaults below."""

    run: Path | None = None
    """Finished conditioned run, which is exported into a temporary folder."""
    export: Path | None = None
    """Folder of `firm export --to gguf`, instead of a run."""
    base: Path | None = None
    """GGUF file of the base model, such as a quantized one; by default the run's own model."""
    name: str = ""
    """Name of the model in requests; by default that of the base model."""
    host: str = "127.0.0.1"
    """Address to bind; others than this machine's own need `api_key_file`."""
    port: Port = 8080
    """Port."""
    api_key_file: Path | None = None
    """File with the key that requests must carry as bearer token; it is not passed on the command
    line, which other users of this machine can see."""
    num_slots: NumWorkers = 4
    """Number of requests that are answered at once."""
    max_waiting: Annotated[int, Interval(ge=0, le=10_000)] = 64
    """Number of requests that wait for a slot; others get status 429."""
    context: NumTokens = 2048
    """Maximum length of a prompt with its reply in tokens."""
    num_threads: Annotated[NumWorkers | None, Hint("null takes one per core")] = None
    """CPU threads; null: one per core."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model of the run."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies, the default of requests."""

    def __post_init__(self) -> None:
        if (self.run is None) == (self.export is None):
            raise ValueError("serve needs a model: firm serve runs/mine, or --export FOLDER.")
        if _served_name(self.name) != self.name:
            raise ValueError(
                "name must have no blanks and no @, which comes before a trade-off, got "
                f"{self.name!r}: try {_served_name(self.name)!r}."
            )


def _served_name(name: str) -> str:
    """Returns a name that requests can state, which is the same if it is one."""
    return "".join("-" if c in "@ " or not c.isprintable() else c for c in name)


@contextmanager
def endpoint(cfg: ServeConfig) -> Iterator["Endpoint"]:
    """Yields an endpoint with the model loaded, bound to its address; it does not answer yet.

    Raises:
        UserError: The run or export cannot be served, or the address is in use or not allowed.
        ModuleNotFoundError: An optional package is missing.
    """
    import_llama()  # before the export, which takes a while
    from firm.serving.endpoint import Endpoint  # needs the packages of the extra `serve`

    key = _api_key(cfg)
    try:
        check_host(cfg.host, key)
        _check_free(cfg)
        with tempfile.TemporaryDirectory(prefix="firm-serve-") as scratch:
            engine = LlamaEngine(
                cfg.export or _export_run(cfg, Path(scratch) / "front"),
                base=cfg.base,
                num_slots=cfg.num_slots,
                context=cfg.context,
                num_threads=cfg.num_threads or os.cpu_count() or 1,
            )
            base = Path(engine.served.base_model).name.removesuffix(".gguf")
            name = cfg.name or _served_name(base)
            options = {"host": cfg.host, "port": cfg.port, "max_waiting": cfg.max_waiting}
            with Endpoint(engine, name=name, api_key=key, **options) as server:
                yield server
    except ValueError as error:
        raise UserError(str(error)) from error


def _export_run(cfg: ServeConfig, out: Path) -> Path:
    conditioned_front(cfg.run or Path(), "serve")
    given = {"policy": cfg.policy, "rollout": cfg.rollout, "has_base": cfg.base is None}
    return export(ExportConfig(run=cfg.run, to="gguf", out=out, **given)).folder


def _api_key(cfg: ServeConfig) -> str | None:
    if cfg.api_key_file is None:
        return None
    key = read_text(cfg.api_key_file, remedy="write the key as text.").strip()
    if not key or not key.isprintable() or " " in key:
        raise UserError(f"api_key_file: {cfg.api_key_file} must hold a key without spaces.")
    return key


def _check_free(cfg: ServeConfig) -> None:
    """Raises `UserError` if the address is in use, before anything is loaded."""
    try:
        socket.create_server((cfg.host, cfg.port), family=family_of(cfg.host)).close()
    except OSError as error:
        raise UserError(
            f"port: {cfg.host}:{cfg.port} cannot be bound ({error.strerror}); choose another "
            "--port or --host."
        ) from error


def main(cfg: ServeConfig) -> None:
    """Answers requests until interrupted."""
    with endpoint(cfg) as server:
        front = server.engine.served.front
        print(f"{server.url}/v1 (press Ctrl-C to stop)", flush=True)
        print(f"model     {server.name}, at equal shares of {', '.join(front.objectives)}")
        shares = dict(zip(front.objectives, front.preferences()[0].tolist(), strict=True))
        print(f"          {model_at(server.name, shares)}, or any other preference", flush=True)
        for found in server.engine.served.certificates:
            at = model_at(server.name, found.preference)
            print(legible(f"certificate  {at}: {found.describe()}"), flush=True)
        server.serve_forever()
