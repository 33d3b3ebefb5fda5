import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from firm.gradients import combine, gram_matrix
from firm.gradients.gram import CHUNK


def _rows(num_objectives, num_parameters, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_objectives)
    return torch.randn(num_objectives, num_parameters, generator=generator).to(dtype)


@pytest.mark.parametrize("num_parameters", [1, 1000, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_entries_are_the_inner_products_to_float64_accuracy(num_parameters):
    rows = _rows(3, num_parameters)
    gram = gram_matrix(rows)
    exact = rows.double() @ rows.double().T
    assert gram.dtype == torch.float64
    assert torch.equal(gram, gram.T)
    assert ((gram - exact).abs().max() / exact.diagonal().max()).item() < 1e-13


def test_nearly_parallel_gradients_keep_the_digits_that_tell_them_apart():
    line = _rows(1, 2_000_000)[0]
    rows = torch.stack([line, line + 1e-3 * _rows(2, 2_000_000)[1]])
    gram = gram_matrix(rows)
    distance = (rows[0].double() - rows[1].double()).square().sum()
    from_gram = gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]
    assert from_gram.item() == pytest.approx(distance.item(), rel=1e-6)
    naive = (rows @ rows.T).double()
    assert naive[0, 0] + naive[1, 1] - 2 * naive[0, 1] != pytest.approx(distance.item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_is_summed_in_float64(dtype):
    rows = _rows(2, 1000, dtype)
    torch.testing.assert_close(gram_matrix(rows), rows.double() @ rows.double().T)


def test_half_precision_rows_keep_the_digits_that_tell_them_apart():
    line = _rows(1, 2 * CHUNK + 7, torch.bfloat16)[0]
    rows = torch.stack([line, line.roll(1) * 2**-9 + line])  # [2, d], a few entries differ
    gram = gram_matrix(rows)
    distance = (rows[0].double() - rows[1].double()).square().sum()
    from_gram = gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]
    assert 0 < distance < 1e-4 * gram[0, 0]
    assert from_gram.item() == pytest.approx(distance.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_jacobian_is_held(dtype):
    rows = _rows(2, 16 * CHUNK, dtype)
    sizes = []

    class NewStorages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                if storage.data_ptr() != rows.untyped_storage().data_ptr():
                    sizes.append(storage.nbytes())
            return result

    with NewStorages():
        gram_matrix(rows)
    assert max(sizes) == 2 * CHUNK * 8  # one chunk in float64
    assert max(sizes) <= rows.nbytes / 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_refused_with_its_objective(value):
    rows = _rows(4, 100)
    rows[2, 50] = value
    with pytest.raises(ValueError, match="objective 2 is not finite"):
        gram_matrix(rows)


def test_a_jacobian_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \[M, d\], got \[5\]"):
        gram_matrix(torch.ones(5))


def test_a_jacobian_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"at least one row, got shape \[0, 5\]"):
        gram_matrix(torch.ones(0, 5))


def test_a_single_row_of_weight_one_comes_back_bit_for_bit():
    row = _rows(1, 1000)
    row[0, :2] = torch.tensor([0.0, -0.0])
    combined = combine(row, torch.ones(1, dtype=torch.float64))
    assert torch.equal(combined.view(torch.int32), row[0].view(torch.int32))
    assert combined.data_ptr() != row.data_ptr()


def test_rows_are_combined_by_their_weights_and_not_changed():
    rows = torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.0, 16.0]])
    before = rows.clone()
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert combine(rows, weights).tolist() == [1.5, 7.0]
    assert torch.equal(rows, before)


def test_weights_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"shape \[2\] for this Jacobian, got \[3\]"):
        combine(torch.ones(2, 4), torch.ones(3))
