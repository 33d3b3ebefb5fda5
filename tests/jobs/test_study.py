"""Settings by seeds, side by side."""

import contextlib
import csv
import html
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import yaml

from firm.cli.main import COMMANDS
from firm.cli.main import main as firm
from firm.jobs import study
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.points import FREE_KEYS
from firm.jobs.study import main
from firm.report.record import read_record
from firm.run import Sweep, UserError, compose, parse, to_dict
from firm.serving.model_card import markdown_table
from tests.nursery import forked_workers
from tests.smoke import ROOT, SMOKE

cli, report = COMMANDS["study"].run, COMMANDS["report"].run


def test_thousands_of_seeds_are_planned_without_composing_each_run(capsys, monkeypatch):
    composed = []
    original = study.run_config

    def counted(cfg, **point):
        composed.append(point)
        return original(cfg, **point)

    monkeypatch.setattr(study, "run_config", counted)
    settings, seeds = "{A: {}, B: {overrides: {num_clients: 3}}}", list(range(5, 1005))
    words = ["--base", str(SMOKE), "--settings", settings, "--seeds", json.dumps(seeds), "--plan"]
    cfg = parse(study.StudyConfig, words)
    runs = study.study_configs(cfg)
    assert composed == [{"setting": "A", "seed": 5}, {"setting": "B", "seed": 5}]
    assert len(runs) == 2000
    for name, setting, seed in (("a-seed_5", "A", 5), ("b-seed_1004", "B", 1004)):
        assert runs[name] == original(cfg, setting=setting, seed=seed)
    assert main(cfg) is None
    printed = capsys.readouterr().out
    assert "2,000 runs" in printed
    assert "and 1,800 more" in printed
    assert "a-seed_104 " in printed
    assert "a-seed_105 " not in printed
    assert "optimizer steps" in printed  # of the first run


def test_keys_of_all_runs_and_of_a_setting_are_given_as_those_of_a_run():
    base = ["--base", str(SMOKE), "--settings", "{A: {}, B: {}}"]
    keys = ["--overrides.strategy.beta", "0.5", "--settings.B.overrides.strategy.beta", "2"]
    runs = study.study_configs(parse(study.StudyConfig, [*base, *keys, "--seeds", "[0]"]))
    assert {name: run.strategy.beta for name, run in runs.items()} == {
        "a-seed_0": 0.5,
        "b-seed_0": 2.0,
    }
    section = "{strategy: {name: firm, num_local_steps: 3}}"
    settings = (
        "{A: {}, B: {overrides: {strategy.name: fedavg}}, C: {overrides: {strategy: {beta: 2}}}}"
    )
    arguments = ["--base", str(SMOKE), "--overrides", section, "--settings", settings]
    runs = study.study_configs(parse(study.StudyConfig, [*arguments, "--seeds", "[0]"]))
    assert [(run.strategy.name, run.strategy.num_local_steps) for run in runs.values()] == [
        ("firm", 3),
        ("fedavg", 3),
        ("firm", 3),
    ]
    with pytest.raises(UserError, match=r"strategy\.bta; did you mean strategy\.beta\?"):
        study.study_configs(parse(study.StudyConfig, [*base, "--overrides.strategy.bta", "1"]))
    with pytest.raises(UserError, match=r"did you mean overrides\.strategy\.beta\?"):
        parse(study.StudyConfig, [*base, "--strategy.beta", "1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--settings", "{..: {}}"],
            "settings need names that contain letters or digits and do not start ",
        ),
        (["--settings", "{/: {}}"], "settings need names that contain letters or digits"),
        (
            ["--settings", "{A b: {}, a_b: {}}"],
            "settings need names that differ as file names, got 'A b'",
        ),
        (
            ["--figures", "{B: [A], b: [A]}"],
            "figures need names that differ as file names, got 'B'",
        ),
        (["--name", "../study"], "name must be at most 64 letters"),
    ],
)
def test_names_that_lead_elsewhere_or_to_one_place_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        parse(study.StudyConfig, ["--settings", "{A: {}}", *arguments])


def test_the_seeds_of_a_setting_are_one_job_type_in_wandb():
    base = str(SMOKE)
    overrides = "{tracking.mode: offline, tracking.tags: [mine]}"
    cfg = parse(
        study.StudyConfig,
        [
            *("--base", base, "--overrides", overrides, "--seeds", "[0, 1]"),
            *("--settings", '{"β = 0.5": {}, own: {overrides: {tracking.job_type: other}}}'),
        ],
    )
    runs = study.study_configs(cfg).values()
    assert [run.tracking.job_type for run in runs] == ["β = 0.5", "other"] * 2
    assert [run.tracking.tags for run in runs] == [("mine", "β = 0.5"), ("mine", "own")] * 2


def test_a_setting_has_a_folder_of_its_own_below_the_study(capsys, monkeypatch):
    takes_seconds = "firm.jobs.plan.planning.estimate_costs"
    monkeypatch.setattr(takes_seconds, lambda *_: (None, None))
    settings = "{'../../β = 0.5': {}}"
    base = str(SMOKE)
    cfg = parse(study.StudyConfig, ["--base", base, "--settings", '{"β = 0.5": {}}', "--plan"])
    main(cfg)
    assert "β_0.5-seed_0" in capsys.readouterr().out
    with pytest.raises(UserError, match="settings need names"):
        parse(study.StudyConfig, ["--settings", settings])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    """The command line of a study of two settings."""
    out = tmp_path_factory.mktemp("studies") / "study"
    settings = "{FIRM: {}, server: {overrides: {strategy.name: fsmgda}}}"
    tiny = "{rounds: 1, strategy.num_local_steps: 1, evaluation.num_validation_prompts: 0}"
    return [
        *("--base", str(SMOKE), "--settings", settings),
        *("--overrides", tiny, "--seeds", "[0]", "--out", str(out)),
    ]


@pytest.fixture(scope="module")
def studied(arguments) -> tuple[Path, str]:
    """The study's folder and what was printed."""
    with contextlib.chdir(ROOT), forked_workers(), redirect_stdout(StringIO()) as printed:
        out = main(parse(study.StudyConfig, arguments))
    assert out is not None
    return out, printed.getvalue()


def test_a_study_runs_all_settings_and_draws_them_side_by_side(studied):
    out, printed = studied
    assert "server" in printed
    page = (out / "report.html").read_text()
    for name in ("firm-seed_0", "server-seed_0"):
        assert json.loads((out / "points" / name / "run.json").read_text())["status"] == "finished"
        assert name in page
    assert list(out.rglob("*.js")) == [out / "plotly.min.js"]
    assert {path.suffix for path in (out / "figures").iterdir()} == {".png", ".svg", ".csv"}


@pytest.mark.slow
def test_a_study_with_a_failed_setting_shows_the_others_and_continues_when_it_is_corrected(
    arguments, studied, tmp_path, capsys, refusal
):
    out = tmp_path / "study"
    given = [*arguments[:-2], "--out", out, "--settings.server.overrides.policy.path", "nosuch"]
    with forked_workers(), pytest.raises(SystemExit) as ended:
        cli(list(map(str, given)))
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert f"1 of 2 runs did not finish; the others are kept. Correct the settings in {out}" in line
    assert f"continue with `firm resume {out}`: server-seed_0" in line
    page = html.unescape((out / "report.html").read_text())
    assert "firm-seed_0" in page
    reason = line.partition("server-seed_0: ")[2]
    assert "nosuch" in reason
    assert f"Runs that are not finished, and not shown: server-seed_0: {reason}" in page
    assert page.count("server-seed_0") == 1
    assert "sweep" not in page.lower()
    finals = (out / "finals.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in finals} == {"FIRM"}
    finished = (out / "points/firm-seed_0/metrics.jsonl").read_bytes()

    file, policy = (
        out / "study.yaml",
        read_record(studied[0] / "points/server-seed_0").settings["policy"],
    )
    file.write_text(file.read_text().replace("nosuch", policy["path"]))
    with forked_workers():
        firm(["resume", str(out)])
    assert "2 runs, 1 unfinished" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "server-seed_0" in page
    assert "Runs that are not finished" not in page
    assert (out / "points/firm-seed_0/metrics.jsonl").read_bytes() == finished
    changed = ["resume", str(out), "--settings.server.overrides.strategy.num_local_steps", "2"]
    assert "has another configuration: settings.server" in refusal(firm, changed)


def test_an_interrupted_study_shows_the_runs_that_are_finished_and_goes_on_with_their_base_alone(
    arguments, studied, tmp_path, monkeypatch, capsys, refusal
):
    out = tmp_path / "study"
    shutil.copytree(studied[0], out)
    (out / "report.html").unlink()
    record = out / "points/server-seed_0/run.json"
    record.write_text(record.read_text().replace('"finished"', '"interrupted"'))
    monkeypatch.setattr(Sweep, "work", interrupted)
    with pytest.raises(SystemExit):
        firm(["resume", str(out)])
    assert f"report   {out / 'report.html'}" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "firm-seed_0" in page
    assert "not shown: server-seed_0: it has not ended" in page

    base = tmp_path / "edited.yaml"
    base.write_text(SMOKE.read_text().replace("batch_size: 8", "batch_size: 4"))
    for file in (out / "study.yaml", out / "sweep.json"):
        file.write_text(file.read_text().replace(str(SMOKE), str(base)))
    told = refusal(firm, ["resume", str(out)])
    assert "firm-seed_0 in" in told
    assert "is finished with other settings: estimator.batch_size was 8, is 4" in told


@pytest.mark.slow
def test_a_finished_study_takes_further_seeds(arguments, studied, tmp_path, capsys, refusal):
    out = tmp_path / "study"
    shutil.copytree(studied[0], out)
    before = {path: path.read_bytes() for path in out.glob("points/*/metrics.jsonl")}
    given = [*arguments[:-1], out, "--resume", "--seeds", "[0, 1]"]
    with forked_workers():
        cli(list(map(str, given)))
    assert "4 runs, 2 unfinished" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before
    finals = (out / "finals.csv").read_text().splitlines()[1:]
    assert {row.split(",")[1] for row in finals} == {"0", "1"}
    assert yaml.safe_load((out / "study.yaml").read_text())["seeds"] == [0, 1]
    assert "seeds.0 was 0, is 1" in refusal(cli, [*given[:-1], "[1, 0]"])


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_a_study_is_called_a_study(arguments, studied, tmp_path, refusal):
    (tmp_path / "notes.txt").write_text("mine")
    for out, more, message in (
        (studied[0], [], f"there is already a study at {studied[0]}; continue"),
        (studied[0], ["--resume", "--rounds", "2"], f"the study at {studied[0]} has another conf"),
        (tmp_path, [], f"{tmp_path} is not empty and contains no study"),
    ):
        assert message in refusal(cli, [*arguments[:-1], out, *more])


@pytest.mark.slow
@pytest.mark.parametrize("line", ["guard: { max_kl: 9.0 }", "client_timeout: 900"])
def test_a_run_that_stopped_midway_starts_again_with_its_corrected_base(tmp_path, capsys, line):
    base, out = tmp_path / "base.yaml", tmp_path / "study"
    base.write_text(SMOKE.read_text())
    words = ["--base", str(base), "--settings", "{A: {}}", "--seeds", "[0]", "--out", str(out)]
    with forked_workers():
        firm(["study", *words, "--overrides.rounds", "1"])
        run = out / "points/a-seed_0"
        record = run / "run.json"
        record.write_text(record.read_text().replace('"finished"', '"failed"'))
        base.write_text(f"{SMOKE.read_text()}\n{line}\n")
        firm(["resume", str(out)])
    starts_again = "a-seed_0 starts again; its unfinished run is now" in capsys.readouterr().out
    assert starts_again == line.startswith("guard")
    assert starts_again == (read_record(run).settings["guard"]["max_kl"] == 9.0)


@pytest.mark.slow
def test_a_run_that_stopped_midway_starts_again_with_its_corrected_setting(
    arguments, studied, tmp_path, capsys
):
    out = tmp_path / "study"
    shutil.copytree(studied[0], out)
    record = out / "points/server-seed_0/run.json"
    record.write_text(record.read_text().replace('"finished"', '"failed"'))
    change = ["--settings.server.overrides.strategy.server_learning_rate", "0.5"]
    with forked_workers():
        firm(["resume", str(out), *change])
    assert "server-seed_0 starts again; its unfinished run is now" in capsys.readouterr().out
    (aside,) = (out / "replaced").iterdir()
    assert (aside / "metrics.jsonl").exists()
    new = read_record(out / "points/server-seed_0")
    assert new.is_finished
    assert new.settings["strategy"]["server_learning_rate"] == 0.5


def test_a_study_keeps_the_figures_of_every_seed(studied):
    out, _ = studied
    with (out / "finals.csv").open() as file:
        rows = {(row["setting"], row["seed"], row["figure"]): row for row in csv.DictReader(file)}
    assert {key[:2] for key in rows} == {("FIRM", "0"), ("server", "0")}
    record = read_record(out / "points/firm-seed_0")
    base, final = record.evaluations["test"]
    for name in record.objectives:
        row = rows["FIRM", "0", f"reward {name}"]
        assert float(row["base"]) == base["rewards"][name]["mean"]
        assert float(row["aligned"]) == final["rewards"][name]["mean"]
    assert float(rows["FIRM", "0", "KL"]["aligned"]) == final["kl"]
    sent = [float(rows[name, "0", "bytes up"]["aligned"]) for name in ("FIRM", "server")]
    assert 0 < sent[0] < sent[1]


def test_settings_of_unlike_calibrations_are_apart_in_the_terminal_too(studied, tmp_path, capsys):
    out = tmp_path / "study"
    shutil.copytree(studied[0], out)
    log = out / "points/server-seed_0/metrics.jsonl"
    log.write_text(re.sub(r'"scale": [.\de]+', '"scale": 9.5', log.read_text()))
    cli(["--resume", str(out)])
    printed = capsys.readouterr().out
    for place in (1, 2):
        assert f", calibration {place}: aligned model on the test prompts" in printed
    assert "Values of 2 groups of settings cannot be compared with each other" in printed
    assert "calibration" not in studied[1].partition("aligned model on the test prompts")[0][-40:]


def test_a_run_whose_log_is_poisoned_hides_no_other_from_table_and_page(
    arguments, studied, tmp_path, capsys
):
    out = tmp_path / "study"
    shutil.copytree(studied[0], out)
    log = out / "points/firm-seed_0/metrics.jsonl"
    log.write_text(re.sub(r'"(mean|kl|bytes_up)": [-.\de]+', r'"\1": Infinity', log.read_text()))
    cli(["--resume", str(out)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (firm,) = [line for line in lines if line[:1] == ["FIRM"]]
    (server,) = [line for line in lines if line[:1] == ["server"]]
    assert firm == ["FIRM", "0.000"]  # bytes
    assert len(server) > len(firm)
    page = (out / "report.html").read_text()
    assert "in the log of firm-seed_0 are not valid and left out" in page


def test_the_settings_of_a_study_are_compared_with_the_one_asked_for(studied, capsys, refusal):
    report([str(studied[0]), "--against", "server"])
    assert capsys.readouterr().out.startswith("no differences from server: they need two seeds")
    line = refusal(report, [str(studied[0]), "--against", "third"])
    assert "no finished runs of 'third'; choose from FIRM, server." in line


def test_settings_with_other_calibrations_are_named_instead(studied, tmp_path, capsys):
    out = Path(shutil.copytree(studied[0], tmp_path / "study"))
    log = out / "points/firm-seed_0/metrics.jsonl"
    log.write_text(re.sub(r'"scale": [\d.]+', '"scale": 123.0', log.read_text()))
    report([str(out), "--against", "server"])
    printed = capsys.readouterr().out
    assert printed == "not compared, since objectives or calibrations differ: FIRM\n"


@pytest.mark.parametrize("file", ["configs/figures.yaml", "configs/hh_study.yaml"])
def test_every_setting_of_the_studies_is_a_valid_run(file):
    cfg = compose(study.StudyConfig, [file], [])
    for setting in cfg.settings:
        run = study.run_config(cfg, setting=setting, seed=1)
        assert isinstance(run, AlignmentConfig)
        assert run.seed == 1
        assert run.evaluation.calibration_seed == cfg.seeds[0]
        assert run.data.hold_out_seed == (cfg.seeds[0] if run.pairs else None)
    assert len({study.point_name(setting, 0) for setting in cfg.settings}) == len(cfg.settings)
    drawn = replace(cfg, overrides={**cfg.overrides, "data.hold_out": 0.1})
    first = next(iter(cfg.settings))
    runs = [study.run_config(drawn, setting=first, seed=seed) for seed in (*cfg.seeds, 9)]
    assert {run.data.hold_out_seed for run in runs} == {cfg.seeds[0]}
    wrong = replace(cfg, overrides={"strategy.bta": 1})
    with pytest.raises(UserError, match=r"unknown key strategy\.bta"):
        study.run_config(wrong, setting=next(iter(cfg.settings)), seed=0)
    wrong = replace(cfg, overrides={"seed": 0})
    with pytest.raises(UserError, match="the seeds of several runs are a list: pass --seeds 0"):
        study.run_config(wrong, setting=next(iter(cfg.settings)), seed=0)


def test_the_configuration_of_a_study_that_was_begun_is_the_one_that_was_asked_for(tmp_path):
    cfg = compose(study.StudyConfig, ["configs/figures.yaml"], [])
    free = {*FREE_KEYS, *study.FREE_KEYS}
    asked = {key: value for key, value in to_dict(cfg).items() if key not in free}
    assert study.study_of(Sweep.open(tmp_path / "study", asked, {}, resume=False)) == cfg


def test_a_row_that_lacks_a_cell_is_no_row_of_a_table():
    with pytest.raises(ValueError, match="a row must have 2 cells like the header, got 1"):
        markdown_table(["a", "b"], [["1", "2"], ["3"]])
