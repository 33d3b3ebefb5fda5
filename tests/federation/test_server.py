import json

import pytest
import torch

from firm.federation import Failure, Reply, ServerState, Update
from firm.federation.server import accept, check_round_config, round_metrics


def _reply(name, value, weights):
    adapter = {"first": torch.tensor([value, 0.0]), "second": torch.tensor([0.0])}
    return Reply(name, Update(name, adapter, 10, {"weights": weights}), 100, 70)


def test_a_state_returns_from_its_checkpoint_form(start, same):
    state = start.advance(start.adapter, ["b"]).advance(start.adapter, ["a"])
    saved = state.to_state()
    assert set(map(type, saved.values())) <= {dict, list, int}
    assert json.loads(json.dumps({**saved, "adapter": None}))["accepted"] == {"a": 2, "b": 1}
    assert same(vars(ServerState.from_state(saved)), vars(state))


def test_advancing_counts_the_round_for_those_who_were_accepted(start):
    adapter = {name: value + 1 for name, value in start.adapter.items()}
    state = start.advance(adapter, ["a", "b"]).advance(adapter, ["b"])
    assert (start.round, start.accepted) == (0, {})
    assert (state.round, state.accepted) == (2, {"a": 1, "b": 2})
    assert state.adapter is adapter


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_becomes_a_failure_with_its_client_and_parameter(value):
    good, bad = _reply("a", 1.0, [[0.5, 0.5]]), _reply("b", value, [[0.5, 0.5]])
    lost = Failure("c", "TimeoutError: too late", 100)
    replies, failures = accept([good, bad], [lost], round_number=3)
    assert replies == [good]
    assert failures == [lost, Failure("b", "the update is not finite in 'first'", 100, 70)]


def test_a_round_without_updates_raises_with_the_first_reason():
    cause = ValueError("no prompts")
    failures = [Failure("b", "ValueError: no prompts", cause=cause), Failure("c", "KeyError: 1")]
    message = "No client finished round 3; b: ValueError: no prompts"
    with pytest.raises(RuntimeError, match=message) as raised:
        accept([], failures, round_number=3)
    assert raised.value.__cause__ is cause


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


def test_rounds_that_cannot_be_run_are_refused():
    check_round_config(1, None)
    with pytest.raises(ValueError, match="num_local_steps must be at least 1, got 0"):
        check_round_config(0, None)
    with pytest.raises(ValueError, match="clients_per_round must be at least 1, got 0"):
        check_round_config(1, 0)
