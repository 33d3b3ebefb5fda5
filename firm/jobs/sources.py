"""Rejects missing files, folders and names, and suggests the nearest existing ones."""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from firm.alignment.policy_config import is_gguf
from firm.base.preferences import FRONT_NAME
from firm.jobs.alignment_config import AlignmentConfig, every_source
from firm.jobs.configs import PickConfig, PointsConfig, ReportConfig, WorkspaceConfig
from firm.jobs.network_config import AdminConfig, ServerConfig, SiteConfig, federation_of
from firm.run.config import lay_out
from firm.run.errors import UserError
from firm.run.resuming import check_run
from firm.run.shipped import FETCHED, with_shipped_paths
from reward_models.registry import TRAINED_KEYS, check_name, reward_settings

REWARD_SETTINGS_NAME = "reward.yaml"
"""File with a reward model's settings, in the folder that `firm reward` writes."""


def trained_settings(text: str) -> dict[str, Any]:
    """Returns the settings of the reward model that a text denotes, as in `reward_settings`.

    A reward model that `firm reward` has trained has those of its training.

    Raises:
        UserError: Its file does not have them.
    """
    options: dict[str, Any] = dict(reward_settings(text))
    file = Path(with_shipped_paths(options.get("path", ""))).expanduser() / REWARD_SETTINGS_NAME
    if "path" not in options or not file.is_file():
        return options
    try:
        (trained,) = yaml.safe_load(file.read_text(encoding="utf-8"))["rewards"].values()
        own = {key: trained[key] for key in TRAINED_KEYS}  # and no code of a stranger's
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"{file} does not have the settings of a trained reward model; restore it."
        ) from None
    return {**options, **own}


def check_sources(cfg: AlignmentConfig) -> None:
    """Checks that local resources named in a configuration exist; does not query hubs.

    Raises:
        UserError: A folder of a model or adapter, a file of data or reward functions, or the name
            of a reward model does not exist.
    """
    check_policy("policy.path", cfg.policy.path)
    check_local(cfg)


def check_local(cfg: AlignmentConfig) -> None:
    """Checks what no model is fetched for: data, reward models and adapters to start from.

    Raises:
        UserError: As `check_sources`.
    """
    cfg = with_shipped_paths(cfg)
    for key, config in every_source(cfg).items():
        source = config.source
        for each in [source] if isinstance(source, str) else source:
            check_data(f"{key}.source", each)
    models = {f"rewards.{name}": own for name, own in cfg.rewards.items()}
    models |= {f"evaluation.metrics.{name}": own for name, own in cfg.evaluation.metrics.items()}
    for group, others in cfg.groups.items():
        models |= {f"groups.{group}.rewards.{name}": own for name, own in others.rewards.items()}
    for key, model in models.items():
        check_reward(key, path=model.path, file=model.file, name=model.name)
    for folder in cfg.start:
        if not Path(folder).expanduser().is_dir():
            raise _missing("start", "folder", folder)


def front_file(path: Path) -> Path:
    """Returns the file of a front: `path` itself, or the only front in this folder.

    Raises:
        UserError: There is no such file, or none or several in the folder.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"front: there is no file or folder {path}; pass a finished conditioned run, or a "
            "finished sweep."
        )
    files = sorted({*path.glob(FRONT_NAME), *path.glob("*.front.json")})
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(
            f"front: {path} has several fronts; pass one: {', '.join(map(str, files))}."
        )
    raise UserError(
        f"front: {path} has no front; pass a finished conditioned run, or a finished sweep."
    )


def check_front(cfg: PickConfig) -> None:
    """Raises `UserError` if there is no front, or several."""
    front_file(cfg.front)


def check_base(cfg: PointsConfig) -> None:
    """Raises `UserError` if there is no configuration of the runs, or it is invalid."""
    lay_out(AlignmentConfig, [cfg.base], [])


def check_kit(cfg: ServerConfig | SiteConfig | AdminConfig) -> None:
    """Raises `UserError` unless a folder is the kit of a federation's party."""
    federation_of(cfg.kit)


def check_run_folder(cfg: ReportConfig | WorkspaceConfig) -> None:
    """Raises `UserError` unless a folder holds a run, or the runs of a study or sweep."""
    if not cfg.run.is_dir():
        check_run(cfg.run)


def check_reward(key: str, *, path: str = "", file: str = "", name: str = "") -> None:
    """Raises `UserError` if a reward model's folder, file or name does not exist."""
    if file:
        if not Path(file).expanduser().is_file():
            raise _missing(key, "file", file)
    elif path:
        check_folder(key, path)
    elif name:
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from None


def check_data(key: str, source: str) -> None:
    """Raises `UserError` if a file or folder of data does not exist; accepts names on a hub."""
    if is_file(source):
        if not Path(source).expanduser().is_file():
            raise _missing(key, "file", source)
    elif not Path(source).expanduser().exists():
        check_folder(key, source.partition(":")[0])


def is_file(source: str) -> bool:
    """Returns whether a data source looks like a file path."""
    return re.search(r"\.jsonl?(\.gz)?$", source) is not None


def check_policy(key: str, path: str) -> None:
    """Raises `UserError` if a model's folder or GGUF file does not exist; accepts hub names."""
    path = with_shipped_paths(path)
    if path.startswith(FETCHED):
        raise UserError(
            f"{key}: {path} is not on this machine; `firm fetch {path.removeprefix(FETCHED)}` "
            "fetches it."
        )
    if not is_gguf(path):
        check_folder(key, path)
    elif not Path(path).expanduser().is_file():
        raise _missing(key, "file", path)


def check_folder(key: str, path: str) -> None:
    """Raises `UserError` if a local path does not exist; accepts names on a hub."""
    is_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if is_local and not Path(path).expanduser().is_dir():
        raise _missing(key, "folder", path)


def _missing(key: str, kind: str, path: str) -> UserError:
    """Returns the error on a missing file or folder, with the most similar name beside it."""
    place = Path(path).expanduser()
    beside = [each.name for each in place.parent.iterdir()] if place.parent.is_dir() else []
    alike = difflib.get_close_matches(place.name, beside, n=1)
    near = f" (did you mean {place.parent / alike[0]}?)" if alike else ""
    start = "" if place.is_absolute() else f" (relative paths start in {Path.cwd()})"
    return UserError(f"{key}: there is no {kind} {path}{near}; correct it{start}.")
