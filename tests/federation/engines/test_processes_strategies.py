"""Rounds that ask more of clients than local training, on two processes as on one."""

from pathlib import Path

import pytest
import torch

from firm.federation import Engine, LocalEngine, Processes, ProcessesEngine, ServerState
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.serialization import pack
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import FedCmooConfig, FirmConfig, FsmgdaConfig
from tests.quadratic import QuadraticClient

NAMES = [f"client_{index}" for index in range(5)]
PRIVACY = PrivacyConfig(clip_norm=0.1, noise_multiplier=1.0, at="client", noise_seed=3)
CONFIGS = {
    "firm": FirmConfig(privacy=PRIVACY, preferences={"client_1": (0.9, 0.1)}),
    "fedcmoo": FedCmooConfig(upload_budget=4.0, num_local_steps=2, clients_per_round=4),
    "fsmgda": FsmgdaConfig(num_local_steps=2, clients_per_round=4),
}


def _clients(hosted):
    targets = torch.randn(len(NAMES), 2, 3, generator=torch.Generator().manual_seed(0))
    return [
        QuadraticClient(name, target, served=(0,) if name == "client_3" else (0, 1))
        for name, target in zip(NAMES, targets, strict=True)
        if name in hosted
    ]


def _state_after_three_rounds(name: str, engine: Engine) -> bytes:
    adapter = {"first": torch.zeros(2), "second": torch.zeros(1)}
    state = ServerState(adapter, ("left", "right"), seed=0)
    for _ in range(3):
        state, _ = STRATEGIES[name](state, NAMES, engine, CONFIGS[name])
    return pack({"server": state.to_state(), "clients": engine.client_states(state.accepted)})


def member(folder: str) -> None:
    """What each of the processes does."""
    torch.set_num_threads(1)
    processes = Processes.join()
    for name in CONFIGS:
        local = LocalEngine(_clients(processes.hosted(NAMES)))
        engine = ProcessesEngine(processes, NAMES, local)
        if processes.is_server:
            Path(folder, name).write_bytes(_state_after_three_rounds(name, engine))
            engine.close()
        else:
            engine.serve()


@pytest.fixture(scope="module")
def folder(two_processes, tmp_path_factory):
    """A file per strategy with the state that two processes end with."""
    folder = tmp_path_factory.mktemp("states")
    program = "import runpy, sys; runpy.run_path(sys.argv[1])['member'](sys.argv[2])"
    members = two_processes(program, __file__, str(folder))
    errors = [member.stderr for member in members]
    assert [member.returncode for member in members] == [0, 0], errors
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_end_with_the_state_of_one_bit_for_bit(folder, name):
    expected = _state_after_three_rounds(name, LocalEngine(_clients(NAMES)))
    assert (folder / name).read_bytes() == expected
