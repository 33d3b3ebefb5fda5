"""TorchJD's weightings on the Gram matrix give the directions of its aggregators on Jacobians."""

import re
import sys
from importlib.util import find_spec

import pytest
import torch

from firm.base.extras import install_command
from firm.federation.serialization import pack, unpack
from firm.federation.strategy_configs import FirmConfig
from firm.solvers.checks import as_gram
from firm.solvers.torchjd import METHODS, check_method, seed_of, torchjd_weights

torchjd = pytest.importorskip("torchjd.aggregation", reason="TorchJD is not installed")

INSTALLED = [name for name, own in METHODS.items() if all(map(find_spec, own.needs))]
STATEFUL = ["cr_mogm", "gradvac", "modo", "nash_mtl", "pcd", "sdmgrad"]


def aggregator_of(method, num_objectives):
    """TorchJD's own aggregator of Jacobians, or of the Gram matrix that it makes of them."""
    jd, own = torchjd, METHODS[method]
    if method == "nash_mtl":
        return jd.NashMTL(num_objectives)
    if method == "cr_mogm":
        return jd.GramianWeightedAggregator(jd.CRMOGMWeighting(jd.UPGradWeighting()))
    if method in ("modo", "sdmgrad"):
        return jd.GramianWeightedAggregator(getattr(jd, own.weighting)())
    required = {
        name: own.options[name] for name in ("c", "alpha", "n_byzantine") if name in own.options
    }
    return getattr(jd, own.weighting.removesuffix("Weighting"))(**required)


def jacobians(num_objectives=4, count=3):
    generator = torch.Generator().manual_seed(num_objectives)
    for _ in range(count):
        yield torch.randn(num_objectives, 9, generator=generator, dtype=torch.float64)


def seed_as_for_weights(method, gram):
    matrix = torch.from_numpy(as_gram(gram))
    is_scaled = not METHODS[method].reads_lengths
    torch.manual_seed(seed_of(matrix / matrix.diagonal().mean() if is_scaled else matrix))


def test_a_client_that_serves_one_objective_weights_it_alone():
    gram = torch.tensor([[1.0, 0.2], [0.2, 3.0]])
    for method in INSTALLED:
        if method != "krum":  # needs three
            weights = torchjd_weights(gram, method, served=[1])
            assert weights[0] == 0 < weights[1], method


@pytest.mark.filterwarnings("ignore:You are solving a parameterized problem")  # NashMTL's
def test_directions_are_those_of_torchjds_aggregators():
    for method in INSTALLED:
        memory, aggregator = {}, aggregator_of(method, 4)
        for jacobian in jacobians():
            gram = jacobian @ jacobian.T
            weights = torchjd_weights(gram, method, memory=memory)
            seed_as_for_weights(method, gram)
            expected = aggregator(jacobian)
            error = (weights @ jacobian - expected).norm() / expected.norm()
            assert error < 1e-6, f"{method}: {error}"
        assert bool(memory) == (method in STATEFUL), method


def test_a_state_that_was_stored_continues_bitwise():
    for method in set(STATEFUL) & set(INSTALLED):
        whole, stored, snapshots = {}, {}, []
        for jacobian in jacobians():
            gram = jacobian @ jacobian.T
            snapshots.append((whole.get("solver"), pack(whole)))
            first = torchjd_weights(gram, method, memory=whole)
            torchjd_weights(gram + torch.eye(4), method, memory={})  # another client's
            stored = unpack(pack(stored))
            assert torch.equal(first, torchjd_weights(gram, method, memory=stored)), method
        for content, packed in snapshots[1:]:  # what a checkpoint holds is not changed
            assert pack({"solver": content}) == packed, method
        assert not torch.equal(first, torchjd_weights(gram, method)), method  # the state matters


def test_random_numbers_of_others_are_left_alone():
    gram = torch.eye(3).double()
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torchjd_weights(gram, "random")
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first, torchjd_weights(gram, "random"))


def test_weights_of_two_conflicting_gradients_by_hand():
    gram = torch.tensor([[1.0, -2.0], [-2.0, 8.0]])
    # the least vᵀGv over v ≥ (1/2, 0) is at (1/2, 1/8), over v ≥ (0, 1/2) at (1, 1/2)
    weights = torchjd_weights(gram, "upgrad")
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.625]).double(), rtol=2e-3, atol=0.0)


def test_short_gradients_are_not_zero_and_zero_ones_weigh_the_same():
    (jacobian,) = jacobians(count=1)
    gram = jacobian @ jacobian.T
    assert gram.min() < 0
    expected = torchjd.UPGradWeighting()(gram)
    for scale in (1e-20, 1.0, 1e20):
        torch.testing.assert_close(torchjd_weights(scale * gram, "upgrad"), expected)
    for zero in (torch.zeros(3, 3), torch.diag(torch.tensor([9.0, 1.0, 0.0])), torch.ones(3, 3)):
        torch.testing.assert_close(
            torchjd_weights(zero, "upgrad"), torch.full((3,), 1 / 3).double()
        )


def test_upgrad_conflicts_with_no_objective():
    for num_objectives in (2, 3, 8):
        for jacobian in jacobians(num_objectives, count=20):
            gram = jacobian @ jacobian.T
            weights = torchjd_weights(gram, "upgrad")
            assert (weights >= 1 / num_objectives - 1e-9).all()
            assert (gram @ weights >= -1e-4 * gram.trace() * weights - 1e-9).all()


def test_served_objectives_are_solved_for_alone():
    (jacobian,) = jacobians(count=1)
    gram = jacobian @ jacobian.T
    weights = torchjd_weights(gram, "upgrad", served=[0, 2], preference=[1.0, 5.0, 3.0, 0.0])
    own = torchjd.UPGrad(torch.tensor([0.25, 0.75]).double())(jacobian[[0, 2]])
    assert weights[[1, 3]].tolist() == [0, 0]
    torch.testing.assert_close(weights @ jacobian, own)
    preference = [9.0, 1.0, 0.0, 0.0]  # an objective alone has the same step at any share
    alone = [torchjd_weights(gram, "upgrad", served=[at], preference=preference) for at in range(3)]
    assert [own.sum().item() for own in alone] == pytest.approx([1.0, 1.0, 0.0])


def test_settings_that_do_not_fit_are_refused():
    for options, message in (
        ({"solver": "torchjd/upgard"}, "one of exact, cvxpy, raco, torchjd/aligned_mtl, torchjd"),
        ({"solver": "torchjd/imtl_g", "beta": 0.5}, "beta has no effect with solver torchjd"),
        ({"solver": "torchjd/pcgrad", "preference": (1.0, 2.0)}, "takes no preference"),
        ({"solver": "torchjd/upgrad", "constraints": ("a >= 0.1",)}, "require solver cvxpy"),
        ({"solver_options": {"c": 0.4}}, "solver_options require solver raco or torchjd/NAME"),
        ({"solver": "raco", "solver_options": {"d": 1.0}}, "solver raco has the option c, got 'd'"),
        ({"solver": "torchjd/cagrad", "solver_options": {"d": 1.0}}, "c, norm_eps, got 'd'"),
        ({"solver": "torchjd/cr_mogm", "solver_options": {"weighting": "a"}}, "one of aligned_mtl"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            FirmConfig(**options)
    gram = torch.eye(2, dtype=torch.float64)
    for preference in ([float("nan"), 0.3], [-1, 0.3], [0.3, 0.3, 0.4], [0, 0], [0.3]):
        with pytest.raises(ValueError, match="preference must "):
            torchjd_weights(gram, "upgrad", preference=preference)
    with pytest.raises(ValueError, match="served must name an objective"):
        torchjd_weights(gram, "mean", served=[])


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "qpsolvers", None)
    with pytest.raises(ValueError, match=re.escape(install_command("torchjd"))):
        check_method("upgrad", {})
