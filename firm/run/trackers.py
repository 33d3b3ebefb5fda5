"""Trackers by name: W&B, and through Accelerate's trackers TensorBoard and MLflow."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from firm.base.extras import install_command
from firm.base.sanitize import printable
from firm.run.config import to_yaml
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.tracking import SeriesTracker, Tracker, TrackingConfig


def open_tracker(
    config: TrackingConfig, run_path: str | Path, run_config: Mapping[str, Any], **labels: Any
) -> SeriesTracker:
    """Returns the configured tracker of a run; see `SeriesTracker` for the arguments.

    Raises:
        UserError: The tracker's package is not installed.
    """
    check_installed(config)
    kind = Tracker if config.name == "wandb" else AccelerateTracker
    return kind(config, run_path, run_config, **labels)


def check_installed(config: TrackingConfig) -> None:
    """Raises `UserError` with a remedy if the configured tracker's package is not installed."""
    if config.is_enabled and find_spec(config.name) is None:
        raise UserError(
            f"tracking.name {config.name} needs the package {config.name}, which is not "
            f"installed: {install_command(config.name)}; or leave tracking out."
        )


class AccelerateTracker(SeriesTracker):
    """Forwards the numbers of metrics.jsonl to TensorBoard or MLflow."""

    def _start(
        self, config: TrackingConfig, path: Path, run_config: Mapping[str, Any], **labels: Any
    ) -> Any:
        name, tags = labels.pop("name"), ", ".join(labels.pop("tags"))
        texts = {**labels, "tags": tags}
        legible = {key: printable(text) for key, text in texts.items() if text}
        return _STARTS[config.name](config, path, run_config, name=name, labels=legible)


def _tensorboard(
    config: TrackingConfig,
    path: Path,
    run_config: Mapping[str, Any],
    *,
    name: str,
    labels: Mapping[str, str],
) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # a resumed run repeats its rows, which hide those of earlier sessions
    tracker = TensorBoardTracker("", path / "tensorboard", purge_step=0)
    tracker.start()
    tracker.log({"config": f"```yaml\n{to_yaml({**labels, **run_config})}```"}, step=0)
    return tracker


def _mlflow(
    config: TrackingConfig,
    path: Path,
    run_config: Mapping[str, Any],
    *,
    name: str,
    labels: Mapping[str, str],
) -> Any:
    from accelerate.tracking import MLflowTracker

    tracker = MLflowTracker(config.project, tags=dict(labels), run_name=name)
    tracker.start()
    tracker.store_init_configuration(dict(leaves(run_config)))
    return tracker


_STARTS = {"tensorboard": _tensorboard, "mlflow": _mlflow}
