import re
import sys
from types import SimpleNamespace

import accelerate.tracking  # noqa: F401  # asks which packages are installed when imported
import pytest

from firm.base.extras import install_command
from firm.run import Tracker, TrackingConfig, UserError
from firm.run.tracking import AccelerateTracker, check_installed, open_tracker

OBJECTIVES = ("helpful", "harmless")
ROWS = [
    {"kind": "client", "round": 1, "client": "a", "rewards": {"helpful": 0.25}, "kl": 0.5},
    {"kind": "client", "round": 1, "client": "b", "rewards": {"helpful": 0.75}, "kl": None},
    {"kind": "round", "round": 1, "bytes_up": 8, "seconds": 1.5},
    {"kind": "round", "round": 2, "bytes_up": 8, "seconds": 2.5},
]
LABELS = {"objectives": OBJECTIVES, "job_type": "firm", "tags": ("firm", "seed 0")}


@pytest.fixture
def written(tmp_path):
    """Series that TensorBoard reads from a run's folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrackingConfig(name="tensorboard")
    for _ in range(2):  # the second session repeats the rows of the first
        with open_tracker(config, tmp_path, {"seed": 3}, **LABELS) as tracker:
            for row in ROWS:
                tracker.log(row)
            tracker.log_samples([])
            tracker.log_points("front", [{}], summary={"hypervolume": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    return events


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_series_once(written):
    series = {
        name: [(point.step, point.value) for point in written.Scalars(name)]
        for name in written.Tags()["scalars"]
    }
    assert series["rewards/helpful/a"] == [(1, 0.25)]
    assert series["train/reward/helpful"] == [(1, 0.5)]
    assert series["round/bytes_up_so_far"] == [(1, 8), (2, 16)]
    assert series["front/hypervolume"] == [(0, 0.5)]
    assert "kl/b" not in series
    (config,) = written.Tensors("config/text_summary")[-1:]
    assert b"seed: 3" in config.tensor_proto.string_val[0]
    assert b"job_type: firm" in config.tensor_proto.string_val[0]


class Mlflow(SimpleNamespace):
    """The functions of MLflow that Accelerate calls, and the calls."""

    def __init__(self):
        limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=100, MAX_PARAMS_TAGS_PER_BATCH=100)
        super().__init__(
            calls={},
            metrics=[],
            utils=SimpleNamespace(validation=limits),
            search_experiments=lambda filter_string: [],
            create_experiment=lambda name, **_: name,
            start_run=lambda **run: self.calls.update(run),
            log_params=lambda params: self.calls.update(params=self.checked(params)),
            log_metrics=lambda values, step: self.metrics.append((step, self.checked(values))),
            end_run=lambda status="FINISHED": self.calls.update(ended=status),
        )

    @staticmethod
    def checked(values):
        for name in values:
            if not re.fullmatch(r"[/\w.\- :]*", name):  # as mlflow.utils.validation has it
                raise ValueError(f"Invalid name: {name}")
        return values


def test_mlflow_gets_the_settings_and_every_series(tmp_path, monkeypatch):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = TrackingConfig(name="mlflow", project="mine", tags=("own",))
    settings = {"strategy": {"beta": 0.5}, "methods": {"FIRM, β = 1": {"kind": "single"}}}
    with AccelerateTracker(config, tmp_path / "run", settings, **LABELS) as tracker:
        for row in ROWS:
            tracker.log(row)
    assert mlflow.calls["experiment_id"] == "mine"
    assert mlflow.calls["run_name"] == "run"
    assert mlflow.calls["tags"] == {"job_type": "firm", "tags": "own, firm, seed 0"}
    params = {"strategy.beta": 0.5, "methods.FIRM_ β _ 1.kind": "single"}
    assert mlflow.calls["params"] == params
    assert mlflow.calls["ended"] == "FINISHED"
    assert mlflow.metrics[0] == (1, {"rewards/helpful/a": 0.25, "kl/a": 0.5})
    assert mlflow.metrics[-1][1]["round/bytes_up_so_far"] == 16


def test_mlflow_learns_that_a_run_failed(tmp_path, monkeypatch, undrawn):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    mlflow.log_params = lambda params: 1 / 0  # the run is active already
    config = TrackingConfig(name="mlflow")

    def fail():
        with AccelerateTracker(config, tmp_path, {"beta": 0.5}, **LABELS) as tracker:
            tracker.log_points("FIRM, β", [], summary={"hypervolume": 0.5})
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert mlflow.calls["ended"] == "FAILED"
    assert mlflow.metrics == [(0, {"FIRM_ β/hypervolume": 0.5})]
    assert len(undrawn) == 1


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch, undrawn):
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    mlflow.log_metrics = lambda values, step: 1 / 0
    config = TrackingConfig(name="mlflow")
    with AccelerateTracker(config, tmp_path, {}, **LABELS) as tracker:
        for row in ROWS:
            tracker.log(row)
    assert undrawn == [
        "MLflow: a row of kind client could not be drawn (ZeroDivisionError: division by zero)."
    ]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow"])
def test_a_tracker_whose_package_is_missing_names_the_command(name, tmp_path, monkeypatch):
    monkeypatch.setattr("firm.run.tracking.find_spec", lambda package: None)
    config = TrackingConfig(name=name, mode="offline")
    with pytest.raises(UserError, match=f"needs the package {name}") as refused:
        open_tracker(config, tmp_path, {}, **LABELS)
    assert install_command(name) in str(refused.value)
    assert name in install_command(name)


def test_without_tracking_no_package_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("firm.run.tracking.find_spec", lambda package: None)
    check_installed(TrackingConfig())
    assert isinstance(open_tracker(TrackingConfig(), tmp_path, {}, **LABELS), Tracker)


def test_labels_of_a_study_reach_every_tracker():
    config = TrackingConfig(name="tensorboard").within("study").of_setting("FIRM")
    assert (config.group, config.job_type, config.tags) == ("study", "FIRM", ("FIRM",))
