import pytest
import torch

from firm.gradients import gram_matrix
from firm.gradients.compression import (
    LowRankCompressor,
    LowRankMessage,
    RandomMaskCompressor,
    RandomMaskMessage,
    TopKCompressor,
    TopKMessage,
    near_square,
)
from firm.gradients.messages import COMPRESSORS
from tests.draws import draw_rows, new_generator


def _decaying(num_objectives, num_parameters, exponent):
    """A Jacobian whose matrix has singular values 1, 2^-exponent, 3^-exponent, ..."""
    rows, columns = near_square(num_objectives * num_parameters)
    u, _, vt = torch.linalg.svd(draw_rows(rows, columns), full_matrices=False)
    values = torch.arange(1, rows + 1) ** -float(exponent)
    return (
        ((u * values) @ vt)
        .reshape(-1)[: num_objectives * num_parameters]
        .view(num_objectives, num_parameters)
    )


@pytest.mark.parametrize("num_entries", [1, 2, 15, 16, 17, 57_030])
def test_the_matrix_is_nearly_square_and_holds_every_entry(num_entries):
    rows, columns = near_square(num_entries)
    assert 0 <= columns - rows <= 2
    assert num_entries <= rows * columns < num_entries + rows


def test_the_rank_is_what_the_budget_pays_for():
    message = LowRankCompressor().compress(draw_rows(2, 28_515), generator=new_generator())
    assert message.left.shape == (238, 59)  # 28,515 // (238 + 240)
    assert message.right.shape == (59, 240)
    assert message.num_bytes == 4 * 59 * (238 + 240)
    small = LowRankCompressor(478).compress(draw_rows(2, 28_515), generator=new_generator())
    assert small.left.shape == (238, 1)


def test_a_jacobian_of_the_rank_that_is_sent_comes_back():
    jacobian = (draw_rows(30, 3) @ draw_rows(3, 30, seed=1)).view(2, 450)
    message = LowRankCompressor(3 * 60).compress(jacobian, generator=new_generator())
    torch.testing.assert_close(message.reconstruct(), jacobian, rtol=1e-4, atol=1e-4)
    torch.set_default_dtype(torch.float64)  # a program's own
    try:
        same = LowRankCompressor(3 * 60).compress(jacobian, generator=new_generator())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(same.reconstruct(), message.reconstruct())
    short = LowRankCompressor(2 * 60).compress(jacobian, generator=new_generator())
    assert (short.reconstruct() - jacobian).norm() > 0.1 * jacobian.norm()


@pytest.mark.parametrize(("num_objectives", "num_parameters"), [(2, 451), (3, 700), (7, 1000)])
def test_low_rank_is_within_a_hundredth_of_the_best_approximation(num_objectives, num_parameters):
    jacobian = _decaying(num_objectives, num_parameters, 0.5)
    message = LowRankCompressor().compress(jacobian, generator=new_generator())
    rows, columns = near_square(jacobian.numel())
    padded = torch.zeros(rows * columns)
    padded[: jacobian.numel()] = jacobian.flatten()
    values = torch.linalg.svdvals(padded.view(rows, columns))
    best = values[message.left.size(1) :].norm()
    error = (message.reconstruct() - jacobian).norm()
    assert 0.9 * best < error < 1.01 * best  # below: the padding's own error is not counted


def test_power_iterations_sharpen_the_subspace():
    jacobian = _decaying(2, 2000, 0.5)
    errors = [
        (
            LowRankCompressor(oversampling=0, power_iterations=power)
            .compress(jacobian, generator=new_generator())
            .reconstruct()
            - jacobian
        ).norm()
        for power in (0, 2)
    ]
    assert errors[1] < 0.95 * errors[0]


def test_a_budget_beyond_the_full_rank_loses_nothing():
    jacobian = draw_rows(2, 50)
    message = LowRankCompressor(10_000).compress(jacobian, generator=new_generator())
    torch.testing.assert_close(message.reconstruct(), jacobian, rtol=1e-4, atol=1e-5)


def test_a_budget_without_a_rank_is_refused_with_the_least_that_would_do():
    with pytest.raises(ValueError, match=r"39 numbers is too small for rank 1.*at least 40"):
        LowRankCompressor(39).compress(draw_rows(2, 200), generator=new_generator())
    LowRankCompressor(40).compress(draw_rows(2, 200), generator=new_generator())
    with pytest.raises(ValueError, match="too small for rank 1"):  # d < 4M
        LowRankCompressor().compress(draw_rows(30, 100), generator=new_generator())


def test_top_k_by_hand():
    jacobian = torch.tensor([[1.0, -5.0, 0.5], [4.0, -0.1, 3.0]])
    message = TopKCompressor(4).compress(jacobian, generator=new_generator())
    # 16 bytes: a bitmap of one byte and three values, where a list would leave two
    assert message.values.tolist() == [-5.0, 4.0, 3.0]
    assert message.positions.tolist() == [0b01010100]
    assert message.num_bytes == 13
    assert message.reconstruct().tolist() == [[0, -5, 0], [4, 0, 3]]


def test_top_k_lists_positions_where_a_bitmap_would_cost_more():
    jacobian = draw_rows(40, 100)
    message = TopKCompressor().compress(jacobian, generator=new_generator())
    assert message.positions.dtype == torch.int32
    assert len(message.values) == 50
    assert message.num_bytes == 400
    kept = message.reconstruct()
    assert torch.equal(kept[kept != 0], jacobian[kept != 0])
    assert jacobian[kept != 0].abs().min() >= jacobian[kept == 0].abs().max()
    assert (kept != 0).sum() == 50


def test_an_index_costs_eight_bytes_beyond_two_to_the_31_entries():
    assert TopKCompressor.num_kept(3000, 2**31) == (1500, False)
    assert TopKCompressor.num_kept(3000, 2**31 + 1) == (1000, False)


def test_top_k_of_equal_entries_keeps_exactly_k():
    message = TopKCompressor(4).compress(torch.ones(2, 3), generator=new_generator())
    assert message.reconstruct().sum() == 3


def test_a_budget_that_holds_every_entry_keeps_all():
    jacobian = draw_rows(3, 20)
    message = TopKCompressor(60 + 2).compress(jacobian, generator=new_generator())
    assert torch.equal(message.reconstruct(), jacobian)


def test_a_budget_below_one_entry_is_refused():
    with pytest.raises(ValueError, match="budget of 1 numbers keeps no entry of 400"):
        TopKCompressor(1).compress(draw_rows(2, 200), generator=new_generator())


def test_a_mask_sends_entries_as_they_are_in_their_places():
    jacobian = draw_rows(4, 100)
    message = RandomMaskCompressor().compress(jacobian, generator=new_generator())
    sent = message.reconstruct()
    assert (sent != 0).sum() == 100
    assert torch.equal(sent[sent != 0], jacobian[sent != 0])
    assert message.num_bytes == 4 * 100 + 8


def test_clients_draw_different_masks_and_equal_generators_equal_ones():
    jacobian, generator = draw_rows(2, 100), new_generator(5)
    first, second = (RandomMaskCompressor().compress(jacobian, generator=generator) for _ in "ab")
    again = RandomMaskCompressor().compress(jacobian, generator=new_generator(5))
    assert not torch.equal(first.reconstruct(), second.reconstruct())
    assert torch.equal(first.reconstruct(), again.reconstruct())


def test_a_mask_divided_by_its_probability_is_unbiased_with_the_stated_variance():
    jacobian, generator = draw_rows(4, 10), new_generator()
    compressor = RandomMaskCompressor(scaling="inverse_probability")
    sent = torch.stack(
        [compressor.compress(jacobian, generator=generator).reconstruct() for _ in range(4000)]
    )
    standard_error = sent.std(dim=0) / 4000**0.5
    assert ((sent.mean(dim=0) - jacobian).abs() < 5 * standard_error).all()
    q = (sent - jacobian).square().sum(dim=(1, 2)).mean() / jacobian.square().sum()
    assert q.item() == pytest.approx(3, rel=0.05)  # 1/p - 1 at p = 1/4


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_leaves_the_jacobian_and_the_global_generator_alone(name):
    jacobian = draw_rows(2, 400).requires_grad_()
    before, state = jacobian.detach().clone(), torch.get_rng_state()
    message = COMPRESSORS[name]().compress(jacobian, generator=new_generator())
    again = COMPRESSORS[name]().compress(jacobian, generator=new_generator())
    assert torch.equal(jacobian, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(message.reconstruct(), again.reconstruct())
    assert message.reconstruct().shape == (2, 400)
    assert not message.reconstruct().requires_grad


@pytest.mark.parametrize("name", COMPRESSORS)
def test_no_compressor_takes_what_is_not_a_jacobian(name):
    compressor = COMPRESSORS[name]()

    def compress(jacobian):
        return compressor.compress(jacobian, generator=new_generator())

    with pytest.raises(ValueError, match=r"shape \[M, d\].*got \[5\]"):
        compress(torch.ones(5))
    with pytest.raises(ValueError, match=r"got \[0, 5\]"):
        compress(torch.ones(0, 5))
    with pytest.raises(ValueError, match=r"floats, got torch.int64"):
        compress(torch.ones(2, 400, dtype=torch.int64))
    for value in (float("nan"), float("inf")):
        rows = draw_rows(3, 400)
        rows[2, 17] = value
        with pytest.raises(ValueError, match="objective 2 is not finite"):
            compress(rows)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_that_is_not_positive_is_refused(name, budget):
    with pytest.raises(ValueError, match=f"budget must be at least 1.*got {budget}"):
        COMPRESSORS[name](budget)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_zero_jacobian_stays_zero(name):
    message = COMPRESSORS[name]().compress(torch.zeros(2, 400), generator=new_generator())
    assert not message.reconstruct().any()


@pytest.mark.parametrize("name", COMPRESSORS)
def test_half_precision_rows_are_compressed_in_float32(name):
    jacobian = draw_rows(2, 400).bfloat16()
    message = COMPRESSORS[name]().compress(jacobian, generator=new_generator())
    same = COMPRESSORS[name]().compress(jacobian.float(), generator=new_generator())
    assert torch.equal(message.reconstruct(), same.reconstruct())
    assert gram_matrix(message.reconstruct()).shape == (2, 2)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="non-negative, got -1 and 2"):
        LowRankCompressor(oversampling=-1)
    with pytest.raises(ValueError, match="'inverse_probability', got 'yes'"):
        RandomMaskCompressor(scaling="yes")


def test_messages_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match=r"left must be float32 of shape \[10, 2\]"):
        LowRankMessage((2, 50), torch.ones(9, 2), torch.ones(2, 10))
    with pytest.raises(ValueError, match=r"right must be float32 of shape \[2, 10\]"):
        LowRankMessage((2, 50), torch.ones(10, 2), torch.ones(3, 10))
    with pytest.raises(ValueError, match="NaN or infinity"):
        LowRankMessage((2, 50), torch.full((10, 2), float("nan")), torch.ones(2, 10))
    with pytest.raises(ValueError, match="locate 1 values among 6"):
        TopKMessage((2, 3), torch.ones(1), torch.tensor([6], dtype=torch.int32))
    with pytest.raises(ValueError, match="locate 1 values among 6"):
        TopKMessage((2, 3), torch.ones(1), torch.tensor([0b11000000], dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"values must be float32 of shape \[6\]"):
        RandomMaskMessage((2, 3), torch.ones(7), 0)
    with pytest.raises(ValueError, match="seed must be from 0"):
        RandomMaskMessage((2, 3), torch.ones(1), -1)
