import logging
import os
import threading
import time
import weakref
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from firm.federation import LocalEngine
from firm.federation.client import ProcessLost, TeamLost
from firm.federation.serialization import pack


@pytest.fixture
def new_apart(new_client):
    """Builds a client that shares nothing with others, the global generators neither."""

    def build(name, **options):
        client = new_client(name, **options)

        def batches(num_steps):
            for _ in range(num_steps):
                client._num_batches += 1
                generator = torch.Generator().manual_seed(ord(name) + client._num_batches)
                noise = torch.randn(2, 3, generator=generator)
                yield SimpleNamespace(minibatches=lambda noise=noise: iter(noise))

        client.batches = batches
        return client

    return build


def _adapters(replies):
    return [reply.content.adapter for reply in replies]


def test_replies_come_in_the_order_that_was_asked(new_client, payload):
    engine = LocalEngine([new_client(name) for name in "abc"])
    replies, failures = engine.map("local_training", ["c", "a"], payload(1, {}))
    assert [reply.client for reply in replies] == ["c", "a"]
    assert [reply.content.client for reply in replies] == ["c", "a"]
    assert failures == []


def test_an_accepted_round_moves_a_client_on(new_client, start, same, payload):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map("local_training", ["a"], payload(1, {}))
    second, _ = engine.map("local_training", ["a"], payload(2, {"a": 1}))
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


def test_a_round_that_was_not_accepted_is_as_if_it_had_not_been(new_client, payload, same):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map("local_training", ["a"], payload(1, {}))
    again, _ = engine.map("local_training", ["a"], payload(2, {}))
    assert same(_adapters(again), _adapters(first))
    later, _ = engine.map("local_training", ["a"], payload(3, {"a": 2}))
    rejected, _ = engine.map("local_training", ["a"], payload(4, {"a": 3}))
    repeated, _ = engine.map("local_training", ["a"], payload(5, {"a": 3}))
    assert same(_adapters(rejected), _adapters(repeated))
    assert not same(_adapters(later), _adapters(rejected))


def test_a_failure_names_client_and_reason_and_spares_the_others(new_client, payload, same, caplog):
    engine = LocalEngine([new_client("a"), new_client("b", fails_in=(1,)), new_client("c")])
    with caplog.at_level(logging.DEBUG):
        replies, failures = engine.map("local_training", ["a", "b", "c"], payload(1, {}))
    assert [reply.client for reply in replies] == ["a", "c"]
    assert [(failure.client, failure.reason) for failure in failures] == [
        ("b", "ArithmeticError: the quadratic has no bottom")
    ]
    assert failures[0].bytes_down == replies[0].bytes_down
    assert isinstance(failures[0].cause, ArithmeticError)
    assert "b failed in round 1" in caplog.text
    assert "Traceback" in caplog.text
    untouched = LocalEngine([new_client("b")])
    expected, _ = untouched.map("local_training", ["b"], payload(1, {}))
    found, _ = engine.map("local_training", ["b"], payload(2, {}))
    assert same(_adapters(found), _adapters(expected))


def test_a_failure_keeps_no_tensor_of_its_client_alive(new_client, payload):
    class Activations(torch.Tensor):
        pass

    client, held = new_client("a"), []

    def step(gradients, weights):
        activations = torch.zeros(3).as_subclass(Activations)
        held.append(weakref.ref(activations))
        raise MemoryError

    client.step = step
    _, failures = LocalEngine([client]).map("local_training", ["a"], payload(1, {}))
    assert failures[0].reason.startswith("MemoryError")
    assert held[0]() is None


def test_a_reply_that_cannot_travel_is_the_clients_failure(new_client, payload):
    client = new_client("a")
    client.metrics = lambda: {"secret": object()}
    _, failures = LocalEngine([client]).map("local_training", ["a"], payload(1, {}))
    assert "['metrics']['secret'] is a object" in failures[0].reason


def test_bytes_are_those_of_the_clients_own_message_and_of_its_reply(new_client, payload):
    engine = LocalEngine([new_client("a"), new_client("b")])
    replies, _ = engine.map("local_training", ["a", "b"], payload(1, {}))
    for reply in replies:
        assert reply.bytes_down == len(pack({**payload(1, {}), "accepted": 0}))
        assert reply.bytes_up == len(pack(reply.content))


def test_bytes_down_count_every_digit_of_the_accepted_round(new_client, payload):
    engine = LocalEngine([new_client("a")])
    engine.map("local_training", ["a"], payload(12, {}))
    replies, _ = engine.map("local_training", ["a"], payload(13, {"a": 12}))
    assert replies[0].bytes_down == len(pack({**payload(13, {}), "accepted": 12}))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_change_nothing(new_apart, payload, same, num_workers):
    names, rounds = list("abcde"), [(1, {}), (2, {}), (3, dict.fromkeys("abde", 2)), (4, {"c": 3})]
    seen = []
    for workers in (1, num_workers):
        clients = [new_apart(name, fails_in=(2,) if name == "c" else ()) for name in names]
        with closing(LocalEngine(clients, num_workers=workers)) as engine:
            for number, accepted in rounds[:3]:
                replies, failures = engine.map(
                    "local_training", names[::-1], payload(number, accepted)
                )
                seen.append(
                    {
                        "clients": [reply.client for reply in replies],
                        "adapters": _adapters(replies),
                        "bytes_down": [reply.bytes_down for reply in replies],
                        "failures": [(failure.client, failure.reason) for failure in failures],
                    }
                )
            seen.append(engine.client_states({**dict.fromkeys("abde", 3), "c": 0}))
    for alone, together in zip(seen[:4], seen[4:], strict=True):
        assert same(alone, together)
    assert seen[1]["failures"] == [("c", "ArithmeticError: the quadratic has no bottom")]


def test_a_free_worker_takes_the_next_client(new_apart, payload):
    first, last, done = new_apart("a"), new_apart("c"), threading.Event()
    load_first, load_last = first.load, last.load
    first.load = lambda adapter: load_first(adapter) if done.wait(20) else 1 / 0
    last.load = lambda adapter: (load_last(adapter), done.set())
    with closing(LocalEngine([first, new_apart("b"), last], num_workers=2)) as engine:
        replies, failures = engine.map("local_training", ["a", "b", "c"], payload(1, {}))
    assert [reply.client for reply in replies] == ["a", "b", "c"]  # "a" waited for "c"
    assert failures == []


def test_a_process_lost_by_those_who_work_on_a_client_is_told_with_its_name(new_apart, payload):
    client = new_apart("b")

    def step(gradients, weights):
        raise TeamLost("a process of the client's 2 is gone")

    client.step = step
    with pytest.raises(ProcessLost, match=r"^b: a process of the client's 2 is gone"):
        LocalEngine([client]).map("local_training", ["b"], payload(1, {}))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_lost_process_is_no_clients_failure(new_apart, payload, num_workers):
    client = new_apart("b")

    def step(gradients, weights):
        raise ProcessLost("rank 1 is gone")

    client.step = step
    engine = LocalEngine([new_apart("a"), client, new_apart("c")], num_workers=num_workers)
    with closing(engine), pytest.raises(ProcessLost, match="rank 1 is gone"):
        engine.map("local_training", ["a", "b", "c"], payload(1, {}))


def test_workers_tell_of_progress_one_at_a_time(new_apart, payload):
    told, busy = [], threading.Lock()

    def on_event(name, **info):
        assert busy.acquire(blocking=False), "two workers talk at once"
        time.sleep(0.01)  # room for another one
        told.append((name, info["client"]))
        busy.release()

    names = list("abcd")
    clients = [new_apart(name) for name in names]
    with closing(LocalEngine(clients, num_workers=4, on_event=on_event)) as engine:
        engine.map("local_training", names, payload(1, {}))
    assert sorted(told) == [(f"client_{e}", n) for e in ("finished", "started") for n in names]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_worker_computes_with_the_threads_that_torch_is_set_to(new_apart, payload):
    assert torch.get_num_threads() == 1
    client, counts = new_apart("a"), []
    images, kernels, load = torch.rand(64, 3, 64, 64), torch.rand(64, 3, 3, 3), client.load

    def convolve_and_load(adapter):
        counts.append(len(os.listdir("/proc/self/task")))
        torch.nn.functional.conv2d(images, kernels)  # threads that oneDNN starts stay
        counts.append(len(os.listdir("/proc/self/task")))
        load(adapter)

    client.load = convolve_and_load
    with closing(LocalEngine([client], num_workers=2)) as engine:
        engine.map("local_training", ["a"], payload(1, {}))
    assert counts[0] == counts[1]


def test_closing_ends_the_workers(new_apart, payload):
    before = set(threading.enumerate())
    engine = LocalEngine([new_apart(name) for name in "abc"], num_workers=3)
    engine.map("local_training", ["a", "b", "c"], payload(1, {}))
    assert set(threading.enumerate()) > before
    engine.close()
    assert set(threading.enumerate()) == before


def test_one_worker_is_the_callers_own_thread(new_client, payload):
    client, threads = new_client("a"), []
    load = client.load
    client.load = lambda adapter: (load(adapter), threads.append(threading.current_thread()))
    LocalEngine([client]).map("local_training", ["a"], payload(1, {}))
    assert threads == [threading.current_thread()]


def test_there_is_a_worker_at_least(new_client):
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        LocalEngine([new_client("a")], num_workers=0)


def test_restored_clients_continue_as_if_never_stopped(new_client, payload, same):
    def new_engine():
        return LocalEngine([new_client("a"), new_client("b")])

    engine = new_engine()
    engine.map("local_training", ["a", "b"], payload(1, {}))
    engine.map("local_training", ["a"], payload(2, {"a": 1, "b": 1}))
    accepted = {"a": 2, "b": 1}
    states = engine.client_states(accepted)
    assert {name: saved["round"] for name, saved in states.items()} == accepted
    expected, _ = engine.map("local_training", ["a", "b"], payload(3, accepted))

    resumed = new_engine()
    resumed.restore_client_states(states)
    found, _ = resumed.map("local_training", ["a", "b"], payload(3, accepted))
    assert same(_adapters(found), _adapters(expected))
    assert same(resumed.client_states({"a": 3, "b": 3}), engine.client_states({"a": 3, "b": 3}))


def test_saved_states_do_not_change_when_the_clients_go_on(new_client, payload, same):
    engine = LocalEngine([new_client("a")])
    engine.map("local_training", ["a"], payload(1, {}))
    states = engine.client_states({"a": 1})
    expected, _ = engine.map("local_training", ["a"], payload(2, {"a": 1}))
    resumed = LocalEngine([new_client("a")])
    resumed.restore_client_states(states)
    found, _ = resumed.map("local_training", ["a"], payload(2, {"a": 1}))
    assert same(_adapters(found), _adapters(expected))


def test_states_of_other_clients_or_rounds_are_refused(new_client, payload):
    engine = LocalEngine([new_client("a")])
    with pytest.raises(ValueError, match=r"has the clients \['b'\], this run has \['a'\]"):
        engine.restore_client_states({"b": {"round": 1, "state": {}}})
    with pytest.raises(RuntimeError, match=r"a has states of rounds \[0\], not of round 4"):
        engine.map("local_training", ["a"], payload(5, {"a": 4}))


def test_progress_is_told_of_every_client(new_client, payload):
    events = []
    clients = [new_client("a"), new_client("b", fails_in=(1,))]
    engine = LocalEngine(clients, on_event=lambda name, **info: events.append((name, info)))
    engine.map("local_training", ["a", "b"], payload(1, {}))
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


def test_an_unknown_task_is_an_error_of_the_caller(new_client, payload):
    with pytest.raises(KeyError, match="no_such_task"):
        LocalEngine([new_client("a")]).map("no_such_task", ["a"], payload(1, {}))
