import logging
import os
import shutil
import threading
import time
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from firm.base.errors import DivergedError, ProcessLost, RolloutError, TeamLost
from firm.federation import LocalEngine
from firm.federation.client import LazyClients
from firm.federation.options.noise import errors_kept_back
from firm.federation.serialization import pack
from firm.run import UserError
from firm.run.states import RunStates


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


def test_replies_come_in_the_order_that_was_asked(new_client, request_of):
    engine = LocalEngine([new_client(name) for name in "abc"])
    replies, failures = engine.map(request_of(1, {}), ["c", "a"])
    assert [reply.client for reply in replies] == ["c", "a"]
    assert [reply.content.client for reply in replies] == ["c", "a"]
    assert failures == []


def test_a_client_knows_the_rate_of_its_request(new_client, request_of):
    client = new_client("a")
    engine = LocalEngine([client])
    engine.map(replace(request_of(1, {}), rate=0.25), ["a"])
    assert client.rate == 0.25
    engine.map(request_of(2, {"a": 1}), ["a"])
    assert client.rate == 1.0


def test_an_accepted_round_moves_a_client_on(new_client, start, same, request_of):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map(request_of(1, {}), ["a"])
    second, _ = engine.map(request_of(2, {"a": 1}), ["a"])
    assert not same(_adapters(first), _adapters(second))  # other noise, other moments
    alone = new_client("a")
    for reply in (first, second):
        alone.load(start.adapter)
        for batch in alone.batches(2):
            for minibatch in batch.minibatches():
                index = len(alone.metrics()["step_losses"])
                weights = torch.tensor(reply[0].content.metrics["weights"][index])
                alone.step(alone.gradients(minibatch), weights)
        assert same(reply[0].content.adapter, alone.adapter())


def test_a_round_that_was_not_accepted_is_as_if_it_had_not_been(new_client, request_of, same):
    engine = LocalEngine([new_client("a")])
    first, _ = engine.map(request_of(1, {}), ["a"])
    again, _ = engine.map(request_of(2, {}), ["a"])
    assert same(_adapters(again), _adapters(first))
    later, _ = engine.map(request_of(3, {"a": 2}), ["a"])
    rejected, _ = engine.map(request_of(4, {"a": 3}), ["a"])
    repeated, _ = engine.map(request_of(5, {"a": 3}), ["a"])
    assert same(_adapters(rejected), _adapters(repeated))
    assert not same(_adapters(later), _adapters(rejected))


def test_a_failure_names_client_and_reason_and_spares_the_others(
    new_client, request_of, same, caplog
):
    engine = LocalEngine([new_client("a"), new_client("b", fails_in=(1,)), new_client("c")])
    with caplog.at_level(logging.DEBUG):
        replies, failures = engine.map(request_of(1, {}), ["a", "b", "c"])
    assert [reply.client for reply in replies] == ["a", "c"]
    assert [(failure.client, failure.reason) for failure in failures] == [
        ("b", "ArithmeticError: the quadratic has no bottom")
    ]
    assert failures[0].bytes_down == replies[0].bytes_down
    assert isinstance(failures[0].cause, ArithmeticError)
    assert "b failed in round 1" in caplog.text
    assert "Traceback" in caplog.text
    assert failures[0].kind == "ArithmeticError"
    assert not failures[0].is_refused


def test_the_batches_of_a_failure_are_left_out_from_then_on(new_client, request_of, same):
    engine = LocalEngine([new_client("b", fails_in=(1,))])
    engine.map(request_of(1, {}), ["b"])
    found, _ = engine.map(request_of(2, {}), ["b"])

    moved_on = new_client("b")
    list(moved_on.batches(1))  # the one at whose first step it failed
    expected, _ = LocalEngine([moved_on]).map(request_of(2, {}), ["b"])
    assert same(_adapters(found), _adapters(expected))
    untouched, _ = LocalEngine([new_client("b")]).map(request_of(2, {}), ["b"])
    assert not same(_adapters(found), _adapters(untouched))


def test_what_was_left_out_is_part_of_the_saved_state(new_client, request_of, same):
    engine = LocalEngine([new_client("b", fails_in=(2,))])
    engine.map(request_of(1, {}), ["b"])
    engine.map(request_of(2, {"b": 1}), ["b"])
    resumed = LocalEngine([new_client("b")])
    resumed.restore_client_states(engine.client_states({"b": 1}))
    found, _ = resumed.map(request_of(3, {"b": 1}), ["b"])
    expected, _ = engine.map(request_of(3, {"b": 1}), ["b"])
    assert same(_adapters(found), _adapters(expected))


@pytest.mark.parametrize("error", [ValueError("a bad prompt"), DivergedError("logits")])
def test_one_bad_batch_costs_a_client_one_round(new_client, request_of, error):
    client = new_client("a")
    gradients = client.gradients

    def choosy(minibatch):
        if client._num_batches == 3:
            raise error
        return gradients(minibatch)

    client.gradients = choosy
    engine, accepted, failed_in = LocalEngine([client]), {}, []
    for number in range(1, 7):
        replies, failures = engine.map(request_of(number, accepted), ["a"])
        accepted = {"a": number} if replies else accepted
        failed_in += [number] if failures else []
        assert not any(failure.is_of_machine for failure in failures)
    assert failed_in == [2]


@pytest.mark.parametrize(
    ("error", "is_of_machine"),
    [
        (OSError(28, "full"), False),
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RolloutError("no server"), True),
    ],
)
def test_a_failure_of_the_machine_leaves_nothing_out(
    new_client, request_of, same, error, is_of_machine
):
    client = new_client("a")
    step = client.step

    def fail(*arguments):
        raise error

    def fail_in_private(*arguments):
        with errors_kept_back():
            raise error

    engine = LocalEngine([client])
    for client.step in (fail, fail_in_private):
        _, failures = engine.map(request_of(1, {}), ["a"])
        assert failures[0].kind.startswith(type(error).__name__)
        assert failures[0].reason.startswith(type(error).__name__)
        assert failures[0].is_of_machine == is_of_machine
    assert "full" not in failures[0].reason
    client.step = step
    found, _ = engine.map(request_of(2, {}), ["a"])
    expected, _ = LocalEngine([new_client("a")]).map(request_of(2, {}), ["a"])
    assert same(_adapters(found), _adapters(expected))


def test_an_answer_that_its_schema_refuses_is_a_failure_that_counts_as_an_attack(
    new_client, request_of
):
    diverging = new_client("a", num_minibatches=1)
    honest = diverging.adapter
    diverging.adapter = lambda: honest() | {"second": torch.tensor([torch.nan])}
    engine = LocalEngine([diverging, new_client("b")])
    replies, failures = engine.map(request_of(1, {}), ["a", "b"])
    assert [reply.client for reply in replies] == ["b"]
    assert failures[0].reason == "its answer is refused: adapter.second is not finite"
    assert failures[0].is_refused


def test_metrics_that_nobody_registered_are_left_out_and_counted(new_client, request_of):
    client = new_client("a")
    client.metrics = lambda: {"mood": "good", "seconds": {"step": 1.0}}
    replies, _ = LocalEngine([client]).map(request_of(1, {}), ["a"])
    assert "mood" not in replies[0].content.metrics
    assert replies[0].content.metrics["seconds"]["step"] == 1.0
    assert replies[0].dropped == 1


def test_a_failure_keeps_no_tensor_of_its_client_alive(new_client, request_of):
    class Activations(torch.Tensor):
        pass

    client, held = new_client("a"), []

    def step(gradients, weights):
        activations = torch.zeros(3).as_subclass(Activations)
        held.append(weakref.ref(activations))
        raise MemoryError

    client.step = step
    _, failures = LocalEngine([client]).map(request_of(1, {}), ["a"])
    assert failures[0].reason.startswith("MemoryError")
    assert held[0]() is None


def test_a_reply_that_cannot_travel_is_the_clients_failure(new_client, request_of):
    client = new_client("a")
    client.metrics = lambda: {"secret": object()}
    _, failures = LocalEngine([client]).map(request_of(1, {}), ["a"])
    assert "['metrics']['secret'] is a object" in failures[0].reason


def test_bytes_are_those_of_the_clients_own_message_and_of_its_reply(new_client, request_of):
    engine = LocalEngine([new_client("a"), new_client("b")])
    replies, _ = engine.map(request_of(1, {}), ["a", "b"])
    for reply in replies:
        assert reply.bytes_down == len(pack(request_of(1, {})))
        assert reply.bytes_up == len(pack(reply.content))


def test_bytes_down_count_every_digit_of_the_accepted_round(new_client, request_of):
    engine = LocalEngine([new_client("a")])
    engine.map(request_of(12, {}), ["a"])
    replies, _ = engine.map(request_of(13, {"a": 12}), ["a"])
    assert replies[0].bytes_down == len(pack(request_of(13, {"a": 12})))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_workers_change_nothing(new_apart, request_of, same, num_workers):
    names, rounds = list("abcde"), [(1, {}), (2, {}), (3, dict.fromkeys("abde", 2)), (4, {"c": 3})]
    seen = []
    for workers in (1, num_workers):
        clients = [new_apart(name, fails_in=(2,) if name == "c" else ()) for name in names]
        with closing(LocalEngine(clients, num_workers=workers)) as engine:
            for number, accepted in rounds[:3]:
                replies, failures = engine.map(request_of(number, accepted), names[::-1])
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


def test_a_free_worker_takes_the_next_client(new_apart, request_of):
    first, last, done = new_apart("a"), new_apart("c"), threading.Event()
    load_first, load_last = first.load, last.load
    first.load = lambda *given: load_first(*given) if done.wait(20) else 1 / 0
    last.load = lambda *given: (load_last(*given), done.set())
    with closing(LocalEngine([first, new_apart("b"), last], num_workers=2)) as engine:
        replies, failures = engine.map(request_of(1, {}), ["a", "b", "c"])
    assert [reply.client for reply in replies] == ["a", "b", "c"]  # "a" waited for "c"
    assert failures == []


def test_a_process_lost_by_those_who_work_on_a_client_is_told_with_its_name(new_apart, request_of):
    client = new_apart("b")

    def step(gradients, weights):
        raise TeamLost("a process of the client's 2 is gone")

    client.step = step
    with pytest.raises(ProcessLost, match=r"^b: a process of the client's 2 is gone"):
        LocalEngine([client]).map(request_of(1, {}), ["b"])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_lost_process_is_no_clients_failure(new_apart, request_of, num_workers):
    client = new_apart("b")

    def step(gradients, weights):
        raise ProcessLost("rank 1 is gone")

    client.step = step
    engine = LocalEngine([new_apart("a"), client, new_apart("c")], num_workers=num_workers)
    with closing(engine), pytest.raises(ProcessLost, match="rank 1 is gone"):
        engine.map(request_of(1, {}), ["a", "b", "c"])


def test_workers_tell_of_progress_one_at_a_time(new_apart, request_of):
    told, busy = [], threading.Lock()

    def on_event(name, **info):
        assert busy.acquire(blocking=False), "two workers talk at once"
        time.sleep(0.01)  # room for another one
        told.append((name, info["client"]))
        busy.release()

    names = list("abcd")
    clients = [new_apart(name) for name in names]
    with closing(LocalEngine(clients, num_workers=4, on_event=on_event)) as engine:
        engine.map(request_of(1, {}), names)
    assert sorted(told) == [(f"client_{e}", n) for e in ("finished", "started") for n in names]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_worker_computes_with_the_threads_that_torch_is_set_to(new_apart, request_of):
    assert torch.get_num_threads() == 1
    client, counts = new_apart("a"), []
    images, kernels, load = torch.rand(64, 3, 64, 64), torch.rand(64, 3, 3, 3), client.load

    def convolve_and_load(*given):
        counts.append(len(os.listdir("/proc/self/task")))
        torch.nn.functional.conv2d(images, kernels)  # threads that oneDNN starts stay
        counts.append(len(os.listdir("/proc/self/task")))
        load(*given)

    client.load = convolve_and_load
    with closing(LocalEngine([client], num_workers=2)) as engine:
        engine.map(request_of(1, {}), ["a"])
    assert counts[0] == counts[1]


def test_closing_ends_the_workers(new_apart, request_of):
    before = set(threading.enumerate())
    engine = LocalEngine([new_apart(name) for name in "abc"], num_workers=3)
    engine.map(request_of(1, {}), ["a", "b", "c"])
    assert set(threading.enumerate()) > before
    engine.close()
    assert set(threading.enumerate()) == before


def test_one_worker_is_the_callers_own_thread(new_client, request_of):
    client, threads = new_client("a"), []
    load = client.load
    client.load = lambda *given: (load(*given), threads.append(threading.current_thread()))
    LocalEngine([client]).map(request_of(1, {}), ["a"])
    assert threads == [threading.current_thread()]


def test_there_is_a_worker_at_least(new_client):
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        LocalEngine([new_client("a")], num_workers=0)


def test_restored_clients_continue_as_if_never_stopped(new_client, request_of, same):
    def new_engine():
        return LocalEngine([new_client("a"), new_client("b")])

    engine = new_engine()
    engine.map(request_of(1, {}), ["a", "b"])
    engine.map(request_of(2, {"a": 1, "b": 1}), ["a"])
    accepted = {"a": 2, "b": 1}
    states = engine.client_states(accepted)
    assert {name: saved["round"] for name, saved in states.items()} == accepted
    expected, _ = engine.map(request_of(3, accepted), ["a", "b"])

    resumed = new_engine()
    resumed.restore_client_states(states)
    found, _ = resumed.map(request_of(3, accepted), ["a", "b"])
    assert same(_adapters(found), _adapters(expected))
    assert same(resumed.client_states({"a": 3, "b": 3}), engine.client_states({"a": 3, "b": 3}))


@pytest.fixture
def new_lazy(new_client, tmp_path):
    """Builds an engine whose clients are built when they are needed; "b" fails in round 3."""
    made = []

    def build(name):
        client = new_client(name)
        made.append(name)
        if name == "b":
            load = client.load

            def load_and_fail(adapter, round):
                load(adapter, round)
                client._fails_in = (client._num_loads,) if round == 3 else ()

            client.load = load_and_fail
        return client

    def new_engine():
        engine = LocalEngine(LazyClients(list("abcdefgh"), build), states=RunStates(tmp_path))
        return engine, made

    return new_engine


def _checkpoint(folder, number, keep):
    """Creates the folder of a checkpoint, and removes those before the last few."""
    (folder / f"checkpoints/round_{number:04d}").mkdir(parents=True)
    for path in sorted((folder / "checkpoints").iterdir())[:-keep]:
        path.rmdir()


def test_a_run_continues_from_each_checkpoint_with_the_states_of_its_clients(
    new_lazy, request_of, tmp_path, same
):
    asked = {1: "ab", 2: "ac", 3: "bc", 4: "ab", 5: "bd", 6: "bd"}
    engine, made = new_lazy()
    accepted, saved, expected = {}, {}, {}
    for number, names in asked.items():
        replies, failures = engine.map(request_of(number, accepted), list(names))
        assert [failure.client for failure in failures] == ["b"] * (number == 3)
        expected[number] = _adapters(replies)
        accepted = {**accepted, **{reply.client: number for reply in replies}}
        saved[number] = dict(accepted), engine.client_states(accepted)
        _checkpoint(tmp_path, number, keep=3)
    assert made == list("abcbad")  # those of the round before are kept, all others are freed
    assert engine._states._recent.keys() == {"b", "d"}
    assert {name: saved["saved"] for name, saved in saved[3][1].items()} == {"a": 2, "b": 3, "c": 3}
    rounds = {path.name: sorted(path.iterdir()) for path in (tmp_path / "clients").iterdir()}
    assert [int(path.name[-4:]) for path in rounds["b"]] == [3, 4, 5, 6]
    assert [int(path.name[-4:]) for path in rounds["d"]] == [5, 6]
    for number in (5, 4):  # as if the later checkpoints were damaged
        engine, _ = new_lazy()
        accepted, states = saved[number]
        engine.restore_client_states(states)
        for later in range(number + 1, 7):
            replies, _ = engine.map(request_of(later, accepted), list(asked[later]))
            assert same(_adapters(replies), expected[later])
            accepted = {**accepted, **{reply.client: later for reply in replies}}
            assert engine.client_states(accepted) == saved[later][1]


def test_a_killed_write_of_a_state_loses_nothing(new_lazy, request_of, tmp_path, same, monkeypatch):
    engine, _ = new_lazy()
    engine.map(request_of(1, {}), ["a"])
    states = engine.client_states({"a": 1})
    _checkpoint(tmp_path, 1, keep=3)
    expected, _ = engine.map(request_of(2, {"a": 1}), ["a"])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.client_states({"a": 2})
    resumed, _ = new_lazy()
    resumed.restore_client_states(states)
    found, _ = resumed.map(request_of(2, {"a": 1}), ["a"])
    assert same(_adapters(found), _adapters(expected))


def test_a_lost_state_of_a_client_is_an_error_with_a_remedy(new_lazy, request_of, tmp_path):
    engine, _ = new_lazy()
    engine.map(request_of(1, {}), ["a"])
    states = engine.client_states({"a": 1})
    (path,) = tmp_path.glob("clients/a/round_0001/*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    resumed, _ = new_lazy()
    resumed.restore_client_states(states)
    with pytest.raises(UserError, match=r"the state of a is damaged: .* Restore it from a backup"):
        resumed.map(request_of(2, {"a": 1}), ["a"])
    shutil.rmtree(path.parent)
    with pytest.raises(UserError, match=r"the state of a is missing at .*clients/a/round_0001\."):
        new_lazy()[0].restore_client_states(states)


def test_states_inside_a_checkpoint_of_an_older_version_are_read(
    new_client, new_lazy, request_of, same
):
    older = LocalEngine([new_client(name) for name in "abcdefgh"])
    older.map(request_of(1, {}), ["a"])
    engine, _ = new_lazy()
    engine.restore_client_states(older.client_states({"a": 1}))
    request = request_of(2, {"a": 1})
    assert same(*(_adapters(each.map(request, ["a", "c"])[0]) for each in (engine, older)))
    states = engine.client_states({"a": 2, "c": 2})
    assert states["a"] == states["c"] == {"round": 2, "saved": 2}
    assert states["h"] == {"round": 0, "saved": 2}


def test_saved_states_do_not_change_when_the_clients_go_on(new_client, request_of, same):
    engine = LocalEngine([new_client("a")])
    engine.map(request_of(1, {}), ["a"])
    states = engine.client_states({"a": 1})
    expected, _ = engine.map(request_of(2, {"a": 1}), ["a"])
    resumed = LocalEngine([new_client("a")])
    resumed.restore_client_states(states)
    found, _ = resumed.map(request_of(2, {"a": 1}), ["a"])
    assert same(_adapters(found), _adapters(expected))


def test_states_of_other_clients_or_rounds_are_refused(new_client, request_of):
    engine = LocalEngine([new_client("a")])
    with pytest.raises(ValueError, match=r"has the clients \['b'\], this run has \['a'\]"):
        engine.restore_client_states({"b": {"round": 1, "state": {}}})
    with pytest.raises(RuntimeError, match=r"a has states of rounds \[0\], not of round 4"):
        engine.map(request_of(5, {"a": 4}), ["a"])


def test_progress_is_told_of_every_client(new_client, request_of):
    events = []
    clients = [new_client("a"), new_client("b", fails_in=(1,))]
    engine = LocalEngine(clients, on_event=lambda name, **info: events.append((name, info)))
    engine.map(request_of(1, {}), ["a", "b"])
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
