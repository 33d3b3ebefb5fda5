"""Gradients of all clients in one pass: those of clients one after the other."""

from typing import get_type_hints

import pytest
import torch
from torch import nn

from firm.federation import LocalEngine, ServerState
from firm.federation.engines import StackedEngine
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy import CONFIGS
from firm.federation.strategy_configs import FedAvgConfig, FirmConfig
from firm.fmoo import workspace as workspaces
from firm.fmoo.client import SupervisedClient
from firm.fmoo.config import LocalConfig
from firm.fmoo.models import Dropout, MultiTaskModel
from firm.fmoo.task_data import TaskData, loss
from firm.fmoo.workspace import Workspace

SIZES = (12, 12, 5, 12, 20)
"""Samples of each client; the third has fewer than a batch."""
VALUES = ("squared", "binary", "squared", "binary")
LABELS = ("cross_entropy", "l2", "cross_entropy", "l2")


def _dense() -> MultiTaskModel:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), Dropout(0.0))
    return MultiTaskModel(encoder, [nn.Linear(5, 1) for _ in VALUES])


def _workspace(model=None, losses=VALUES, size=1.0, slope=1.0, **options) -> Workspace:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(SIZES), 6, generator=generator)
    inputs[12:24] *= size  # the second client's
    targets = torch.randint(2, (len(inputs), len(losses)), generator=generator)
    targets[:2] = torch.tensor([[0], [1]])
    width = 2 if losses == LABELS else 1
    data = TaskData(
        inputs,
        targets if losses == LABELS else targets.float(),
        ("a", "b", "c", "d"),
        losses,
        num_outputs=(width,) * len(losses),
    )
    model = model or _dense()
    heads = [nn.Linear(5, width) for _ in losses]
    for head in heads:
        head.weight.data *= slope
    model.heads = nn.ModuleList(heads)
    return Workspace(model, data, LocalConfig(**{"lr": 0.05, "batch_size": 8, **options}))


def _engine(kind, workspace):
    parts = torch.arange(sum(SIZES)).split(list(SIZES))
    clients = [
        SupervisedClient(
            f"client_{index}", workspace, own, seed=3, served=[1, 2] if index == 3 else None
        )
        for index, own in enumerate(parts)
    ]
    state = ServerState(clients[0].adapter(), clients[0].objectives, seed=3)
    return state, kind(clients), [client.name for client in clients]


def _ends(make_workspace, strategy, cfg, rounds=2):
    ends = []
    for kind in (LocalEngine, StackedEngine):
        torch.manual_seed(1)
        state, engine, names = _engine(kind, make_workspace())
        row = {}
        for _ in range(rounds):
            state, row = strategy(state, names, engine, cfg)
        ends.append((state, row["round"]))
    return ends


def _assert_same(ends):
    (first, _), (second, _) = ends
    for name, value in first.adapter.items():
        torch.testing.assert_close(value, second.adapter[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def num_joined(monkeypatch):
    """How many clients each pass was for."""
    counts = []
    own = workspaces.gradients_together

    def counted(asked, **options):
        counts.append(len(asked))
        return own(asked, **options)

    monkeypatch.setattr(workspaces, "gradients_together", counted)
    return counts


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not CONFIGS[name].reads_rewards])
@pytest.mark.parametrize("losses", [VALUES, LABELS], ids=["values", "labels"])
def test_every_strategy_ends_as_with_clients_in_turn(num_joined, name, losses):
    cfg = get_type_hints(STRATEGIES[name])["cfg"](num_local_steps=3)
    _assert_same(_ends(lambda: _workspace(losses=losses), STRATEGIES[name], cfg))
    # a batch of another shape, and where objectives are not summed another number of them, is apart
    assert max(num_joined) in (3, 4)


@pytest.mark.parametrize(
    "options", [{"optimizer": "adam"}, {"momentum": 0.9, "weight_decay": 0.1}, {"batch_size": None}]
)
def test_every_optimizer_ends_as_with_clients_in_turn(num_joined, options):
    cfg = FirmConfig(num_local_steps=3, solve_per="batch")
    _assert_same(_ends(lambda: _workspace(**options), firm_round, cfg))
    assert max(num_joined) > 1


@pytest.mark.parametrize(
    ("slope", "what"),
    [(1.0, "the loss of 'a' is inf"), (1e-20, "The gradient of objective 0 is not finite")],
)
def test_what_is_not_finite_is_its_client_s_alone(slope, what):
    cfg = FedAvgConfig(num_local_steps=1)
    ends = _ends(lambda: _workspace(size=1e30, slope=slope), STRATEGIES["fedavg"], cfg, rounds=1)
    _assert_same(ends)
    failures = [row["failures"] for _, row in ends]
    assert failures[0] == failures[1]
    assert [failure["client"] for failure in failures[0]] == ["client_1"]
    assert what in failures[0][0]["reason"]


@pytest.mark.parametrize(
    "layer",
    [nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 1), nn.Flatten()), Dropout(0.5)],
    ids=["convolution", "dropout"],
)
def test_other_models_run_one_after_the_other_with_the_same_numbers(num_joined, layer):
    def workspace() -> Workspace:
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Flatten(), layer, nn.Linear(6, 5))
        return _workspace(MultiTaskModel(encoder, []))

    (first, _), (second, _) = _ends(workspace, firm_round, FirmConfig(num_local_steps=3))
    assert all(torch.equal(value, second.adapter[name]) for name, value in first.adapter.items())
    assert not num_joined


def test_what_a_user_wrote_is_run_client_by_client(new_plugins):
    @loss("known")
    def known(outputs, targets):
        return outputs[targets > 0].mean()  # no pass for all clients can choose by values

    class Net(MultiTaskModel): ...

    encoder = nn.Sequential(nn.Flatten(), nn.Linear(6, 5))
    assert _workspace().is_stackable
    assert not _workspace(Net(encoder, [])).is_stackable
    assert not _workspace(losses=("known", "squared", "binary", "binary")).is_stackable


def test_models_of_clients_are_used_again(monkeypatch):
    made, own = [], workspaces.Replica.__init__

    def counted(self, *args, **options):
        made.append(self)
        own(self, *args, **options)

    monkeypatch.setattr(workspaces.Replica, "__init__", counted)
    state, engine, names = _engine(StackedEngine, _workspace())
    for _ in range(3):
        state, _ = firm_round(state, names, engine, FirmConfig(num_local_steps=1))
    assert len(made) == 1 + len(SIZES)  # one of this thread's own
