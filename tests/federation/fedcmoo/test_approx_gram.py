import pytest
import torch

from firm.federation.fedcmoo.approx_gram import (
    TwoWayReply,
    broadcast,
    inner_products,
    one_way_gram,
    project_to_psd,
    two_sample_gram,
    two_way_gram,
    two_way_reply,
)
from firm.gradients import gram_matrix
from firm.gradients.compression import (
    LowRankCompressor,
    RandomMaskCompressor,
    TopKCompressor,
)
from firm.gradients.jacobian import CHUNK
from firm.gradients.messages import COMPRESSORS
from firm.gradients.quantization import QuantizingCompressor
from firm.gradients.sketch import CountSketchCompressor, HybridCompressor
from tests.draws import draw_rows, new_generator

LOSSLESS = TopKCompressor(10_000)
SKETCHES = ("count_sketch", "hybrid")


def _clients(number, num_objectives=3, num_parameters=300):
    """Jacobians that share a part, so that sums do not vanish."""
    common = 0.5 * draw_rows(num_objectives, num_parameters, seed=99)
    return [common + draw_rows(num_objectives, num_parameters, seed=i) for i in range(number)]


def _compress(compressor, jacobians, seed=0, shared_seed=0):
    generator = new_generator(seed)
    return [
        compressor.compress(jacobian, generator=generator, shared_seed=shared_seed)
        for jacobian in jacobians
    ]


def _truth(jacobians):
    return gram_matrix(torch.stack(jacobians).double().mean(dim=0))


def _error(truth, estimate):
    return torch.linalg.matrix_norm(truth - estimate) / torch.linalg.matrix_norm(truth)


def _two_way(compressor, jacobians, *, answer_by=None):
    messages = _compress(compressor, jacobians)
    answer = broadcast(messages, answer_by or compressor, generator=new_generator(7))
    replies = [two_way_reply(j, m, answer) for j, m in zip(jacobians, messages, strict=True)]
    return two_way_gram(messages, replies)


def test_one_way_by_hand():
    jacobians = [torch.tensor([[4.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 0.0], [2.0, 2.0]])]
    # the mean Jacobian is [[3, 0], [1, 2]]
    assert one_way_gram(_compress(LOSSLESS, jacobians)).tolist() == [[9, 3], [3, 5]]


@pytest.mark.parametrize("compressor", [LOSSLESS, CountSketchCompressor(900)])
def test_messages_without_loss_give_the_gram_matrix_of_the_mean(compressor):
    jacobians = _clients(4)
    assert _error(_truth(jacobians), one_way_gram(_compress(compressor, jacobians))) < 1e-6


@pytest.mark.parametrize("name", SKETCHES)
def test_sketches_do_not_go_two_ways(name):
    messages = _compress(COMPRESSORS[name](), _clients(2))
    with pytest.raises(ValueError, match="Message does not support two-way communication"):
        broadcast(messages, LOSSLESS, generator=new_generator())
    with pytest.raises(ValueError, match="Message does not support two-way communication"):
        two_way_gram(messages, [])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_estimates_are_symmetric_positive_semidefinite_and_blind_to_the_order(name):
    jacobians = _clients(5)
    messages = _compress(COMPRESSORS[name](), jacobians)
    estimates = [one_way_gram(messages)]
    torch.testing.assert_close(one_way_gram(messages[::-1]), estimates[0], rtol=1e-5, atol=1e-5)
    if name not in SKETCHES:
        estimates.append(_two_way(COMPRESSORS[name](), jacobians))
    for gram in estimates:
        assert gram.dtype == torch.float64
        assert torch.equal(gram, gram.T)
        assert torch.linalg.eigvalsh(gram)[0] > -1e-12 * gram.diagonal().max()


@pytest.mark.parametrize(
    "compressor", [LowRankCompressor(), TopKCompressor(150), RandomMaskCompressor(400)]
)
def test_two_ways_leave_only_the_last_term_of_equation_13(compressor):
    jacobians = _clients(4)
    estimate = _two_way(compressor, jacobians, answer_by=LOSSLESS)
    errors = [
        jacobian - message.reconstruct()
        for jacobian, message in zip(jacobians, _compress(compressor, jacobians), strict=True)
    ]
    total = sum(errors)
    neglected = gram_matrix(total) - sum(gram_matrix(error) for error in errors)
    assert torch.linalg.eigvalsh(_truth(jacobians) - neglected / 16)[0] > 0  # nothing to project
    torch.testing.assert_close(estimate, _truth(jacobians) - neglected / 16, rtol=1e-4, atol=1e-4)


def test_the_recompressed_answer_moves_only_the_correction():
    jacobians = _clients(4)
    messages = _compress(TopKCompressor(150), jacobians)
    answer = broadcast(messages, TopKCompressor(150), generator=new_generator())
    total = sum(message.reconstruct() for message in messages)
    flat = total.flatten().abs()
    kept = torch.where(flat >= flat.topk(len(answer.values)).values[-1], total.flatten(), 0.0)
    torch.testing.assert_close(answer.reconstruct().flatten(), kept)
    reply = two_way_reply(jacobians[1], messages[1], answer)
    sent = messages[1].reconstruct().double()
    expected = (jacobians[1] - sent) @ (answer.reconstruct() - sent).T
    torch.testing.assert_close(reply.correction, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(reply.own_gram, gram_matrix(jacobians[1]))
    assert reply.num_bytes == 2 * 9 * 8


@pytest.mark.parametrize("compressor", [TopKCompressor(100), LowRankCompressor()])
def test_one_client_alone_is_exact_after_two_ways(compressor):
    (jacobian,) = _clients(1)  # h = H, because neither compressor loses on what it has sent
    torch.testing.assert_close(
        _two_way(compressor, [jacobian]), gram_matrix(jacobian), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("compressor", [LowRankCompressor(), TopKCompressor(100)])
def test_two_ways_are_better_than_one(compressor):
    jacobians = _clients(6)
    truth = _truth(jacobians)
    one_way = _error(truth, one_way_gram(_compress(compressor, jacobians)))
    assert _error(truth, _two_way(compressor, jacobians)) < 0.6 * one_way


def test_identical_clients_without_loss_are_one_client():
    jacobian = draw_rows(3, 300)
    truth = gram_matrix(jacobian)
    assert _error(truth, _two_way(LOSSLESS, [jacobian] * 5)) < 1e-6
    assert _error(truth, one_way_gram(_compress(LOSSLESS, [jacobian] * 5))) < 1e-6


def test_two_samples_by_hand():
    first = _compress(LOSSLESS, [torch.tensor([[2.0, 0.0], [0.0, 4.0]])])
    second = _compress(
        LOSSLESS, [torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 2.0], [2.0, 1.0]])]
    )
    # [[2, 0], [0, 4]] times the transpose of [[2, 2], [1, 1]]
    assert two_sample_gram(first, second).tolist() == [[4, 2], [8, 4]]


@pytest.mark.parametrize(
    "compressor",
    [
        QuantizingCompressor(bits=2, bucket=8),
        RandomMaskCompressor(scaling="inverse_probability"),
        CountSketchCompressor(),
        HybridCompressor(),
    ],
)
def test_two_samples_are_unbiased_where_the_messages_are(compressor):
    jacobians = _clients(2, num_objectives=2, num_parameters=100)
    truth, estimates = _truth(jacobians), []
    for s in range(600):
        first = _compress(compressor, jacobians, seed=2 * s, shared_seed=s)
        second = _compress(compressor, jacobians, seed=2 * s + 1, shared_seed=s)
        estimates.append(two_sample_gram(first, second))
    mean, spread = torch.stack(estimates).mean(dim=0), torch.stack(estimates).std(dim=0)
    assert ((mean - truth).abs() < 4 * spread / 600**0.5).all()
    assert (spread < truth.diagonal().max()).all()  # else the line above would say nothing


def test_negative_eigenvalues_become_zero_by_hand():
    assert torch.allclose(
        project_to_psd(torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
        torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64),
    )
    gram = gram_matrix(draw_rows(3, 10))
    assert torch.equal(project_to_psd(gram), gram)


def test_an_indefinite_two_way_estimate_is_projected():
    messages = _compress(TopKCompressor(4), [torch.eye(2)] * 2)
    own_gram = torch.zeros(2, 2, dtype=torch.float64)
    # Σ_{i≠j} H_i H_jᵀ is 2 I; corrections of -1 and 3 on the first row make [[-1, 3], [3, 2]]
    replies = [
        TwoWayReply(own_gram, torch.tensor([[-1.0, 3.0], [0.0, 0.0]]).double()),
        TwoWayReply(own_gram, torch.tensor([[-0.5, 0.0], [0.0, 0.0]]).double()),
    ]
    indefinite = torch.tensor([[-1.0, 3.0], [3.0, 2.0]]).double() / 4
    torch.testing.assert_close(two_way_gram(messages, replies), project_to_psd(indefinite))


def test_inner_products_are_float64_sums_over_all_chunks():
    first, second = draw_rows(2, 2 * CHUNK + 3), draw_rows(3, 2 * CHUNK + 3, seed=1)
    exact = first.double() @ second.double().T
    torch.testing.assert_close(inner_products(first, second), exact, rtol=1e-12, atol=1e-9)


def test_messages_that_do_not_belong_together_are_refused():
    jacobians = _clients(2)
    with pytest.raises(ValueError, match="messages is empty"):
        one_way_gram([])
    with pytest.raises(ValueError, match="messages is empty"):
        broadcast([], LOSSLESS, generator=new_generator())
    sketches = [
        CountSketchCompressor().compress(jacobians[0], generator=new_generator(), shared_seed=s)
        for s in (1, 2)
    ]
    with pytest.raises(ValueError, match="shared_seed: message 0 has 1, message 1 has 2"):
        one_way_gram(sketches)
    with pytest.raises(ValueError, match="shared_seed: message 0 has 1, message 1 has 2"):
        two_sample_gram(sketches[:1], sketches[1:])
    with pytest.raises(ValueError, match=r"shape \[M, d\]: message 0 has \[3, 300\]"):
        one_way_gram(_compress(LOSSLESS, [jacobians[0], jacobians[1][:2]]))
    with pytest.raises(ValueError, match="kind: message 0 has TopKMessage, message 2 has LowRank"):
        one_way_gram(_compress(LOSSLESS, jacobians) + _compress(LowRankCompressor(), jacobians))
    with pytest.raises(ValueError, match=r"sketch: message 0 has \[3, 100\], message 1 has"):
        one_way_gram(
            [
                *_compress(CountSketchCompressor(), jacobians[:1]),
                *_compress(CountSketchCompressor(150), jacobians[1:]),
            ]
        )


def test_shapes_and_numbers_of_messages_are_checked():
    messages = _compress(LOSSLESS, _clients(2))
    with pytest.raises(ValueError, match=r"one shape, got \[2, 300\]"):
        two_way_reply(_clients(1)[0][:2], messages[0], messages[0])
    with pytest.raises(ValueError, match="second is empty"):
        two_sample_gram(messages, [])
