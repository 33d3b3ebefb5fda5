"""A strategy of another package: one file, named by `plugins`, and nothing else touched."""

from pathlib import Path

import pytest

from firm.cli.align import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import UserError, parse
from tests.runs import read_rows

SMOKE = Path(__file__).parents[2] / "configs/smoke.yaml"
PLUGIN = '''
"""FedAvg towards half of the mean, with a transformation and a logged quantity of its own."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from firm.federation.aggregation import moved
from firm.federation.rounds import Round
from firm.federation.strategies import strategy
from firm.federation.strategies.fedavg import ScalarConfig
from firm.federation.transforms import Count, Mean, chain
from firm.run.quantities import Quantity, register

register(Quantity("shrinkage", "Shrinkage of the mean", "share", kind="round"))


@dataclass(frozen=True)
class Shrink:
    """Moves the mean back towards the server's adapter."""

    share: float

    def check(self, before) -> None:
        """Follows anything."""

    def __call__(self, step):
        adapter = moved(step.start, [step.adapter], [self.share])
        return replace(step, adapter=adapter, entries={**step.entries, "shrinkage": self.share})


@dataclass(frozen=True)
class ShrunkConfig(ScalarConfig):
    """Options of shrunk FedAvg."""

    name: Literal["shrunk"] = "shrunk"
    """The strategy."""
    share: float = 0.5
    """Share of the mean update that is taken."""

    def server(self, num_rounds: int = 0):
        """Returns the server's step."""
        return chain(Count(self.aggregation), Mean(), Shrink(self.share))


@strategy
def shrunk(state, clients, engine, cfg: ShrunkConfig) -> tuple[Any, dict[str, Any]]:
    """Runs one round."""
    this_round = Round(state, clients, engine, cfg)
    return this_round.aggregate(this_round.train(cfg.local_training()))
'''


@pytest.fixture
def plugin(tmp_path, new_plugins):
    path = tmp_path / "shrunk.py"
    path.write_text(PLUGIN)
    return path


def _config(*arguments: object) -> AlignmentConfig:
    short = ["--rounds", "1", "--evaluation.num_validation_prompts", "0"]
    return parse(AlignmentConfig, ["--config", str(SMOKE), *short, *map(str, arguments)])


def test_a_strategy_of_another_package_aligns_a_model_and_stands_on_its_page(plugin, tmp_path):
    options = ("--plugins", f"[{plugin}]", "--strategy.name", "shrunk", "--strategy.share", 0.25)
    folder = main(_config(*options, "--out", tmp_path / "run"))
    (row,) = read_rows(folder, "round")
    assert row["shrinkage"] == 0.25
    assert "Shrinkage of the mean" in (folder / "report.html").read_text()
    with pytest.raises(UserError, match=r"unknown key strategy\.beta"):
        _config(*options, "--strategy.beta", 0.1)
