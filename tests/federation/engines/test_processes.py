"""How clients and rows are divided, and what members of a team tell each other."""

import inspect
import signal
import threading
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation import Processes, Team
from firm.federation import processes as engine
from firm.federation.serialization import pack

MEMBER = """
import torch
from firm.federation import Processes

processes = Processes.join(per_client=2)
team = processes.team()
mine = torch.full((2, 3), float(team.rank + 1))
print("sum", team.sum(mine).tolist(), mine.tolist())
gathered = team.gather({"rows": torch.ones(team.rank * 5)})
print("gather", [len(content["rows"]) for content in gathered])
try:
    with team.unanimous():
        1 / (1 - team.rank)
except Exception as error:
    print("together", type(error).__name__, error)
try:
    with team.unanimous():
        if team.rank:
            raise MemoryError("full")
except Exception as error:
    print("machine", type(error).__name__)
with team.unanimous():
    print("again", "fine")
message = {"half": torch.tensor(0.5)} if processes.is_server else None
print("broadcast", processes.broadcast(message))
try:
    if processes.is_server:
        processes.receive(1)
except RuntimeError as error:
    print("lost", error)
"""


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_every_client_is_hosted_by_one_team(num_teams, per_client, num_clients):
    clients = [f"client_{index}" for index in range(num_clients)]
    size = num_teams * per_client
    hosted = [Processes(rank, size, per_client).hosted(clients) for rank in range(size)]
    leaders = [rank for rank in range(size) if Processes(0, size, per_client).leads(rank)]
    assert len(leaders) == num_teams
    assert sorted(name for rank in leaders for name in hosted[rank]) == sorted(clients)
    for rank in range(size):
        assert hosted[rank] == hosted[rank - rank % per_client]


@given(st.integers(2, 5), st.integers(0, 20))
def test_members_share_all_rows_evenly_and_in_order(size, num_rows):
    shares = [Team(rank, size).share(num_rows) for rank in range(size)]
    rows = [row for share in shares for row in range(num_rows)[share]]
    assert rows == list(range(num_rows))
    assert max(s.stop - s.start for s in shares) - min(s.stop - s.start for s in shares) <= 1


def test_teams_of_unequal_size_are_refused():
    with pytest.raises(ValueError, match=r"must divide the number of processes, got 2 and 3"):
        Processes(0, 3, 2)


def test_one_process_is_the_server_and_alone():
    processes = Processes.join()
    assert (processes.is_server, processes.size, processes.team()) == (True, 1, None)
    assert processes.broadcast({"x": 1}) == {"x": 1}


def test_the_thread_that_receives_has_freed_its_tensors_when_the_message_is_there(monkeypatch):
    packed, asked, looked = pack({"do": "stop"}), threading.Event(), Future()

    def receive(tensor, rank):
        asked.wait()
        tensor[:] = torch.tensor([len(packed)] if tensor.dtype == torch.int64 else list(packed))

    def look(message):
        held = [value for frame in inspect.stack() for value in frame.frame.f_locals.values()]
        looked.set_result([value for value in held if isinstance(value, torch.Tensor)])

    monkeypatch.setattr(engine.dist, "recv", receive)
    message = Processes(0, 2).expect(1)
    message.add_done_callback(look)
    asked.set()
    assert message.result(timeout=60) == {"do": "stop"}
    assert looked.result(timeout=60) == []


def test_two_members_sum_gather_and_fail_together(two_processes):
    members = two_processes(MEMBER)
    first, second = (member.stdout.splitlines() for member in members)
    assert len(second) == 6, members[1].stderr
    assert first[0] == f"sum {[[3.0] * 3] * 2} {[[1.0] * 3] * 2}"
    assert second[0] == f"sum {[[3.0] * 3] * 2} {[[2.0] * 3] * 2}"
    assert first[1] == second[1] == "gather [0, 5]"
    assert first[2].startswith("together RuntimeError process 1 of the client's 2 failed: ZeroDiv")
    assert second[2] == "together ZeroDivisionError division by zero"
    assert first[3] == second[3] == "machine MemoryError"
    assert first[4] == second[4] == "again fine"
    assert second[5] == "broadcast {'half': tensor(0.5000)}"
    assert first[-1].startswith("lost process 1 of the run's 2 is gone")


def test_the_end_of_a_process_is_not_interrupted_by_its_launcher(monkeypatch):
    """The launcher stops all processes once one is gone, also those that are saying so."""
    monkeypatch.setattr(engine, "_received", lambda rank: threading.Event().wait())
    for rank in (0, 1):  # both are there, so the launcher itself was asked to end
        process = Processes(rank=rank, size=2)
        with pytest.raises(engine.Terminated):
            process._stopped(signal.SIGTERM, None)
        process._stopped(signal.SIGTERM, None)  # a second time: nothing
    other = Processes(rank=0, size=2)
    monkeypatch.setattr(engine, "_received", lambda rank: (_ for _ in ()).throw(RuntimeError()))
    with pytest.raises(engine.ProcessLost, match="process 0 of the run's 2 is gone"):
        Processes(rank=1, size=2)._stopped(signal.SIGTERM, None)
    lost = other.expect(1)
    with pytest.raises(engine.ProcessLost, match="process 1 of the run's 2 is gone"):
        lost.result(10)
    other._stopped(signal.SIGTERM, None)
