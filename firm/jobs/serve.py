"""Serves a conditioned run at any preference, by llama.cpp, with OpenAI's chat endpoint."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from firm.base.sanitize import legible
from firm.jobs.configs import ExportConfig, ServeConfig, served_name
from firm.jobs.export import export
from firm.jobs.pick import conditioned_front
from firm.run.errors import UserError
from firm.run.files import read_text
from firm.run.progress import say
from firm.serving.llama import LlamaEngine, import_llama
from firm.serving.local import check_host, family_of
from firm.serving.requests import model_at

if TYPE_CHECKING:
    from firm.serving.endpoint import Endpoint


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
            if engine.context < cfg.context:
                say(
                    f"note: the context is {engine.context} tokens, since the model has no longer "
                    f"one (--context {cfg.context})"
                )
            base = Path(engine.served.base_model).name.removesuffix(".gguf")
            name = cfg.name or served_name(base)
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
