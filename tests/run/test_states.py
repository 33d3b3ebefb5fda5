import os

import pytest
import torch

from firm.base.inside import LinkFound
from firm.federation.engines import MemoryStates
from firm.run.states import DiskStates, RunStates


def _state(value):
    return {"moments": torch.full((2,), float(value)), "step": value}


@pytest.fixture(params=[MemoryStates, DiskStates, RunStates])
def states(request, tmp_path):
    return request.param() if request.param is MemoryStates else request.param(tmp_path)


def test_a_state_comes_back_as_it_was(states):
    states.write("client_0", 0, _state(0))
    states.write("client_0", 1, _state(1))
    states.write("client_1", 0, _state(7))
    assert torch.equal(states.read("client_0", 1)["moments"], torch.ones(2))
    assert states.read("client_0", 0)["step"] == 0
    assert states.read("client_1", 0)["step"] == 7


def test_a_state_replaces_one_of_the_same_round(states):
    states.write("client_0", 1, _state(1))
    states.write("client_0", 1, _state(2))
    assert states.read("client_0", 1)["step"] == 2


def test_what_came_after_the_accepted_round_is_dropped(states):
    for round in (0, 1, 2):
        states.write("client_0", round, _state(round))
    states.forget("client_0", 1)
    assert states.read("client_0", 1)["step"] == 1
    with pytest.raises(RuntimeError, match=r"states of rounds \[.*1\], not of round 2"):
        states.read("client_0", 2)


def test_a_state_that_is_not_there_is_told_with_those_that_are(states):
    with pytest.raises(RuntimeError, match=r"client_9 has states of rounds \[\], not of round 3"):
        states.read("client_9", 3)


def test_a_disk_keeps_the_last_few_accepted_states(tmp_path):
    states = DiskStates(tmp_path, num_kept=2)
    for round in range(5):
        states.write("client_0", round, _state(round))
        states.forget("client_0", round)
    assert sorted(path.name for path in (tmp_path / "client_0").iterdir()) == [
        "round_000003",
        "round_000004",
    ]


def test_a_site_that_starts_again_finds_its_states(tmp_path):
    DiskStates(tmp_path).write("client_0", 12, _state(12))
    assert DiskStates(tmp_path).read("client_0", 12)["step"] == 12


def test_a_damaged_state_is_refused(tmp_path):
    states = DiskStates(tmp_path)
    states.write("client_0", 1, _state(1))
    (path,) = (tmp_path / "client_0/round_000001").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(ValueError, match="round_000001"):
        states.read("client_0", 1)


@pytest.mark.parametrize("client", ["../client_0", "/tmp/client_0", ".", "", "a/b"])
def test_no_client_has_its_states_elsewhere(tmp_path, client):
    states = DiskStates(tmp_path / "states")
    with pytest.raises(ValueError, match="a client's name must be at most 64 letters"):
        states.write(client, 0, _state(0))
    with pytest.raises(ValueError, match="a client's name"):
        states.forget(client, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["client_0", "client_0/round_000001"])
def test_a_state_is_not_written_through_a_link(tmp_path, place):
    (tmp_path / "outside").mkdir()
    states = DiskStates(tmp_path / "states")
    states.write("client_1", 0, _state(0))
    (tmp_path / "states" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "states" / place).symlink_to(tmp_path / "outside")
    with pytest.raises(LinkFound, match=rf"states/{place} is a link"):
        states.write("client_0", 1, _state(1))
    assert os.listdir(tmp_path / "outside") == []
