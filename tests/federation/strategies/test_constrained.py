from dataclasses import replace

import pytest
import torch

from firm.federation import ServerState
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.constrained import constrained
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import ConstrainedConfig, FedAvgConfig


def test_a_multiplier_rises_by_what_a_reward_lacks_and_moves_the_weights(
    rewarded, origin, run_rounds, point
):
    cfg = ConstrainedConfig(min_rewards={"right": 0.5}, multiplier_learning_rate=2.0)
    clients = [rewarded("a", [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])]
    state, rows = run_rounds(constrained, clients, origin, cfg)
    # λ = (1, 0) takes half of the way to (1, 0, 0); the reward of right was 1 - 2 at the origin
    assert rows[0]["round"]["multipliers"] == {"right": 0.0}
    assert point(state).tolist() == pytest.approx([0.5, 0.0, 0.0])
    assert state.memory["multipliers"] == pytest.approx({"right": 2 * (0.5 - -1.0)})
    state, rows = run_rounds(constrained, clients, replace(state, accepted={}), cfg)
    # λ = (1, 3) / 4
    assert rows[0]["round"]["multipliers"] == pytest.approx({"right": 3.0})
    step = 0.5 * torch.tensor([0.25 * 0.5 - 0.75 * 0.5, 0.75 * 2.0, 0.0])
    assert point(state).tolist() == pytest.approx((torch.tensor([0.5, 0, 0]) + step).tolist())


def test_a_constraint_that_holds_leaves_fedavg_on_the_weights(
    new_client, rewarded, start, run_rounds, point
):
    targets = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]
    cfg = ConstrainedConfig(min_rewards={"right": 0.0}, weights=(3.0, 1.0), num_local_steps=2)
    state, _ = run_rounds(constrained, [rewarded("a", targets)], start, cfg, num_rounds=3)
    fixed = FedAvgConfig(weights=(3.0, 1.0), num_local_steps=2)
    expected, _ = run_rounds(fedavg, [rewarded("a", targets)], start, fixed, num_rounds=3)
    torch.testing.assert_close(point(state), point(expected))


@pytest.mark.parametrize("constrained_one", ["left", "right"])
def test_the_solution_is_that_of_the_constrained_problem(
    rewarded, origin, run_rounds, point, constrained_one
):
    # minimise the distance to one target subject to half of a squared distance of at most 0.5 to
    # the other, (0, 2, 0) or (2, 0, 0): the optimum is at distance 1 from it, on the line between
    targets = [[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    clients = [rewarded(name, targets, lr=0.05) for name in "ab"]
    cfg = ConstrainedConfig(min_rewards={constrained_one: 0.5}, multiplier_learning_rate=0.05)
    state, _ = run_rounds(constrained, clients, origin, cfg, num_rounds=600)
    held = torch.tensor(targets[["left", "right"].index(constrained_one)])
    other = torch.tensor(targets[["right", "left"].index(constrained_one)])
    best = held + (other - held) / (other - held).norm()
    torch.testing.assert_close(point(state), best, atol=2e-2, rtol=0)


def test_clients_without_the_objective_leave_its_mean_alone(rewarded, origin, run_rounds):
    targets = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    cfg = ConstrainedConfig(min_rewards={"right": 0.75})
    clients = [rewarded("a", targets), rewarded("b", targets, known=("left",))]
    state, _ = run_rounds(constrained, clients, origin, cfg)
    assert state.memory["multipliers"] == pytest.approx({"right": 0.25})
    alone = [rewarded("b", targets, known=("left",))]
    state, _ = run_rounds(constrained, alone, replace(state, accepted={}), cfg)
    assert state.memory["multipliers"] == pytest.approx({"right": 0.25})


def test_a_resumed_run_keeps_its_multipliers(rewarded, origin, run_rounds, point):
    targets = [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    cfg = ConstrainedConfig(min_rewards={"right": 0.5})
    whole, _ = run_rounds(constrained, [rewarded("a", targets)], origin, cfg, num_rounds=3)
    half, _ = run_rounds(constrained, [rewarded("a", targets)], origin, cfg)
    saved = ServerState.from_state(unpack(pack(half.to_state())))
    rest, _ = run_rounds(
        constrained, [rewarded("a", targets)], replace(saved, accepted={}), cfg, num_rounds=2
    )
    assert rest.memory["multipliers"] == whole.memory["multipliers"]
    torch.testing.assert_close(point(rest), point(whole), rtol=0, atol=0)


def test_clients_that_send_no_rewards_are_an_error(new_plain_client, origin, run_rounds):
    cfg = ConstrainedConfig(min_rewards={"right": 0.75})
    clients = [new_plain_client("a", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])]
    with pytest.raises(ValueError, match="none of 1 clients sent them"):
        run_rounds(constrained, clients, origin, cfg)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least one constraint, got none"),
        ({"min_rewards": {"rihgt": 0.5}}, "'rihgt'; choose from left, right; .*right"),
        ({"min_rewards": {"left": 0.5, "right": 0.5}}, "constrains all objectives"),
        ({"min_rewards": {"right": 1.5}}, r"min_rewards.right must be in \[0, 1\], got 1.5"),
        ({"min_rewards": {"right": 0.5}, "weights": (1.0,)}, "weights must have one entry"),
        ({"min_rewards": {"right": 0.5}, "weights": (0.0, 0.0)}, "not all zero"),
    ],
)
def test_constraints_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ConstrainedConfig(**fields).check(("left", "right"))
