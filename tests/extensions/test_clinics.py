"""Data, a loss and a model of a user's own in one short file: as a script, and in a study."""

import doctest
import runpy
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import firm.fmoo
from firm.cli.main import COMMANDS
from firm.fmoo import DatasetConfig, LocalConfig, TaskData, Workspace, load_data, loss, model
from firm.jobs.fmoo import ClassicConfig, main, run_classic
from firm.run import compose, parse
from tests.plugins import plugins_forgotten
from tests.runs import read_rows

cli = COMMANDS["classic"].run

FOLDER = Path(__file__).parent
FILE = FOLDER / "clinics.py"
STUDY = [
    *("--plugins", "[mine.py]", "--data.name", "clinics", "--model.name", "two_heads"),
    *("--partition.kind", "natural", "--rounds", "2", "--out", "study"),
    *("--algorithms", "{FedCMOO: {strategy: {name: fedcmoo}}}"),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> tuple[Path, dict]:
    """The folder in which the file ran as a script, and its variables."""
    folder = tmp_path_factory.mktemp("script")
    with plugins_forgotten(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        variables = runpy.run_path(str(FILE), run_name="__main__")
    return folder, variables


@pytest.mark.usefixtures("new_plugins")
def test_the_example_in_the_documentation_of_the_package_works():
    results = doctest.testmod(firm.fmoo)
    assert results.attempted > 15
    assert results.failed == 0


def test_the_example_is_short():
    assert len(FILE.read_text().splitlines()) <= 35


def test_a_script_gives_losses_by_round_the_parameters_and_a_table(script, monkeypatch):
    folder, variables = script
    monkeypatch.chdir(folder)
    result = variables["result"]
    losses = pd.read_csv("losses.csv")
    assert list(losses) == ["setting", "seed", "round", "days", "readmitted"]
    assert losses["round"].tolist() == [*range(0, 45, 5)] * 2
    last = losses.groupby("setting").last()
    assert (last[["days", "readmitted"]] < 0.4).all(axis=None)
    assert {"weights", "bytes_up", "test/losses"} <= set(result.metrics["quantity"])
    net = variables["two_heads"](None, None)
    net.load_state_dict(torch.load("clinics.pt"))
    for algorithm in ("fedcmoo", "fsmgda"):
        (row,) = read_rows(result.path / algorithm / "seed_0", "evaluation", round=40)
        assert row["losses"] == last.loc[algorithm, ["days", "readmitted"]].to_dict()
    with pytest.raises(
        ValueError, match="the algorithms fedcmoo, fsmgda with the seeds 0, got 'a'"
    ):
        result.parameters("a")
    with pytest.raises(ValueError, match="got 'fsmgda', seed 1"):
        result.parameters("fsmgda", seed=1)


@pytest.mark.usefixtures("new_plugins")
def test_a_study_that_names_the_file_gives_the_same_and_goes_on(script, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    short = [("out", str(tmp_path / "study")), ("rounds", 5)]
    study = main(compose(ClassicConfig, ["clinics.yaml"], short))
    assert "<dd>3, natural</dd>" in (study / "comparison.html").read_text()
    for algorithm in ("fedcmoo", "fsmgda"):
        rows = read_rows(study / algorithm / "seed_0", "evaluation")
        path = script[0] / script[1]["result"].path / algorithm / "seed_0"
        direct = read_rows(path, "evaluation")
        assert rows == direct[:2]
    before = (study / "fsmgda/seed_0/metrics.jsonl").read_bytes()
    again = run_classic(compose(ClassicConfig, ["clinics.yaml"], [*short, ("resume", True)]))
    assert (study / "fsmgda/seed_0/metrics.jsonl").read_bytes() == before
    assert again.losses.index.tolist() == [
        (n, 0, at) for n in ("fedcmoo", "fsmgda") for at in (0, 5)
    ]


def test_seeds_stand_in_the_tables(tmp_path, monkeypatch, new_plugins):
    monkeypatch.chdir(FOLDER)
    options = {"out": str(tmp_path / "study"), "rounds": 1, "seeds": [3, 7]}
    result = run_classic(compose(ClassicConfig, ["clinics.yaml"], [*options.items()]))
    assert sorted(set(result.losses.index.get_level_values("seed"))) == [3, 7]
    first, last, default = (
        result.parameters("fsmgda", **which) for which in ({"seed": 3}, {"seed": 7}, {})
    )
    assert torch.equal(default["heads.0.bias"], first["heads.0.bias"])
    assert not torch.equal(first["heads.0.bias"], last["heads.0.bias"])


class Tied(nn.Module):
    """Has a frozen layer, two layers of one weight, and a buffer that its output depends on."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.rand(6) + 0.5)

    def forward(self, x):
        y = self.scale * self.second(torch.tanh(self.first(self.frozen(x))))
        return [y[:, :1], y[:, 1:2]]


def test_a_state_has_buffers_frozen_parameters_and_tied_names(tmp_path, monkeypatch, new_plugins):
    monkeypatch.chdir(FOLDER)
    model("tied")(lambda cfg, data: Tied())
    options = {"out": str(tmp_path / "study"), "rounds": 2, "model.name": "tied"}
    result = run_classic(compose(ClassicConfig, ["clinics.yaml"], [*options.items()]))
    state = result.parameters("fsmgda")
    net = Tied()
    net.load_state_dict(state)
    assert set(state) == set(net.state_dict())
    assert torch.equal(state["first.weight"], state["second.weight"])
    untrained = result.new_model(0).state_dict()
    changed = {name for name in state if not torch.equal(state[name], untrained[name])}
    assert changed == {"first.weight", "first.bias", "second.weight"}
    data = load_data(DatasetConfig(name="clinics"))
    measured = Workspace(net, data.train, LocalConfig()).evaluate(data.test).losses.tolist()
    logged = result.losses.loc["fsmgda", 0, 2]
    assert measured == [logged[name] for name in data.test.objectives]


BAD = {
    "no file": ("", "", "plugins: mine.py cannot be imported (ImportError: there is no such"),
    "import": ("import torch\n", "import torc\n", "mine.py cannot be imported (ModuleNotFound"),
    "taken": ('@loss("huber")', '@loss("l2")', "a loss 'l2' is already registered"),
    "name of the data": ('@dataset("clinics")', '@dataset("clinic")', "did you mean 'clinic'?"),
    "name of the model": ('@model("two_heads")', '@model("two_head")', "did you mean 'two_head'?"),
    "name of the loss": ('"days": "huber"', '"days": "hubert"', "did you mean 'huber'?"),
    "no data": (
        "    return TaskData.of_clients",
        "    TaskData.of_clients",
        "data set clinics: its function must return Splits or TaskData, got NoneType",
    ),
    "raises": (
        "cfg.seed",
        "cfg.sead",
        "data set clinics: its function raised AttributeError: 'DatasetConfig' object has no",
    ),
    "a client without samples": (
        "x[c], y[c]",
        "x[c][:80 * c], y[c][:80 * c]",
        "data set clinics: client 'clinic_0' has no samples: remove it",
    ),
    "too many losses": (
        '"days": "huber"}',
        '"days": "huber", "cost": "huber"}',
        "targets must have the shape [240, 3], one column per objective, got [240, 2]",
    ),
    "no module": ("MultiTaskModel(body, ", "(body, ", "two_heads must be a torch.nn.Module, got"),
    "too few outputs": (
        "nn.Linear(16, 1), nn.Linear(16, 1)]",
        "nn.Linear(16, 1)]",
        "must return a list of 2 outputs, one for each of readmitted, days, got 1",
    ),
    "one tensor": (
        "MultiTaskModel(body, [",
        "nn.Sequential(body, *[",
        "on inputs of shape [2, 6] raised Runt",
    ),
    "width": ("nn.Linear(6, 16)", "nn.Linear(5, 16)", "the model on inputs of shape [2, 6] raised"),
    "a loss for each sample": (
        "huber_loss(outputs[:, 0], targets)",
        'huber_loss(outputs[:, 0], targets, reduction="none")',
        "the loss huber of 'days' must be a scalar tensor, such as a mean, got shape [2]",
    ),
    "no tensor": (
        "huber_loss(outputs[:, 0], targets)",
        "huber_loss(outputs[:, 0], targets).item()",
        "must be a scalar tensor, such as a mean, got float",
    ),
    "a loss that raises": (
        "outputs[:, 0]",
        "outputs[:, 1]",
        "the loss huber of 'days' raised IndexError: index 1 is out of bounds",
    ),
    "batch statistics": ("nn.Tanh()", "nn.BatchNorm1d(16)", "encoder.1 is a torch BatchNorm1d"),
    "dropout": ("nn.Tanh()", "nn.Dropout()", "encoder.1 is a torch Dropout, which draws"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("new_plugins")
def test_what_is_wrong_with_the_file_is_told_in_one_line(case, tmp_path, monkeypatch, refusal):
    old, new, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    if old:
        text = FILE.read_text()
        assert old in text
        Path("mine.py").write_text(text.replace(old, new))
    assert message in refusal(cli, STUDY)


@pytest.mark.usefixtures("new_plugins")
def test_a_loss_that_is_not_finite_ends_a_run_that_names_the_objective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE.read_text().replace("targets)\n", "targets) / 0\n"))
    with pytest.raises(ValueError, match="the loss of 'days' is inf: look for NaN"):
        main(parse(ClassicConfig, STUDY))


@pytest.mark.usefixtures("new_plugins")
def test_a_split_without_samples_is_refused(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(FOLDER)
    arguments = ["--config", "clinics.yaml", "--split", "validation", "--out", tmp_path / "study"]
    assert "clinics has no validation samples to evaluate on; choose" in refusal(cli, arguments)
    assert not (tmp_path / "study").exists()


@pytest.mark.usefixtures("new_plugins")
def test_a_cell_of_a_notebook_may_run_twice():
    for _ in range(2):

        @model("mine")
        @loss("mine")
        class Mine(nn.Module): ...

    with pytest.raises(ValueError, match="a model 'mine' is already registered; choose another"):
        model("mine")(TaskData)


@pytest.mark.usefixtures("new_plugins")
def test_more_clients_per_round_than_users_are_refused_before_anything_is_trained(
    tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(FOLDER)
    fedavg = "{good: {strategy: {name: fedavg}}, bad: {strategy: {name: fedavg, %s: 9}}}"
    for key in ("clients_per_round", "quorum"):
        own = ["--algorithms", fedavg % key, "--out", tmp_path / "study"]
        line = refusal(cli, ["--config", "clinics.yaml", *own])
        assert f"algorithms.bad.strategy.{key} must be at most the number of clients, 3" in line
        assert not (tmp_path / "study").exists()
