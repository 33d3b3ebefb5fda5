from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation.diagnostics import (
    beta_alarm,
    beta_effect,
    beta_for_effect,
    cosines,
    disagreement_bound,
    disagreement_drift,
    drift,
    failure_alarms,
    gradient_norms,
    norm_ratio,
    stationarity,
    step_parts,
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
    weights = firm_weights(gram[:3, :3], beta=0.0)
    parts = step_parts(gram[:3, :3], weights)  # of min-norm weights
    assert (parts / parts.sum()).tolist() == pytest.approx(weights.tolist())


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
    second = {"a": torch.tensor([2.0]), "b": torch.tensor([4.0])}  # 1 from the mean
    assert drift([first, second], mean, start) == pytest.approx(1 / 5)
    twice = {"a": torch.tensor([6.0]), "b": torch.tensor([8.0])}  # a step at server rate 2
    assert drift([first, second], twice, start) == pytest.approx(1 / 10)
    assert drift([mean, mean], mean, start) == 0
    assert drift([start], start, start) == 0


@pytest.mark.parametrize("effect", [0.05, 0.5])
def test_the_beta_of_an_effect_has_that_effect(effect):
    gram = torch.tensor([[1.0, -0.4, 0.1], [-0.4, 1.5, 0.2], [0.1, 0.2, 0.8]], dtype=torch.float64)
    beta = beta_for_effect(gram, effect)
    reached = beta_effect(firm_weights(gram, beta=beta), firm_weights(gram, beta=0.0))
    assert reached == pytest.approx(effect, rel=1e-6)


def test_the_beta_of_an_effect_agrees_with_the_closed_form_of_two_objectives():
    gram = torch.tensor([[1.2, -0.3], [-0.3, 0.8]], dtype=torch.float64)  # mean of the diagonal: 1
    assert beta_for_effect(gram, 0.05) == pytest.approx(2.6 * 0.05 / 0.95, rel=1e-6)


def test_where_weights_are_uniform_no_beta_is_needed():
    assert beta_for_effect(torch.eye(3, dtype=torch.float64), 0.05) == 0.0


def _client_row(round_number, beta, cosine):
    gram = torch.tensor([[1.0, cosine], [cosine, 1.0]], dtype=torch.float64)
    gram = torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64)) @ gram  # norms 2 and 0.5
    gram = gram @ torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64))
    weights, unregularised = firm_weights(gram, beta=beta), firm_weights(gram, beta=0.0)
    return {
        "kind": "client",
        "round": round_number,
        "beta_effect": [beta_effect(weights, unregularised)] * 2,
        "gradient_norms": [gradient_norms(gram).tolist()] * 2,
        "cosines": [cosines(gram).tolist()] * 2,
    }


def test_an_inert_beta_is_told_once_with_one_that_matters():
    rows = [_client_row(number, 0.01, -0.4) for number in (1, 2, 3)]
    assert beta_alarm(rows[:2], 0.01) is None
    told = beta_alarm(rows, 0.01)
    assert told is not None
    assert beta_alarm([*rows, _client_row(4, 0.01, -0.4)], 0.01) is None
    assert told.startswith("strategy.beta 0.01 is inert, with almost no effect on the weights λ")
    # trace-normalised, G12 is -0.4 * 2 * 0.5 / 2.125
    needed = (2 + 2 * 0.4 / 2.125) * 0.05 / 0.95
    assert f"about {needed:.2g} would move them 5%" in told
    assert beta_effect(*_two_weights(needed)) == pytest.approx(0.05, rel=1e-3)
    told = beta_alarm(rows, 0.01, normalize=False)  # β is of the gradients' own scale
    assert told is not None
    assert f"about {2.125 * needed:.2g} would move them 5%" in told


def _two_weights(beta):
    gram = torch.tensor([[4.0, -0.4], [-0.4, 0.25]], dtype=torch.float64)
    return firm_weights(gram, beta=beta), firm_weights(gram, beta=0.0)


def test_a_beta_that_matters_or_is_meant_to_do_nothing_raises_no_alarm():
    assert beta_alarm([_client_row(3, 1.0, -0.4)], 1.0) is None
    assert beta_alarm([_client_row(3, 0.0, -0.4)], 0.0) is None
    assert beta_alarm([{"kind": "round", "round": 3}], 0.01) is None


def test_clients_that_keep_their_solves_to_themselves_raise_no_alarm():
    rows = [{"kind": "client", "round": round, "num_steps": 2} for round in (1, 2, 3)]
    assert beta_alarm(rows, 0.01) is None


def test_disagreement_drift_by_hand():
    jacobians = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]])]
    weights = [torch.tensor([0.25, 0.75]), torch.tensor([0.75, 0.25])]
    # deviations (-1/4, 1/4) and (1/4, -1/4): directions (-1/4, 1/2) and (3/4, -1), mean (1/4, -1/4)
    assert disagreement_drift(jacobians, weights) == pytest.approx(1 / 8)
    # the mean of 1/16 + 1/4 and 9/16 + 1
    grams = [rows @ rows.T for rows in jacobians]
    assert disagreement_bound(grams, weights) == pytest.approx(15 / 16)


def test_clients_that_agree_do_not_drift():
    jacobians = [torch.randn(3, 5) for _ in range(4)]
    weights = [torch.tensor([0.2, 0.3, 0.5])] * 4
    assert disagreement_drift(jacobians, weights) == pytest.approx(0, abs=1e-15)
    assert disagreement_bound([rows @ rows.T for rows in jacobians], weights) == pytest.approx(
        0, abs=1e-15
    )


@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 5), objectives=st.integers(1, 4))
def test_disagreement_drift_keeps_its_bound(seed, clients, objectives):
    generator = torch.Generator().manual_seed(seed)
    jacobians = torch.randn(clients, objectives, 6, generator=generator).double()
    weights = torch.rand(clients, objectives, generator=generator).double()
    weights /= weights.sum(dim=1, keepdim=True)
    bound = disagreement_bound(list(jacobians @ jacobians.mT), list(weights))
    assert disagreement_drift(list(jacobians), list(weights)) <= bound * (1 + 1e-12) + 1e-15


def test_with_one_common_gradient_per_objective_the_disagreement_cancels_and_its_bound_does_not():
    rows = torch.eye(2)
    weights = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    assert disagreement_drift([rows, rows], weights) == 0
    assert disagreement_bound([rows @ rows.T] * 2, weights) == pytest.approx(1 / 2)


def test_stationarity_bounds_the_drawn_gradients_and_equals_them_for_a_single_client():
    jacobians = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0)).double()
    mean = jacobians.mean(dim=0)
    shortest = firm_weights(mean @ mean.T, beta=0.0) @ mean
    squared = shortest.square().sum().item()
    assert stationarity((jacobians @ jacobians.mT).tolist()) >= squared
    assert stationarity([(mean @ mean.T).tolist()]) == pytest.approx(squared)


def test_with_noisy_gradients_stationarity_is_no_bound_on_the_expected_ones_even_in_the_mean():
    draws = [torch.tensor(signs) + 1.0 for signs in product([-1.0, 1.0], repeat=3)]
    found = [stationarity([torch.outer(rows, rows).tolist()]) for rows in draws]
    # a gradient that the noise took away makes it 0; one draw of eight has none: 2²
    assert sum(found) / len(found) == pytest.approx(0.5)
    assert stationarity([torch.ones(3, 3).tolist()]) == pytest.approx(1.0)


def test_solves_in_which_beta_cannot_act_do_not_make_it_inert():
    rows = [_client_row(number, 0.01, -0.4) for number in (1, 2, 3)]
    alone = [{**row, "gradient_norms": [[1.0, 0.0]], "cosines": [[None]]} for row in rows]
    for row in alone:
        del row["beta_effect"]
    wider = [
        {
            **row,
            "gradient_norms": [[*n, 0.0] for n in row["gradient_norms"]],
            "cosines": [[*c, None, None] for c in row["cosines"]],
        }
        for row in rows
    ]
    assert beta_alarm([*wider, *alone], 0.01) == beta_alarm(rows, 0.01)
    assert beta_alarm(alone, 0.01) is None


def test_norm_ratio_by_hand():
    assert norm_ratio([2.0, 3.0, 6.0]) == 3
    assert norm_ratio([2.0, 0.0]) == float("inf")
    assert norm_ratio([0.0, 0.0]) == 1
    assert norm_ratio([1.5]) == 1


def _round(number, clients, failed=()):
    failures = [{"client": name, "reason": "ValueError"} for name in failed]
    return {"kind": "round", "round": number, "clients": list(clients), "failures": failures}


def test_a_client_that_fails_in_rounds_in_a_row_is_told_once_and_when_their_number_doubles():
    rows, told = [], {}
    for number in range(1, 15):
        rows += [{"kind": "client", "round": number}, _round(number, "b", failed="a")]
        told[number] = failure_alarms(rows)
    assert [number for number, alarms in told.items() if alarms] == [3, 6, 12]
    assert told[6] == ["a has failed in 6 rounds in a row, from round 1 to 6: ValueError"]


def test_rounds_without_the_client_count_for_nothing_and_one_success_ends_the_row():
    rows = [_round(1, "b", "a"), _round(2, "b"), _round(3, "b", "a"), _round(4, "b", "a")]
    assert failure_alarms(rows) == [
        "a has failed in 3 rounds in a row, from round 1 to 4: ValueError"
    ]
    rows = [_round(1, "b", "a"), _round(2, "b", "a"), _round(3, "ab"), _round(4, "b", "a")]
    assert failure_alarms(rows) == []
    assert failure_alarms([]) == []
