import numpy as np
import pytest
import torch

from firm.solvers import firm_weights, kkt_gap
from firm.solvers.kkt import box_gap


def test_gap_of_a_corner_and_of_the_optimum_by_hand():
    gram = torch.tensor([[4.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    # optimum (1/5, 4/5): both products are 4/5
    assert kkt_gap(gram, torch.tensor([0.2, 0.8]).double()).item() == pytest.approx(0, abs=1e-7)
    # corner (0, 1): value 1, products (0, 1); the shortfall 1 over √(1 · 4)
    assert kkt_gap(gram, torch.tensor([0.0, 1.0]).double()).item() == 0.5
    # corner (1, 0): value 4, products (4, 0); the shortfall 4 over √(4 · 4)
    assert kkt_gap(gram, torch.tensor([1.0, 0.0]).double()).item() == 1.0


def test_gap_grows_on_the_way_from_the_optimum_and_is_blind_to_scale():
    gram = np.array([[2.0, 0.3, -0.4], [0.3, 1.0, 0.2], [-0.4, 0.2, 3.0]])
    optimum = firm_weights(gram, beta=0.0)
    corner = np.array([1.0, 0.0, 0.0])
    path = [optimum + step * (corner - optimum) for step in (0.0, 0.01, 0.1, 0.5, 1.0)]
    gaps = [float(kkt_gap(gram, weights)) for weights in path]
    assert gaps[0] < 1e-15
    assert gaps == sorted(gaps)
    assert gaps[1] > 1e-3
    assert [float(kkt_gap(1e-9 * gram, weights)) for weights in path] == pytest.approx(gaps)


def test_long_gradients_do_not_hide_that_a_short_one_has_too_little_weight():
    gram = np.diag([1.0, 1e12])
    assert float(kkt_gap(gram, np.array([1 - 1e-6, 1e-6]))) > 0.4  # λᵀGλ is twice the optimum


def test_gap_of_a_batch_is_that_of_its_members():
    rows = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0)).double()
    gram = rows @ rows.mT
    weights = torch.full((4, 3), 1 / 3).double()
    together = kkt_gap(gram, weights)
    assert together.shape == (4,)
    assert together.tolist() == [
        kkt_gap(one, weight).item() for one, weight in zip(gram, weights, strict=True)
    ]


def test_zero_gradients_have_no_gap():
    assert kkt_gap(torch.zeros(2, 2), torch.tensor([0.3, 0.7])).item() == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.tensor([0.5, 0.6]), "sum to 1"),
        (torch.tensor([1.5, -0.5]), "non-negative"),
        (torch.tensor([1.0]), "shape"),
        (torch.tensor([float("nan"), 1.0]), "finite"),
    ],
)
def test_weights_off_the_simplex_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        kkt_gap(torch.eye(2), weights)


def test_a_step_that_helps_counts_although_a_longer_one_would_not():
    # products (2, 0, 1); the second may take no more. 0.2 from the first to the third gains 0.2;
    # filling the third up would cost the same again, from the second
    matrix, weights = np.diag([10.0, 0.0, 10 / 3]), np.array([0.2, 0.5, 0.3])
    gap = box_gap(matrix, weights, np.zeros(3), np.array([1.0, 0.5, 1.0]))
    bound = 10 * 0.2**2 + 10 / 3 * 0.3**2  # D
    assert float(gap) == pytest.approx(0.2 / (bound * max(0.7**2 * 10 / 3, bound)) ** 0.5)
