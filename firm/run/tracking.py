"""Optional tracking in Weights & Biases; the run directory always contains the metrics, too.

W&B groups series by the first part of their names. Here, this is the quantity, and the client comes
last, as in `weights/helpful/client_0`, so that the clients' curves of a quantity are shown
together. The mean over the clients of a round is a separate series, `train/weight/helpful`, and
equals the mean on the run's page.

Runs of a setting that differ only in their seed have the same group and job type, by which W&B
draws their mean and spread.

A run does not depend on the service: without a key or network, or with a wrong key, it continues
offline, says so in one line, and leaves files that `wandb sync` can upload later. Data that W&B
rejects causes a warning and does not end the run.
"""

import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Self

from firm.base.extras import install_command
from firm.base.fields import PositiveFloat, configuration
from firm.base.quantities import drawn
from firm.base.sanitize import legible_data, printable
from firm.run.comparison import compare
from firm.run.config import to_yaml
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.guard import Guard
from firm.run.rows import (
    Points,
    as_one_training,
    entries,
    is_of_earlier,
    mean_over_clients,
    valid_row,
    valid_rows,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[^/\\#?%:]{1,128}")
"""Names that W&B accepts."""
_LABEL_LENGTH = 64
"""Maximum length of tags and job types in W&B."""
_SINGULAR = {"rewards": "reward", "weights": "weight", "scores": "score", "cosines": "cosine"}
"""Singular of fields that have one number per objective, for names of single series."""
SERVICES = {"wandb": "W&B", "tensorboard": "TensorBoard", "mlflow": "MLflow"}
"""Services by `TrackingConfig.name`, for messages."""
_GROWTH = 1.05
"""Factor by which the evaluations must have increased to be drawn again, since W&B stores every
chart with all of its points."""
SENT = ("bytes_up", "bytes_down")
"""Fields of a round that are summed over the rounds."""


@configuration
class TrackingConfig:
    """Tracking of metrics with W&B, TensorBoard or MLflow, in addition to the run directory."""

    name: Literal["wandb", "tensorboard", "mlflow"] = "wandb"
    """Tracker. wandb: W&B, if `mode` enables it. tensorboard: files in `tensorboard/` in the run's
    directory. mlflow: the server that MLFLOW_TRACKING_URI names, with `project` as experiment."""
    mode: Literal["disabled", "offline", "online"] = "disabled"
    """Mode of W&B. disabled: no tracking; offline: files for `wandb sync`; online: the W&B
    service."""
    project: str = "firm"
    """W&B project, or MLflow experiment."""
    entity: str | None = None
    """W&B user or team; null: the owner of the API key."""
    group: str | None = None
    """W&B group of the run; null: the sweep or study of the run, if any."""
    job_type: str | None = None
    """W&B job type; null: the setting of a study or sweep, otherwise the strategy."""
    tags: tuple[str, ...] = ()
    """W&B tags, in addition to strategy, setting and seed."""
    timeout_s: PositiveFloat = 30.0
    """Seconds to wait for the service at the start, and for the last upload at the end."""

    def __post_init__(self) -> None:
        for key in ("project", "entity", "group"):
            name = getattr(self, key)
            if name is not None and not (_NAME.fullmatch(name) and name.isprintable()):
                raise ValueError(
                    f"{key} must be 1 to 128 printable characters without any of /\\#?%:, got "
                    f"{printable(repr(name), max_length=80)}."
                )

        labels = [("tags", tag) for tag in self.tags]
        for key, label in [("job_type", self.job_type), *labels]:
            if label is not None and not (label.isprintable() and 0 < len(label) <= _LABEL_LENGTH):
                raise ValueError(
                    f"{key} must be 1 to {_LABEL_LENGTH} printable characters, got "
                    f"{printable(repr(label), max_length=80)}."
                )

    @property
    def is_enabled(self) -> bool:
        """True if a tracker receives the metrics."""
        return self.name != "wandb" or self.mode != "disabled"

    def within(self, group: str) -> Self:
        """Returns a copy with the given group, unless a group is set or tracking is disabled."""
        if not self.is_enabled or self.group is not None:
            return self
        return replace(self, group=group)

    def of_setting(self, setting: str) -> Self:
        """Returns a copy with a setting as tag and, unless a job type is set, as job type."""
        if not self.is_enabled:
            return self
        label = _label(setting)
        return replace(self, job_type=self.job_type or label, tags=(*self.tags, label))


class SeriesTracker:
    """Forwards the numbers of metrics.jsonl to a service, as series over the rounds.

    Texts and tables stay in the run's directory. Does nothing if tracking is disabled; failures of
    the service are warnings.

    Args:
        config: Settings. Their group and job type take precedence over ``group`` and ``job_type``,
            and their tags precede ``tags``.
        run_path: The run's directory.
        run_config: Configuration to show beside the metrics.
        objectives: Names of the objectives.
        name: Name of the run; by default that of its directory.
        group: Group of the run.
        job_type: Setting of the run within its group.
        tags: Further labels.
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
        self._trainings: dict[str, Mapping[str, Any]] = {}
        self._sent: Counter[str] = Counter()
        self._guard = Guard(SERVICES[config.name])
        self._run: Any = None
        path = Path(run_path).resolve()
        job_type = config.job_type or job_type
        if config.is_enabled:
            with self._guard("the start of the run"):
                self._run = self._start(
                    config,
                    path,
                    legible_data(dict(run_config)),
                    name=printable(name or path.name),
                    group=config.group or group,
                    job_type=job_type and _label(job_type),
                    tags=list(dict.fromkeys(map(_label, [*config.tags, *tags]))),
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(succeeded=kind is None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Forwards the valid data of one row of metrics.jsonl.

        Numbers become series over the rounds. The row of a round follows the rows of its clients,
        and adds the means over the clients and the total of bytes sent so far. An earlier round's
        adapter, which a run measures again at its end, has no place in them.
        """
        valid, _ = valid_row(row, num_objectives=len(self._objectives))
        if self._run is None or valid is None or is_of_earlier(valid):
            return
        with self._guard(f"a row of kind {valid['kind']}"):
            self._log(valid, self._series(valid))

    def _series(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Returns the numbers of the next row, with means and totals for the row of a round."""
        series = flatten(row, self._objectives)
        if row["kind"] == "client":
            self._trainings[row["client"]] = row
        if row["kind"] != "round":
            return series
        trainings = [own for own in self._trainings.values() if own["round"] == row["round"]]
        self._sent.update({name: row[name] or 0 for name in SENT if name in row})
        so_far = {f"round/{name}_so_far": total for name, total in self._sent.items()}
        return {**series, **means([*trainings, row], self._objectives), **so_far}

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Shows rows of samples.jsonl, if the service shows texts."""

    def log_points(
        self, title: str, rows: Sequence[Mapping[str, Any]], *, summary: Mapping[str, float]
    ) -> None:
        """Shows the results of several runs.

        Args:
            title: Prefix of all names in the service.
            rows: One row per run, whose keys include the names of the objectives.
            summary: Values of the summary by name.
        """
        if self._run is not None:
            with self._guard(title):
                named = {f"{title}/{name}": value for name, value in summary.items()}
                self._log_points(title, rows, named)

    def finish(self, *, succeeded: bool = True) -> None:
        """Closes the run, and waits at most `timeout_s` seconds for W&B's last upload."""
        run, self._run = self._run, None
        if run is not None:
            with self._guard("the end of the run"):
                self._finish(run, succeeded)

    def _start(
        self, config: TrackingConfig, path: Path, run_config: Mapping[str, Any], **labels: Any
    ) -> Any:
        raise NotImplementedError

    def _log(self, row: Mapping[str, Any], series: Mapping[str, float]) -> None:
        if series:
            self._run.log(series, step=row["round"])

    def _log_points(
        self, title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]
    ) -> None:
        if summary:
            self._run.log(summary, step=0)

    def _finish(self, run: Any, succeeded: bool) -> None:
        run.finish()


class AccelerateTracker(SeriesTracker):
    """Forwards the numbers of metrics.jsonl to TensorBoard or MLflow, by Accelerate's trackers."""

    _is_mlflow = False

    def _start(
        self, config: TrackingConfig, path: Path, run_config: Mapping[str, Any], **labels: Any
    ) -> Any:
        from accelerate.tracking import MLflowTracker, TensorBoardTracker

        name, texts = labels.pop("name"), {**labels, "tags": ", ".join(labels.pop("tags"))}
        own = {key: printable(text) for key, text in texts.items() if text}
        if config.name == "mlflow":
            tracker = MLflowTracker(config.project, tags=own, run_name=name)
            tracker.start()
            self._is_mlflow = True
            with self._guard("the settings"):  # the run is active already
                tracker.store_init_configuration(self._named(dict(leaves(run_config))))
            return tracker
        # a resumed run repeats its rows, which hide those of earlier sessions
        tracker = TensorBoardTracker("", path / "tensorboard", purge_step=0)
        tracker.start()
        tracker.log({"config": f"```yaml\n{to_yaml({**own, **run_config})}```"}, step=0)
        return tracker

    def _log(self, row: Mapping[str, Any], series: Mapping[str, float]) -> None:
        super()._log(row, self._named(series))

    def _log_points(
        self, title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]
    ) -> None:
        super()._log_points(title, rows, self._named(summary))

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return _mlflow_names(values) if self._is_mlflow else dict(values)

    def _finish(self, run: Any, succeeded: bool) -> None:
        if self._is_mlflow:  # Accelerate's tracker would end a failed run as finished
            import_module("mlflow").end_run("FINISHED" if succeeded else "FAILED")
        else:
            run.finish()


def _mlflow_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by names of the characters that MLflow allows.

    >>> _mlflow_names({"FIRM, β = 0.05/kl": 1.0})
    {'FIRM_ β _ 0.05/kl': 1.0}
    """
    return {re.sub(r"[^\w.: /-]", "_", name): value for name, value in values.items()}


class Tracker(SeriesTracker):
    """Forwards metrics, replies and charts to W&B; see `SeriesTracker` for the arguments.

    W&B's files are stored in `wandb/` in the run's directory. The row of kind "run" is added to the
    configuration, and alarms become alerts. Evaluations with scores are also drawn in the trade-off
    plane, at intervals that grow with their number and at the end, and the last one on the test
    split is compared with the base model in a table and in the summary.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._evaluations: list[Mapping[str, Any]] = []
        self._num_drawn = 0  # evaluations in the latest charts
        self._samples: list[Mapping[str, Any]] = []
        super().__init__(*arguments, **options)

    def _start(
        self, config: TrackingConfig, path: Path, run_config: Mapping[str, Any], **labels: Any
    ) -> Any:
        """Starts a W&B run, online if configured and possible, else offline."""
        import wandb  # importing takes a second, which only tracked runs spend

        # A silent W&B does not ask for a key: without one, `init` raises, even on a terminal.
        wandb.setup(settings=wandb.Settings(silent=True))
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=config.timeout_s,
            finish_timeout=config.timeout_s,
            x_disable_stats=True,
            reinit="create_new",  # a program's own run goes on
        )

        def init(mode: Literal["offline", "online"]) -> Any:
            return wandb.init(
                mode=mode,
                project=config.project,
                entity=config.entity,
                dir=str(path),  # absolute, since W&B's service may run in another folder
                config=dict(run_config),
                settings=settings,
                **labels,
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
            logger.warning(
                "W&B is offline (%s); upload with: wandb sync %s",
                printable(reason),
                # of the files' folder, as `wandb sync` expects
                shlex.quote(printable(Path(run.dir).parent)),
            )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        return run

    def _log(self, row: Mapping[str, Any], series: Mapping[str, float]) -> None:
        if row["kind"] == "run":
            own = {key: value for key, value in row.items() if key != "kind"}
            # a resumed run with more rounds repeats the row of its first session
            self._run.config.update({"run": legible_data(own)}, allow_val_change=True)
        if row["kind"] == "round" and (alarms := row.get("alarms")):
            # one alert: within a minute W&B drops others with the same title
            text = "\n".join(printable(alarm, max_length=5_000) for alarm in alarms)
            self._run.alert(f"Round {row['round']}", text)
        if series:
            self._run.log({"round": row["round"], **series, **self._charts(row)})

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Shows rows of samples.jsonl: replies to each prompt before and after alignment."""
        valid, _ = valid_rows(list(rows), kind="sample")
        shown = [row for row in valid if {"prompt", "completion"} <= row.keys()]
        self._samples += [row for row in shown if "preference" not in row]
        with self._guard("the samples"):
            if self._run and self._samples:
                last_round = max(row["round"] for row in self._samples)
                self._run.log({"round": last_round, "samples": _sample_table(self._samples)})

    def _log_points(
        self, title: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]
    ) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines = [[row.get(key) for key in columns] for row in rows]
        charts = {
            f"{title}/{x}-{y}": _scatter(columns, lines, x, y, title)
            for x, y in combinations(self._objectives, 2)
        }
        self._run.log({f"{title}/points": _table(columns, lines), **charts})
        self._run.summary.update(summary)

    def _finish(self, run: Any, succeeded: bool) -> None:
        if self._num_drawn < len(self._evaluations):
            run.log({"round": self._evaluations[-1]["round"], **self._planes()})
        run.finish(exit_code=0 if succeeded else 1)

    def _charts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if row["kind"] != "evaluation" or "scores" not in row:
            return {}
        self._evaluations.append(row)
        is_due = len(self._evaluations) >= _GROWTH * self._num_drawn
        planes = self._planes() if is_due else {}
        if row["split"] != "test" or not row.get("change"):
            return planes
        bases = [e for e in self._evaluations if e["split"] == "test" and "change" not in e]
        table, summary = _comparison(bases[-1] if bases else {}, row)
        self._run.summary.update(summary)
        return {**planes, "test": table}

    def _planes(self) -> dict[str, Any]:
        """Draws the global model after each round in one chart per pair of objectives.

        A single objective is drawn against the KL divergence.
        """
        self._num_drawn = len(self._evaluations)
        charts, names = {}, self._objectives
        for x, y in [*combinations(names, 2)] or [("kl", *names)]:
            lines = []
            for row in self._evaluations:
                across = row.get("kl") if x == "kl" else _mean(row, x)
                lines.append([row["split"], row["round"], across, _mean(row, y)])
            whole = [line for line in lines if None not in line]
            charts[f"trade-off/{x}-{y}"] = _scatter(["split", "round", x, y], whole, x, y)
        return charts


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


def flatten(row: Mapping[str, Any], objectives: Sequence[str]) -> dict[str, float]:
    """Returns the numbers of a row under flat names, such as "weights/helpful/client_0".

    Lists over solves are averaged, and derived quantities are added. Rows without a round (of kind
    "run") have no series.

    >>> row = {"kind": "client", "round": 1, "client": "a", "weights": [[0.25, 0.75], [1, 0]]}
    >>> flatten(row, ["helpful", "harmless"])
    {'weights/helpful/a': 0.625, 'weights/harmless/a': 0.375}
    """
    if "round" not in row:
        return {}
    before = [] if row["kind"] == "client" else [row["kind"]]
    before += [row["split"]] if "split" in row else []
    after = [row["client"]] if row["kind"] == "client" else []
    return {
        "/".join([*before, *path, *after]): value
        for path, value in entries(row, objectives)
        if value is not None
    }


def mean_name(quantity: str, *path: str) -> str:
    """Returns the W&B name of the mean of a quantity over clients.

    >>> mean_name("weights", "helpful"), mean_name("kl")
    ('train/weight/helpful', 'train/kl')
    """
    return "/".join(["train", _SINGULAR.get(quantity, quantity), *path])


def means(rows: Sequence[Mapping[str, Any]], objectives: Sequence[str]) -> dict[str, float]:
    """Returns the means over the clients of a round under flat names, such as "train/kl".

    They are equal to those on the run's page: they cover the rewards and all drawn quantities of
    clients, all clients count equally, and a weight that the server computes for all clients
    replaces the mean of theirs.

    >>> row = {"kind": "client", "round": 1, "rewards": {"helpful": 0.25}}
    >>> means([{**row, "client": "a"}, {**row, "client": "b"}], ["helpful"])
    {'train/reward/helpful': 0.25}
    """
    names = {"rewards", *(each.name for each in drawn() if each.kind == "client")}
    lines: dict[str, dict[str, Points]] = {}
    for row in rows:
        for (name, *path), value in entries(as_one_training(dict(row)), objectives):
            is_servers = row["kind"] == "round" and name == "weights" and path[0] in objectives
            is_clients = row["kind"] == "client" and name in names
            if value is not None and (is_servers or is_clients):
                key = mean_name(name, *path)
                lines.setdefault(key, {})[row.get("client", "")] = {row["round"]: value}
    return {key: mean for key, own in lines.items() for mean in mean_over_clients(own).values()}


def _comparison(
    base: Mapping[str, Any], aligned: Mapping[str, Any]
) -> tuple[Any, dict[str, float | None]]:
    """Compares base and aligned model on the test split: a table, and its means by name."""
    lines: list[list[Any]] = []
    for line in compare(base, aligned):
        measures = [line.base, line.aligned, line.change]
        ends = [(m.mean, m.se) if m else (None, None) for m in measures]
        lines.append([line.name, *(value for end in ends for value in end)])
    summary = {
        f"test/{name}/{column}": mean
        for name, *figures in lines
        for column, mean in zip(("base", "aligned", "change"), figures[::2], strict=True)
        if mean is not None
    }
    columns = ["score", "base", "base se", "aligned", "aligned se", "change", "change se"]
    return _table(columns, lines), summary


def _sample_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Returns a table of the base model's replies, each with the latest reply to its prompt."""
    last_round = max(row["round"] for row in rows)
    scores = list(dict.fromkeys(name for row in rows for name in row.get("scores") or ()))
    replies: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["round"] == last_round > 0:
            replies.setdefault(row["prompt"], []).append(row)
    lines = []
    for base in (row for row in rows if row["round"] == 0):
        matching = replies.get(base["prompt"])
        aligned = matching.pop(0) if matching else {"completion": None, "scores": {}}
        texts = [base["prompt"], base["completion"], aligned["completion"]]
        figures = [
            (side.get("scores") or {}).get(name) for name in scores for side in (base, aligned)
        ]
        lines.append([*texts, *figures])
    titles = [f"{name}, {side}" for name in scores for side in ("base", "aligned")]
    return _table(["prompt", "base", "aligned", *titles], lines)


def _mean(row: Mapping[str, Any], name: str) -> float | None:
    return (row["scores"].get(name) or {}).get("mean")


def _scatter(columns: list[Any], lines: list[Any], x: str, y: str, title: str = "") -> Any:
    import wandb

    heading = f"{title}: {y} against {x}" if title else f"{y} against {x}"
    return wandb.plot.scatter(_table(columns, lines), x, y, title=heading)


def _table(columns: list[Any], lines: list[Any]) -> Any:
    import wandb

    return wandb.Table(columns=legible_data(columns), data=legible_data(lines))


def _label(text: str) -> str:
    """Converts a text to a tag or job type; long texts are shortened, with a hash to differ."""
    label = printable(text)
    if len(label) <= _LABEL_LENGTH:
        return label
    digest = sha256(text.encode()).hexdigest()[:8]
    return f"{label[: _LABEL_LENGTH - 9]}…{digest}"
