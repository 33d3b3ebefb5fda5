import pytest
import torch

from firm.federation.fedcmoo.approx_gram import one_way_gram
from firm.gradients import gram_matrix
from firm.gradients.compression import LowRankCompressor
from firm.gradients.sketch import (
    CHUNK,
    CountSketchCompressor,
    CountSketchMessage,
    HybridCompressor,
    from_sketch,
    to_sketch,
)
from tests.draws import draw_rows, new_generator

NUM_SEEDS = 4000


def _sketch(jacobian, seed=0, budget=None):
    return CountSketchCompressor(budget).compress(
        jacobian, generator=new_generator(), shared_seed=seed
    )


def _grams_of_parts(message):
    return sum(sign * gram_matrix(part) for sign, part in message.parts())


def test_the_matrix_has_one_sign_in_every_row_and_even_columns():
    matrix = to_sketch(torch.eye(1000), 300, 7)  # C, [d, k]
    assert (matrix.abs().sum(dim=1) == 1).all()
    assert (matrix.abs().max(dim=1).values == 1).all()
    sizes = matrix.abs().sum(dim=0)
    assert set(sizes.tolist()) == {3.0, 4.0}
    assert 400 < (matrix.sum(dim=1) == 1).sum() < 600


def test_sketching_and_back_are_products_with_one_matrix_and_its_transpose():
    matrix, jacobian = to_sketch(torch.eye(200), 60, 7), draw_rows(3, 200)
    torch.testing.assert_close(to_sketch(jacobian, 60, 7), jacobian @ matrix)
    torch.testing.assert_close(from_sketch(jacobian @ matrix, 200, 7), jacobian @ matrix @ matrix.T)


def test_chunks_are_put_together_without_loss():
    num_parameters = 2 * CHUNK + 5
    jacobian = torch.zeros(1, num_parameters)
    jacobian[0, [0, CHUNK - 1, CHUNK, 2 * CHUNK, num_parameters - 1]] = torch.arange(1.0, 6)
    sketch = to_sketch(jacobian, num_parameters // 2, 3)
    assert sketch.abs().sum() == 15
    back = from_sketch(sketch, num_parameters, 3)
    assert torch.equal(back[jacobian != 0], jacobian[jacobian != 0])


def test_a_sketch_has_a_row_per_objective_and_as_many_buckets_as_the_budget_pays_for():
    message = _sketch(draw_rows(3, 100))
    assert message.sketch.shape == (3, 33)
    assert message.num_bytes == 4 * 99 + 8


def test_equal_seeds_give_equal_sketches_and_others_do_not():
    jacobian = draw_rows(2, 500)
    assert torch.equal(_sketch(jacobian, 5).sketch, _sketch(jacobian, 5).sketch)
    assert not torch.equal(_sketch(jacobian, 5).sketch, _sketch(jacobian, 6).sketch)


def test_the_sum_of_sketches_is_the_sketch_of_the_sum():
    first, second = draw_rows(2, 500), draw_rows(2, 500, seed=1)
    added = _sketch(first).sketch + _sketch(second).sketch
    torch.testing.assert_close(added, _sketch(first + second).sketch)
    gram = one_way_gram([_sketch(first), _sketch(second)])
    torch.testing.assert_close(gram, gram_matrix(added) / 4)


def test_inner_products_have_the_true_mean_and_the_stated_variance():
    jacobian = draw_rows(2, 40)
    jacobian[1] += jacobian[0]
    grams = torch.stack([gram_matrix(_sketch(jacobian, s).sketch) for s in range(NUM_SEEDS)])
    truth = gram_matrix(jacobian)
    standard_error = grams.std(dim=0) / NUM_SEEDS**0.5
    assert ((grams.mean(dim=0) - truth).abs() < 4 * standard_error).all()
    x, y = jacobian.double()
    meet = (40 / 20 - 1) / 39  # two columns share a bucket
    variance = meet * (truth[0, 0] * truth[1, 1] + truth[0, 1] ** 2 - 2 * (x**2 * y**2).sum())
    assert grams[:, 0, 1].var().item() == pytest.approx(variance.item(), rel=0.15)


def test_the_reconstruction_is_unbiased():
    jacobian = draw_rows(2, 20)
    back = torch.stack([_sketch(jacobian, s).reconstruct() for s in range(NUM_SEEDS)])
    standard_error = back.std(dim=0) / NUM_SEEDS**0.5
    assert ((back.mean(dim=0) - jacobian).abs() < 5 * standard_error).all()


def test_a_budget_that_holds_every_entry_makes_no_error():
    jacobian = draw_rows(3, 50)
    message = _sketch(jacobian, budget=150)
    torch.testing.assert_close(one_way_gram([message]), gram_matrix(jacobian))
    assert torch.equal(message.reconstruct(), jacobian)


def test_a_budget_below_one_bucket_each_is_refused():
    with pytest.raises(ValueError, match=r"budget of 2 numbers.*at least 3"):
        _sketch(draw_rows(3, 100), budget=2)


def test_a_sketch_with_a_negative_seed_or_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="shared_seed must be from 0"):
        _sketch(draw_rows(2, 100), -1)
    with pytest.raises(ValueError, match=r"sketch must be float32 of shape \[2, 4\]"):
        CountSketchMessage((2, 8), torch.ones(3, 4), 0)


def _low_rank_and_rest(scale):
    low_rank = (draw_rows(20, 2) @ draw_rows(2, 20, seed=1)).view(2, 200)
    return low_rank + scale * draw_rows(2, 200, seed=2)


def _hybrid(jacobian, seed, budget=None):
    return HybridCompressor(budget).compress(jacobian, generator=new_generator(), shared_seed=seed)


def test_the_hybrid_spends_half_on_rank_and_the_rest_on_the_sketch():
    message = _hybrid(draw_rows(2, 28_515), 0)
    assert message.left.shape == (238, 29)  # 14,257 // 478
    assert message.sketch.shape == (2, (28_515 - 29 * 478) // 2)
    assert 4 * 28_515 - 8 < message.num_bytes - 8 <= 4 * 28_515


def test_the_hybrid_is_exact_where_the_rank_suffices():
    jacobian = _low_rank_and_rest(0.0)
    truth = gram_matrix(jacobian)
    torch.testing.assert_close(
        _grams_of_parts(_hybrid(jacobian, 3)), truth, rtol=1e-4, atol=1e-4 * truth.max().item()
    )
    torch.testing.assert_close(_hybrid(jacobian, 3).reconstruct(), jacobian, rtol=0, atol=1e-4)


def test_the_hybrid_is_unbiased_and_its_low_rank_part_makes_no_noise():
    jacobian = _low_rank_and_rest(0.1)
    truth = gram_matrix(jacobian)
    hybrid = torch.stack([_grams_of_parts(_hybrid(jacobian, s)) for s in range(1000)])
    plain = torch.stack([gram_matrix(_sketch(jacobian, s).sketch) for s in range(1000)])
    standard_error = hybrid.std(dim=0) / 1000**0.5
    assert ((hybrid.mean(dim=0) - truth).abs() < 4 * standard_error).all()
    assert (hybrid.std(dim=0) < 0.3 * plain.std(dim=0)).all()


def test_the_hybrid_is_low_rank_plus_a_sketch_of_what_it_leaves():
    jacobian = _low_rank_and_rest(0.5)
    message = _hybrid(jacobian, 4)
    low_rank = LowRankCompressor(100).compress(jacobian, generator=new_generator()).reconstruct()
    width = message.sketch.size(1)
    torch.testing.assert_close(
        message.sketch, to_sketch(jacobian - low_rank, width, 4), rtol=0, atol=1e-4
    )
    (_, exact), (sign, minus), (_, whole) = message.parts()
    assert sign == -1
    torch.testing.assert_close(exact, low_rank)
    torch.testing.assert_close(minus, to_sketch(low_rank, width, 4))
    torch.testing.assert_close(whole, to_sketch(jacobian, width, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        message.reconstruct(), low_rank + from_sketch(message.sketch, 200, 4)
    )


def test_the_hybrid_refuses_a_budget_whose_half_gives_no_rank():
    with pytest.raises(
        ValueError, match=r"half of a budget of 79 numbers is too small for rank 1.*at least 80"
    ):
        _hybrid(draw_rows(2, 200), 0, budget=79)
