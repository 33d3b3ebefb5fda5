import numpy as np
import pytest
import torch

from firm.solvers import smoothed_weights


def test_the_average_after_t_steps_is_the_mean_of_all_weights():
    solved = np.random.default_rng(0).dirichlet(np.ones(3), size=20)
    average = np.array([1.0, 0.0, 0.0])  # forgotten at the first step
    for step, weights in enumerate(solved, start=1):
        average = smoothed_weights(average, weights, step=step)
        np.testing.assert_allclose(average, solved[:step].mean(axis=0), atol=1e-15)


def test_type_and_input_are_kept():
    previous = torch.tensor([0.5, 0.5])
    found = smoothed_weights(previous, torch.tensor([1.0, 0.0]).double(), step=2)
    assert found.dtype == torch.float32
    assert found.tolist() == [0.75, 0.25]
    assert previous.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("weights", "step", "message"),
    [
        (torch.ones(3) / 3, 1, r"the shape of previous, \[2\], got \[3\]"),
        (torch.tensor([float("nan"), 1.0]), 1, "finite"),
        (torch.ones(2) / 2, 0, "step must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(weights, step, message):
    with pytest.raises(ValueError, match=message):
        smoothed_weights(torch.ones(2) / 2, weights, step=step)
