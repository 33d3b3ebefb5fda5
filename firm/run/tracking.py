"""Metrics in Weights & Biases, when asked for; the run directory always has them too.

A run never waits for the service: without a key, without a network or with a wrong key it goes on
off line, says so in one line, and leaves files that `wandb sync` uploads later.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeGuard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackingConfig:
    """Whether and where metrics are sent beside the run directory."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """disabled: not at all; offline: to files for `wandb sync`; online: to the W&B service."""
    project: str = "firm"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null is the key's own."""
    timeout_s: float = 30.0
    """Seconds to wait for the service at the start, and for the last upload at the end."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}.")


class Tracker:
    """Forwards the rows of metrics.jsonl to W&B; does nothing where tracking is disabled.

    Args:
        config: Whether and where.
        run_path: The run's directory; W&B's files go to `wandb/` in it, its name is the run's.
        run_config: The resolved configuration, shown beside the metrics.
        objectives: Names of the M objectives, which become the names of per-objective series.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_path: str | Path,
        run_config: Mapping[str, Any],
        *,
        objectives: Sequence[str],
    ) -> None:
        self._objectives = tuple(objectives)
        self._run = None
        if config.mode != "disabled":
            self._run = _start(config, Path(run_path), run_config)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(succeeded=kind is None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Forwards the numbers of one row, over its round."""
        if self._run and (series := flatten(row, self._objectives)):
            self._run.log({"round": row["round"], **series})

    def finish(self, *, succeeded: bool = True) -> None:
        """Closes W&B's files, and waits at most the configured time for the last upload."""
        if self._run:
            self._run.finish(exit_code=0 if succeeded else 1)
            self._run = None


def flatten(row: Mapping[str, Any], objectives: Sequence[str]) -> dict[str, float]:
    """Returns the numbers of a row under flat names, such as "client_0/weights/helpful".

    Lists over solves become their means. Rows without a round (the run's own) have no series.

    Example:
        >>> row = {"kind": "client", "round": 1, "client": "a", "weights": [[0.25, 0.75], [1, 0]]}
        >>> flatten(row, ["helpful", "harmless"])
        {'a/weights/helpful': 0.625, 'a/weights/harmless': 0.375}
    """
    if "round" not in row:
        return {}
    parts = [row["kind"], row.get("split")] if row["kind"] != "client" else [row["client"]]
    prefix = "/".join(part for part in parts if part)
    pairs = ["-".join(pair) for pair in combinations(objectives, 2)]
    columns = {"weights": objectives, "gradient_norms": objectives, "cosines": pairs}
    return {
        f"{prefix}/{name}": value
        for key, entry in row.items()
        if key not in ("kind", "round", "client", "split")
        for name, value in _series(key, entry, columns.get(key, ()))
    }


def _series(name: str, entry: Any, columns: Sequence[str]) -> Iterator[tuple[str, float]]:
    if isinstance(entry, Mapping):
        for key, item in entry.items():
            yield from _series(f"{name}/{key}", item, columns)
    elif isinstance(entry, list) and entry and isinstance(entry[0], list):  # [S][columns]
        for column, values in zip(columns, zip(*entry, strict=True), strict=True):
            yield f"{name}/{column}", fmean(values)
    elif isinstance(entry, list) and entry and _is_number(entry[0]):
        yield name, fmean(entry)
    elif _is_number(entry):
        yield name, float(entry)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _start(config: TrackingConfig, run_path: Path, run_config: Mapping[str, Any]) -> Any:
    """A W&B run, online if that is wanted and possible."""
    import wandb  # a second of imports that only tracked runs pay

    # A silent W&B asks for no key: without one, `init` raises at once, on a terminal too.
    wandb.setup(settings=wandb.Settings(silent=True))
    settings = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=config.timeout_s,
        finish_timeout=config.timeout_s,
        x_disable_stats=True,
    )

    def init(mode: Literal["offline", "online"]) -> Any:
        return wandb.init(
            mode=mode,
            project=config.project,
            entity=config.entity,
            name=run_path.resolve().name,
            dir=str(run_path),
            config=dict(run_config),
            settings=settings,
        )

    run, reason = None, "as configured"
    if config.mode == "online":
        try:
            run = init("online")
            logger.warning("W&B: %s", run.url)
        except wandb.Error as error:
            reason = str(error).partition("\n")[0].rstrip(".")
    if run is None:
        run = init("offline")
        logger.warning("W&B is off line (%s); upload with: wandb sync %s", reason, _folder(run))
    run.define_metric("round")
    run.define_metric("*", step_metric="round")
    return run


def _folder(run: Any) -> Path:
    return Path(run.dir).parent  # the files' folder lies in the one that `wandb sync` takes
