import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firm.federation import Failure, Reply, RoundFailed, ServerState, Update
from firm.federation.diagnostics import disagreement_drift
from firm.federation.engines.engine import checked_reply
from firm.federation.server import accept, round_metrics
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy import StrategyConfig
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig
from firm.federation.training import LocalTraining
from firm.gradients import gram_matrix
from firm.solvers import firm_weights


def _reply(name, value, weights):
    adapter = {"first": torch.tensor([value, 0.0]), "second": torch.tensor([0.0])}
    return Reply(name, Update(name, adapter, 10, {"weights": weights}), 100, 70)


def test_a_state_returns_from_its_checkpoint_form(start, same):
    state = start.advance(start.adapter, ["b"]).advance(start.adapter, ["a"])
    saved = state.to_state()
    assert set(map(type, saved.values())) <= {dict, list, int, float}
    assert json.loads(json.dumps({**saved, "adapter": None}))["accepted"] == {"a": 2, "b": 1}
    assert same(vars(ServerState.from_state(saved)), vars(state))


def test_a_strategys_memory_survives_the_checkpoint_and_rounds_that_do_not_change_it(start, same):
    state = start.advance(start.adapter, ["a"], memory={"weights": [0.1, 0.9]})
    state = ServerState.from_state(state.advance(start.adapter, ["a"]).to_state())
    assert state.memory == {"weights": [0.1, 0.9]}
    assert start.memory == {}
    old = start.to_state()
    del old["memory"]  # a checkpoint of before there was one
    assert same(vars(ServerState.from_state(old)), vars(start))


def test_advancing_counts_the_round_for_those_who_were_accepted(start):
    adapter = {name: value + 1 for name, value in start.adapter.items()}
    state = start.advance(adapter, ["a", "b"]).advance(adapter, ["b"])
    assert (start.round, start.accepted) == (0, {})
    assert (state.round, state.accepted) == (2, {"a": 1, "b": 2})
    assert state.adapter is adapter


def _update(**changes):
    fields = {"client": "b", "adapter": _adapter(1.0), "num_examples": 10, "metrics": {}}
    return Update(**{**fields, **changes})


def _request(start):
    fields = {"round": 1, "objectives": start.objectives, "adapter": start.adapter}
    return LocalTraining(**fields, num_local_steps=1, weighting="firm")


def _adapter(value):
    return {"first": torch.tensor([value, 0.0]), "second": torch.tensor([0.0])}


INVALID = {
    "nan": (_update(adapter=_adapter(float("nan"))), "adapter.first is not finite"),
    "infinite": (_update(adapter=_adapter(float("inf"))), "adapter.first is not finite"),
    "enormous": (_update(adapter=_adapter(1e20)), "adapter.first has entries beyond 1e+18"),
    "lacking": (
        _update(adapter={"first": torch.zeros(2)}),
        "adapter lacks the parameter 'second'",
    ),
    "unknown": (
        _update(adapter={**_adapter(1.0), "third": torch.zeros(1)}),
        "adapter has the unknown parameter 'third'",
    ),
    "shape": (
        _update(adapter={**_adapter(1.0), "second": torch.zeros(2)}),
        "adapter.second must have shape [1], got [2]",
    ),
    "dtype": (
        _update(adapter={**_adapter(1.0), "second": torch.zeros(1).half()}),
        "adapter.second must be torch.float32, got torch.float16",
    ),
    "no examples": (
        _update(num_examples=0),
        "num_examples must be at least 1, got 0",
    ),
    "too many examples": (
        _update(num_examples=10**400),
        "num_examples must be at most 1e+09",
    ),
    "an examples' count that is none": (
        _update(num_examples="many"),
        "num_examples must be an integer, got 'many'",
    ),
    "another client's": (_update(client="a"), "client must be the one that received the request"),
    "weights of another layout": (
        _update(metrics={"weights": [[0.5, 0.5], [1.0]]}),
        "metrics.weights[1] must be a list of 2 items, got [1.0]",
    ),
    "a weight that is not finite": (
        _update(metrics={"weights": [[0.5, float("nan")]]}),
        "metrics.weights[0][1] must be a finite number, got nan",
    ),
    "a Gram matrix that is none": (
        _update(metrics={"weights": [[0.5, 0.5]], "gram": [[1.0, 0.0]]}),
        "metrics.gram must be a list of 2 items, got [[1.0, 0.0]]",
    ),
    "an asymmetric Gram matrix": (
        _update(metrics={"weights": [[0.5, 0.5]], "gram": [[1.0, 0.5], [0.0, 1.0]]}),
        "metrics.gram must be a Gram matrix, symmetric",
    ),
    "a Gram matrix of no gradients": (
        _update(metrics={"weights": [[0.5, 0.5]], "gram": [[1.0, 3.0], [3.0, 1.0]]}),
        "metrics.gram must be a Gram matrix, symmetric",
    ),
    "a Gram matrix alone": (
        _update(metrics={"gram": [[1.0, 0.0], [0.0, 1.0]]}),
        "metrics has a gram without weights",
    ),
    "seconds in words": (
        _update(metrics={"seconds": {"rollout": "long"}}),
        "metrics.seconds.rollout must be a finite number, got 'long'",
    ),
    "metrics that are none": (_update(metrics=3), "metrics must be a mapping, got 3"),
    "no update": (3, "the message must be of type Update, got 3"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_answer_becomes_a_failure_with_its_client_and_the_reason(start, case):
    content, reason = INVALID[case]
    failure = checked_reply(_request(start), "b", content, 100, 70)
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(f"its answer is refused: {reason}")
    assert failure.is_refused
    assert (failure.client, failure.bytes_down, failure.bytes_up) == ("b", 100, 70)


def test_unknown_fields_and_metrics_are_left_out_and_counted(start):
    fields = {**vars(_update(metrics={"client": "a", "mine": [torch.zeros(1)]})), "mood": "good"}
    reply = checked_reply(_request(start), "b", fields, 100, 70)
    assert isinstance(reply, Reply)
    assert reply.content.metrics == {}
    assert reply.dropped == 3


def test_an_update_beyond_the_norm_limit_is_refused(start):
    good, far = _reply("a", 1.0, [[0.5, 0.5]]), Reply("b", _update(adapter=_adapter(10.1)), 100, 70)
    lost = Failure("c", "TimeoutError: too late", 100)
    cfg = StrategyConfig(max_update_norm=10.0)
    replies, failures = accept(_request(start), [good, far], [lost], cfg=cfg)
    assert replies == [good]
    reason = "its update has norm 10.01, above max_update_norm 10"
    assert failures == [lost, Failure("b", reason, 100, 70, is_refused=True)]
    accept(_request(start), [far], [], cfg=StrategyConfig())  # any length without a limit


def test_failures_are_equal_whatever_raised_them():
    one, other = (Failure("c", "no memory", kind=k, cause=MemoryError()) for k in ("a", "b"))
    assert one == other
    assert one != Failure("c", "no answer")


def test_what_no_engine_has_read_is_no_answer(start):
    replies = [Reply("a", vars(_update()), 100, 70), _reply("b", 1.0, [[0.5, 0.5]])]
    accepted, failures = accept(_request(start), replies, [], cfg=StrategyConfig())
    assert [reply.client for reply in accepted] == ["b"]
    assert failures[0].reason == "its answer must be of type Update, got dict"


def test_a_strategy_checks_what_it_needs_and_a_check_that_raises_refuses(start):
    replies = [_reply(name, 1.0, [[0.5, 0.5]]) for name in "abc"]

    def check(update):
        return {"a": None, "b": "the name is b"}[update.client]

    accepted, failures = accept(_request(start), replies, [], cfg=StrategyConfig(), check=check)
    assert [reply.client for reply in accepted] == ["a"]
    assert [failure.reason for failure in failures] == [
        "the name is b",
        "its answer is refused: KeyError: 'c'",
    ]


def test_answers_that_differ_from_most_in_what_all_must_share_are_refused(start):
    replies = [_reply(name, 1.0, [[0.5, 0.5]]) for name in "abc"]
    widths = {"a": 4, "b": 7, "c": 4}
    accepted, failures = accept(
        _request(start), replies, [], cfg=StrategyConfig(), common=lambda u: widths[u.client]
    )
    assert [reply.client for reply in accepted] == ["a", "c"]
    assert failures[0].reason == "its answer has 7, the others' 4"


def test_a_round_below_its_quorum_raises_with_every_reason(start):
    cause = ValueError("no prompts")
    failures = [Failure("b", "ValueError: no prompts", cause=cause), Failure("c", "KeyError: 1")]
    message = r"no clients finished round 1, quorum 1 \(b: ValueError: no prompts; c: KeyError: 1\)"
    with pytest.raises(RoundFailed, match=message) as raised:
        accept(_request(start), [], failures, cfg=StrategyConfig())
    assert raised.value.__cause__ is cause

    many = [*failures, *(Failure(name, "KeyError: 1") for name in "defgh")]
    with pytest.raises(RoundFailed, match=r"no prompts; c, d, e and 3 more: KeyError: 1\)"):
        accept(_request(start), [], many, cfg=StrategyConfig())

    good, cfg = _reply("a", 1.0, [[0.5, 0.5]]), StrategyConfig(quorum=2)
    with pytest.raises(RoundFailed, match=r"^1 client finished round 1, quorum 2 \(b: .*resume"):
        accept(_request(start), [good], failures, cfg=cfg)
    accept(_request(start), [good, good], failures, cfg=cfg)


def test_no_client_is_dropped_where_the_machine_of_all_failed(start):
    good, error = _reply("a", 1.0, [[0.5, 0.5]]), MemoryError("full")
    full = Failure("b", "MemoryError: full", cause=error, is_of_machine=True)
    message = (
        r"^1 client finished round 1, not all \(b: MemoryError: full\); .* resume from round 0"
    )
    with pytest.raises(RoundFailed, match=message) as raised:
        accept(_request(start), [good], [full], cfg=StrategyConfig())
    assert raised.value.__cause__ is error
    elsewhere = Failure("b", "MemoryError", kind="MemoryError")  # at a site
    accept(_request(start), [good], [elsewhere], cfg=StrategyConfig())


def test_the_rows_of_a_round_say_who_took_part_and_how_they_differ(start):
    replies = [_reply("a", 1.1, [[0.2, 0.8], [0.4, 0.6]]), _reply("c", 2.1, [[0.5, 0.5]])]
    failure = Failure("b", "ValueError: no prompts", 100)
    mean = {"first": torch.tensor([1.6, 0.0]), "second": torch.tensor([0.0])}
    after = start.advance(mean, ["a", "c"])
    rows = round_metrics(start, after, replies, [failure], seconds=1.5)
    row = rows["round"]
    assert row["weights_spread"] == pytest.approx({"left": 0.1, "right": 0.1})  # means 0.3, 0.5
    # each client is 0.5 from the mean, which is √(1.5² + 0.2² + 0.3²) from the start
    assert row.pop("drift") == pytest.approx(0.5 / (1.5**2 + 0.2**2 + 0.3**2) ** 0.5)
    del row["weights_spread"]
    assert row == {
        "kind": "round",
        "round": 1,
        "clients": ["a", "c"],
        "failures": [{"client": "b", "reason": "ValueError: no prompts"}],
        "seconds": 1.5,
        "bytes_down": 300,
        "bytes_up": 140,
        "norm_ratio": None,
    }
    assert rows["clients"][1] == {
        "kind": "client",
        "round": 1,
        "client": "c",
        "num_examples": 10,
        "weights": [[0.5, 0.5]],
        "bytes_down": 100,
        "bytes_up": 70,
    }
    assert json.dumps(rows)


def test_clients_without_weights_have_no_spread(start):
    reply = _reply("a", 1.1, [[0.2, 0.8]])
    del reply.content.metrics["weights"]
    row = round_metrics(start, start.advance(start.adapter, ["a"]), [reply], [], seconds=1.0)
    assert "weights_spread" not in row["round"]


def test_the_stationarity_bound_comes_of_the_grams_that_were_sent(start):
    replies = [_reply(name, 1.0, [[0.5, 0.5]]) for name in "abc"]
    after = start.advance(start.adapter, ["a", "b", "c"])
    assert "stationarity" not in round_metrics(start, after, replies, [], seconds=1.0)["round"]
    replies[0].content.metrics["gram"] = [[1.0, 0.0], [0.0, 4.0]]
    replies[1].content.metrics["gram"] = [[3.0, 0.0], [0.0, 4.0]]
    row = round_metrics(start, after, replies, [], seconds=1.0)["round"]
    assert row["stationarity"] == pytest.approx(4 / 3)  # 1 / (1/2 + 1/4), the mean of two
    assert row["disagreement_bound"] == 0
    for reply in replies[:2]:  # their first batches lack the second objective
        reply.content.metrics.update({"gram": [[2.0, 0.0], [0.0, 0.0]], "weights": [[1.0, 0.0]]})
    row = round_metrics(start, after, replies, [], seconds=1.0)["round"]
    assert row["stationarity"] == 2


def test_weights_that_disagree_by_turns_do_not_cancel_in_the_disagreement_bound(start):
    by_turns = [[1.0, 0.0], [0.0, 1.0]]
    replies = [_reply("a", 1.0, by_turns), _reply("b", 1.0, by_turns[::-1])]
    for reply in replies:
        reply.content.metrics["gram"] = [[1.0, 0.0], [0.0, 1.0]]
    row = round_metrics(start, start.advance(start.adapter, ["a", "b"]), replies, [], seconds=1.0)
    # in each solve the mean of (1/2, -1/2) and -1 times (-1/2, 1/2), for opposite gradients
    first = [torch.tensor(weights) for weights in by_turns]
    assert disagreement_drift([torch.eye(2), -torch.eye(2)], first) == pytest.approx(0.5)
    assert row["round"]["disagreement_bound"] == pytest.approx(0.5)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_clients=st.integers(1, 4),
    num_local_steps=st.integers(1, 3),
    beta=st.floats(0.0, 1.0),
)
def test_the_bounds_of_a_round_hold_for_the_gradients_at_the_global_model(
    new_client, run_rounds, start, seed, num_clients, num_local_steps, beta
):
    generator = torch.Generator().manual_seed(seed)
    targets = 2 * torch.randn(num_clients, 2, 3, generator=generator)
    names = [f"client_{index}" for index in range(num_clients)]

    def build():
        return [new_client(name, own) for name, own in zip(names, targets, strict=True)]

    cfg = FirmConfig(share_gram=True, beta=beta, num_local_steps=num_local_steps)
    _, (metrics,) = run_rounds(firm_round, build(), start, cfg)
    row = metrics["round"]

    jacobians = []
    for client in build():  # each draws the batch that it drew in the round
        client.load(start.adapter)
        (batch,) = client.batches(1)
        jacobians.append(client.gradients(next(batch.minibatches())).jacobian.double())
    weights = [firm_weights(gram_matrix(rows), beta=beta) for rows in jacobians]
    mean = torch.stack(jacobians).mean(dim=0)
    shortest = firm_weights(gram_matrix(mean), beta=0.0) @ mean
    slack = 1 + 1e-5  # the clients' gradients are float32
    assert disagreement_drift(jacobians, weights) <= slack * row["disagreement_bound"] + 1e-9
    assert shortest.square().sum().item() <= slack * row["stationarity"] + 1e-9


def test_the_disagreement_bound_and_the_norm_ratio_by_hand(start):
    replies = [_reply("a", 1.0, [[0.5, 0.5], [0.7, 0.3]]), _reply("b", 1.0, [[0.2, 0.8]])]
    for reply, norms in zip(replies, ([[1.0, 2.0], [3.0, 1.0]], [[4.0, 1.0]]), strict=True):
        reply.content.metrics["gradient_norms"] = norms
        reply.content.metrics["gram"] = [[1.0, 0.0], [0.0, 4.0]]
    row = round_metrics(start, start.advance(start.adapter, ["a"]), replies, [], seconds=1.0)
    # the first 0.5 and 0.2 are 0.15 from their mean: 0.15² (1 + 4), the same for both clients
    assert row["round"]["disagreement_bound"] == pytest.approx(0.1125)
    assert row["round"]["norm_ratio"] == 3  # the median of 2, 3 and 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_local_steps": 0}, "num_local_steps must be at least 1 and at most .*, got 0"),
        (
            {"num_local_epochs": 0},
            "num_local_epochs must be at least 1, got 0; null uses num_local_steps",
        ),
        (
            {"num_local_epochs": 2, "num_local_steps": 3},
            "mutually exclusive, got 3 and 2; remove one of them",
        ),
        ({"clients_per_round": 0}, "clients_per_round must be at least 1, got 0"),
        ({"quorum": 0}, "quorum must be at least 1, got 0"),
        ({"quorum": 3, "clients_per_round": 2}, r"quorum must be at most clients_per_round \(2\)"),
        ({"max_update_norm": 0.0}, "max_update_norm must be positive, got 0.0"),
    ],
)
@pytest.mark.parametrize("config", [StrategyConfig, FirmConfig, FedAvgConfig])
def test_rounds_that_cannot_be_run_are_refused(config, values, message):
    config()
    with pytest.raises(ValueError, match=message):
        config(**values)
