"""Rounds of FIRM and FedCMOO with other papers' weights."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from firm.base.extras import install_command
from firm.federation import LocalEngine
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FedAvgConfig, FedCmooConfig, FirmConfig
from firm.solvers import raco_weights, torchjd_weights


@pytest.fixture
def upgrad():
    """FedCMOO's configuration with UPGrad's weights and Jacobians as they are."""
    pytest.importorskip("torchjd", reason="UPGrad needs TorchJD")
    pytest.importorskip("qpsolvers", reason="TorchJD's projector needs qpsolvers")
    return FedCmooConfig(compressor="none", communication="one_way", solver="upgrad")


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
    torch.testing.assert_close(weights, torchjd_weights(mean @ mean.T, "upgrad"))
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


def test_a_run_with_a_stateful_method_resumes_bitwise(upgrad, new_plain_client, origin, point):
    """Rounds with a stateful method, in one run and in two."""
    cfg = FirmConfig(solver="torchjd/gradvac", num_local_steps=3)
    targets = [[4.0, 1.0, 0.0], [-1.0, 1.0, 0.5]]

    def engine():
        return LocalEngine([new_plain_client(name, targets) for name in "ab"])

    def rounds(state, engine, count):
        for _ in range(count):
            state, rows = firm_round(state, ["a", "b"], engine, cfg)
        return state, rows

    whole, rows = rounds(origin, engine(), 3)
    for row in rows["clients"]:  # shares, though GradVac's sum to 2 or more
        assert [sum(shares) for shares in row["weights"]] == pytest.approx([1.0] * 3)
    first = engine()
    state, _ = rounds(origin, first, 2)
    states = unpack(pack(first.client_states(state.accepted)))
    assert "solver" in states["a"]["state"]["carried"]
    second = engine()
    second.restore_client_states(states)
    resumed, _ = rounds(state, second, 1)
    assert torch.equal(point(resumed), point(whole))


def test_a_round_takes_racos_direction(new_plain_client, origin):
    targets = [[4.0, 1.0, 0.0], [-1.0, 1.0, 0.0]]
    cfg = FirmConfig(solver="raco", preference=(0.7, 0.3), solver_options={"c": 0.3})
    engine = LocalEngine([new_plain_client("a", targets)])
    state, _ = firm_round(origin, ["a"], engine, cfg)
    jacobian = -torch.tensor(targets).double()
    weights = raco_weights(jacobian @ jacobian.T, preference=[0.7, 0.3], c=0.3)
    step = torch.cat([part.reshape(-1) for part in state.adapter.values()]).double()
    assert torch.cosine_similarity(step, -weights @ jacobian, dim=0) == pytest.approx(1.0)


def test_what_is_missing_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd", None)
    with pytest.raises(ValueError, match=re.escape(install_command("torchjd"))):
        FedCmooConfig(solver="upgrad")


def test_the_theorys_matrix_is_refused(upgrad):
    with pytest.raises(ValueError, match="use solver steps"):
        replace(upgrad, communication="two_sample", normalize_gram=False)
