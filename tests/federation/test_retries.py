"""Rounds that too few clients finish: tried again, with other clients where there are some."""

from dataclasses import replace

import pytest
import torch

from firm.federation import Failure, LocalEngine, RoundFailed
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.robust import RobustConfig
from firm.federation.rounds import with_retries
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig

NAMES = [f"client_{index}" for index in range(8)]


class Silent:
    """An engine some of whose clients do not answer in the first ``times`` requests."""

    def __init__(self, engine, names, times=10**9, **failure):
        self._engine, self._names, self._left = engine, set(names), times
        self._failure = {"reason": "no answer", **failure}
        self.asked = []

    def map(self, request, clients):
        self.asked.append(list(clients))
        replies, failures = self._engine.map(request, clients)
        if self._left <= 0:
            return replies, failures
        self._left -= 1
        silent = [
            Failure(each.client, **self._failure) for each in replies if each.client in self._names
        ]
        return [r for r in replies if r.client not in self._names], [*failures, *silent]


@pytest.fixture
def engine(new_client):
    return LocalEngine([new_client(name, torch.zeros(2, 3) + i) for i, name in enumerate(NAMES)])


def test_a_round_without_its_quorum_is_tried_again(engine, start):
    silent = Silent(engine, NAMES[:2], times=1)
    cfg = FedAvgConfig(quorum=8)
    state, rows = with_retries(fedavg, start, NAMES, silent, cfg)
    assert silent.asked == [NAMES, NAMES]
    assert rows["round"]["clients"] == NAMES
    assert rows["round"]["retries"] == 1
    assert rows["round"]["failures"] == []
    assert rows["round"]["earlier_failures"] == [
        {"client": name, "reason": "no answer"} for name in NAMES[:2]
    ]
    assert state.attempts == ()
    plain, plain_rows = fedavg(start, NAMES, engine, cfg)
    assert all(torch.equal(plain.adapter[n], state.adapter[n]) for n in plain.adapter)
    assert not {"retries", "earlier_failures"} & plain_rows["round"].keys()
    up, plain_up = rows["round"]["bytes_up"], plain_rows["round"]["bytes_up"]
    assert up == plain_up * (6 + 8) // 8  # the first attempt's answers, too


def test_a_retry_asks_others_where_there_are_some(engine, start):
    cfg = FedAvgConfig(quorum=3, clients_per_round=3)
    first = Silent(engine, [])
    fedavg(start, NAMES, first, cfg)
    (drawn,) = first.asked
    silent = Silent(engine, drawn[:2])
    state, rows = with_retries(fedavg, start, NAMES, silent, cfg)
    assert silent.asked[0] == drawn
    assert not set(drawn[:2]) & set(silent.asked[1])
    assert rows["round"]["clients"] == silent.asked[1]
    again = with_retries(fedavg, start, NAMES, Silent(engine, drawn[:2]), cfg)[0]
    assert again.accepted == state.accepted  # the draw is the seed's


def test_a_retry_asks_the_same_clients_where_there_are_no_others(engine, start):
    cfg = FedAvgConfig(quorum=3, clients_per_round=3)
    few = NAMES[:4]
    silent = Silent(engine, few, times=1)
    _, rows = with_retries(fedavg, start, few, silent, cfg)
    assert len(rows["round"]["clients"]) == 3


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_run_stops_after_its_retries(retries, engine, start):
    silent = Silent(engine, NAMES[:2])
    with pytest.raises(RoundFailed, match="6 clients finished round 1, quorum 7"):
        with_retries(fedavg, start, NAMES, silent, FedAvgConfig(quorum=7, round_retries=retries))
    assert len(silent.asked) == retries + 1


def test_a_round_that_the_machine_has_failed_is_not_tried_again(engine, start):
    """Others would be drawn, and the round would go on without those that failed."""
    cfg = FedAvgConfig(quorum=1, clients_per_round=3)
    silent = Silent(engine, NAMES, times=1, reason="MemoryError: full", is_of_machine=True)
    with pytest.raises(RoundFailed, match="MemoryError: full"):
        with_retries(fedavg, start, NAMES, silent, cfg)
    assert len(silent.asked) == 1


def test_a_failed_attempt_is_in_no_checkpoint_and_ends_with_the_round(engine, start):
    cfg = FedAvgConfig(quorum=8)
    seen = []

    def spied(state, *arguments):
        seen.append(state)
        return fedavg(state, *arguments)

    with_retries(spied, start, NAMES, Silent(engine, NAMES[:1], times=1), cfg)
    assert len(seen[1].attempts) == 1
    assert type(start).from_state(seen[1].to_state()) == start


def test_messages_of_failed_attempts_are_in_epsilon(engine, start):
    privacy = PrivacyConfig(clip_norm=1.0, noise_multiplier=4.0, at="client")
    cfg = FedAvgConfig(privacy=privacy, quorum=8)
    _, rows = with_retries(fedavg, start, NAMES, Silent(engine, NAMES[:1], times=1), cfg)
    assert rows["round"]["privacy"]["epsilon_server"] == pytest.approx(cfg.spent_epsilon(2))


def test_silent_clients_count_as_attackers_where_that_is_set(engine, start):
    """Eight clients, two assumed attackers, two silent: six answers, and Multi-Krum needs seven."""
    robust = RobustConfig("multi_krum", 2)
    silent = Silent(engine, NAMES[:2])
    with pytest.raises(RoundFailed, match="6 clients finished round 1, quorum 7"):
        fedavg(start, NAMES, silent, FedAvgConfig(robust=robust))
    cfg = FedAvgConfig(robust=replace(robust, count_silent=True))
    state, rows = fedavg(start, NAMES, silent, cfg)
    assert rows["round"]["clients"] == NAMES[2:]
    assert rows["round"]["robust"]["num_attackers"] == 0
    assert set(state.accepted) == set(NAMES[2:])
    _, rows = fedavg(start, NAMES, Silent(engine, NAMES[:1]), cfg)
    assert rows["round"]["robust"]["num_attackers"] == 1
