import pytest
import torch

from firm.gradients.quantization import (
    CHUNK,
    QuantizedMessage,
    QuantizingCompressor,
    _pack,
    _unpack,
)
from tests.draws import draw_rows, new_generator


def _draws(compressor, jacobian, number):
    generator = new_generator(1)
    return torch.stack(
        [compressor.compress(jacobian, generator=generator).reconstruct() for _ in range(number)]
    )


def _bound(compressor, num_objectives, num_parameters):
    """The q of Assumption 5 for Jacobians of shape [M, d]."""
    budget = compressor.budget or num_parameters
    rate = compressor._rate(num_objectives, num_parameters, budget)
    return compressor._bound(*rate, num_parameters)


@pytest.mark.parametrize("bits", range(2, 17))
def test_codes_are_packed_without_loss(bits):
    codes = torch.randint(2**bits, (CHUNK + 13,), generator=new_generator(bits), dtype=torch.int32)
    packed = _pack(codes, bits)
    assert packed.numel() == -(-codes.numel() * bits // 8)
    assert torch.equal(_unpack(packed, codes.numel(), bits), codes)


def test_values_on_the_levels_come_back_exactly_by_hand():
    jacobian = torch.tensor([[2.0, -2.0, 0.0, 2.0], [0.0, 0.5, -0.5, 0.0]])
    message = QuantizingCompressor(budget=8, bits=2, bucket=4).compress(
        jacobian, generator=new_generator()
    )
    assert message.scales.tolist() == [[2.0], [0.5]]
    assert message.codes.tolist() == [0b10_00_01_10, 0b01_10_00_01]  # levels + 1, two bits each
    assert torch.equal(message.reconstruct(), jacobian)
    assert message.num_bytes == 2 + 4 * 2 + 8
    nothing = QuantizingCompressor(budget=8, bits=2, bucket=4).compress(
        torch.zeros(2, 4), generator=new_generator()
    )
    assert nothing.codes.tolist() == [0b01_01_01_01] * 2


# all entries at 4 and at 2 bits; a tenth of the columns, which 5 bits leave of M = 40
@pytest.mark.parametrize(
    ("jacobian", "compressor"),
    [
        (draw_rows(2, 30), QuantizingCompressor(bits=4, bucket=8)),
        (draw_rows(2, 30), QuantizingCompressor(bits=2, bucket=16)),
        (draw_rows(40, 60), QuantizingCompressor()),
    ],
)
def test_assumption_5_holds_for_every_objective(jacobian, compressor):
    number = 2000
    sent = _draws(compressor, jacobian, number)
    squared_norms = jacobian.square().sum(dim=1)
    q = (sent - jacobian).square().sum(dim=2).mean(dim=0) / squared_norms
    assert (q <= 1.05 * _bound(compressor, *jacobian.shape)).all()
    # what is left of the noise in the mean of so many unbiased draws
    bias = (sent.mean(dim=0) - jacobian).square().sum(dim=1) / squared_norms
    assert (bias < 2.5 * q / number).all()
    assert (bias > q / number / 5).all()


def test_the_bound_by_hand():
    # 2 bits: s = 1, √n/s = 4 below n/(4s²) = 4; all 30 columns are kept, so d/k = 1
    assert _bound(QuantizingCompressor(bits=2, bucket=16), 2, 30) == 4
    # 5 bits: s = 15; a budget of 60 numbers is 48 bits each: a scale and three entries
    expected = 60 / 3 * (1 + 3 / (4 * 15**2)) - 1
    assert _bound(QuantizingCompressor(bits=5), 40, 60) == pytest.approx(expected)


def test_the_bits_are_those_with_the_smallest_bound():
    for num_objectives in (2, 8, 40):
        chosen = QuantizingCompressor()
        message = chosen.compress(draw_rows(num_objectives, 1000), generator=new_generator())
        bounds = {
            bits: _bound(QuantizingCompressor(bits=bits), num_objectives, 1000)
            for bits in range(2, 17)
        }
        assert bounds[message.bits] == min(bounds.values())
        assert _bound(chosen, num_objectives, 1000) == min(bounds.values())


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 8, 14, 15, 40, 200])
@pytest.mark.parametrize("bits", [None, 2, 5])
@pytest.mark.parametrize("bucket", [1, 7, 128])
def test_the_budget_is_kept_and_nearly_used(num_objectives, bits, bucket):
    message = QuantizingCompressor(bits=bits, bucket=bucket).compress(
        draw_rows(num_objectives, 1001), generator=new_generator()
    )
    assert message.num_bytes <= 4 * 1001 + 8
    if message.num_kept < 1001:  # one more entry a row, and a scale for it, would not fit
        more = num_objectives * (message.bits + 32) / 8
        assert message.num_bytes + more > 4 * 1001


def test_rounding_takes_one_of_the_two_neighbouring_levels():
    jacobian = draw_rows(2, 64)
    compressor = QuantizingCompressor(bits=3, bucket=64)
    step = jacobian.abs().amax(dim=1, keepdim=True) / 3
    for sent in _draws(compressor, jacobian, 20):
        assert ((sent - jacobian).abs() < step * (1 + 1e-5)).all()
        assert torch.allclose((sent / step).round(), sent / step, atol=1e-4)


def test_a_budget_below_one_entry_is_refused():
    with pytest.raises(ValueError, match="2 numbers is too small for one entry of each of the 40"):
        QuantizingCompressor(2).compress(draw_rows(40, 100), generator=new_generator())


@pytest.mark.parametrize("bits", [1, 17])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits must be from 2 to 16 or None, got {bits}"):
        QuantizingCompressor(bits=bits)
    with pytest.raises(ValueError, match="bucket must be at least 1, got 0"):
        QuantizingCompressor(bucket=0)


def test_messages_that_do_not_fit_together_are_refused():
    good = QuantizingCompressor(bits=4).compress(draw_rows(2, 10), generator=new_generator())
    with pytest.raises(ValueError, match=r"codes must be uint8 of shape \[10\]"):
        QuantizedMessage(**{**vars(good), "codes": good.codes[:-1]})
    with pytest.raises(ValueError, match=r"scales must be float32 of shape \[2, 1\]"):
        QuantizedMessage(**{**vars(good), "scales": good.scales[:1]})
    with pytest.raises(ValueError, match=r"2 to 16 bits and 1 to 10 entries.*got 4 and 11"):
        QuantizedMessage(**{**vars(good), "num_kept": 11})
