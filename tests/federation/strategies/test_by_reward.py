"""Strategies whose server weights the objectives by rewards: smooth Tchebycheff and FAMO."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from firm.federation.strategies.famo import MIN_LOSS, famo, famo_weights, step_logits
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.tchebycheff import tchebycheff, tchebycheff_weights
from firm.federation.strategy_configs import FamoConfig, FedAvgConfig, TchebycheffConfig

NAMES = ("left", "right", "far")
scalarization = pytest.importorskip("torchjd.scalarization", reason="torchjd is not installed")


def test_tchebycheff_weights_are_the_gradient_of_torchjds_scalarisation():
    shares, rewards = (0.5, 0.3, 0.2), {"left": 0.9, "right": 0.4, "far": -0.3}
    cfg = TchebycheffConfig(weights=shares, smoothing=0.2, ideal=1.1)
    losses = torch.tensor([1.1 - rewards[name] for name in NAMES], requires_grad=True)
    scalar = scalarization.STCH(mu=0.2, weights=torch.tensor(shares))
    gradient = torch.autograd.grad(scalar(losses), losses)[0]
    expected = (gradient / gradient.sum()).tolist()
    assert tchebycheff_weights(shares, NAMES, rewards, cfg) == pytest.approx(expected, rel=1e-5)


def test_tchebycheff_reaches_a_front_where_no_weighted_sum_has_its_minimum(
    rewarded, origin, run_rounds, point
):
    # squared distances to two targets 2 apart: p (1 - reward) is equal for both at the optimum
    targets = [[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    cfg = TchebycheffConfig(weights=(0.8, 0.2), smoothing=0.01)
    clients = [rewarded(name, targets, lr=0.02) for name in "ab"]
    state, _ = run_rounds(tchebycheff, clients, origin, cfg, num_rounds=500)
    distance = [(point(state) - torch.tensor(each)).square().sum().item() / 2 for each in targets]
    assert 0.8 * distance[0] == pytest.approx(0.2 * distance[1], rel=0.1)
    equal = FedAvgConfig(weights=(0.8, 0.2))
    fixed, _ = run_rounds(fedavg, clients, origin, equal, num_rounds=500)
    assert point(fixed)[0].item() == pytest.approx(1.6, abs=0.02)
    assert point(state)[0].item() == pytest.approx(4 / 3, abs=0.05)


def test_large_smoothing_is_a_weighted_sum(rewarded, start, run_rounds, point):
    targets = [[1.0, 0.0, 0.5], [0.0, 3.0, 0.5]]
    smooth = TchebycheffConfig(weights=(3.0, 1.0), smoothing=1e9, num_local_steps=2)
    state, _ = run_rounds(tchebycheff, [rewarded("a", targets)], start, smooth, num_rounds=3)
    fixed = FedAvgConfig(weights=(3.0, 1.0), num_local_steps=2)
    expected, _ = run_rounds(fedavg, [rewarded("a", targets)], start, fixed, num_rounds=3)
    torch.testing.assert_close(point(state), point(expected))


def test_famos_weights_and_steps_are_torchjds():
    cfg = FamoConfig(weights_learning_rate=0.05, weights_decay=0.01)
    theirs = scalarization.FAMO(3, lr=0.05, weight_decay=0.01)
    course = torch.tensor([[0.9, 0.5, 0.2], [0.7, 0.5, 0.25], [0.6, 0.2, 0.2], [0.5, 0.1, 0.3]])
    memory: dict = {}
    for before, after in pairwise(course):
        losses = before.clone().requires_grad_()
        expected = torch.autograd.grad(theirs(losses), losses)[0].tolist()
        own = famo_weights(memory.get("logits", [0.0] * 3), before.tolist())
        assert own == pytest.approx(expected, rel=1e-5)
        theirs.update(after)
        memory |= step_logits(memory, (before.log() - after.log()).tolist(), cfg)


def test_famo_weights_an_objective_more_that_improves_less(rewarded, origin, run_rounds):
    # both begin at a loss of 2; only left's falls, since right's target moves away with it
    targets = [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    client = rewarded("a", targets, lr=0.1)
    cfg = FamoConfig(weights_learning_rate=0.5)
    state, _ = run_rounds(famo, [client], origin, cfg)
    client._targets[1] += torch.tensor([0.0, 1.0, 0.0])
    state, _ = run_rounds(famo, [client], replace(state, accepted={}), cfg, num_rounds=3)
    left, right = state.memory["famo"]["logits"]
    assert left < 0 < right


def test_an_objective_at_its_ideal_keeps_a_loss(rewarded, origin, run_rounds):
    client = rewarded("a", [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    state, _ = run_rounds(famo, [client], origin, FamoConfig())
    assert state.memory["famo"]["losses"] == {"left": MIN_LOSS, "right": 2.0}


@pytest.mark.parametrize(
    ("strategy", "cfg"), [(tchebycheff, TchebycheffConfig()), (famo, FamoConfig())]
)
def test_weights_are_equal_until_all_rewards_are_known(
    strategy, cfg, rewarded, origin, run_rounds, point
):
    targets = [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    clients = [rewarded("a", targets, known=("left",))]
    state, _ = run_rounds(strategy, clients, origin, cfg, num_rounds=2)
    equal, _ = run_rounds(fedavg, [rewarded("a", targets)], origin, FedAvgConfig(), num_rounds=2)
    torch.testing.assert_close(point(state), point(equal))
    clients = [rewarded("a", targets)]
    state, _ = run_rounds(strategy, clients, replace(state, accepted={}), cfg, num_rounds=2)
    equal = replace(equal, accepted={})
    equal, _ = run_rounds(fedavg, clients, equal, FedAvgConfig(), num_rounds=2)
    assert not torch.allclose(point(state), point(equal))
