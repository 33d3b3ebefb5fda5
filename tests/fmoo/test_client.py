"""The supervised client: gradients, determinism, state and attacks, on a small network."""

import threading
from contextlib import closing
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from torch import nn

from firm.federation import LocalEngine, ServerState
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategy import CONFIGS
from firm.federation.strategy_configs import (
    AflConfig,
    FedAvgConfig,
    FedCmooConfig,
    FedMgdaConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
)
from firm.fmoo.client import SupervisedClient
from firm.fmoo.config import LocalConfig, LossAttackConfig
from firm.fmoo.modules import Dropout, MultiTaskModel
from firm.fmoo.task_data import TaskData, loss
from firm.fmoo.workspace import Workspace, rotate


def _data(num_samples: int = 40) -> TaskData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (num_samples, 1, 6, 6), generator=generator, dtype=torch.uint8)
    targets = torch.randint(3, (num_samples, 2), generator=generator)
    targets[:3] = torch.tensor([[0, 0], [1, 1], [2, 2]])
    return TaskData(inputs, targets, ("left", "right"), ("cross_entropy", "cross_entropy"))


def _workspace(**options) -> Workspace:
    cfg = LocalConfig(**{"lr": 0.2, "batch_size": 8, "rotation": 20, **options})
    return Workspace(_model(), _data(), cfg)


def _model(dropout: nn.Module | None = None) -> MultiTaskModel:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), dropout or Dropout(0.5), nn.Linear(64, 5)
    )
    return MultiTaskModel(encoder, [nn.Linear(5, 3), nn.Linear(5, 3)])


def _client(workspace: Workspace | None = None, name: str = "client_0", **options):
    workspace = workspace or _workspace()
    indices = options.pop("indices", torch.arange(5, 25))
    client = SupervisedClient(name, workspace, indices, seed=3, **options)
    client.load(client.adapter())
    return client


def _same(first, second) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _train(client, adapter, num_steps=3):
    client.load(adapter)
    for batch in client.batches(num_steps):
        gradients = client.gradients(batch)
        client.step(gradients, torch.tensor([0.3, 0.7]))
    return client.adapter()


def test_rows_are_the_gradients_of_each_loss_and_heads_of_others_get_none():
    client = _client()
    (batch,) = client.batches(1)
    rows = client.gradients(batch).jacobian
    assert rows.shape == (2, sum(p.numel() for p in client.adapter().values()))
    left, right = rows[:, client.shared.stop :].split(18, dim=1)  # two heads of 5 x 3 + 3
    assert left[1].abs().max() == 0
    assert right[0].abs().max() == 0
    assert left[0].abs().max() > 0
    assert right[1].abs().max() > 0
    assert rows[:, client.shared].abs().amax(dim=1).min() > 0


def test_one_weighted_backward_pass_equals_the_weighted_rows():
    weights = torch.tensor([0.25, 0.75])
    rows = _client().gradients(next(_client().batches(1))).jacobian
    fresh = _client()
    (batch,) = fresh.batches(1)
    direct = fresh.weighted_gradients(batch, weights)
    torch.testing.assert_close(direct.jacobian, weights[None] @ rows, rtol=1e-5, atol=1e-7)


def test_a_remembered_jacobian_is_combined_without_a_backward_pass(monkeypatch):
    client = _client()
    (batch,) = client.batches(1)
    rows = client.gradients(batch).jacobian
    monkeypatch.setattr(client, "_batch_gradients", None)  # neither forward nor backward pass
    reused = client.weighted_gradients(batch, torch.tensor([0.5, 0.5])).jacobian
    torch.testing.assert_close(reused, rows.mean(dim=0, keepdim=True))
    assert torch.equal(client.gradients(batch).jacobian, rows)
    client.step(client.gradients(batch), torch.tensor([0.5, 0.5]))
    assert client._memo is None  # a thousand idle clients hold nothing


def test_a_jacobian_of_other_parameters_or_another_batch_is_not_remembered():
    client = _client()
    first, second = client.batches(2)
    client.gradients(first)
    weights = torch.tensor([0.5, 0.5])
    other_batch = client.weighted_gradients(second, weights).jacobian
    assert not torch.allclose(other_batch, client.weighted_gradients(first, weights).jacobian)
    client.gradients(first)
    client.step(client.gradients(first), weights)
    moved = client.weighted_gradients(first, weights).jacobian
    torch.testing.assert_close(moved, client.gradients(first).jacobian.mean(dim=0, keepdim=True))
    before = client.gradients(first).jacobian
    with torch.no_grad():
        next(iter(client._workspace.parameters.values())).add_(0.1)
    assert not torch.allclose(client.gradients(first).jacobian, before)


def test_what_a_client_does_depends_on_its_state_alone():
    client = _client()
    start = client.adapter()
    _train(client, start)
    state = client.state()
    torch.manual_seed(99)  # what others draw from the global generator does not matter
    first = _train(client, start)
    client.restore(state)
    torch.manual_seed(7)
    assert _same(_train(client, start), first)
    twin = _client()
    twin.restore(state)
    assert _same(_train(twin, start), first)
    assert not _same(_train(client, start), first)  # later batches are others


def test_the_global_generator_is_not_drawn_from():
    client = _client()
    (batch,) = client.batches(1)
    before = torch.get_rng_state()
    client.gradients(batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout()])
def test_dropout_that_draws_from_the_global_generator_is_refused(dropout):
    with pytest.raises(ValueError, match=rf"encoder\.3 is a torch {type(dropout).__name__}"):
        Workspace(_model(dropout), _data(), LocalConfig())


def test_dropout_differs_from_batch_to_batch_and_not_from_one_look_to_the_next():
    client = _client(_workspace(rotation=0), indices=torch.arange(5, 6))
    first, second = client.batches(2)
    rows = [client.gradients(batch).jacobian for batch in (first, second, first)]
    assert torch.equal(rows[0], rows[2])
    assert not torch.allclose(rows[0], rows[1])  # of the same sample


def test_the_model_that_a_workspace_is_given_stays_as_it_is():
    model = _model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workspace = Workspace(model, _data(), LocalConfig(batch_size=8))
    client = _client(workspace)
    assert not _same(_train(client, client.adapter()), before)
    assert _same(model.state_dict(), before)


def test_every_thread_has_a_model_of_its_own():
    workspace = _workspace()
    before = {name: value.detach().clone() for name, value in workspace.parameters.items()}
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    seen = []

    def work():
        seen.append(workspace.model)
        workspace.load(zeros)
        seen.append({name: value.detach() for name, value in workspace.parameters.items()})
        seen.append(workspace.generator)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert _same(seen[1], zeros)
    assert _same(workspace.parameters, before)
    assert seen[0] is not workspace.model
    assert seen[2] is not workspace.generator


def test_an_epoch_shows_every_sample_once_as_far_as_whole_batches_go():
    client = _client()
    epoch = [batch.indices for batch in client.batches(2)]  # 20 samples, batches of 8
    drawn = torch.cat(epoch).tolist()
    assert len(set(drawn)) == 16
    assert set(drawn) <= set(range(5, 25))
    whole = _client(_workspace(batch_size=None))
    (batch,) = whole.batches(1)
    assert sorted(batch.indices.tolist()) == list(range(5, 25))


def test_objectives_that_are_not_served_have_no_gradient():
    client = _client(served=(1,))
    (batch,) = client.batches(1)
    rows = client.gradients(batch).jacobian
    assert rows[0].abs().max() == 0
    assert rows[1].abs().max() > 0
    client.load(client.adapter())
    alone = client.weighted_gradients(batch, torch.tensor([0.9, 0.5])).jacobian
    torch.testing.assert_close(alone[0], 0.5 * rows[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indices": torch.arange(0)}, "client_0 has no samples"),
        ({"served": ()}, "must serve some of the objectives 0 to 1"),
        ({"served": (2,)}, r"must serve some of the objectives 0 to 1, got \(2,\)"),
    ],
)
def test_a_client_needs_samples_and_objectives(options, message):
    with pytest.raises(ValueError, match=message):
        _client(**options)


def test_losses_are_those_of_the_whole_shard_without_dropout():
    client = _client()
    workspace = client._workspace
    workspace.model.eval()
    data = workspace.data
    outputs = workspace.model(workspace.prepare(data.inputs[5:25]))
    expected = [
        nn.functional.cross_entropy(o, data.targets[5:25, j]) for j, o in enumerate(outputs)
    ]
    assert client.losses().tolist() == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    assert workspace.model.training


@pytest.mark.slow
def test_a_loss_of_known_targets_is_their_mean_over_all_samples(new_plugins, monkeypatch):
    @loss("known")
    def known(outputs, targets):
        return (outputs[:, 0] - targets).square().nanmean()

    data = _data()
    targets = torch.linspace(-1, 1, 2 * len(data)).reshape(-1, 2)
    targets[:9, 0] = torch.nan  # all of one part, and most of the next
    data = TaskData(data.inputs, targets, data.objectives, ("known", "known"))
    workspace = Workspace(_model(), data, LocalConfig(lr=0.2, rotation=0))
    whole = workspace.evaluate(data).losses
    monkeypatch.setattr("firm.fmoo.workspace.EVALUATION_BATCH", 8)
    torch.testing.assert_close(workspace.evaluate(data).losses, whole, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"all 9 targets of '.*' are NaN: give each client"):
        workspace.evaluate(data, torch.arange(9))


@pytest.mark.slow
def test_a_model_with_outputs_of_any_form_is_evaluated(new_plugins):
    @loss("likelihood")
    def likelihood(outputs, targets):
        mean, spread = outputs
        return nn.functional.gaussian_nll_loss(mean[:, 0], targets, spread.exp().expand_as(targets))

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.spread = _model(), nn.Parameter(torch.zeros(()))

        def forward(self, inputs):
            return [(output, self.spread) for output in self.own(inputs)]

    data = _data()
    targets = torch.linspace(-1, 1, 2 * len(data)).reshape(-1, 2)
    data = TaskData(data.inputs, targets, data.objectives, ("likelihood", "likelihood"))
    workspace = Workspace(Pairs(), data, LocalConfig(lr=0.2, rotation=0))
    assert workspace.evaluate(data).losses.isfinite().all()


def test_accuracy_counts_right_labels():
    workspace = _workspace()
    with torch.no_grad():
        for name, parameter in workspace.parameters.items():
            parameter.zero_()
            if name == "heads.1.bias":
                parameter[2] = 1.0  # the second head always says 2
    scores = workspace.evaluate(workspace.data)
    assert scores.accuracies is not None
    share = (workspace.data.targets[:, 1] == 2).double().mean()
    assert scores.accuracies[1] == pytest.approx(share.item())
    assert scores.losses[0] == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-6)


def test_attackers_inflate_losses_and_gradients():
    honest, biased = _client(), _client(attack=LossAttackConfig("bias", ("client_0",), 1000.0))
    scaled = _client(attack=LossAttackConfig("scaling", ("client_0",), 10.0))
    batches = [next(client.batches(1)) for client in (honest, biased, scaled)]
    rows = [
        client.gradients(batch).jacobian
        for client, batch in zip((honest, biased, scaled), batches, strict=True)
    ]
    assert torch.equal(rows[0], rows[1])
    torch.testing.assert_close(rows[2], 10 * rows[0])
    torch.testing.assert_close(biased.losses(), honest.losses() + 1000)
    torch.testing.assert_close(scaled.losses(), 10 * honest.losses())


def test_rotation_keeps_the_centre_and_turns_by_the_angle():
    images = torch.zeros(1, 1, 9, 9)
    images[0, 0, 4, 4], images[0, 0, 0, 4] = 1.0, 1.0
    torch.testing.assert_close(rotate(images, 0.0, torch.Generator()), images)
    share = (torch.rand(1, generator=torch.Generator().manual_seed(0)) * 2 - 1).item()
    turned = rotate(images, 90 / abs(share), torch.Generator().manual_seed(0))  # a quarter turn
    assert turned[0, 0, 4, 4] == pytest.approx(1.0, abs=1e-4)
    assert turned[0, 0, 4, [0, 8]].max() == pytest.approx(1.0, abs=1e-4)
    assert turned.sum() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("size", [(5, 5), (6, 6), (4, 7)])
def test_rotation_is_that_of_torchs_affine_grid(size):
    height, width = size
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(9, 2, height, width, generator=generator)
    turned = rotate(images, 40, torch.Generator().manual_seed(0))
    share = torch.rand(9, generator=torch.Generator().manual_seed(0)) * 2 - 1
    angles, zeros = share * 40 * torch.pi / 180, torch.zeros(9)
    first = torch.stack([angles.cos(), -angles.sin() * height / width, zeros], dim=1)
    second = torch.stack([angles.sin() * width / height, angles.cos(), zeros], dim=1)
    grid = nn.functional.affine_grid(
        torch.stack([first, second], dim=1), [9, 2, height, width], align_corners=False
    )
    expected = nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_number_of_workers_changes_no_number(optimizer):
    ends = []
    for num_workers in (1, 2, 3):
        workspace = _workspace(lr=0.05, optimizer=optimizer)
        clients = [
            SupervisedClient(f"client_{i}", workspace, torch.arange(8 * i, 8 * i + 8), seed=0)
            for i in range(5)
        ]
        state = ServerState(clients[0].adapter(), ("left", "right"), seed=0)
        names, cfg = [client.name for client in clients], FedCmooConfig(num_local_steps=4)
        with closing(LocalEngine(clients, num_workers=num_workers)) as engine:
            for _ in range(3):
                state, _ = fedcmoo(state, names, engine, cfg)
        ends.append(state)
    assert _same(ends[0].adapter, ends[1].adapter)
    assert _same(ends[0].adapter, ends[2].adapter)
    assert ends[0].memory == ends[1].memory == ends[2].memory  # the weights of the objectives


def test_a_federation_learns_and_two_runs_are_the_same():
    ends = []
    for _ in range(2):
        workspace = _workspace(lr=0.5, rotation=0)
        clients = [
            SupervisedClient(f"client_{i}", workspace, torch.arange(10 * i, 10 * i + 10), seed=0)
            for i in range(4)
        ]
        state = ServerState(clients[0].adapter(), ("left", "right"), seed=0)
        workspace.load(state.adapter)
        before = workspace.evaluate(workspace.data).losses
        engine, names = LocalEngine(clients), [client.name for client in clients]
        for _ in range(6):
            state, _ = fedcmoo(state, names, engine, FedCmooConfig(num_local_steps=4))
        for _ in range(6):
            state, _ = fedavg(state, names, engine, FedAvgConfig(num_local_steps=4))
        workspace.load(state.adapter)
        assert (workspace.evaluate(workspace.data).losses < before).all()
        ends.append(state.adapter)
    assert _same(*ends)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not CONFIGS[name].reads_rewards])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_order_of_the_objectives_does_not_matter(name, exact_config, optimizer):
    strategy, cfg = STRATEGIES[name], exact_config(name, num_local_steps=3)

    def ends(order):
        data, model = _data(), _model()
        names = tuple(data.objectives[j] for j in order)
        data = TaskData(data.inputs, data.targets[:, order], names, data.losses)
        model.heads = nn.ModuleList(model.heads[j] for j in order)
        workspace = Workspace(model, data, LocalConfig(lr=0.01, optimizer=optimizer, batch_size=8))
        clients = [
            SupervisedClient(name, workspace, torch.arange(first, last), seed=1)
            for name, first, last in (("a", 0, 20), ("b", 10, 40))
        ]
        state = ServerState(clients[0].adapter(), objectives=names, seed=1)
        engine = LocalEngine(clients)
        for _ in range(3):
            state, _ = strategy(state, ["a", "b"], engine, cfg)
        workspace.load(state.adapter)
        heads = [workspace.model.heads[order.index(j)] for j in range(2)]
        return [*workspace.model.encoder.parameters(), *(p for h in heads for p in h.parameters())]

    for one, other in zip(ends([0, 1]), ends([1, 0]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config", [FedAvgConfig, FedMgdaConfig, QFedAvgConfig, AflConfig, FsmgdaConfig, FirmConfig]
)
def test_in_a_local_epoch_clients_of_unequal_shards_go_over_their_own_samples_once(config):
    workspace, seen = _workspace(batch_size=4), {"small": [], "large": []}
    clients = [
        _client(workspace, "small", indices=torch.arange(8)),
        _client(workspace, "large", indices=torch.arange(8, 36)),
    ]
    for client in clients:
        _record(client, seen[client.name])
    state = ServerState(clients[0].adapter(), workspace.data.objectives, seed=0)
    cfg = config(num_local_epochs=1)
    _, rows = STRATEGIES[cfg.name](state, list(seen), LocalEngine(clients), cfg)
    num_trainings = 2 if config is FsmgdaConfig else 1  # one of each objective
    assert sorted(seen["small"]) == sorted(list(range(8)) * num_trainings)
    assert sorted(seen["large"]) == sorted(list(range(8, 36)) * num_trainings)
    assert [row["num_steps"] for row in rows["clients"]] == [2 * num_trainings, 7 * num_trainings]


def _record(client, seen):
    """Has a client note the samples that it takes steps on."""
    draw = client.batches

    def batches(num_steps):
        for batch in draw(num_steps):
            seen.extend(batch.indices.tolist())
            yield batch

    client.batches = batches


def test_an_epoch_has_whole_batches_and_leaves_the_rest_to_another_order():
    client = _client(_workspace(batch_size=6))  # 20 samples
    assert client.batches_per_epoch == 3
    first = torch.cat([batch.indices for batch in client.batches(3)])
    assert len(set(first.tolist())) == 18
    left_over = set(range(5, 25)) - set(first.tolist())
    later = torch.cat([batch.indices for batch in client.batches(9)])
    assert left_over <= set(later.tolist())
    assert _client(_workspace(batch_size=64)).batches_per_epoch == 1
    assert _client(_workspace(batch_size=None)).batches_per_epoch == 1


def test_rounds_of_epochs_go_on_where_a_client_was_restored():
    workspace = _workspace(batch_size=6)
    start, clients, cfg = _model_state(workspace), [_client(workspace)], FedAvgConfig()
    cfg = replace(cfg, num_local_epochs=2)
    engine, names = LocalEngine(clients), ["client_0"]
    half, _ = fedavg(start, names, engine, cfg)
    whole, _ = fedavg(half, names, engine, cfg)
    resumed = LocalEngine([_client(workspace)])
    resumed.restore_client_states(engine.client_states(half.accepted))
    assert _same(fedavg(half, names, resumed, cfg)[0].adapter, whole.adapter)


def _model_state(workspace):
    return ServerState(_client(workspace).adapter(), workspace.data.objectives, seed=0)


LINEAR = {
    "logistic": (("binary",), 1, {}),
    "attributes": (("binary", "binary"), 3, {}),
    "least squares": (("squared", "squared"), 1, {}),
    "biased": (("squared", "squared"), 1, {"attack": LossAttackConfig("bias", ("client_0",), 5.0)}),
    "of one objective": (("squared", "squared"), 1, {"served": (1,)}),
}


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("case", LINEAR)
def test_steps_of_a_linear_model_at_once_are_those_one_by_one(case, proximal, monkeypatch):
    losses, width, options = LINEAR[case]
    workspace = _linear_workspace(losses, width)
    start = _model_state(workspace)
    cfg = FedAvgConfig(weights=(1.0, 2.0)[: len(losses)], proximal=proximal, num_local_epochs=2)
    at_once, rows = fedavg(start, ["client_0"], LocalEngine([_client(workspace, **options)]), cfg)
    monkeypatch.setattr(SupervisedClient, "weighted_steps", lambda *_, **__: 0)
    by_one, others = fedavg(start, ["client_0"], LocalEngine([_client(workspace, **options)]), cfg)
    assert rows["clients"][0]["num_steps"] == others["clients"][0]["num_steps"] == 10
    for name, parameter in by_one.adapter.items():
        torch.testing.assert_close(at_once.adapter[name], parameter, rtol=1e-4, atol=1e-6)
    for name, told in others["clients"][0]["losses"].items():
        assert rows["clients"][0]["losses"][name] == pytest.approx(told, rel=1e-4)


class _Net(nn.Module):
    """A module of no known form, part of it frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 1, bias=False), nn.Linear(7, 4)
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.last(self.first(inputs).relu())
        return output, -output


@pytest.mark.parametrize("name", ["fedavg", "fedcmoo", "fsmgda", "fedmgda", "firm", "qfedavg"])
def test_every_algorithm_trains_any_module_and_leaves_what_is_frozen(name):
    torch.manual_seed(0)
    net, data = _Net(), _linear_workspace(("squared", "squared"), 1).data
    workspace = Workspace(net, data, LocalConfig(lr=0.05, batch_size=8))
    assert not workspace.is_stackable
    assert workspace.linear_heads is None
    shards = torch.arange(40).split(20)
    clients = [SupervisedClient(f"c_{i}", workspace, own, seed=0) for i, own in enumerate(shards)]
    start = clients[0].adapter()
    assert {key: value.numel() for key, value in start.items()} == {
        "last.weight": 4,
        "first.weight": 28,
    }
    assert clients[0].shared == slice(0, 32)
    strategy = STRATEGIES[name]
    cfg = get_type_hints(strategy)["cfg"](num_local_steps=2)
    state = ServerState(start, data.objectives, seed=0)
    before = workspace.evaluate(data).losses
    state, _ = strategy(state, ["c_0", "c_1"], LocalEngine(clients), cfg)
    workspace.load(state.adapter)
    after = workspace.evaluate(data)
    assert after.losses.mean() < before.mean()
    assert after.accuracies is None
    assert torch.equal(workspace.model.get_parameter("first.bias"), net.first.bias)


def _changed(change):
    net = _Net()
    change(net)
    return net


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (_changed(lambda n: n.requires_grad_(False)), "no parameter that requires grad"),
        (_changed(lambda n: n.double()), r"parameter last\.weight must be float32 on the CPU, got"),
        (
            _changed(lambda n: setattr(n, "lstm", nn.LSTM(2, 2, 2, dropout=0.1))),
            "lstm is a torch LSTM, which draws",
        ),
        (
            _changed(lambda n: setattr(n, "norm", nn.BatchNorm2d(2))),
            "norm is a torch BatchNorm2d, whose running statistics would mix clients",
        ),
    ],
)
def test_modules_that_clients_cannot_take_turns_on_are_refused(net, message):
    data = _linear_workspace(("squared", "squared"), 1).data
    with pytest.raises(ValueError, match=message):
        Workspace(net, data, LocalConfig())


def test_a_module_without_dropout_or_statistics_may_have_the_layers_for_them():
    data = _linear_workspace(("squared", "squared"), 1).data
    net = _changed(lambda n: setattr(n, "further", nn.Sequential(nn.Dropout(0.0), nn.LSTM(2, 2))))
    net.norm = nn.InstanceNorm1d(2)
    Workspace(net, data, LocalConfig())


def test_linear_heads_without_biases_or_frozen_are_trained_step_by_step():
    data = _linear_workspace(("squared", "squared"), 1).data
    for head in (nn.Linear(7, 1, bias=False), nn.Linear(7, 1).requires_grad_(False)):
        model = MultiTaskModel(nn.Flatten(), [nn.Linear(7, 1), head])
        client = _client(Workspace(model, data, LocalConfig(batch_size=4)))
        assert client.weighted_steps(2, torch.ones(2), proximal=0.0) == 0


def test_rotated_images_of_a_linear_model_are_trained_on_step_by_step():
    data = _linear_workspace(("squared", "squared"), 1).data
    images = replace(data, inputs=data.inputs[:, :4].reshape(40, 1, 2, 2))
    for rotation, num_steps in ((25, 0), (0, 2)):
        model = MultiTaskModel(nn.Flatten(), [nn.Linear(4, 1), nn.Linear(4, 1)])
        client = _client(Workspace(model, images, LocalConfig(batch_size=4, rotation=rotation)))
        assert client.weighted_steps(2, torch.ones(2), proximal=0.0) == num_steps


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam"}, {"lr": 1e30}])
def test_other_optimizers_take_steps_one_by_one_and_a_loss_that_is_infinite_stops(options):
    workspace = _linear_workspace(("squared",), 1, **options)
    client = _client(workspace)
    if "lr" in options:
        with pytest.raises(ValueError, match="the loss of 'left' is nan: "):
            client.weighted_steps(8, torch.ones(1), proximal=0.0)
    else:
        assert client.weighted_steps(8, torch.ones(1), proximal=0.0) == 0
        assert client.state() == {"num_batches": 0}
    attack = LossAttackConfig("scaling", ("client_0",), 3.0)
    assert _client(workspace, attack=attack).weighted_steps(8, torch.ones(1), proximal=0.0) == 0


def _linear_workspace(losses, width, **options):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 7, generator=generator)
    targets = torch.randn(40, len(losses), width, generator=generator)
    targets = (targets > 0).float() if losses[0] == "binary" else targets
    names = ("left", "right")[: len(losses)]
    data = TaskData(inputs, targets[:, :, 0] if width == 1 else targets, names, losses)
    cfg = LocalConfig(**{"lr": 0.2, "batch_size": 4, **options})
    torch.manual_seed(0)
    model = MultiTaskModel(nn.Flatten(), [nn.Linear(7, width) for _ in losses])
    return Workspace(model, data, cfg)
