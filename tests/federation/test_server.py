import json

import pytest
import torch

from firm.federation import Failure, Reply, RoundFailed, ServerState, Update
from firm.federation.server import RoundConfig, accept, round_metrics
from firm.federation.strategies import FedAvgConfig, FirmConfig
from firm.federation.validity import invalidity


def _reply(name, value, weights):
    adapter = {"first": torch.tensor([value, 0.0]), "second": torch.tensor([0.0])}
    return Reply(name, Update(name, adapter, 10, {"weights": weights}), 100, 70)


def test_a_state_returns_from_its_checkpoint_form(start, same):
    state = start.advance(start.adapter, ["b"]).advance(start.adapter, ["a"])
    saved = state.to_state()
    assert set(map(type, saved.values())) <= {dict, list, int}
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


def _adapter(value):
    return {"first": torch.tensor([value, 0.0]), "second": torch.tensor([0.0])}


INVALID = {
    "nan": (_update(adapter=_adapter(float("nan"))), "the update is not finite in 'first'"),
    "infinite": (_update(adapter=_adapter(float("inf"))), "the update is not finite in 'first'"),
    "lacking": (_update(adapter={"first": torch.zeros(2)}), "the update lacks parameter 'second'"),
    "unknown": (
        _update(adapter={**_adapter(1.0), "third": torch.zeros(1)}),
        "the update has an unknown parameter 'third'",
    ),
    "shape": (
        _update(adapter={**_adapter(1.0), "second": torch.zeros(2)}),
        "the update has shape [2] in 'second', not [1]",
    ),
    "dtype": (
        _update(adapter={**_adapter(1.0), "second": torch.zeros(1).half()}),
        "the update has dtype torch.float16 in 'second', not torch.float32",
    ),
    "no examples": (_update(num_examples=0), "the update counts 0 examples"),
    "too many examples": (
        _update(num_examples=10**12),
        "the update counts 1000000000000 examples",
    ),
    "an examples' count that is none": (
        _update(num_examples="many"),
        "the reply is malformed (TypeError: '<=' not supported between instances of 'int' and "
        "'str')",
    ),
    "weights of another layout": (
        _update(metrics={"weights": [[0.5, 0.5], [1.0]]}),
        "the update's metrics have no usable 'weights'",
    ),
    "a weight that is not finite": (
        _update(metrics={"weights": [[0.5, float("nan")]]}),
        "the update's metrics have no usable 'weights'",
    ),
    "a Gram matrix that is none": (
        _update(metrics={"weights": [[0.5, 0.5]], "gram": [[1.0, 0.0]]}),
        "the update's metrics have no usable 'gram'",
    ),
    "a Gram matrix alone": (
        _update(metrics={"gram": [[1.0, 0.0], [0.0, 1.0]]}),
        "the update's metrics have a 'gram' without 'weights'",
    ),
    "the server's own key": (
        _update(metrics={"client": "a"}),
        "the update's metrics have the key 'client', which is not a client's to set",
    ),
    "seconds in words": (
        _update(metrics={"seconds": {"rollout": "long"}}),
        "the update's metrics have no usable 'seconds'",
    ),
    "metrics that are no numbers": (
        _update(metrics={"extra": [torch.zeros(1)]}),
        "the update's metrics hold something other than numbers and texts",
    ),
    "far": (_update(adapter=_adapter(10.1)), "the update has norm 10.01, above max_update_norm 10"),
    "no update": ({"adapter": None}, "the reply is no update but dict"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_update_becomes_a_failure_with_its_client_and_the_reason(start, case):
    content, reason = INVALID[case]
    good, bad = _reply("a", 1.0, [[0.5, 0.5]]), Reply("b", content, 100, 70)
    lost = Failure("c", "TimeoutError: too late", 100)
    cfg = RoundConfig(max_update_norm=10.0)
    replies, failures = accept([good, bad], [lost], state=start, cfg=cfg)
    assert replies == [good]
    assert failures == [lost, Failure("b", reason, 100, 70)]


def test_replies_other_than_updates_have_their_own_check(start):
    replies = [Reply(name, {"number": number}, 100, 70) for name, number in (("a", 1), ("b", 2))]
    accepted, failures = accept(
        replies,
        [],
        state=start,
        cfg=RoundConfig(),
        check=lambda content: "the number is even" if content["number"] % 2 == 0 else None,
    )
    assert accepted == replies[:1]
    assert failures == [Failure("b", "the number is even", 100, 70)]


def test_any_length_of_update_is_accepted_without_a_limit(start):
    assert invalidity(_update(adapter=_adapter(1e6)), start.adapter, start.objectives) is None


def test_a_round_below_its_quorum_raises_with_every_reason(start):
    cause = ValueError("no prompts")
    failures = [Failure("b", "ValueError: no prompts", cause=cause), Failure("c", "KeyError: 1")]
    message = r"no clients finished round 1, quorum 1 \(b: ValueError: no prompts; c: KeyError: 1\)"
    with pytest.raises(RoundFailed, match=message) as raised:
        accept([], failures, state=start, cfg=RoundConfig())
    assert raised.value.__cause__ is cause

    good, cfg = _reply("a", 1.0, [[0.5, 0.5]]), RoundConfig(quorum=2)
    with pytest.raises(RoundFailed, match=r"^1 client finished round 1, quorum 2 \(b: .*resume"):
        accept([good], failures, state=start, cfg=cfg)
    accept([good, good], failures, state=start, cfg=cfg)


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


def test_the_disagreement_bound_and_the_norm_ratio_by_hand(start):
    replies = [_reply("a", 1.0, [[0.5, 0.5], [0.7, 0.3]]), _reply("b", 1.0, [[0.2, 0.8]])]
    for reply, norms in zip(replies, ([[1.0, 2.0], [3.0, 1.0]], [[4.0, 1.0]]), strict=True):
        reply.content.metrics["gradient_norms"] = norms
        reply.content.metrics["gram"] = [[1.0, 0.0], [0.0, 4.0]]
    row = round_metrics(start, start.advance(start.adapter, ["a"]), replies, [], seconds=1.0)
    # means 0.6 and 0.2 are 0.2 from theirs: 0.2² (1 + 4), the same for both clients
    assert row["round"]["disagreement_bound"] == pytest.approx(0.2)
    assert row["round"]["norm_ratio"] == 3  # the median of 2, 3 and 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_local_steps": 0}, "num_local_steps must be at least 1, got 0"),
        ({"clients_per_round": 0}, "clients_per_round must be at least 1, got 0"),
        ({"quorum": 0}, "quorum must be at least 1 client, got 0"),
        ({"quorum": 3, "clients_per_round": 2}, r"quorum must be at most clients_per_round \(2\)"),
        ({"max_update_norm": 0.0}, "max_update_norm must be positive, got 0.0"),
    ],
)
@pytest.mark.parametrize("config", [RoundConfig, FirmConfig, FedAvgConfig])
def test_rounds_that_cannot_be_run_are_refused(config, values, message):
    config()
    with pytest.raises(ValueError, match=message):
        config(**values)
