"""Local models of a round that is thrown away."""

from types import SimpleNamespace
from typing import Any

import torch

from firm.federation import LocalEngine, ServerState
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fsmgda import fsmgda
from firm.federation.strategy_configs import FedAvgConfig, FsmgdaConfig
from firm.fmoo import LocalConfig, ModelConfig, SupervisedClient, TaskData, Workspace, build_model
from firm.fmoo.measures import share_improved
from firm.fmoo.progress import local_models


def _clients() -> list[SupervisedClient]:
    generator = torch.Generator().manual_seed(0)
    data = TaskData(
        inputs=torch.randn(40, 5, generator=generator),
        targets=torch.randn(40, 2, generator=generator),
        objectives=("a", "b"),
        losses=("squared", "squared"),
    )
    model = build_model(ModelConfig(name="mlp", hidden=[6]), data, seed=0)
    workspace = Workspace(model, data, LocalConfig(lr=0.1, batch_size=8))
    shards = torch.arange(40).split(20)
    return [SupervisedClient(f"c{i}", workspace, shard, seed=0) for i, shard in enumerate(shards)]


def _start() -> tuple[ServerState, list[str], LocalEngine]:
    clients = _clients()
    state = ServerState(clients[0].adapter(), ("a", "b"), seed=0)
    return state, [client.name for client in clients], LocalEngine(clients)


def test_the_mean_of_the_local_models_is_the_next_global_model():
    for strategy, cfg in (
        (fedavg, FedAvgConfig(num_local_steps=3)),
        (fsmgda, FsmgdaConfig(num_local_steps=3)),
    ):
        state, names, engine = _start()
        models = local_models(strategy, state, names, engine, cfg)
        after, _ = strategy(state, names, engine, cfg)  # the same round, carried out
        assert list(models) == names
        for key, parameter in after.adapter.items():
            mean = torch.stack([model[key] for model in models.values()]).mean(dim=0)
            torch.testing.assert_close(mean, parameter, rtol=0, atol=1e-6)
            assert not torch.equal(parameter, state.adapter[key])


def test_only_the_rounds_participants_have_local_models():
    state, names, engine = _start()
    models = local_models(fedavg, state, names, engine, FedAvgConfig(clients_per_round=1))
    assert len(models) == 1


def test_only_losses_of_a_clients_own_objectives_count_as_its_improvement():
    losses = iter([[1.0, 1.0], [1.0, 1.0], [0.5, 2.0], [2.0, 0.5]])
    workspace = SimpleNamespace(
        load=lambda adapter: None,
        evaluate=lambda data, shard: SimpleNamespace(losses=torch.tensor(next(losses))),
        data=SimpleNamespace(objectives=("a", "b")),
    )
    clients = [SimpleNamespace(name="c", served=(0,)), SimpleNamespace(name="d", served=(0, 1))]
    shards = {"c": None, "d": None}
    federation: Any = SimpleNamespace(workspace=workspace, clients=clients, shards=shards)
    state: Any = SimpleNamespace(adapter={})
    assert share_improved(federation, state, state, {"clients": ["c", "d"]}) == 0.5
