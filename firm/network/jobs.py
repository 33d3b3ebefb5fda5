"""Allowed contents of a job; any other content is refused, even if it is signed.

A job consists of a folder for each party and of metadata. `site_app` and `server_app` define the
allowed files of a folder and their contents, and `META` defines the allowed metadata. A site and a
server check a job before building any part of it, in addition to FLARE's own checks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firm.base.sanitize import check_name, printable
from firm.network.wire import TASK

POLL = 0.05
"""Polling interval for tasks in seconds, at the server and at the sites. FLARE's defaults of 0.5 s
and 2 s would take up most of a short round."""

EXECUTOR = "firm.network.executor.SiteExecutor"
"""The only class that a job instantiates at a site."""

NAME = "<name>"
"""Placeholder that allows any name, such as a run's, as an argument or value."""

_SIGNATURE = (".__nvfl_sig.json", ".__nvfl_submitter.crt")
"""FLARE's own files in each folder that is signed."""

_MAX_BYTES = 65_536
"""Maximum size of a file; configurations have a few hundred bytes."""


@dataclass(frozen=True)
class Between:
    """Allows a finite number within a range."""

    low: float
    high: float


@dataclass(frozen=True)
class Names:
    """Allows a list of parties' names."""


@dataclass(frozen=True)
class Free:
    """Allows any value: the server writes it, and no code depends on it."""


App = Mapping[str, Any]
"""Allowed content of each file of a folder, by path; a constant allows only itself."""

_EMPTY: dict[str, list[Any]] = {
    "task_data_filters": [],
    "task_result_filters": [],
    "components": [],
}

HEARTBEAT_S = Between(0.1, 3600.0)
"""Range of `heartbeat_interval` and `heartbeat_timeout`."""


def site_app(heartbeat_interval: Any = HEARTBEAT_S, heartbeat_timeout: Any = HEARTBEAT_S) -> App:
    """Returns the allowed contents of a site's folder.

    Args:
        heartbeat_interval: Time between two heartbeats in seconds, or its allowed range.
        heartbeat_timeout: Time without a heartbeat in seconds, after which the site's process
            counts as dead, or its allowed range.
    """
    arguments = {"heartbeat_interval": heartbeat_interval, "heartbeat_timeout": heartbeat_timeout}
    return {
        "config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": [TASK], "executor": {"path": EXECUTOR, "args": arguments}}],
            **_EMPTY,
        }
    }


def server_app(controller: str, arguments: Mapping[str, Any]) -> App:
    """Returns the allowed contents of the server's folder.

    Args:
        controller: Import path of the workflow's class.
        arguments: Its arguments; ``NAME`` as a value allows any name.
    """
    return {
        "config/config_fed_server.json": {
            "format_version": 2,
            "server": {"task_request_interval": POLL},
            "workflows": [{"id": "firm", "path": controller, "args": dict(arguments)}],
            **_EMPTY,
        }
    }


META: dict[str, Any] = {
    "name": NAME,
    "resource_spec": {},
    "min_clients": Between(1, 1_000_000),
    "mandatory_clients": Names(),
    "deploy_map": {"server": ["server"], "site": Names()},
    "study": "default",
    **dict.fromkeys(
        (
            "data_storage_format",
            "duration",
            "job_clients",
            "job_deploy_detail",
            "job_folder_name",
            "job_id",
            "last_schedule_time",
            "schedule_count",
            "schedule_history",
            "start_time",
            "status",
            "submit_time",
            "submit_time_iso",
            "submitter_name",
            "submitter_org",
            "submitter_role",
        ),
        Free(),
    ),
}
"""Allowed metadata of a job; its submitter writes the first five keys, the server the others."""


def problem_of_app(folder: Path, allowed: App) -> str | None:
    """Describes the first forbidden or missing content of a job's folder; None if it is allowed."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    folders = {parent.as_posix() for name in allowed for parent in Path(name).parents}
    signed = {(Path(parent) / name).as_posix() for parent in folders for name in _SIGNATURE}
    for name, path in sorted(files.items()):
        is_known_file = path.is_file() and (name in allowed or name in signed)
        is_known_folder = path.is_dir() and name in folders
        if path.is_symlink() or not (is_known_file or is_known_folder):
            return _refusal(f"the file {printable(name, max_length=100)}", "is not allowed")
    for name, content in allowed.items():
        if name not in files:
            return _refusal(f"the file {name}", "is missing")
        try:
            with files[name].open("rb") as file:
                value = _parse(file.read(_MAX_BYTES + 1))
            if problem := _difference(value, content, Path(name).name):
                return problem
        except (ValueError, RecursionError) as error:
            return _refusal(f"the file {name}", f"cannot be read: {printable(error)}")
    return None


def problem_of_meta(meta: Mapping[str, Any]) -> str | None:
    """Describes the first forbidden entry of a job's metadata; None if all are allowed."""
    present = {key: allowed for key, allowed in META.items() if key in meta}
    return _difference(dict(meta), present, "meta")


def problem_of_component(component: Any, allowed: App) -> str | None:
    """Describes why a job may not build a component with its arguments; None if it may."""
    if not isinstance(component, dict):
        return _refusal("a component", "must be a mapping")
    path = component.get("path")
    for entry in _components(allowed):
        if isinstance(path, str) and entry["path"] == path:
            return _difference(component, entry, "component")
    return _refusal(f"the class {printable(path, max_length=200)}", "is not allowed")


def _components(allowed: Any) -> list[dict[str, Any]]:
    if isinstance(allowed, Mapping):
        own = [dict(allowed)] if "path" in allowed else []
        return own + [entry for value in allowed.values() for entry in _components(value)]
    if isinstance(allowed, list):
        return [entry for value in allowed for entry in _components(value)]
    return []


def _parse(content: bytes) -> Any:
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is longer than {_MAX_BYTES} bytes.")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # parsers differ in which of two equal keys they use, so FLARE might see another value
        if len(dict(pairs)) != len(pairs):
            raise ValueError("it contains a key twice.")
        return dict(pairs)

    return json.loads(content.decode("utf-8"), object_pairs_hook=unique)


def _difference(value: Any, allowed: Any, where: str) -> str | None:
    """Describes the first part of a value that a rule forbids; None if the value is allowed."""
    parts: list[tuple[Any, Any, str]] = []
    match allowed:
        case Free():
            return None
        case Between(low, high):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:  # false for NaN
                return _refusal(where, f"must be from {low:g} to {high:g}", value)
        case Names():
            if not isinstance(value, list) or not all(map(_is_name, value)):
                return _refusal(where, "must be a list of names", value)
        case str() if allowed == NAME:
            if not _is_name(value):
                return _refusal(where, "must be a name", value)
        case dict():
            if not isinstance(value, dict):
                return _refusal(where, "must be a mapping", value)
            if strange := sorted(map(str, value.keys() - allowed.keys())):
                key = printable(strange[0], max_length=100)
                return _refusal(f"{where}.{key}", "is not allowed")
            if missing := [key for key in allowed if key not in value]:
                return _refusal(f"{where}.{missing[0]}", "is missing")
            parts = [(value[key], rule, f"{where}.{key}") for key, rule in allowed.items()]
        case list():
            if not isinstance(value, list) or len(value) != len(allowed):
                return _refusal(where, f"must have {len(allowed)} entries", value)
            pairs = enumerate(zip(value, allowed, strict=True))
            parts = [(item, rule, f"{where}[{index}]") for index, (item, rule) in pairs]
        case _ if type(value) is not type(allowed) or value != allowed:
            return _refusal(where, f"must be {allowed!r}", value)
    return next(filter(None, (_difference(*part) for part in parts)), None)


def _is_name(value: Any) -> bool:
    try:
        check_name(value, "it")
    except ValueError:
        return False
    return True


def _refusal(what: str, why: str, *received: Any) -> str:
    got = f", got {printable(repr(received[0]), max_length=100)}" if received else ""
    return f"the job is refused: {what} {why}{got}"
