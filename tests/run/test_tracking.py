import json
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import wandb

from firm.run import Tracker, TrackingConfig, tracking
from firm.run.rows import load_quantities
from firm.run.tracking import flatten
from tests.wandb_files import items, merged, on_a_terminal, records_of, started, table

OBJECTIVES = ["helpful", "harmless", "brief"]
ROW = {
    "kind": "client",
    "round": 2,
    "client": "client_0",
    "num_steps": 4,
    "weights": [[0.25, 0.5, 0.25], [0.75, 0.25, 0.0]],
    "cosines": [[-0.5, 0.25, None], [0.5, 0.75, 1.0]],
    "gram": [[1.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "score_correlation": {"helpful-harmless": -0.25, "helpful-brief": None},
    "beta_effect": [0.25, 0.75],
    "rewards": {"helpful": 0.125},
    "seconds": {"rollout": 1.5},
    "kl": None,
    "note": "text",
    "is_odd": True,
}


@pytest.fixture(scope="module", autouse=True)
def _quantities() -> None:
    load_quantities({"policy": {}})  # a run registers them before it logs


def test_a_row_becomes_flat_series_with_lists_averaged_over_solves() -> None:
    assert flatten(ROW, OBJECTIVES) == {
        "num_steps/client_0": 4.0,
        "weights/helpful/client_0": 0.5,
        "weights/harmless/client_0": 0.375,
        "weights/brief/client_0": 0.125,
        "cosines/helpful-harmless/client_0": 0.0,
        "cosines/helpful-brief/client_0": 0.5,
        "cosines/harmless-brief/client_0": 1.0,
        "score_correlation/helpful-harmless/client_0": -0.25,
        "beta_effect/client_0": 0.5,
        "rewards/helpful/client_0": 0.125,
        "seconds/rollout/client_0": 1.5,
    }


def test_other_rows_are_grouped_by_kind_and_split() -> None:
    evaluation = {"kind": "evaluation", "round": 0, "split": "test", "scores": {"a": {"mean": 1}}}
    assert flatten(evaluation, OBJECTIVES) == {"evaluation/test/scores/a/mean": 1.0}
    server = {
        "kind": "round",
        "round": 1,
        "clients": ["a"],
        "failures": [{"client": "b", "reason": "late"}],
    }
    server |= {"alarms": ["β"], "bytes_up": 8}
    assert flatten(server, OBJECTIVES) == {"round/bytes_up": 8.0}
    assert flatten({"kind": "run", "rounds": 3}, OBJECTIVES) == {}


def evaluation(round: int, split: str, **means: float) -> dict[str, Any]:
    scores = {name: {"mean": mean, "se": 0.25} for name, mean in means.items()}
    change = {name: {"mean": mean - 0.5, "se": 0.125} for name, mean in means.items()}
    row = {"kind": "evaluation", "round": round, "split": split, "scores": scores, "kl": round / 2}
    return row | ({"change": change} if round else {})


def track(run_path: Path, *rows: dict[str, Any], objectives: list[str] = OBJECTIVES) -> Any:
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, run_path, {}, objectives=objectives) as tracker:
        for row in rows:
            tracker.log(row)
    return records_of(run_path)


def test_all_alarms_of_a_round_are_in_its_alert(tmp_path: Path) -> None:
    """W&B sends one alert of a title in a minute."""
    row = {"kind": "round", "round": 7, "clients": ["a"], "failures": []}
    records = track(tmp_path, {**row, "alarms": ["the policy\x1b[31m runs away", "the second"]})
    [alert] = [record.alert for record in records if record.HasField("alert")]
    assert alert.title == "Round 7"
    assert alert.text == "the policy\\x1b[31m runs away\nthe second"  # no control characters


@pytest.mark.slow
def test_a_program_s_own_run_goes_on_and_gets_nothing(tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "run"
    for folder in (own, path):
        folder.mkdir()
    settings = wandb.Settings(silent=True, console="off")
    with wandb.init(mode="offline", project="mine", dir=str(own), settings=settings) as run:
        [history] = items(track(path, ROW), "history")
        assert wandb.run is run
        run.log({"mine": 1})
    assert history["round"] == ROW["round"]
    [kept] = items(records_of(own), "history")
    assert {key for key in kept if not key.startswith("_")} == {"mine"}


def test_offline_mode_leaves_the_metrics_in_the_run_directory(tmp_path: Path, caplog) -> None:
    torch.manual_seed(0)
    generators = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(
        config, tmp_path, {"strategy": {"beta": 0.0625}}, objectives=OBJECTIVES
    ) as tracker:
        tracker.log({"kind": "run", "rounds": 3, "calibration": {"helpful": {"mean": 0.125}}})
        tracker.log(ROW)
    records = records_of(tmp_path)
    [history] = items(records, "history")
    assert {k: v for k, v in history.items() if not k.startswith("_")} == {
        "round": 2,
        **flatten(ROW, OBJECTIVES),
    }
    [started] = [record.run for record in records if record.HasField("run")]
    assert started.display_name == tmp_path.name
    settings = {entry.key: json.loads(entry.value_json) for entry in started.config.update}
    assert settings["strategy"] == {"beta": 0.0625}
    assert merged(items(records, "config"))["run"] == {
        "rounds": 3,
        "calibration": {"helpful": {"mean": 0.125}},
    }
    [line] = [r.getMessage() for r in caplog.records if r.name == "firm.run.tracking"]
    assert re.fullmatch(
        rf".* \(as configured\); upload with: wandb sync {tmp_path}/wandb/o.*", line
    )
    assert generators == (
        *(random.getstate(), str(np.random.get_state())),
        torch.get_rng_state().tolist(),
    ), "tracking must not move the generators of the run"


def test_the_mean_over_the_clients_of_a_round_is_logged_once(tmp_path: Path) -> None:
    other = {"rewards": {"helpful": 0.375}, "weights": [[0.0, 0.5, 0.5]], "kl": 4.0}
    late = {**ROW, "round": 3, "kl": 1.5, "rewards": {"helpful": 0.75}, "beta_effect": []}
    records = track(
        tmp_path,
        ROW,
        {**ROW, **other, "client": "client_1"},
        {"kind": "round", "round": 2, "seconds": 1.0, "bytes_up": 8},
        late,
        {"kind": "round", "round": 3, "seconds": 1.0, "bytes_up": 3, "weights": {"client_0": 1.0}},
    )
    history = items(records, "history")
    second, third = (
        {key: value for key, value in row.items() if key.startswith("train/")}
        for row in history
        if "round/seconds" in row
    )
    assert second["train/reward/helpful"] == 0.25
    assert [second[f"train/weight/{name}"] for name in OBJECTIVES] == [0.25, 0.4375, 0.3125]
    assert second["train/kl"] == 4.0  # of the client that measured it
    assert second["train/cosine/harmless-brief"] == 1.0
    assert second.keys().isdisjoint({"train/bytes_up", "train/seconds", "train/num_steps"})
    assert (third["train/reward/helpful"], third["train/kl"]) == (0.75, 1.5)
    assert third.keys().isdisjoint({"train/weight/client_0", "train/beta_effect"})
    assert sum("train/kl" in row for row in history) == 2
    sent = [row["round/bytes_up_so_far"] for row in history if "round/bytes_up" in row]
    assert sent == [8, 11]
    assert not any("round/bytes_down_so_far" in row for row in history)


def test_evaluations_are_drawn_in_the_trade_off_plane_of_each_pair(tmp_path: Path) -> None:
    records = track(
        tmp_path,
        evaluation(0, "test", helpful=0.5, harmless=0.75, brief=1.0),
        evaluation(0, "validation", helpful=0.25, harmless=1.5, brief=1.0),
        evaluation(1, "validation", helpful=0.375, harmless=1.25, brief=1.0),
    )
    history = items(records, "history")
    planes = ["trade-off/helpful-harmless", "trade-off/helpful-brief", "trade-off/harmless-brief"]
    assert all(f"{plane}_table" in history[-1] for plane in planes)
    lines = table(tmp_path, history[-1]["trade-off/helpful-harmless_table"])
    assert lines == [
        {"split": "test", "round": 0, "helpful": 0.5, "harmless": 0.75},
        {"split": "validation", "round": 0, "helpful": 0.25, "harmless": 1.5},
        {"split": "validation", "round": 1, "helpful": 0.375, "harmless": 1.25},
    ]
    charts = [json.dumps(config) for config in items(records, "config")]
    assert any("trade-off/helpful-harmless_table" in chart for chart in charts)


def test_an_earlier_adapter_that_is_measured_again_is_no_point_of_the_last_round(
    tmp_path: Path,
) -> None:
    rows = [evaluation(number, "validation", helpful=number / 4) for number in (1, 2, 3)]
    again = {**evaluation(3, "validation", helpful=0.25), "adapter_round": 1}
    tests = {**evaluation(3, "test", helpful=0.25), "adapter_round": 1}
    history = items(track(tmp_path, *rows, again, tests), "history")
    key = "evaluation/validation/scores/helpful/mean"
    assert [row[key] for row in history if key in row] == [0.25, 0.5, 0.75]
    assert "evaluation/test/scores/helpful/mean" in history[-1]


def test_the_charts_of_a_long_run_have_points_in_proportion_to_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def drawn(tracker: Tracker) -> dict[str, Any]:
        tracker._num_drawn = len(tracker._evaluations)
        return {"points": sizes.append(tracker._num_drawn)}

    monkeypatch.setattr(Tracker, "_planes", drawn)
    rows = [evaluation(number, "validation", helpful=0.5) for number in range(1, 200)]
    track(tmp_path, *rows)
    assert sizes[:20] == list(range(1, 21))
    assert sizes[-1] == 199  # the last one is drawn at the end
    assert sum(sizes) < 25 * 199  # all 199 charts have 100 points on average


def test_a_single_objective_is_drawn_against_the_kl(tmp_path: Path) -> None:
    records = track(tmp_path, evaluation(3, "validation", helpful=0.5), objectives=["helpful"])
    [history] = items(records, "history")
    assert table(tmp_path, history["trade-off/kl-helpful_table"]) == [
        {"split": "validation", "round": 3, "kl": 1.5, "helpful": 0.5}
    ]


def test_the_final_test_is_compared_in_a_table_and_in_the_summary(tmp_path: Path) -> None:
    records = track(
        tmp_path,
        evaluation(0, "test", helpful=0.5, parse=1.0),
        evaluation(4, "test", helpful=0.75, parse=0.875),
        objectives=["helpful"],
    )
    history = items(records, "history")
    assert "test" not in history[0]
    lines = {line.pop("score"): line for line in table(tmp_path, history[1]["test"])}
    assert lines["helpful"] == {
        "base": 0.5,
        "base se": 0.25,
        "aligned": 0.75,
        "aligned se": 0.25,
        "change": 0.25,
        "change se": 0.125,
    }
    assert lines["kl"]["aligned"] == 2.0
    summary = merged(items(records, "summary"))
    assert [summary[f"test/parse/{name}"] for name in ("base", "aligned", "change")] == [
        *(1.0, 0.875, 0.375)
    ]
    assert summary["test/kl/change"] == 2.0


def sample(round: int, prompt: str, reply: str, score: float | None) -> dict[str, Any]:
    return {"round": round, "prompt": prompt, "completion": reply, "scores": {"helpful": score}}


def test_replies_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, tmp_path, {}, objectives=OBJECTIVES) as tracker:
        tracker.log_samples([sample(0, "p", "base p", 0.5), sample(0, "q", "base q", None)])
        tracker.log_samples([sample(8, "q", "new q", 0.75), sample(8, "p", "new p", 0.25)])
    before, after = items(records_of(tmp_path), "history")
    assert (before["round"], after["round"]) == (0, 8)
    [first, _] = table(tmp_path, before["samples"])
    assert first["aligned"] is first["helpful, aligned"] is None
    assert table(tmp_path, after["samples"]) == [
        {
            "prompt": "p",
            "base": "base p",
            "aligned": "new p",
            "helpful, base": 0.5,
            "helpful, aligned": 0.25,
        },
        {
            "prompt": "q",
            "base": "base q",
            "aligned": "new q",
            "helpful, base": None,
            "helpful, aligned": 0.75,
        },
    ]


def test_where_no_texts_are_logged_there_is_no_table_of_them(tmp_path: Path) -> None:
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, tmp_path, {}, objectives=OBJECTIVES) as tracker:
        tracker.log_samples([])
        tracker.log(ROW)
    assert not any("samples" in row for row in items(records_of(tmp_path), "history"))
    assert not list(tmp_path.glob("wandb/*/files/media/table/*"))


def test_a_disabled_tracker_writes_nothing(tmp_path: Path) -> None:
    with Tracker(TrackingConfig(), tmp_path, {}, objectives=OBJECTIVES) as tracker:
        tracker.log(ROW)
        tracker.log_points("front", [{"helpful": 0.5}], summary={})
        tracker.log_samples([sample(0, "p", "reply", 0.5)])
    assert os.listdir(tmp_path) == []


ONLINE = """
import os, sys
from firm.run import Tracker, TrackingConfig, tracking
from firm.run.rows import load_quantities
config = TrackingConfig(mode="online", timeout_s=2)
for key in (None, "k" * 40):
    if key:
        os.environ["WANDB_API_KEY"] = key
    run_path = f"{sys.argv[1]}/{key}"
    os.mkdir(run_path)
    with Tracker(config, run_path, {}, objectives=["a"]) as tracker:
        tracker.log({"kind": "round", "round": 1, "seconds": 1.5})
"""


def test_a_relative_run_folder_is_this_process_s_and_not_that_of_the_service(
    tmp_path: Path, monkeypatch
) -> None:
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, tmp_path / "first", {}, objectives=OBJECTIVES):
        pass  # the service runs, in the folder that was current then
    monkeypatch.chdir(tmp_path)
    with Tracker(config, "second", {}, objectives=OBJECTIVES) as tracker:
        tracker.log(ROW)
    [history] = items(records_of(tmp_path / "second"), "history")
    assert history["round"] == 2


@pytest.mark.slow
def test_online_without_key_or_network_goes_on_offline(tmp_path: Path) -> None:
    hidden = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9"}  # nobody listens on discard
    command = [sys.executable, "-c", ONLINE, str(tmp_path)]
    status, output = on_a_terminal(command, environment)
    assert status == 0, output
    without_key, without_network = output.strip().splitlines()
    assert without_key.startswith("W&B is offline (No API key configured")
    assert without_network.startswith("W&B is offline (Timed out while retrying")
    for line, name in ((without_key, "None"), (without_network, "k" * 40)):
        assert f"upload with: wandb sync {tmp_path}/{name}/wandb/offline-run-" in line
        [history] = items(records_of(tmp_path / name), "history")
        assert history["round/seconds"] == 1.5


def test_group_job_type_and_tags_are_the_configurations_and_then_the_recipes(
    tmp_path: Path,
) -> None:
    recipes: dict[str, Any] = {"objectives": OBJECTIVES, "job_type": "firm"}
    recipes["tags"] = ("firm", "mine", "long " * 20)
    offline = TrackingConfig(mode="offline", timeout_s=20)
    own = replace(offline, tags=("mine", "a: b/c"))
    for name, config, group, job_type, expected in (
        ("run", own, "the recipe's", "firm", "the recipe's"),
        ("own", replace(offline, job_type="mine", group="mine"), "the recipe's", "mine", "mine"),
        ("point", own.of_setting("FIRM, β 0.1"), None, "FIRM, β 0.1", ""),
    ):
        with Tracker(config, tmp_path / name, {}, **recipes, group=group) as tracker:
            tracker.log(ROW)
        run = started(tmp_path / name)
        assert (run.job_type, run.run_group) == (job_type, expected)
        *tags, cut = run.tags
        assert tags == [*dict.fromkeys([*config.tags, "firm", "mine"])]
        assert len(cut) == 64


def test_a_setting_labels_runs_that_are_tracked() -> None:
    offline = TrackingConfig(mode="offline", tags=("mine",))
    setting = offline.of_setting("FIRM")
    assert (setting.job_type, setting.tags) == ("FIRM", ("mine", "FIRM"))
    assert TrackingConfig(mode="offline", job_type="own").of_setting("FIRM").job_type == "own"
    assert TrackingConfig().of_setting("FIRM") == TrackingConfig()
    long = [offline.of_setting("β" * 80 + end).job_type for end in "ab"]
    assert len(set(long)) == 2  # settings that W&B would otherwise take for one


def test_a_group_is_given_to_runs_that_are_tracked_and_have_none() -> None:
    offline = TrackingConfig(mode="offline")
    assert offline.within("sweep").group == "sweep"
    assert offline.within("mine").within("sweep").group == "mine"
    assert TrackingConfig().within("sweep") == TrackingConfig()


def test_several_runs_make_a_table_a_plane_and_figures_in_the_summary(tmp_path: Path) -> None:
    rows = [
        {"method": "FIRM", "helpful": 0.75, "harmless": 0.25, "KL": None},
        {"method": "soup", "helpful": 0.5, "harmless": 0.5, "KL": 1.5, "parse": 0.75},
    ]
    config = TrackingConfig(mode="offline", timeout_s=20)
    with Tracker(config, tmp_path, {}, objectives=["helpful", "harmless"]) as tracker:
        tracker.log_points("front", rows, summary={"hypervolume/FIRM": 0.1875})
    records = records_of(tmp_path)
    [history] = items(records, "history")
    assert table(tmp_path, history["front/points"]) == [{**rows[0], "parse": None}, rows[1]]
    plane = table(tmp_path, history["front/helpful-harmless_table"])
    assert [(line["helpful"], line["harmless"]) for line in plane] == [(0.75, 0.25), (0.5, 0.5)]
    assert merged(items(records, "summary"))["front/hypervolume/FIRM"] == 0.1875


def test_a_timeout_that_would_mean_for_ever_is_refused() -> None:
    for seconds, words in (
        (0, "positive"),
        (float("inf"), "a finite number"),
        (float("nan"), "a finite number"),
    ):
        with pytest.raises(ValueError, match=f"timeout_s must be {words}, got {seconds}"):
            TrackingConfig(timeout_s=seconds)


@pytest.mark.parametrize("key", ["project", "entity", "group"])
@pytest.mark.parametrize("name", ["", "a/b", "..\\a", "a\n", "\x1b[2J", "a" * 129])
def test_names_that_wandb_or_a_terminal_would_take_otherwise_are_refused(key, name) -> None:
    with pytest.raises(ValueError, match=f"{key} must be 1 to 128 printable characters") as refused:
        TrackingConfig(**{key: name})
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("label", ["", "a\n", "\x1b[2J", "a" * 65])
def test_job_types_and_tags_that_wandb_does_not_take_are_refused(label) -> None:
    for key, value in (("job_type", label), ("tags", ("mine", label))):
        with pytest.raises(ValueError, match=f"{key} must be 1 to 64 printable") as refused:
            TrackingConfig(**{key: value})
        assert str(refused.value).isprintable()


POISONED = [float("nan"), float("inf"), 1e308, 10**400, -1, "x", [None], {}, {"a": "b"}, True]
POISONED += [[[1e308, 1e308]], [[0.5], [0.25, 0.75, 0.0]], [[[[[[[1.0]]]]]]]]


@pytest.fixture
def sent(monkeypatch) -> list[dict[str, Any]]:
    """What a tracker would send, without W&B's processes."""
    rows: list[dict[str, Any]] = []

    class FakeRun:
        config: ClassVar[dict[str, Any]] = {}
        summary: ClassVar[dict[str, Any]] = {}

        def log(self, row: dict[str, Any]) -> None:
            if row.get("kl/broken"):
                raise OSError("no space left on device")
            rows.append(row)

        def finish(self, **_: Any) -> None:
            raise OSError("no space left on device")

    monkeypatch.setattr(tracking.Tracker, "_start", lambda *_, **__: FakeRun())
    return rows


def test_values_that_no_series_can_have_are_left_out_of_a_row(tmp_path: Path, sent, undrawn):
    with Tracker(TrackingConfig(mode="offline"), tmp_path, {}, objectives=OBJECTIVES) as tracker:
        for field in ROW.keys() - {"kind", "round", "client"}:
            for value in POISONED:
                tracker.log({**ROW, field: value})
        whole = evaluation(1, "test", helpful=0.5, harmless=0.75, brief=1.0)
        for field in whole.keys() - {"kind", "round", "split"}:
            for value in POISONED:
                tracker.log({**whole, field: value})
        for value in POISONED:
            tracker.log({**ROW, "round": value})
            tracker.log({"kind": "round", "round": 2, "weights": value, "clients": value})
            tracker.log_samples([{"round": 0, "prompt": "p", "completion": "c", "scores": value}])
            tracker.log_samples([{"round": value, "prompt": value, "completion": value}])
    assert len(undrawn) == 1  # the end alone, which failed
    assert len(sent) > 200
    numbers = [y for row in sent for y in row.values() if isinstance(y, float)]
    assert all(abs(y) <= 1e30 for y in numbers)
    assert {row["kl/client_0"] for row in sent if "kl/client_0" in row} == {-1.0}
    assert sum(row.get("seconds/rollout/client_0") == 1.5 for row in sent) > 100


def test_a_run_goes_on_where_wandb_cannot_even_start(tmp_path: Path, undrawn, monkeypatch) -> None:
    def init(**_: Any) -> None:
        raise wandb.Error("no service")

    monkeypatch.setattr(wandb, "init", init)
    config = TrackingConfig(mode="online")
    with Tracker(config, tmp_path, {}, objectives=OBJECTIVES) as tracker:
        tracker.log(ROW)
        tracker.log_samples([sample(0, "p", "reply", 0.5)])
        tracker.log_points("front", [{"helpful": 0.5}], summary={})
    assert undrawn == ["W&B: the start of the run could not be drawn (Error: no service)."]


def test_what_wandb_does_not_take_is_a_warning_once_and_the_run_goes_on(
    tmp_path: Path, sent, undrawn
) -> None:
    with Tracker(TrackingConfig(mode="offline"), tmp_path, {}, objectives=OBJECTIVES) as tracker:
        for _ in range(3):
            tracker.log({"kind": "client", "round": 1, "client": "broken", "kl": 1.0})
        tracker.log({"kind": "client", "round": 1, "client": "whole", "kl": 1.0})
    assert sent == [{"round": 1, "kl/whole": 1.0}]
    told = "could not be drawn (OSError: no space left on device)."
    assert undrawn == [f"W&B: a row of kind client {told}"]
