import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.diagnostics import (
    beta_effect,
    cosines,
    drift,
    gradient_norms,
    weights_spread,
)
from firm.solvers import firm_weights


def test_norms_and_cosines_by_hand():
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-6.0, 0.0], [0.0, 0.0]]).double()
    gram = rows @ rows.T
    assert gradient_norms(gram).tolist() == [5, 2, 6, 0]
    # pairs 01, 02, 03, 12, 13, 23; nothing points along a zero gradient
    assert cosines(gram).tolist() == pytest.approx([0.8, -0.6, 0, 0, 0, 0])
    assert cosines(torch.ones(1, 1)).tolist() == []


@given(cosine=st.floats(-0.9, 0.9), beta=st.floats(0.0, 10.0), ratio=st.floats(0.95, 1.05))
def test_beta_effect_of_two_objectives_has_its_closed_form(cosine, beta, ratio):
    gram = torch.tensor([[1.0, cosine * ratio], [cosine * ratio, ratio**2]]).double()
    unregularised = firm_weights(gram, beta=0.0)
    effect = beta_effect(firm_weights(gram, beta=beta), unregularised)
    if min(unregularised) <= 0 or abs(ratio - 1) < 1e-6:
        return  # the form holds in the interior, and where there is something to move
    normalized = gram / (gram.trace() / 2)
    expected = beta / (2 - 2 * normalized[0, 1].item() + beta)
    assert effect == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_beta_effect_is_zero_without_beta_one_at_uniform_weights_and_zero_where_nothing_can_move():
    corner, uniform = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.5, 0.5]).double()
    assert beta_effect(corner, corner) == 0
    assert beta_effect(uniform, corner) == 1
    assert beta_effect(uniform, uniform) == 0
    assert beta_effect(torch.ones(1), torch.ones(1)) == 0


def test_weights_spread_is_the_deviation_of_the_clients_means():
    first = [[0.0, 1.0], [0.2, 0.8]]  # mean 0.1, 0.9
    second = [[0.5, 0.5]]
    assert weights_spread([first, second]).tolist() == pytest.approx([0.2, 0.2])
    assert weights_spread([first]).tolist() == [0, 0]


def test_drift_by_hand():
    start = {"a": torch.zeros(1), "b": torch.zeros(1)}
    mean = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}  # 5 from the start
    first = {"a": torch.tensor([4.0]), "b": torch.tensor([4.0])}  # 1 from the mean
    second = {"a": torch.tensor([3.0]), "b": torch.tensor([1.0])}  # 3 from the mean
    assert drift([first, second], mean, start) == pytest.approx(2 / 5)
    assert drift([mean, mean], mean, start) == 0
    assert drift([start], start, start) == 0
