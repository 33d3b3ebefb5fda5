"""A sweep over preferences: ordinary runs, a front from each method, and soups between corners."""

import contextlib
import html
import json
import multiprocessing
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from firm.base.preferences import NamedShares
from firm.fronts import Front, Point, grid
from firm.jobs.configs import MethodConfig, SweepConfig
from firm.jobs.sweep import _check_reference, main, row_rewards, sweep_configs
from firm.report import read_record
from firm.run import Sweep, UserError, parse
from tests.nursery import forked_workers
from tests.runs import read_adapter, read_rows
from tests.smoke import ROOT, SMOKE
from tests.wandb_files import items, merged, records_of, started, table

TINY = {
    "rounds": 1,
    "strategy.num_local_steps": 1,
    "evaluation.num_validation_prompts": 2,
    "tracking.mode": "offline",
}
CONFIG = SweepConfig(
    base=SMOKE,
    overrides=TINY,
    methods={
        "FIRM": MethodConfig(),
        "soups": MethodConfig(kind="soup", overrides={"evaluation.num_shown_samples": 0}),
    },
    preferences=[NamedShares({"positivity": 0, "brevity": 2}), [1, 1], [0, 3]],
    num_workers=2,
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    with contextlib.chdir(ROOT), forked_workers():
        return main(replace(CONFIG, out=tmp_path_factory.mktemp("sweeps") / "sweep"))


def adapter(sweep: Path, name: str) -> dict[str, torch.Tensor]:
    return read_adapter(sweep / "points" / name)


@pytest.mark.slow
def test_every_point_is_a_finished_run_of_its_preference(swept):
    names = {path.name for path in (swept / "points").iterdir()}
    preferences = ("100_0", "50_50", "0_100")
    assert names == {f"{m}-{p}-seed_0" for m in ("firm", "soups") for p in preferences}
    for name in names:
        record = json.loads((swept / "points" / name / "run.json").read_text())
        assert record["status"] == "finished"
    config = (swept / "points/firm-50_50-seed_0/config.yaml").read_text()
    assert "preference:\n  - 0.5\n  - 0.5\n" in config


def test_the_front_tells_what_the_runs_measured_prompt_by_prompt(swept):
    front = Front.load(swept / "firm.front.json")
    assert front.objectives == ("brevity", "positivity")
    assert front.reference == (0.0, 0.0)
    rewards, prompts = row_rewards(Sweep(swept), front)  # [N, R, M], [R]
    assert rewards.shape == (3, 8, 2)
    assert np.allclose(rewards.mean(1), front.rewards(), atol=1e-6)
    assert prompts.tolist() == list(range(8))
    for point in front.points:
        assert (swept / point.adapter / "adapter_model.safetensors").exists()


def test_the_sweep_has_a_page_and_figures_for_a_paper(swept):
    page = (swept / "report.html").read_text()
    for name in ("firm-50_50-seed_0", "soups-50_50-seed_0"):
        assert name in page
    assert list(swept.rglob("*.js")) == [swept / "plotly.min.js"]
    sizes = [path.stat().st_size for path in swept.rglob("report.html")]
    assert len(sizes) == 7  # of six points and the sweep
    assert max(sizes) < 500_000
    assert {path.name for path in (swept / "figures").iterdir()} == {
        "front.png", "front.svg", "front.csv",
    }  # fmt: skip


def test_a_soup_is_the_mean_of_the_adapters_that_were_trained_alone(swept):
    first, second = (adapter(swept, f"soups-{p}-seed_0") for p in ("100_0", "0_100"))
    for name, parameter in adapter(swept, "soups-50_50-seed_0").items():
        assert torch.allclose(parameter, (first[name] + second[name]) / 2, atol=1e-7)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    # alone is alone: FIRM at a corner of the simplex is the same training
    for name, parameter in adapter(swept, "firm-100_0-seed_0").items():
        assert torch.equal(parameter, first[name])


def test_one_conditioned_training_gives_every_point_of_a_front(tmp_path):
    changes = {
        "estimator.name": "critic_free",
        "estimator.num_replies": 2,
        "strategy.name": "fedavg",
        "policy.conditioning.kind": "preference",  # as in a configuration of a front
        "tracking.mode": "disabled",
    }
    cfg = replace(
        CONFIG,
        out=tmp_path / "sweep",
        overrides={**TINY, **changes},
        methods={"front": MethodConfig(kind="front")},
        preferences=[[2, 0], [1, 3]],
    )
    with forked_workers():
        out = main(cfg)
    trained = out / "points/front-50_50-seed_0"
    assert {path.name for path in (out / "points").iterdir()} == {
        "front-100_0-seed_0", "front-25_75-seed_0", trained.name,
    }  # fmt: skip
    assert len(read_rows(trained, "client")) == 2
    slopes = load_file(trained / "adapter/conditioned.safetensors")
    centre, first, second = (
        adapter(out, f"front-{shares}-seed_0") for shares in ("50_50", "100_0", "25_75")
    )
    assert any(value.abs().max() > 0 for value in slopes.values())
    for name, value in centre.items():
        slope = slopes.get(name.replace("lora_B", "lora_B1"), torch.zeros(()))
        torch.testing.assert_close(first[name], value + slope)
        torch.testing.assert_close(second[name], value - slope / 2)
    assert len(Front.load(out / "front.front.json").points) == 3


def test_a_soup_is_judged_beside_the_base_model_and_not_beside_itself(swept):
    fronts = [Front.load(swept / f"{name}.front.json") for name in ("firm", "soups")]
    record = read_record(swept / "points/soups-50_50-seed_0")  # without rounds
    base, final = record.evaluations["test"]
    rewards = record.evaluations["validation"][-1]["rewards"]
    own = {name: rewards[name]["mean"] for name in fronts[1].objectives}
    assert fronts[1].validation["soups-50_50-seed_0"] == own
    assert all(front.has_validation for front in fronts)
    assert {name: base["rewards"][name]["mean"] for name in record.objectives} == fronts[0].base
    assert "change" in final
    assert final["rewards"] != base["rewards"]


def test_points_are_a_group_in_wandb_and_a_run_of_it_shows_the_front(swept):
    group = f"sweep-{json.loads((swept / 'sweep.json').read_text())['id']}"
    for method in ("FIRM", "soups"):
        for preference in ("100_0", "50_50", "0_100"):
            point = swept / f"points/{method.lower()}-{preference}-seed_0"
            run = started(point)
            assert (run.run_group, run.job_type) == (group, f"{method} {preference}")
            assert set(run.tags) == {run.job_type, "firm", "seed 0"}
            assert f"group: {group}" in (point / "config.yaml").read_text()

    run = started(swept)
    assert (run.run_group, run.job_type) == (group, "front")
    records = records_of(swept)
    assert {f"front/hypervolume/{m}" for m in ("FIRM", "soups")} < merged(
        items(records, "summary")
    ).keys()
    history = merged(items(records, "history"))
    rows = table(swept, history["front/points"])
    fronts = {name: Front.load(swept / f"{name.lower()}.front.json") for name in ("FIRM", "soups")}
    points = [(method, point) for method, front in fronts.items() for point in front.points]
    for row, (method, point) in zip(rows, points, strict=True):
        assert {name: row[name] for name in ("brevity", "positivity")} == point.rewards
        assert (row["method"], row["seed"], row["KL"]) == (method, 0, point.kl)
        assert (row["adapter"], row["collapse"]) == (point.adapter, point.collapse or "")
    shares = ("1.000", "0.000"), ("0.500", "0.500"), ("0.000", "1.000")
    named = [f"brevity {first}, positivity {second}" for first, second in shares]
    assert [row["preference"] for row in rows[:3]] == named
    assert "front/brevity-positivity_table" in history


def test_no_text_goes_to_wandb_where_no_samples_are_shown(swept):
    def texts(name: str) -> set[str]:
        """What the shown samples of a run would be, in W&B's files of it."""
        run = swept / "points" / name
        records_of(run)  # once they are whole
        files = [path for path in run.rglob("*") if "wandb" in path.parts and path.is_file()]
        noted = b"".join(path.read_bytes() for path in files)
        rows = map(json.loads, (shown / "samples.jsonl").read_text().splitlines())
        return {row["prompt"] for row in rows if json.dumps(row["prompt"]).encode() in noted}

    shown = swept / "points/firm-50_50-seed_0"
    assert texts("firm-50_50-seed_0")
    assert not texts("soups-50_50-seed_0")
    assert not list((swept / "points/soups-50_50-seed_0").rglob("samples*.json"))
    columns = table(shown, merged(items(records_of(shown), "history"))["samples"])[0].keys()
    assert list(columns) == [
        "prompt", "base", "aligned", "brevity, base", "brevity, aligned",
        "positivity, base", "positivity, aligned",
    ]  # fmt: skip


def test_a_finished_sweep_is_told_again_without_running_anything(swept):
    def stamps() -> dict[Path, int]:
        paths = (swept / "points").rglob("*")  # W&B's own process writes its logs later
        return {path: path.stat().st_mtime_ns for path in paths if "wandb" not in path.parts}

    before, front = stamps(), (swept / "firm.front.json").read_bytes()
    main(replace(CONFIG, out=swept, resume=True))
    assert stamps() == before
    assert (swept / "firm.front.json").read_bytes() == front


def test_a_sweep_of_another_configuration_is_refused_and_stays_as_it_is(swept):
    before = (swept / "sweep.json").read_bytes()
    with pytest.raises(
        UserError, match=r"has another configuration: overrides\.rounds was 1, is 2"
    ):
        main(replace(CONFIG, overrides={**TINY, "rounds": 2}, out=swept, resume=True))
    with pytest.raises(UserError, match="there is already a sweep"):
        main(replace(CONFIG, out=swept))
    assert (swept / "sweep.json").read_bytes() == before


def test_a_reference_point_that_a_model_is_not_above_is_told_and_nothing_is_overwritten(swept):
    before = {path: path.read_bytes() for path in swept.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"FIRM: .*The runs are kept: lower --reference"):
        main(replace(CONFIG, out=swept, resume=True, reference=[0.0, 0.99]))
    assert {path: path.read_bytes() for path in swept.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preferences": [[0.5, -0.5]]}, "non-negative and not all zero, got"),
        ({"preferences": [[0, 0]]}, "non-negative and not all zero, got"),
        ({"preferences": [[1, 1, 1]]}, "an entry for each of brevity, positivity"),
        ({"preferences": [[1, 1]]}, "preferences must have at least two vectors"),
        ({"preferences": [[1, 1], [2, 2]]}, "preferences must differ"),
        (
            {"preferences": [[0.5, 0.5], [0.500001, 0.499999]]},
            "must differ in the first four digits",
        ),
        (
            {"preferences": [NamedShares({"positivty": 1})]},
            r"preferences\.0 has the unknown objective 'positivty'.*did you mean 'positivity'",
        ),
        ({"reference": [0.1]}, "reference must have a value for each"),
        ({"reference": NamedShares({"brevity": 0.1})}, "reference must have a value for each"),
        ({"methods": {"A": MethodConfig(overrides={"strategy.bta": 0})}}, r"methods\.A\.overrides"),
        (
            {"methods": {"A": MethodConfig(overrides={"strategy.name": "fsmgda"})}},
            "strategy fsmgda does not support preferences; choose from fedavg, fedmgda, firm",
        ),
    ],
)
def test_bad_input_is_told_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        main(replace(CONFIG, out=tmp_path / "sweep", **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": {"A b": MethodConfig(), "a_b": MethodConfig()}},
            "that differ as file names, got 'A b",
        ),
        ({"methods": {"..": MethodConfig()}}, "methods need names that contain letters or digits"),
        ({"methods": {"": MethodConfig()}}, "methods need names that contain letters or digits"),
        ({"name": "/tmp/sweep"}, "name must be at most 64 letters"),
        (
            {"resolution": 10**6, "preferences": []},
            "resolution must be at least 1 and at most 100, got 1000000",
        ),
    ],
)
def test_names_and_sizes_that_cannot_be_folders_or_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(("resolution", "num_objectives"), [(1, 2), (4, 2), (3, 3)])
def test_a_grid_has_every_multiple_once_and_all_corners(resolution, num_objectives):
    points = grid(resolution, num_objectives)
    assert len(set(points)) == len(points)
    assert len(points) == {(1, 2): 2, (4, 2): 5, (3, 3): 10}[resolution, num_objectives]
    assert all(sum(point) == pytest.approx(1) and min(point) >= 0 for point in points)
    for corner in torch.eye(num_objectives).tolist():
        assert tuple(corner) in points


def test_the_command_line_reads_methods_and_preferences():
    methods = "{FIRM: {}, fixed: {overrides: {strategy.name: fedavg}}}"
    arguments = ["--methods", methods, "--preferences", "[[0.2, 0.8]]", "--seeds", "[0, 1]"]
    cfg = parse(SweepConfig, arguments)
    assert cfg.methods["fixed"].overrides == {"strategy.name": "fedavg"}
    assert cfg.preferences == [[0.2, 0.8]]


@pytest.mark.slow
def test_a_sweep_that_is_killed_ends_with_the_same_front(tmp_path, swept):
    out = tmp_path / "sweep"
    num_done = 0
    while num_done < 6:
        cfg = replace(CONFIG, out=out, resume=num_done > 0)
        with forked_workers():  # and a sweep that is a process, so that it can be killed
            process = multiprocessing.get_context("fork").Process(target=main, args=[cfg])
            process.start()
        while process.is_alive():
            time.sleep(0.05)
            finished = [
                path
                for path in out.glob("points/*/run.json")
                if json.loads(path.read_text())["status"] == "finished"
            ]
            if num_done + 1 < len(finished) < 6:  # after the second and the fourth
                num_done = len(finished)
                process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    for method in ("firm", "soups"):
        name = f"{method}.front.json"
        assert (out / name).read_bytes() == (swept / name).read_bytes()


def test_a_point_with_a_poisoned_log_is_left_out_and_the_others_are_drawn(swept, tmp_path, undrawn):
    out = tmp_path / "sweep"
    shutil.copytree(swept, out)
    log = out / "points/firm-50_50-seed_0/metrics.jsonl"
    text = log.read_text()
    assert text.count('"rewards"') > 1
    log.write_text(re.sub(r'"mean": [-.\de]+', '"mean": NaN', text))
    main(replace(CONFIG, out=out, resume=True))
    assert [note.partition(" could")[0] for note in undrawn] == ["The point firm-50_50-seed_0"]
    names = {point.name for point in Front.load(out / "firm.front.json").points}
    assert names == {"firm-100_0-seed_0", "firm-0_100-seed_0"}
    assert len(Front.load(out / "soups.front.json").points) == 3


def test_a_sweep_with_a_failed_point_shows_the_others_and_names_it(swept, tmp_path, capsys):
    out = tmp_path / "sweep"
    shutil.copytree(swept, out)
    point = out / "points/firm-50_50-seed_0"
    record = (point / "run.json").read_text()
    (point / "run.json").write_text(record.replace('"finished"', '"failed"'))
    (point / "metrics.jsonl").write_text("")  # it cannot continue
    merged = out / "points/soups-50_50-seed_0/run.json"
    merged.write_text(merged.read_text().replace('"finished"', '"failed"'))
    for name in ("report.html", "firm.front.json"):
        (out / name).unlink()
    with forked_workers(), pytest.raises(UserError, match="1 of 1 runs did not finish"):
        main(replace(CONFIG, out=out, resume=True))
    told = capsys.readouterr().out
    assert f"report   {out / 'report.html'}" in told
    assert "soups-50_50-seed_0 starts again" in told  # its adapters were in another folder
    page = html.unescape((out / "report.html").read_text())
    named = f"not shown: firm-50_50-seed_0: {point / 'metrics.jsonl'} must have at least"
    assert f"Runs that are not finished, and {named}" in page
    names = {point.name for point in Front.load(out / "firm.front.json").points}
    assert names == {"firm-100_0-seed_0", "firm-0_100-seed_0"}
    assert all(name in page for name in names)


def test_a_front_is_swept_on_a_base_with_fronts_and_groups_of_its_own():
    cfg = SweepConfig(
        base="configs/miniature_front.yaml",  # with refined preferences
        overrides={"groups": {"own": {"clients": [0], "preferences": [[0.9, 0.1]]}}},
        methods={"one": MethodConfig(kind="front")},
        preferences=[[1, 0], [0, 1]],
    )
    configs = sweep_configs(cfg, Path("runs"))
    kinds = Counter(own.policy.conditioning.kind for own in configs.values())
    assert kinds == {"preference": 1, "none": 2}


def test_points_that_train_nothing_keep_what_their_base_says_of_clients():
    """Calibrations of a group's own reward, and matrices that training would have frozen."""
    given = {"method": "minmax", "low": 0, "high": 1}
    own = {"clients": [0], "rewards": {"helpful": {"name": "brevity", "normalization": "minmax"}}}
    cfg = SweepConfig(
        base="configs/miniature.yaml",
        overrides={
            "groups": {"eu.west": own},
            "evaluation.calibrations": {"eu.west/helpful": given},
            "policy.lora.freeze_a": True,
            "estimator.name": "critic_free",
        },
        methods={"one": MethodConfig(kind="front"), "soup": MethodConfig(kind="soup")},
        preferences=[[1, 0], [0.5, 0.5], [0, 1]],
    )
    configs = sweep_configs(cfg, Path("runs"))
    assert all("eu.west/helpful" in each.evaluation.calibrations for each in configs.values())
    frozen = Counter((each.rounds > 0, each.policy.lora.freeze_a) for each in configs.values())
    assert frozen == {(True, True): 3, (False, False): 3}


def test_four_objectives_without_moocore_keep_their_front(monkeypatch):
    """The page of the sweep says why it has no hypervolume."""
    monkeypatch.setitem(sys.modules, "moocore", None)
    names = "abcd"
    points = tuple(
        Point(
            name=str(at),
            preference=(1, 1, 1, 1),
            seed=0,
            rewards=dict.fromkeys(names, own),
            errors=dict.fromkeys(names, 0.0),
            scores={},
            kl=0.0,
            adapter=f"{at}/adapter",
        )
        for at, own in enumerate((0.4, 0.6))
    )
    front = Front(
        objectives=tuple(names),
        points=points,
        reference=(0.0,) * 4,
        calibrations={name: {"method": "none"} for name in names},
        base=dict.fromkeys(names, 0.5),
        strategy="firm",
        num_prompts=8,
    )
    _check_reference({"FIRM": front})
    with pytest.raises(UserError, match="lower --reference"):
        _check_reference({"FIRM": replace(front, reference=(0.5,) * 4)})
