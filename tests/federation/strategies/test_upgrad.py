"""UPGrad's weights, and rounds of FedCMOO with them."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from firm.base.extras import install_command
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategy_configs import FedAvgConfig, FedCmooConfig
from firm.solvers.upgrad import upgrad_weights


@pytest.fixture
def upgrad():
    """FedCMOO's configuration with UPGrad's weights and Jacobians as they are."""
    pytest.importorskip("torchjd", reason="UPGrad needs TorchJD")
    pytest.importorskip("qpsolvers", reason="TorchJD's projector needs qpsolvers")
    return FedCmooConfig(compressor="none", communication="one_way", solver="upgrad")


def test_weights_of_two_conflicting_gradients_by_hand(upgrad):
    gram = torch.tensor([[1.0, -2.0], [-2.0, 8.0]])
    # the least vᵀGv over v ≥ (1/2, 0) is at (1/2, 1/8), over v ≥ (0, 1/2) at (1, 1/2)
    weights = upgrad_weights(gram)
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.625]).double(), rtol=2e-3, atol=0.0)


def test_weights_are_torchjds_at_every_scale(upgrad):
    from torchjd.aggregation import UPGradWeighting

    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    gram = jacobian @ jacobian.T
    assert gram.min() < 0
    expected = UPGradWeighting()(gram)
    for scale in (1e-20, 1.0, 1e20):
        torch.testing.assert_close(upgrad_weights(scale * gram), expected)


@pytest.mark.parametrize("num_objectives", [2, 3, 8])
def test_the_direction_conflicts_with_no_objective(upgrad, num_objectives):
    generator = torch.Generator().manual_seed(num_objectives)
    for _ in range(20):
        jacobian = torch.randn(num_objectives, 5, generator=generator, dtype=torch.float64)
        gram = jacobian @ jacobian.T
        weights = upgrad_weights(gram)
        assert (weights >= 1 / num_objectives - 1e-9).all()
        assert (gram @ weights >= -1e-4 * gram.trace() * weights - 1e-9).all()


def test_without_conflict_and_without_gradients_weights_are_uniform(upgrad):
    for gram in (torch.diag(torch.tensor([9.0, 1.0, 0.0])), torch.ones(3, 3), torch.zeros(3, 3)):
        torch.testing.assert_close(upgrad_weights(gram), torch.full((3,), 1 / 3).double())


def test_a_round_takes_the_direction_of_the_mean_jacobian(
    upgrad, new_plain_client, origin, run_rounds, point
):
    targets = torch.tensor(
        [[[4.0, 1.0, 0.0], [-1.0, 1.0, 0.0]], [[2.0, 0.0, 1.0], [-3.0, 2.0, 0.0]]]
    )
    clients = [new_plain_client(name, t.tolist()) for name, t in zip("ab", targets, strict=True)]
    cfg = replace(upgrad, server_learning_rate=0.8)
    state, rows = run_rounds(fedcmoo, clients, origin, cfg)
    mean = -targets.mean(dim=0).double()  # [M, 3], the gradients at zero
    weights = torch.tensor(list(rows[0]["round"]["weights"].values()), dtype=torch.float64)
    torch.testing.assert_close(weights, upgrad_weights(mean @ mean.T))
    assert weights.sum() > 1.1
    torch.testing.assert_close(point(state).double(), -0.8 * 0.5 * weights @ mean)
    assert (mean @ point(state).double() < 0).all()  # both losses fall


def test_objectives_are_averaged_over_the_clients_that_serve_them(
    upgrad, new_plain_client, origin, run_rounds, point
):
    targets = torch.tensor([[4.0, 1.0, 0.0], [-1.0, 1.0, 0.0]])
    ends = []
    for served in ((0,), (0, 1)):
        other = new_plain_client("b", targets.tolist(), served=served)
        clients = [new_plain_client("a", targets.tolist()), other]
        ends.append(point(run_rounds(fedcmoo, clients, origin, upgrad)[0]))
    torch.testing.assert_close(*ends)


def test_identical_objectives_are_fedavg(upgrad, new_client, start, run_rounds, point):
    def clients():
        targets = ([[1.0, -2.0, 0.5]] * 2, [[3.0, 0.0, 1.0]] * 2)
        return [
            new_client(name, torch.tensor(target), optimizer=torch.optim.SGD)
            for name, target in zip("ab", targets, strict=True)
        ]

    cfg = replace(upgrad, num_local_steps=3)
    state, _ = run_rounds(fedcmoo, clients(), start, cfg, num_rounds=2)
    expected, _ = run_rounds(
        fedavg, clients(), start, FedAvgConfig(num_local_steps=3), num_rounds=2
    )
    torch.testing.assert_close(point(state), point(expected))


def test_compressed_jacobians_give_nearly_the_same_weights(
    upgrad, new_plain_client, origin, run_rounds
):
    def weights(cfg):
        clients = [new_plain_client("a", [[4.0, 1.0, 0.0], [-1.0, 1.0, 0.0]])]
        return run_rounds(fedcmoo, clients, origin, cfg)[1][0]["round"]["weights"]

    compressed = replace(upgrad, compressor="low_rank", communication="two_way", upload_budget=4.0)
    assert weights(compressed) == pytest.approx(weights(upgrad), rel=1e-3)


def test_what_is_missing_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ValueError, match=re.escape(install_command("torchjd"))):
        FedCmooConfig(solver="upgrad")


def test_the_theorys_matrix_is_refused(upgrad):
    with pytest.raises(ValueError, match="use solver steps"):
        replace(upgrad, communication="two_sample", normalize_gram=False)
