"""The adapter that a run leaves: utilities, and the choice between the best and the last."""

import itertools
import math

import pytest
import torch

from firm.alignment.best_adapter import BestAdapter, utility

GROUPS = torch.arange(8)


def by_row(**rewards: list[float]) -> dict[str, torch.Tensor]:
    own = {f"rewards/{name}": torch.tensor(values) for name, values in rewards.items()}
    return {"prompt": torch.arange(2), **own, "scores/x": torch.tensor([9.0, 9.0])}


def test_without_preferences_the_utility_is_the_mean_of_the_rewards():
    values = utility([((1.0, 1.0), by_row(x=[0.2, 0.4], y=[0.6, 0.8]))])
    assert values.tolist() == pytest.approx([0.4, 0.6])


def test_each_preference_takes_the_fold_that_is_best_for_it():
    folds = {(1.0, 0.0): by_row(x=[0.5, 0.5], y=[0.1, 0.1]),
             (0.0, 1.0): by_row(x=[0.9, 0.7], y=[0.2, 0.4])}  # fmt: skip
    values = utility(list(folds.items()))
    assert values.tolist() == pytest.approx([(0.9 + 0.2) / 2, (0.7 + 0.4) / 2])


def test_the_order_of_preferences_and_objectives_does_not_matter():
    folds = {(3.0, 1.0): ([0.5, 0.1], [0.3, 0.8]), (0.2, 0.8): ([0.4, 0.2], [0.6, 0.7])}
    found = []
    for order, is_swapped in itertools.product((1, -1), (False, True)):
        measured = []
        for preference, (x, y) in list(folds.items())[::order]:
            swapped = by_row(y=y, x=x), preference[::-1]
            own = swapped if is_swapped else (by_row(x=x, y=y), preference)
            measured.append((own[1], own[0]))
        found.append(utility(measured).tolist())
    assert all(own == pytest.approx(found[0]) for own in found)


def test_rows_without_a_reward_leave_the_mean_to_the_others():
    values = utility([((1.0, 1.0), by_row(x=[0.2, math.nan], y=[math.nan, 0.8]))])
    assert values.mean().item() == pytest.approx((0.2 + 0.8) / 2)


def noted(*means: float, noise: float = 0.0) -> BestAdapter:
    """Returns what a run knows after rounds with these mean utilities."""
    best = BestAdapter()
    for number, mean in enumerate(means, start=1):
        spread = torch.linspace(-noise, noise, 8, dtype=torch.float64) * (-1) ** number
        best.note(number, mean + spread)
    return best


@pytest.mark.parametrize(
    ("means", "noise", "round", "says"),
    [
        ((0.1, 0.5, 0.6), 0.0, None, "the last, and the best on the validation data (utility 0.6"),
        ((0.1, 0.6, 0.6), 0.0, None, "the last, and as good as any"),
        ((0.1, 0.6, 0.5), 0.0, 2, "the best on the validation data (utility 0.600); the last has"),
        ((0.1, 0.6, 0.5), 0.5, None, "round 2 with 0.600 is not clearly better"),
        ((), 0.0, None, "no other one was measured"),
    ],
)
def test_an_earlier_adapter_is_the_choice_if_it_is_clearly_better(means, noise, round, says):
    found, why = noted(*means, noise=noise).earlier(3, "utility", groups=GROUPS)
    assert found == round
    assert says in why


def test_a_last_adapter_that_has_run_away_is_no_choice():
    best = noted(0.1, 0.6, 0.5, noise=0.5)
    assert best.earlier(3, "utility", groups=GROUPS, is_out=True)[0] == 2
    found, why = best.earlier(4, "utility", groups=GROUPS, is_out=True)
    assert found == 2
    assert "outside the guard's trust region" in why
    assert "among the adapters that the guard accepts" in why


def test_an_undone_adapter_is_no_choice():
    best = noted(0.1, 0.5, 0.9)
    best.drop(3)
    assert best.best is not None
    assert best.best.round == 2
    best.drop(1)  # it is not the best
    assert best.best.round == 2


def test_a_restored_comparison_chooses_as_the_original_would():
    first, second = noted(0.1, 0.6, 0.5), BestAdapter()
    second.restore(first.state())
    asked = [each.earlier(3, "utility", groups=GROUPS) for each in (first, second)]
    assert asked[0] == asked[1]
