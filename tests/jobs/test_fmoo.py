"""The classic package's recipe: a study of algorithms, the same every time and after every stop."""

import csv
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from firm.cli.main import COMMANDS
from firm.federation import ServerState
from firm.federation.strategies import STRATEGIES
from firm.fmoo import DatasetConfig, Splits, TaskData, load_data
from firm.fmoo import measures as fmoo_measures
from firm.fmoo.config import DATASETS, MODELS
from firm.fmoo.partition import partition
from firm.fronts.measures import delta_m
from firm.jobs import fmoo as module
from firm.jobs.fmoo import federate, main
from firm.jobs.fmoo_config import ClassicConfig, attack_on
from firm.report import read_record
from firm.report.tables import Setting
from firm.run import Run, UserError, pace, parse
from firm.run.checkpoint import load_state
from firm.run.shipped import CONFIGS
from tests.runs import edit_rows, read_rows, write_classic_run
from tests.wandb_files import started

cli = COMMANDS["classic"].run

TWO_SAMPLES = "name: fedcmoo, communication: two_sample, compressor: none, normalize_gram: false"
SMALL = {
    "fedcmoo": "{strategy: {name: fedcmoo, num_local_steps: 2}, local: {lr: 0.3, batch_size: 16}}",
    "firm": "{strategy: {name: firm, num_local_steps: 2}, local: {lr: 0.3, batch_size: 16}}",
}


def _config(out: Path, *arguments: str, **algorithms: str) -> ClassicConfig:
    chosen = ", ".join(f"{name}: {text}" for name, text in (algorithms or SMALL).items())
    return parse(
        ClassicConfig,
        [
            "--algorithms", f"{{{chosen}}}", "--num_clients", "4", "--rounds", "4",
            "--evaluate_every", "2", "--seeds", "[0, 1]", "--out", str(out), *arguments,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return main(_config(tmp_path_factory.mktemp("fmoo") / "study"))


def test_every_algorithm_and_seed_has_a_run_and_the_study_a_page_and_a_table(study):
    for name in SMALL:
        for seed in (0, 1):
            run = study / name / f"seed_{seed}"
            assert [row["round"] for row in read_rows(run, "evaluation")] == [0, 2, 4]
            assert json.loads((run / "run.json").read_text())["status"] == "finished"
    with (study / "summary.csv").open() as file:
        header, *lines = csv.reader(file)
    assert header == ["algorithm", "left", "right", "mean", "worst", "MB up"]
    assert [line[0] for line in lines] == list(SMALL)
    last = [read_rows(study / f"firm/seed_{seed}", "evaluation")[-1] for seed in (0, 1)]
    assert float(lines[1][1]) == pytest.approx(
        fmean(row["accuracies"]["left"] for row in last), abs=6e-4
    )
    assert "FedCMOO".lower() in (study / "comparison.html").read_text()


def test_the_page_of_a_study_is_one_file_and_there_is_no_workspace(study, capsys, refusal):
    COMMANDS["report"].run([str(study)])
    assert capsys.readouterr().out.strip() == str(study / "comparison.html")
    assert "is a classic study, for which there is no workspace" in refusal(
        COMMANDS["workspace"].run, ["--run", study]
    )


def test_an_interrupted_study_has_a_page_of_the_algorithms_that_are_finished(tmp_path, monkeypatch):
    def interrupts(state, *others):
        raise KeyboardInterrupt

    monkeypatch.setattr(pace, "SHARE", 1e-6)  # only the first page is due
    monkeypatch.setitem(STRATEGIES, "fedavg", interrupts)
    third = "{strategy: {name: fedavg, num_local_steps: 2}, local: {lr: 0.3, batch_size: 16}}"
    arguments = ["--rounds", "1", "--seeds", "[0]"]
    with pytest.raises(KeyboardInterrupt):
        main(_config(tmp_path / "study", *arguments, **SMALL, third=third))
    with (tmp_path / "study/summary.csv").open() as file:
        assert [line[0] for line in csv.reader(file)][1:] == list(SMALL)
    assert "firm" in (tmp_path / "study/comparison.html").read_text()


def test_a_run_that_diverges_stops_no_other_and_starts_again_when_corrected(tmp_path, capsys):
    out = tmp_path / "study"
    text = "{{strategy: {{name: fedavg, num_local_steps: 1}}, local: {{lr: {}}}}}"

    def study(high: float, low: float = 0.1, resume: str = "false") -> None:
        own = {"'fedavg, high'": text.format(high), "fedavg": text.format(low)}
        few = ["--evaluate_every", "1", "--seeds", "[0]", "--model.name", "mlp"]
        main(_config(out, *few, "--resume", resume, **own))

    # the losses of the first local step are finite, those of the evaluation are not
    with pytest.raises(UserError) as failed:
        study(1e15)
    for part in (
        "1 of 2 runs did not finish; the others are kept",
        f"Correct the settings in {out / 'study.yaml'}",
        f"`firm resume {out}`",
        "fedavg, high, seed 0: ended in round 1: the loss of 'left' is nan",
    ):
        assert part in str(failed.value)
    assert "fedavg, high, seed 0: ended in round 1: the loss" in capsys.readouterr().out
    page = (out / "comparison.html").read_text()
    assert "and not shown: fedavg, high, seed 0: ended in round 1: " in page
    with (out / "summary.csv").open() as file:
        assert [own[0] for own in csv.reader(file)][1:] == ["fedavg"]
    # nothing is moved if a finished run would have other settings
    with pytest.raises(UserError, match=r"algorithms\.fedavg\.local\.lr was 0\.1, is 0\.2"):
        study(0.2, 0.2, resume="true")
    assert not (out / "replaced").exists()
    before = (out / "fedavg/seed_0/metrics.jsonl").read_bytes()
    study(0.2, resume="true")
    aside = out / "replaced/fedavg, high/seed_0-1"
    assert f"fedavg, high, seed 0 starts again; its unfinished run is now {aside}" in (
        capsys.readouterr().out
    )
    assert Run(aside).record()["status"] == "failed"
    assert (out / "fedavg/seed_0/metrics.jsonl").read_bytes() == before
    with (out / "summary.csv").open() as file:
        assert [own[0] for own in csv.reader(file)][1:] == ["fedavg, high", "fedavg"]
    assert "and not shown" not in (out / "comparison.html").read_text()


def test_the_seeds_of_an_algorithm_are_one_job_type_in_wandb(tmp_path):
    arguments = ["--rounds", "1", "--tracking.mode", "offline", "--tracking.tags", "[mine]"]
    out = main(_config(tmp_path / "study", *arguments, ours=SMALL["firm"]))
    for seed in (0, 1):
        run = started(out / f"ours/seed_{seed}")
        assert (run.run_group, run.job_type) == ("study", "ours")
        assert list(run.tags) == ["mine", "firm", "ours", f"seed {seed}"]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(study, tmp_path, monkeypatch):
    out, strategy = tmp_path / "study", STRATEGIES["firm"]
    monkeypatch.setitem(STRATEGIES, "firm", _stops_in_round_3(strategy))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        main(_config(out))
    assert interrupt.value.__notes__ == [f"continue with: firm resume {out}"]
    assert len(read_rows(out / "firm/seed_0", "evaluation")) == 2  # rounds 0 and 2
    monkeypatch.setitem(STRATEGIES, "firm", strategy)
    cli(["--resume", str(out)])
    for name in SMALL:
        for seed in (0, 1):
            path = f"{name}/seed_{seed}"
            assert read_rows(out / path, "evaluation") == read_rows(study / path, "evaluation")
    assert (out / "summary.csv").read_text() == (study / "summary.csv").read_text()


@pytest.mark.slow
def test_a_study_goes_on_to_more_rounds_as_if_it_had_them_from_the_start(study, tmp_path):
    out = tmp_path / "study"
    main(_config(out, "--rounds", "2", "--seeds", "[0]"))
    main(_config(out, "--resume", "true"))
    for name in SMALL:
        path = f"{name}/seed_0"
        assert read_rows(out / path, "evaluation") == read_rows(study / path, "evaluation")
        assert Run(out / path).settings()["rounds"] == Run(study / path).settings()["rounds"]
    with pytest.raises(UserError, match="rounds must be at least 4, the rounds that the run at"):
        main(_config(out, "--rounds", "2", "--resume", "true"))


def _stops_in_round_3(strategy):
    def stops(state, *arguments):
        if state.round == 2:
            raise KeyboardInterrupt
        return strategy(state, *arguments)

    return stops


def test_finished_runs_are_kept_and_others_join(study, tmp_path, monkeypatch):
    own = tmp_path / "study"
    shutil.copytree(study, own)
    before = {path: path.read_bytes() for path in own.glob("firm/*/metrics.jsonl")}
    main(
        _config(
            own,
            "--resume",
            "true",
            firm=SMALL["firm"],
            scalarized="{strategy: {name: fedavg}, local: {batch_size: 16}}",
        )
    )
    assert {path: path.read_bytes() for path in before} == before
    assert len(read_rows(own / "scalarized/seed_1", "evaluation")) == 3
    # finished runs are no other algorithm's, and unfinished ones go on as they began
    other = SMALL["firm"].replace("lr: 0.3", "lr: 5.0")
    for rounds in ("4", "6"):
        with pytest.raises(UserError, match=r"algorithms\.firm\.local\.lr was 0\.3, is 5\.0"):
            main(_config(own, "--resume", "true", "--rounds", rounds, firm=other))
    with pytest.raises(UserError, match=r"model\.dropout was None, is 0\.25"):
        main(_config(own, "--resume", "true", "--model.dropout", "0.25", firm=SMALL["firm"]))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "balanced", "shards"])
def test_every_partition_gives_all_clients_samples(kind):
    splits = load_data(DatasetConfig())
    cfg = _config(Path("unused"), "--partition.kind", kind, "--partition.min_samples", "5")
    shards = partition(splits.train, cfg.partition, 4, seed=0)
    assert list(shards) == [f"client_{index}" for index in range(4)]
    assert all(len(shard) >= 5 for shard in shards.values())
    drawn = [index for shard in shards.values() for index in shard]
    assert len(set(drawn)) == len(drawn)
    cfg = _config(Path("unused"), "--partition.kind", kind, "--partition.min_samples", "2000")
    with pytest.raises(ValueError, match="at least 2000"):
        partition(splits.train, cfg.partition, 4, seed=0)


def test_results_do_not_depend_on_the_number_of_workers(study, tmp_path):
    out = main(_config(tmp_path / "study", "--num_workers", "3", "--seeds", "[1]"))
    for name in SMALL:
        path = f"{name}/seed_1"
        assert read_rows(out / path, "evaluation") == read_rows(study / path, "evaluation")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model.name", "mlp"], "mlp, gradients of all clients in one pass"),
        (["--model.name", "mlp", "--engine", "local"], "mlp, gradients client by client"),
        (["--engine", "stacked"], "lenet, gradients client by client"),
        ([], "lenet, gradients client by client"),
        (
            ["--model.name", "linear", "--algorithms", "{firm: {strategy: {name: firm}}}"],
            "linear, gradients of all clients in one pass",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_dense_models_train_all_clients_in_one_pass_and_the_log_says_so(
    tmp_path, capsys, arguments, told
):
    cfg = _config(tmp_path / "study", "--rounds", "1", "--seeds", "[0]", *arguments)
    main(cfg)
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "gradients" in line] == [
        f"{name}, seed 0: {told}" for name in cfg.algorithms
    ]


@pytest.mark.parametrize(("strategy", "is_joint"), [("fedavg", False), ("firm", True)])
def test_a_linear_map_under_a_weighted_sum_stays_one_loop_over_arrays(strategy, is_joint):
    text = f"{{strategy: {{name: {strategy}}}, local: {{lr: 0.1}}}}"
    options = ("--model.name", "linear", "--partition.kind", "iid")
    cfg = _config(Path("unused"), *options, mean=text)
    table = TaskData(torch.randn(40, 3), torch.randn(40, 2), ("a", "b"), ("squared", "squared"))
    splits = Splits(table, table, table)
    federation = federate(cfg, cfg.algorithms["mean"], splits, 0)
    assert federation.has_joint_passes == is_joint


def test_users_are_measured_on_samples_that_their_clients_keep_from_training(tmp_path):
    cfg = _config(tmp_path / "study", "--partition.test_fraction", "0.25", "--num_clients", "12")
    splits = load_data(cfg.data)
    federation = federate(cfg, cfg.algorithms["firm"], splits, 0)
    shards = partition(splits.train, cfg.partition, 12, seed=0)
    for name, shard in shards.items():
        own, kept = (set(s.tolist()) for s in (federation.shards[name], federation.held_out[name]))
        assert own | kept == set(shard)
        assert not own & kept
        assert len(kept) == round(0.25 * len(shard))
    out = main(replace(cfg, rounds=2, seeds=(0,)))
    users = read_rows(out / "firm/seed_0", "evaluation")[-1]["users"]
    assert list(users) == list(shards)
    with (out / "summary.csv").open() as file:
        line = list(csv.DictReader(file))[1]
    assert float(line["users"]) == pytest.approx(np.mean(list(users.values())), abs=6e-4)
    assert float(line["worst 5 %"]) <= float(line["users"]) <= float(line["best 5 %"])
    assert 'id="users"' in (out / "comparison.html").read_text()


def test_a_user_without_a_sample_of_its_own_to_measure_on_is_left_out(tmp_path):
    few = ["--partition.kind", "dirichlet", "--partition.alpha", "0.05", "--num_clients", "30"]
    cfg = _config(tmp_path / "study", *few, "--partition.test_fraction", "0.004", "--rounds", "1")
    splits = load_data(cfg.data)
    federation = federate(cfg, cfg.algorithms["firm"], splits, 0)
    empty = [name for name, kept in federation.held_out.items() if not len(kept)]
    assert 0 < len(empty) < 30
    state = ServerState(federation.clients[0].adapter(), ("left", "right"), seed=0)
    users = fmoo_measures.evaluation(federation, splits, cfg.split, state)["users"]
    assert set(users) == set(federation.names) - set(empty)


def test_users_of_the_data_set_are_measured_on_the_split_that_is_asked_for(tmp_path):
    cfg = _config(tmp_path / "study", "--data.validation_fraction", "0.3")
    splits = load_data(cfg.data)
    federation = federate(cfg, cfg.algorithms["firm"], splits, 0)

    def named(data):
        places = torch.arange(len(data)) % 4
        return replace(data, natural=places, natural_names=tuple(federation.names))

    splits = Splits(*(named(getattr(splits, own)) for own in ("train", "validation", "test")))
    state = ServerState(federation.clients[0].adapter(), ("left", "right"), seed=0)
    for split in ("validation", "test"):
        row = fmoo_measures.evaluation(federation, splits, split, state)
        for place, name in enumerate(federation.names):
            scores = federation.workspace.evaluate(
                getattr(splits, split).take(slice(place, None, 4))
            )
            assert row["users"][name] == pytest.approx(scores.accuracies.mean().item())


def test_what_objectives_must_share_is_refused_where_they_share_nothing():
    splits = load_data(DatasetConfig())
    cfg = _config(Path("unused"), "--model.name", "linear")
    federate(cfg, cfg.algorithms["firm"], splits, 0)
    with pytest.raises(ValueError, match=r"strategy fedcmoo compares gradients .* choose mlp"):
        federate(cfg, cfg.algorithms["fedcmoo"], splits, 0)


def test_a_client_has_at_most_the_samples_that_it_may_have():
    splits = load_data(DatasetConfig())
    cfg = _config(Path("unused"), "--partition.max_samples", "7")
    whole = partition(splits.train, _config(Path("unused")).partition, 4, seed=0)
    for name, shard in partition(splits.train, cfg.partition, 4, seed=0).items():
        assert len(set(shard)) == 7
        assert set(shard) <= set(whole[name])


def test_objectives_are_dealt_out_in_turn():
    cfg = _config(Path("unused"), "--partition.objectives_per_client", "1")
    splits = load_data(cfg.data)
    federation = federate(cfg, cfg.algorithms["firm"], splits, 0)
    assert [client.served for client in federation.clients] == [(0,), (1,), (0,), (1,)]


@pytest.mark.slow
def test_a_run_ends_at_the_target_loss_and_the_table_tells_the_round(tmp_path):
    target, arguments = 2.28, ("--split", "train", "--evaluate_every", "1", "--model.dropout", "0")
    fast = {name: text.replace("lr: 0.3", "lr: 1.0") for name, text in SMALL.items()}
    cfg = _config(tmp_path / "study", *arguments, "--rounds", "40", **fast)
    cfg = replace(cfg, target_loss=target, seeds=(0,))
    out = main(cfg)
    with (out / "summary.csv").open() as file:
        lines = {line["algorithm"]: line for line in csv.DictReader(file)}
    for name in SMALL:
        rows = read_rows(out / name / "seed_0", "evaluation")
        below = [row["round"] for row in rows if max(row["losses"].values()) <= target]
        assert below == [rows[-1]["round"]]
        assert 0 < below[0] < 40
        slowest = max(int(lines[name][f"rounds to {target}, {side}"]) for side in ("left", "right"))
        assert slowest == below[0]
    before = (out / "firm/seed_0/metrics.jsonl").read_bytes()
    main(replace(cfg, resume=True))  # a run that reached it is finished
    assert (out / "firm/seed_0/metrics.jsonl").read_bytes() == before


def _measured(folder: Path, rows: list[dict], **algorithms: list[dict]) -> dict[str, str]:
    runs = []
    for name, own in algorithms.items():
        settings = {"rounds": 4, "target_loss": 0.5, "algorithms": {name: {}}}
        settings["algorithms"][name]["rounds"] = 2 if name == "firm" else None
        records = []
        for seed, log in enumerate((rows, own)):
            path = write_classic_run(folder / name / f"seed_{seed}", log, seeds=[seed], **settings)
            records.append(read_record(path))
        runs.append(Setting.of(name, 0, records))
    header, lines = module.summary(runs)
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


def test_the_table_knows_each_algorithms_rounds_and_the_users_of_all_seeds(tmp_path):
    def row(**users):
        figures = {"left": 1.0, "right": 1.0}
        shown = {"losses": figures, "accuracies": figures, "users": users}
        return {"kind": "evaluation", "split": "test", "round": 2, **shown}

    lines = _measured(
        tmp_path, [row(a=0.5, b=0.75)], fedcmoo=[row(b=0.25)], firm=[row(b=0.75, a=1.0)]
    )
    assert lines["fedcmoo"]["rounds to 0.5, left"] == "> 4"
    assert lines["firm"]["rounds to 0.5, left"] == "> 2"
    assert lines["fedcmoo"]["b"] == "0.500"
    assert lines["fedcmoo"].get("a", "") == ""


def test_the_initial_model_has_its_users_accuracies_and_users_of_some_seeds_are_named(
    study, tmp_path, capsys
):
    out = tmp_path / "study"
    shutil.copytree(study, out)

    def with_users(row: dict, other: str) -> dict:
        users = {"a": 0.25 if row["round"] == 0 else 0.75, other: 0.5}
        return {**row, "users": users} if row["kind"] == "evaluation" else row

    for path in out.glob("*/seed_*"):
        edit_rows(path, partial(with_users, other="b" if path.name == "seed_0" else "c"))
    main(_config(out, "--resume", "true"))
    note = "Users b, c: not shown, since not all runs have them."
    assert f"note: {note}" in capsys.readouterr().out
    page = (out / "comparison.html").read_text()
    assert note in page
    cells = re.findall(r"<t[dh][^>]*>\s*([^<]*?)\s*</t[dh]>", page[page.index(">initial model<") :])
    assert "0.250" in cells[:6]  # two objectives, their mean and worst, and the user


def test_an_algorithm_may_be_centralised_and_have_its_own_clients_and_rounds(tmp_path):
    local = "local: {lr: 0.1, batch_size: null}"
    out = main(
        _config(
            tmp_path / "study",
            "--seeds", "[0]",
            MGD=f"{{strategy: {{name: fsmgda}}, {local}, is_centralised: true, rounds: 2}}",
            FMGDA=f"{{strategy: {{name: fsmgda}}, {local}, num_clients: 3}}",
        )
    )  # fmt: skip
    last = {name: read_rows(out / name / "seed_0", "round")[-1] for name in ("MGD", "FMGDA")}
    assert last["MGD"]["clients"] == ["everyone"]
    assert last["MGD"]["round"] == 2
    assert last["FMGDA"]["clients"] == ["client_0", "client_1", "client_2"]
    assert last["FMGDA"]["round"] == 4
    assert "3 to 4, balanced" in (out / "comparison.html").read_text()


def test_attackers_take_part_in_every_round(tmp_path):
    few = "clients_per_round: 2"
    attack = ["--attack.kind", "scaling", "--attack.clients", "[client_3]", "--attack.amount", "2"]
    strategy = f"{{strategy: {{name: fedavg, {few}}}, local: {{lr: 0.1, batch_size: 16}}}}"
    out = main(_config(tmp_path / "study", *attack, "--seeds", "[0]", FedAvg=strategy))
    rounds = read_rows(out / "FedAvg/seed_0", "round")
    assert [len(row["clients"]) for row in rounds] == [2] * 4
    assert all("client_3" in row["clients"] for row in rounds)


def test_an_algorithm_may_have_an_attack_of_its_own_amount():
    text = "{strategy: {name: fedavg}, attack_amount: 300}"
    attack = ["--attack.kind", "bias", "--attack.clients", "[client_0]", "--attack.amount", "1"]
    cfg = parse(
        ClassicConfig, [*attack, "--algorithms", f"{{a: {text}, b: {{strategy: {{name: afl}}}}}}"]
    )
    amounts = [attack_on(cfg.algorithms[name], cfg).amount for name in ("a", "b")]
    assert amounts == [300, 1]


def test_the_share_of_improved_clients_is_told_where_it_is_evaluated(tmp_path):
    out = main(_config(tmp_path / "study", "--improved_share", "true", "--seeds", "[0]"))
    shares = {row["round"]: row.get("improved") for row in read_rows(out / "firm/seed_0", "round")}
    assert [shares[number] is None for number in (1, 2, 3, 4)] == [True, False, True, False]
    assert all(shares[number] in (0, 0.25, 0.5, 0.75, 1) for number in (2, 4))


def test_local_trainings_are_compared_from_the_same_global_models(study, tmp_path):
    cfg = _config(tmp_path / "study", "--seeds", "[0]", "--progress_from", "fedcmoo")
    looked, plain = main(cfg) / "fedcmoo/seed_0", study / "fedcmoo/seed_0"
    rows = read_rows(looked, "evaluation")
    assert [row.pop("progress", None) is None for row in rows] == [True, False, False]
    assert rows == read_rows(plain, "evaluation")  # looking changes nothing
    falls = read_rows(looked, "evaluation")[1]["progress"]
    assert list(falls) == list(SMALL)
    assert all(list(fall) == ["left", "right"] for fall in falls.values())
    assert falls["fedcmoo"] != falls["firm"]
    assert all("progress" not in row for row in read_rows(cfg.out / "firm/seed_0", "evaluation"))


def test_preferences_and_objectives_alone_make_a_plane_and_a_column(tmp_path):
    local = "local: {lr: 0.3, batch_size: 16}"
    algorithms = {
        "one": f"{{strategy: {{name: fedcmoo_pref, preference: {{right: 1, left: 3}}}}, {local}}}",
        "middle": f"{{strategy: {{name: fedcmoo_pref, preference: [1, 1]}}, {local}}}",
        "other": f"{{strategy: {{name: fedcmoo_pref, preference: [1, 3]}}, {local}}}",
        "left": f"{{strategy: {{name: fedavg, weights: {{left: 1}}}}, {local}}}",
        "right": f"{{strategy: {{name: fedavg, weights: [0, 1]}}, {local}}}",
    }
    out = main(_config(tmp_path / "study", "--rounds", "2", "--seeds", "[0]", **algorithms))
    page = (out / "comparison.html").read_text()
    assert 'id="preferences"' in page
    assert "rank correlation" in page
    last = {name: read_rows(out / name / "seed_0", "evaluation")[-1] for name in algorithms}
    ends = {name: row["accuracies"] for name, row in last.items()}
    wanted = delta_m(
        [ends["one"]["left"], ends["one"]["right"]],
        [ends["left"]["left"], ends["right"]["right"]],
        is_higher_better=True,
    )
    with (out / "summary.csv").open() as file:
        lines = {line["algorithm"]: line["Δ_M, %"] for line in csv.DictReader(file)}
    assert float(lines["one"]) == pytest.approx(100 * wanted, abs=0.051)
    assert lines["left"] == ""


def test_algorithms_of_a_family_make_a_line_over_the_number_in_which_they_differ(tmp_path):
    algorithms = {
        f"FIRM, K = {steps}": f"{{strategy: {{name: firm, num_local_steps: {steps}}}, "
        "local: {batch_size: 16}}"
        for steps in (1, 2)
    }
    quoted = {f'"{name}"': text for name, text in algorithms.items()}
    out = main(_config(tmp_path / "study", "--rounds", "1", "--seeds", "[0]", **quoted))
    assert "The setting strategy.num_local_steps" in (out / "comparison.html").read_text()


@pytest.mark.parametrize("path", sorted((CONFIGS / "fmoo").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_is_one_and_names_what_there_is(path):
    cfg = parse(ClassicConfig, ["--config", str(path)])
    assert cfg.data.name in DATASETS
    assert cfg.model.name in MODELS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "rounds must be at least 1 and at most 1,000,000, got 0"),
        (["--seeds", "[1, 1]"], "distinct numbers"),
        (["--data.name", "two_digit"], "two_digits"),
        (["--model.name", "lenett"], "lenet"),
        (["--partition.kind", "natural"], "no natural users"),
        (
            ["--attack.kind", "bias", "--attack.clients", "[phd]", "--attack.amount", "1"],
            "attack.clients must be among the clients client_0 to client_19, got 'phd'",
        ),
        (
            ["--algorithms", "{a: {strategy: {name: firm, preferences: {client_20: [1, 0]}}}}"],
            "strategy.preferences must name clients, client_0 to client_19, got 'client_20'",
        ),
        (["--algorithms", "{a: {strategy: {name: fedcmo}}}"], "fedcmoo"),
        (["--algorithms.FedCMOO.local.lr", "-1"], "lr must be positive, got -1"),
        (
            ["--algorithms", "{a: {strategy: {name: fedavg, weights: {lft: 1}}}}"],
            "weights has the unknown objective 'lft'; choose from left, right; did you mean 'left'",
        ),
        (
            ["--progress_from", "FedCMOO", "--algorithms.FSMGDA.is_centralised", "true"],
            "requires algorithms with the same clients, but FSMGDA and FedCMOO differ",
        ),
        (
            ["--algorithms", "{a: {strategy: {name: fedcmoo_pref, preference: {lft: 0}}}}"],
            "preference has the unknown objective 'lft'",
        ),
        (["--progress_from", "FedCMO"], "progress_from must be one of FedCMOO, FSMGDA"),
        (
            [
                *("--progress_from", "a"),
                *("--algorithms", "{a: {strategy: {name: firm, secure: masks}}}"),
            ],
            "progress_from compares single clients, which secure sums hide",
        ),
        (
            ["--algorithms", "{a: {strategy: {name: fedcmoo_pref, preference: [3, 2, 1]}}}"],
            "algorithms.a: ",
        ),
        (["--partition.objectives_per_client", "3"], "objectives_per_client must be at most 2"),
        (["--target_loss", "0"], "target_loss must be positive, got 0"),
        (
            ["--partition.test_fraction", "1"],
            "test_fraction must be at least 0 and less than 1, got 1",
        ),
        (["--partition.max_samples", "0"], "max_samples must be at least min_samples (1), got 0"),
        (
            ["--algorithms.FedCMOO.rounds", "0"],
            "rounds must be at least 1 and at most 1,000,000 or null, got 0",
        ),
        (["--num_threads", "0"], "num_threads must be at least 1 or null, got 0"),
        (["--num_workers", "-1"], "num_workers must be at least 1 or null, got -1"),
        (["--partition.num_users", "0"], "partition.num_users must be at least 1 or null, got 0"),
        (
            ["--partition.kind", "natural", "--algorithms.FedCMOO.num_clients", "5"],
            "algorithms.FedCMOO.num_clients must be null with partition.kind natural",
        ),
        (["--partition.min_samples", "-1"], "partition.min_samples must be at least 1, got -1"),
        (["--partition.alpha", ".nan"], "partition.alpha must be a finite number, got nan"),
        (
            ["--algorithms", "{a: {strategy: {name: fedcmoo, quorum: 99}}}"],
            "algorithms.a.strategy.quorum must be at most the number of clients, 20, got 99",
        ),
        (
            ["--algorithms.FedCMOO.strategy.clients_per_round", "99"],
            "strategy.clients_per_round must be at most the number of clients, 20, got 99",
        ),
        (
            ["--algorithms", "{a: {strategy: {" + TWO_SAMPLES + ", gram_clients: 99}}}"],
            "algorithms.a.strategy.gram_clients must be at most the number of clients, 20, got 99",
        ),
        (
            ["--algorithms", "{../a: {strategy: {name: fedcmoo}}}"],
            "algorithms: an algorithm's name must be a valid folder name",
        ),
        (["--algorithms", "{/a: {strategy: {name: fedcmoo}}}"], "must be a valid folder name"),
    ],
)
def test_bad_input_ends_in_one_line(arguments, message, refusal, tmp_path):
    assert message in refusal(cli, ["--out", str(tmp_path / "out"), *arguments])


def test_nobody_else_can_enter_a_study(study):
    for folder in (study, *study.glob("*/seed_*")):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_run_whose_last_checkpoint_is_gone_is_not_finished(tmp_path):
    out = main(_config(tmp_path / "study", "--seeds", "[0]"))
    (run,) = (folder for folder in sorted(out.glob("*/seed_0"))[:1])
    last = max((run / "checkpoints").glob("round_*"))
    before = load_state(last)
    shutil.rmtree(last)
    main(_config(out, "--seeds", "[0]", "--resume", "true"))
    ends = [own["state"]["server"]["adapter"] for own in (load_state(last), before)]
    assert all(torch.equal(ends[0][name], own) for name, own in ends[1].items())


def test_a_study_that_was_stopped_before_its_first_run_can_be_started_again(tmp_path):
    out = tmp_path / "study"
    (out / "firm/.seed_0.draft").mkdir(parents=True)
    (out / "log.txt").write_text("stopped")
    assert main(_config(out, "--seeds", "[0]")) == out


def test_a_study_is_never_overwritten(study, refusal):
    one = ["--algorithms", "{firm: {strategy: {name: firm}}}"]
    assert f"continue it with `firm resume {study}`" in refusal(cli, ["--out", str(study), *one])
    other = ["--algorithms", "{other: {strategy: {name: firm}}}"]
    assert "exists and is not empty" in refusal(cli, ["--out", str(study), *other])


@pytest.mark.parametrize("name", ["famo", "tchebycheff"])
def test_strategies_that_need_rewards_are_refused_before_anything_is_trained(
    tmp_path, refusal, name
):
    own = [
        "--algorithms",
        f"{{firm: {{strategy: {{name: firm}}}}, x: {{strategy: {{name: {name}}}}}}}",
    ]
    line = refusal(cli, ["--out", str(tmp_path / "study"), *own])
    assert f"algorithms.x: strategy.name {name} needs" in line
    assert not (tmp_path / "study").exists()


def test_rounds_have_no_figures_that_the_page_would_take_for_evaluations(tmp_path):
    strategies = {
        "pref": "{name: fedcmoo_pref}",
        "qfedavg": "{name: qfedavg}",
        "afl": "{name: afl}",
        "fsmgda": "{name: fsmgda}",
    }
    algorithms = {
        name: f"{{strategy: {strategy}, local: {{batch_size: 16}}}}"
        for name, strategy in strategies.items()
    }
    out = main(_config(tmp_path / "study", "--rounds", "1", "--seeds", "[0]", **algorithms))
    for name in algorithms:
        (row,) = read_rows(out / name / "seed_0", "round")
        assert not row.keys() & {"losses", "accuracies", "users"}


def test_all_alarms_of_all_runs_stand_on_the_page(study, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(study, out)
    alarm = "client_1 has failed in {} rounds in a row <script>alert(1)</script>"

    def with_alarm(row: dict) -> dict:
        if row["kind"] != "round" or row["round"] < 3:
            return row
        return {**row, "alarms": [alarm.format(row["round"]), "the same"]}

    edit_rows(out / "firm/seed_1", with_alarm)
    main(_config(out, "--resume", "true"))
    html = (out / "comparison.html").read_text()
    head = html[: html.index("<main>")]
    told = "client_1 has failed in {} rounds in a row &lt;script&gt;alert(1)&lt;/script&gt;</p>"
    for at in (3, 4):
        assert f"<b>firm, seed 1, round {at}:</b> {told.format(at)}" in head
    assert "<b>firm, seed 1, rounds 3, 4:</b> the same</p>" in head
    assert head.count("<b>") == 3
    assert "<b>" not in (study / "comparison.html").read_text().partition("<main>")[0]


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 10**400, -1, "x", [None], {}, {"a": "b"}, {"left": 1e308}, None],
    ids=lambda value: str(value)[:9],
)
def test_a_poisoned_run_hides_no_other_of_the_study(study, tmp_path, value):
    out = tmp_path / "study"
    shutil.copytree(study, out)
    keys = {"kind", "round", "split"}
    edit_rows(out / "firm/seed_1", lambda row: row | dict.fromkeys(row.keys() - keys, value))
    cfg, splits = _config(out, "--resume", "true"), load_data(DatasetConfig())
    runs = [
        Setting.of(name, color, [read_record(out / name / f"seed_{seed}") for seed in (0, 1)])
        for color, name in enumerate(SMALL)
    ]
    module.write_comparison(cfg, runs, splits, out)
    html = (out / "comparison.html").read_text()
    assert "firm, seed 1, is left out: no row of its log has valid accuracies and losses." in html
    assert "in the log of seed_1 are not valid and left out" in html
    with (out / "summary.csv").open() as file:
        _, fedcmoo, firm = csv.reader(file)
    whole = [read_rows(out / f"fedcmoo/seed_{seed}", "evaluation")[-1] for seed in (0, 1)]
    own = read_rows(out / "firm/seed_0", "evaluation")[-1]
    for told, finals in ((fedcmoo, whole), (firm, [own])):
        means = [fmean(row["accuracies"][name] for row in finals) for name in ("left", "right")]
        assert [float(cell) for cell in told[1:3]] == pytest.approx(means, abs=6e-4)


def test_a_study_of_which_nothing_is_valid_keeps_its_last_page(study, tmp_path, undrawn):
    out = tmp_path / "study"
    shutil.copytree(study, out)
    before = (out / "comparison.html").read_text()
    runs = [Setting(name, 0, [[], []]) for name in SMALL]
    module.write_comparison(_config(out), runs, load_data(DatasetConfig()), out)
    assert (out / "comparison.html").read_text() == before
    assert [note.partition(" could")[0] for note in undrawn] == [
        "The table summary.csv",
        "The page comparison.html",
    ]


def test_a_target_is_not_reached_by_losses_that_were_not_measured():
    row = {"kind": "evaluation", "round": 2}
    for losses in (None, {}, {"left": 0.1, "right": None}):
        assert not module.is_done({**row, "losses": losses}, 4, 0.5)
    assert module.is_done({**row, "losses": {"left": 0.1, "right": 0.5}}, 4, 0.5)
