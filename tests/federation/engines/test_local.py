import logging
import weakref

import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.serialization import pack


def _payload(start, round_number, accepted):
    return {
        "round": round_number,
        "accepted": accepted,
        "adapter": start.adapter,
        "num_local_steps": 2,
        "weighting": "firm",
        "weighting_options": {},
        "solve_per": "minibatch",
        "share_gram": False,
    }


def _adapters(replies):
    return [reply.content.adapter for reply in replies]


def test_replies_come_in_the_order_that_was_asked(new_client, start):
    engine = LocalEngine([new_client(name) for name in "abc"])
    replies, failures = engine.map("local_training", ["c", "a"], _payload(start, 1, {}))
    assert [reply.client for reply in replies] == ["c", "a"]
    assert [reply.content.client for reply in replies] == ["c", "a"]
    assert failures == []


def test_an_accepted_round_moves_a_client_on(new_client, start, same):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map("local_training", ["a"], _payload(start, 1, {}))
    second, _ = engine.map("local_training", ["a"], _payload(start, 2, {"a": 1}))
    assert not same(_adapters(first), _adapters(second))  # other noise, other moments
    alone = new_client("a")
    for reply in (first, second):
        alone.load(start.adapter)
        for batch in alone.batches(2):
            for minibatch in batch.minibatches():
                index = len(alone.metrics()["losses"])
                weights = torch.tensor(reply[0].content.metrics["weights"][index])
                alone.step(alone.gradients(minibatch), weights)
        assert same(reply[0].content.adapter, alone.adapter())


def test_a_round_that_was_not_accepted_is_as_if_it_had_not_been(new_client, start, same):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map("local_training", ["a"], _payload(start, 1, {}))
    again, _ = engine.map("local_training", ["a"], _payload(start, 2, {}))
    assert same(_adapters(again), _adapters(first))
    later, _ = engine.map("local_training", ["a"], _payload(start, 3, {"a": 2}))
    rejected, _ = engine.map("local_training", ["a"], _payload(start, 4, {"a": 3}))
    repeated, _ = engine.map("local_training", ["a"], _payload(start, 5, {"a": 3}))
    assert same(_adapters(rejected), _adapters(repeated))
    assert not same(_adapters(later), _adapters(rejected))


def test_a_failure_names_client_and_reason_and_spares_the_others(new_client, start, same, caplog):
    engine = LocalEngine([new_client("a"), new_client("b", fails_in=(1,)), new_client("c")])
    with caplog.at_level(logging.DEBUG):
        replies, failures = engine.map("local_training", ["a", "b", "c"], _payload(start, 1, {}))
    assert [reply.client for reply in replies] == ["a", "c"]
    assert [(failure.client, failure.reason) for failure in failures] == [
        ("b", "ArithmeticError: the quadratic has no bottom")
    ]
    assert failures[0].bytes_down == replies[0].bytes_down
    assert isinstance(failures[0].cause, ArithmeticError)
    assert "b failed in round 1" in caplog.text
    assert "Traceback" in caplog.text
    untouched = LocalEngine([new_client("b")])
    expected, _ = untouched.map("local_training", ["b"], _payload(start, 1, {}))
    found, _ = engine.map("local_training", ["b"], _payload(start, 2, {}))
    assert same(_adapters(found), _adapters(expected))


def test_a_failure_keeps_no_tensor_of_its_client_alive(new_client, start):
    class Activations(torch.Tensor):
        pass

    client, held = new_client("a"), []

    def step(gradients, weights):
        activations = torch.zeros(3).as_subclass(Activations)
        held.append(weakref.ref(activations))
        raise MemoryError

    client.step = step
    _, failures = LocalEngine([client]).map("local_training", ["a"], _payload(start, 1, {}))
    assert failures[0].reason.startswith("MemoryError")
    assert held[0]() is None


def test_a_reply_that_cannot_travel_is_the_clients_failure(new_client, start):
    client = new_client("a")
    client.metrics = lambda: {"secret": object()}
    _, failures = LocalEngine([client]).map("local_training", ["a"], _payload(start, 1, {}))
    assert "['metrics']['secret'] is a object" in failures[0].reason


def test_bytes_are_those_of_the_clients_own_message_and_of_its_reply(new_client, start):
    engine = LocalEngine([new_client("a"), new_client("b")])
    replies, _ = engine.map("local_training", ["a", "b"], _payload(start, 1, {}))
    for reply in replies:
        assert reply.bytes_down == len(pack({**_payload(start, 1, {}), "accepted": 0}))
        assert reply.bytes_up == len(pack(reply.content))


def test_restored_clients_continue_as_if_never_stopped(new_client, start, same):
    def new_engine():
        return LocalEngine([new_client("a"), new_client("b")])

    engine = new_engine()
    engine.map("local_training", ["a", "b"], _payload(start, 1, {}))
    engine.map("local_training", ["a"], _payload(start, 2, {"a": 1, "b": 1}))
    accepted = {"a": 2, "b": 1}
    states = engine.client_states(accepted)
    assert {name: saved["round"] for name, saved in states.items()} == accepted
    expected, _ = engine.map("local_training", ["a", "b"], _payload(start, 3, accepted))

    resumed = new_engine()
    resumed.restore_client_states(states)
    found, _ = resumed.map("local_training", ["a", "b"], _payload(start, 3, accepted))
    assert same(_adapters(found), _adapters(expected))
    assert same(resumed.client_states({"a": 3, "b": 3}), engine.client_states({"a": 3, "b": 3}))


def test_saved_states_do_not_change_when_the_clients_go_on(new_client, start, same):
    engine = LocalEngine([new_client("a")])
    engine.map("local_training", ["a"], _payload(start, 1, {}))
    states = engine.client_states({"a": 1})
    expected, _ = engine.map("local_training", ["a"], _payload(start, 2, {"a": 1}))
    resumed = LocalEngine([new_client("a")])
    resumed.restore_client_states(states)
    found, _ = resumed.map("local_training", ["a"], _payload(start, 2, {"a": 1}))
    assert same(_adapters(found), _adapters(expected))


def test_states_of_other_clients_or_rounds_are_refused(new_client, start):
    engine = LocalEngine([new_client("a")])
    with pytest.raises(ValueError, match=r"has the clients \['b'\], this run has \['a'\]"):
        engine.restore_client_states({"b": {"round": 1, "state": {}}})
    with pytest.raises(RuntimeError, match=r"a has states of rounds \[0\], not of round 4"):
        engine.map("local_training", ["a"], _payload(start, 5, {"a": 4}))


def test_progress_is_told_of_every_client(new_client, start):
    events = []
    clients = [new_client("a"), new_client("b", fails_in=(1,))]
    engine = LocalEngine(clients, on_event=lambda name, **info: events.append((name, info)))
    engine.map("local_training", ["a", "b"], _payload(start, 1, {}))
    assert [(name, info["client"], info["round"]) for name, info in events] == [
        ("client_started", "a", 1),
        ("client_finished", "a", 1),
        ("client_started", "b", 1),
        ("client_finished", "b", 1),
    ]
    assert events[1][1]["reason"] is None
    assert len(events[1][1]["metrics"]["weights"]) == 4
    assert events[3][1]["metrics"] == {}
    assert events[1][1]["seconds"] > 0
    assert events[3][1]["reason"] == "ArithmeticError: the quadratic has no bottom"


def test_clients_that_cannot_be_told_apart_or_disagree_are_refused(new_client):
    with pytest.raises(ValueError, match=r"distinct names, got \['a', 'a'\]"):
        LocalEngine([new_client("a"), new_client("a")])
    with pytest.raises(ValueError, match="same objectives in the same order"):
        LocalEngine([new_client("a"), new_client("b", objectives=("right", "left"))])


def test_an_unknown_task_is_an_error_of_the_caller(new_client, start):
    with pytest.raises(KeyError, match="no_such_task"):
        LocalEngine([new_client("a")]).map("no_such_task", ["a"], _payload(start, 1, {}))
