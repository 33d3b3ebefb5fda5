import pytest
import torch

from firm.solvers import fixed_weights


def test_weights_are_scaled_to_sum_one_whatever_the_gradients():
    gram = torch.tensor([[1.0, 0.2], [0.2, 9.0]])
    assert fixed_weights(gram, weights=(3.0, 1.0)).tolist() == [0.75, 0.25]
    assert fixed_weights(gram).tolist() == [0.5, 0.5]
    assert fixed_weights(gram.expand(4, 2, 2), weights=(3.0, 1.0)).shape == (4, 2)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="weights must"):
        fixed_weights(torch.eye(2), weights=weights)
