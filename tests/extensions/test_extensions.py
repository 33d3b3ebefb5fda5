"""What another package adds with one file each: everything new takes part in a study."""

import contextlib
import csv
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

from firm.cli.main import COMMANDS, main
from tests.plugins import plugins_forgotten
from tests.runs import read_rows
from tests.smoke import POLICY

FOLDER = Path(__file__).parent
PLUGINS = [
    *("momentum", "reinforce", "vowels", "counting_engine", "reply_loss", "medoid"),
    "shifted_engine",
]
OVERRIDES = {
    "plugins": [str(FOLDER / f"{name}.py") for name in PLUGINS],
    "strategy.name": "momentum",
    "strategy.robust.rule": "medoid",
    "estimator.name": "reinforce",
    "engine": "counting",
    "rollout.engine.name": "shifted",
    "rewards": {
        "vowels": {"name": "vowels", "options": {"letters": "ae"}},
        "brevity": {"name": "brevity"},
    },
    "tracking.mode": "offline",
    "policy.path": str(POLICY),
}
MOMENTUM = Path("points/momentum-seed_0")
SETTINGS = {"momentum": {}, "none": {"overrides": {"strategy.momentum": 0.0}}}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Iterator[tuple[Path, str]]:
    """The study's folder, and what it printed; from an empty working directory."""
    folder = tmp_path_factory.mktemp("extensions")
    command = ["study", "--base", "smoke", "--out", "study"]
    options = {"seeds": [0], "settings": SETTINGS, "overrides": OVERRIDES}
    for key, value in options.items():
        command += [f"--{key}", yaml.safe_dump(value, default_flow_style=True)]
    with plugins_forgotten(), contextlib.chdir(folder), redirect_stdout(StringIO()) as printed:
        main(command)
        yield folder / "study", printed.getvalue()


@pytest.mark.slow
def test_every_extension_takes_part(study):
    folder, printed = study
    assert "vowels" in printed
    (run,) = read_rows(folder / MOMENTUM, "run")
    assert run["objectives"] == ["brevity", "vowels"]
    assert "counting engine: 2 calls" in (folder / "logs/momentum-seed_0.txt").read_text()
    settings = yaml.safe_load((folder / MOMENTUM / "config.yaml").read_text())
    assert settings["strategy"]["momentum"] == 0.9
    assert settings["estimator"]["group_size"] == 4
    assert settings["rollout"]["engine"]["shift"] == 0.25
    rounds = read_rows(folder / MOMENTUM, "round")
    assert [row["robust"]["rule"] for row in rounds] == ["medoid", "medoid"]
    assert all(len(row["robust"]["chosen"]) == 1 for row in rounds)
    clients = read_rows(folder / MOMENTUM, "client")
    assert len(clients) == 4
    assert all(row["reply_loss"] > 0 for row in clients)


def test_an_estimator_that_takes_no_preferences_trains_no_conditioned_policy(tmp_path, refusal):
    arguments = [
        *("--config", "smoke", "--plugins", f"[{FOLDER / 'reinforce.py'}]"),
        *("--estimator.name", "reinforce", "--strategy.name", "fedavg"),
        *("--policy.conditioning.kind", "preference", "--out", tmp_path / "run"),
    ]
    with plugins_forgotten():
        assert "has no argument preferences" in refusal(COMMANDS["align"].run, arguments)


def test_the_strategy_of_another_package_decides_what_the_server_does(study):
    file = "adapter/adapter_model.safetensors"
    ends = [(study[0] / f"points/{name}-seed_0" / file).read_bytes() for name in SETTINGS]
    assert len(ends[0]) == len(ends[1])
    assert ends[0] != ends[1]


def test_the_quantity_stands_on_both_pages_in_the_figures_data_and_in_wandb(study):
    folder, _ = study
    for page in (folder, folder / MOMENTUM):
        assert "Loss of a reply" in (page / "report.html").read_text()
    logged = [row["reply_loss"] for row in read_rows(folder / MOMENTUM, "client", round=2)]
    with (folder / "figures/further.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["panel"] == "Loss of a reply"]
    drawn = [row for row in rows if row["setting"] == "momentum"]
    assert float(drawn[-1]["mean"]) == pytest.approx(sum(logged) / len(logged))
    (wandb,) = (folder / MOMENTUM).glob("wandb/offline-run-*/run-*.wandb")
    assert b"reply_loss" in wandb.read_bytes()
