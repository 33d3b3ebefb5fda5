from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from firm.federation import Client
from firm.federation.rounds import Round
from firm.federation.strategies import STRATEGIES, StrategyConfig, strategy
from firm.federation.strategy import CONFIGS
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig, QFedAvgConfig
from firm.federation.training import LocalTraining
from firm.run.config import UserError, compose


@dataclass(frozen=True)
class FirstConfig(StrategyConfig):
    """Takes the model of the first client."""

    name: Literal["first"] = "first"
    """The strategy."""
    factor: float = 1.0
    """A key of its own."""

    def requests(self, objectives):
        return {LocalTraining: {**self.training(), "weighting": "fixed"}}


def first(state, clients, engine, cfg: FirstConfig) -> tuple[Any, dict[str, Any]]:
    this_round = Round(state, clients, engine, cfg)
    fields = {"weighting_options": {"weights": None}}
    replies = this_round.train({**cfg.requests(state.objectives)[LocalTraining], **fields})
    return this_round.finish(replies, replies[0].content.adapter)


@dataclass(frozen=True)
class Config:
    """A run."""

    strategy: StrategyConfig = field(default_factory=FirmConfig)
    """A round."""


@pytest.fixture
def registered():
    strategy(first)
    yield
    del STRATEGIES["first"], CONFIGS["first"]


def test_a_registered_strategy_is_configured_and_runs(registered, new_client, start, run_rounds):
    cfg = compose(Config, [], [("strategy.name", "first"), ("strategy.factor", 2)]).strategy
    assert cfg == FirstConfig(factor=2.0)
    state, _ = run_rounds(STRATEGIES[cfg.name], [new_client(), new_client("b")], start, cfg)
    alone, _ = run_rounds(STRATEGIES["fedavg"], [new_client()], start, FedAvgConfig())
    assert all((state.adapter[name] == alone.adapter[name]).all() for name in state.adapter)


def test_a_strategy_that_is_not_registered_is_no_choice():
    with pytest.raises(UserError, match=r"strategy\.name must be one of .*, got 'first'"):
        compose(Config, [], [("strategy.name", "first")])
    with pytest.raises(UserError, match=r"unknown key strategy\.bata; did you mean strategy\.beta"):
        compose(Config, [], [("strategy.bata", 1)])


def test_a_name_is_taken_once(registered):
    def second(state, clients, engine, cfg: FirstConfig):
        return state, {}

    with pytest.raises(ValueError, match="a strategy 'first' is already registered"):
        strategy(second)
    with pytest.raises(ValueError, match="<lambda> needs an argument cfg, a StrategyConfig"):
        strategy(lambda state, clients, engine, cfg: (state, {}))


def test_clients_are_refused_by_the_capability_that_they_lack():
    class Full(Client):
        capabilities = frozenset({"losses", "epochs"})

    for cfg in (FirmConfig(), QFedAvgConfig(), FedAvgConfig(num_local_epochs=2)):
        cfg.check_clients("Full", Full.capabilities)
    FirmConfig().check_clients("Client", Client.capabilities)
    with pytest.raises(
        ValueError, match="name qfedavg needs losses on a client's whole shard, which Client does"
    ):
        QFedAvgConfig().check_clients("Client", Client.capabilities)
    with pytest.raises(ValueError, match=r"fedavg needs the number of batches .*num_local_steps"):
        FedAvgConfig(num_local_epochs=2).check_clients("Client", Client.capabilities)
