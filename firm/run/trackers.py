"""Trackers by name: W&B, and through Accelerate's trackers TensorBoard and MLflow."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from firm.base.extras import install_command
from firm.base.sanitize import legible_data, printable
from firm.run.config import to_yaml
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.guard import Guard
from firm.run.rows import valid_row
from firm.run.tracking import Series, Tracker, TrackingConfig


def open_tracker(
    config: TrackingConfig, run_path: str | Path, run_config: Mapping[str, Any], **labels: Any
) -> "AnyTracker":
    """Returns the configured tracker of a run; see `Tracker` for the arguments.

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


class AccelerateTracker:
    """Forwards the numbers of metrics.jsonl to TensorBoard or MLflow.

    Texts and tables stay in the run's directory. Arguments are as for `Tracker`.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_path: str | Path,
        run_config: Mapping[str, Any],
        *,
        objectives: Sequence[str],
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._objectives = tuple(objectives)
        self._series = Series(objectives)
        self._guard = Guard({"tensorboard": "TensorBoard", "mlflow": "MLflow"}[config.name])
        self._tracker: Any = None
        path = Path(run_path).resolve()
        labels = {
            "group": config.group or group,
            "job_type": config.job_type or job_type,
            "tags": ", ".join(dict.fromkeys([*config.tags, *tags])),
        }
        with self._guard("the start of the run"):
            self._tracker = _STARTS[config.name](
                config,
                path,
                legible_data(dict(run_config)),
                name=printable(name or path.name),
                labels={key: printable(text) for key, text in labels.items() if text},
            )

    def __enter__(self) -> "AccelerateTracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(succeeded=kind is None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Forwards the numbers of one row of metrics.jsonl as series over the rounds."""
        valid, _ = valid_row(row, num_objectives=len(self._objectives))
        if self._tracker is None or valid is None:
            return
        with self._guard(f"a row of kind {valid['kind']}"):
            if series := self._series.of(valid):
                self._tracker.log(series, step=valid["round"])

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Ignores rows of samples.jsonl."""

    def log_points(
        self, title: str, rows: Sequence[Mapping[str, Any]], *, summary: Mapping[str, float]
    ) -> None:
        """Forwards the summary of several runs."""
        if self._tracker is not None and summary:
            with self._guard(title):
                self._tracker.log({f"{title}/{name}": own for name, own in summary.items()}, step=0)

    def finish(self, *, succeeded: bool = True) -> None:
        """Closes the run."""
        tracker, self._tracker = self._tracker, None
        with self._guard("the end of the run"):
            if tracker is not None:
                tracker.finish()


AnyTracker = Tracker | AccelerateTracker


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
