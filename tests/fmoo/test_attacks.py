"""Attacks on the loss: what they change, and what FedMGDA+ makes of it."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.client import Gradients
from firm.fmoo.attacks import attacked_gradients, attacked_losses
from firm.fmoo.config import LossAttackConfig
from firm.run import parse
from firm.solvers import min_norm_weights

BIAS = LossAttackConfig("bias", ("client_0",), 1000.0)
SCALING = LossAttackConfig("scaling", ("client_0",), 10.0)


def true_gradients(seed: int = 0, num_clients: int = 4) -> list[Gradients]:
    """One gradient per client, each its only objective, in an acute cone."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_clients, 1, 6)
    jacobians = 1 + torch.randn(shape, generator=generator, dtype=torch.float64)
    losses = torch.rand(num_clients, 1, generator=generator, dtype=torch.float64)
    return [Gradients(*pair) for pair in zip(jacobians, losses, strict=True)]


def sent(gradients: list[Gradients], attack: LossAttackConfig) -> list[Gradients]:
    return [
        attacked_gradients(one, client=f"client_{index}", attack=attack)
        for index, one in enumerate(gradients)
    ]


def direction(gradients: list[Gradients], *, is_normalised: bool) -> torch.Tensor:
    """FedMGDA's common direction; FedMGDA+'s if the updates have unit length."""
    updates = torch.cat([one.jacobian for one in gradients])  # [C, d]
    if is_normalised:
        updates = updates / updates.norm(dim=1, keepdim=True)
    return min_norm_weights(updates @ updates.T) @ updates


def test_a_bias_adds_to_the_losses_alone():
    (honest, *_) = true_gradients()
    attacked = attacked_gradients(honest, client="client_0", attack=BIAS)
    assert torch.equal(attacked.losses, honest.losses + 1000)
    assert torch.equal(attacked.jacobian, honest.jacobian)


def test_scaling_multiplies_losses_and_gradients():
    (honest, *_) = true_gradients()
    attacked = attacked_gradients(honest, client="client_0", attack=SCALING)
    assert torch.equal(attacked.losses, honest.losses * 10)
    assert torch.equal(attacked.jacobian, honest.jacobian * 10)


@pytest.mark.parametrize("attack", [BIAS, SCALING])
def test_scaled_or_biased_gradients_are_those_of_the_reported_loss(attack):
    point = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    loss = point.pow(4).sum()[None]
    reported = attacked_losses(loss, client="client_0", attack=attack)
    (row,) = torch.autograd.grad(loss, point, retain_graph=True)
    (attacked_row,) = torch.autograd.grad(reported, point)
    attacked = attacked_gradients(
        Gradients(row[None], loss.detach()), client="client_0", attack=attack
    )
    assert torch.allclose(attacked.jacobian, attacked_row[None], rtol=1e-14)
    assert torch.equal(attacked.losses, reported.detach())


@pytest.mark.parametrize("attack", [BIAS, SCALING])
def test_neither_the_honest_nor_the_argument_is_changed(attack):
    (honest, *_) = true_gradients()
    copies = honest.losses.clone(), honest.jacobian.clone()
    assert attacked_gradients(honest, client="client_1", attack=attack) is honest
    assert attacked_losses(honest.losses, client="client_1", attack=attack) is honest.losses
    attacked_gradients(honest, client="client_0", attack=attack)
    attacked_losses(honest.losses, client="client_0", attack=attack)
    assert torch.equal(honest.losses, copies[0])
    assert torch.equal(honest.jacobian, copies[1])


def test_what_a_client_adds_to_its_gradients_is_handed_on():
    gradients = dataclasses.replace(true_gradients()[0], aux="critic")
    assert attacked_gradients(gradients, client="client_0", attack=SCALING).aux == "critic"


def test_without_an_attack_nobody_attacks():
    (honest, *_) = true_gradients()
    attack = LossAttackConfig("none", ("client_0",), 5.0)
    assert attacked_gradients(honest, client="client_0", attack=attack) is honest


@given(st.integers(0, 1000), st.sampled_from(["bias", "scaling"]), st.floats(1e-3, 1e4))
def test_fedmgda_plus_does_not_notice_either_attack(seed, kind, amount):
    honest = true_gradients(seed)
    attacked = sent(honest, LossAttackConfig(kind, ("client_0", "client_2"), amount))
    moved = direction(attacked, is_normalised=True)
    assert torch.allclose(moved, direction(honest, is_normalised=True), atol=1e-9)


@given(st.integers(0, 1000), st.floats(-1e4, 1e4))
def test_a_bias_does_not_move_mgda_even_without_normalisation(seed, amount):
    honest = true_gradients(seed)
    attacked = sent(honest, LossAttackConfig("bias", ("client_0",), amount))
    moved = direction(attacked, is_normalised=False)
    assert torch.equal(moved, direction(honest, is_normalised=False))


def test_scaling_turns_the_mean_and_the_direction_without_normalisation():
    honest = true_gradients()
    attacked = sent(honest, LossAttackConfig("scaling", ("client_0",), 1e4))
    attacker = honest[0].jacobian[0]

    def cosine(vector: torch.Tensor) -> float:
        return torch.cosine_similarity(vector, attacker, dim=0).item()

    def mean(gradients: list[Gradients]) -> torch.Tensor:
        return torch.cat([one.jacobian for one in gradients]).mean(dim=0)

    assert cosine(mean(honest)) < 0.9
    assert cosine(mean(attacked)) > 0.999  # FedAvg trains for the attacker alone
    turned = direction(attacked, is_normalised=False)
    assert not torch.allclose(turned, direction(honest, is_normalised=False), rtol=1e-3)


def test_a_bias_makes_the_attacker_the_worst_off_whom_afl_trains_for():
    honest = true_gradients()
    attacked = sent(honest, BIAS)
    assert torch.cat([one.losses for one in honest]).argmax() != 0
    assert torch.cat([one.losses for one in attacked]).argmax() == 0


def test_the_configuration_is_read_from_a_command_line():
    arguments = ["--kind", "scaling", "--clients", "[a, b]", "--amount", "10"]
    assert parse(LossAttackConfig, arguments) == LossAttackConfig("scaling", ("a", "b"), 10.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "poison"}, "kind must be"),
        ({"kind": "bias"}, "needs attackers"),
        ({"kind": "bias", "clients": ("a", "a")}, "each attacker once"),
        (
            {"kind": "bias", "clients": ("a",), "amount": float("nan")},
            "amount must be a finite number",
        ),
        ({"kind": "scaling", "clients": ("a",), "amount": 0.0}, "amount must be positive"),
    ],
)
def test_an_attack_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LossAttackConfig(**fields)
