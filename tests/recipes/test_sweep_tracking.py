"""Sweeps in W&B, off line: the points are a group, in which a run of the sweep shows the front."""

import json
import time
from pathlib import Path

from firm.fronts import Front
from firm.run import parse
from recipes import pareto_sweep, study

ROOT = Path(__file__).parents[2]
OFFLINE = ["--overrides", "{tracking.mode: offline, rounds: 1}"]


def tracked(folder: Path) -> tuple[Path, bytes]:
    """W&B's folder in a run's, and all that it noted, once its service has ended the file."""
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    deadline, size = time.monotonic() + 20, -1
    while size != (size := file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.5)
    return file.parent, file.read_bytes()


def test_points_are_a_group_and_a_run_of_it_shows_the_front(tmp_path):
    base = str(ROOT / "configs/smoke.yaml")
    arguments = ["--base", base, "--preferences", "[[1, 3], [3, 1]]", "--name", "tracked"]
    cfg = parse(pareto_sweep.SweepConfig, [*arguments, *OFFLINE, "--out", str(tmp_path / "sweep")])
    out = pareto_sweep.main(cfg)
    assert out is not None
    group = f"tracked-{json.loads((out / 'sweep.json').read_text())['id']}".encode()
    points = sorted((out / "points").iterdir())
    assert len(points) == 2
    for point in points:
        assert group in tracked(point)[1]
        assert f"group: {group.decode()}" in (point / "config.yaml").read_text()

    folder, noted = tracked(out)
    assert group in noted
    assert b"hypervolume/FIRM" in noted
    [path] = folder.glob("files/media/table/front/points_*.json")
    content = json.loads(path.read_text())
    rows = [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]
    front = Front.load(out / "firm.front.json")
    for row, point in zip(rows, front.points, strict=True):
        assert {name: row[name] for name in front.objectives} == point.rewards
        assert (row["method"], row["seed"], row["KL"]) == ("FIRM", 0, point.kl)
        assert (row["adapter"], row["collapse"]) == (point.adapter, point.collapse or "")
    assert [row["preference"] for row in rows] == ["0.25, 0.75", "0.75, 0.25"]
    assert list(folder.glob("files/media/table/front/brevity-positivity_table_*.json"))


def test_a_study_is_planned_by_its_runs_and_the_first_one(capsys):
    base = str(ROOT / "configs/smoke.yaml")
    settings = "{A: {}, B: {overrides: {num_clients: 3}}}"
    cfg = parse(study.StudyConfig, ["--base", base, "--settings", settings, "--plan"])
    assert study.main(cfg) is None
    printed = capsys.readouterr().out
    assert "6 runs" in printed
    assert "b-seed_2" in printed
    assert "optimizer steps per client and round" in printed
