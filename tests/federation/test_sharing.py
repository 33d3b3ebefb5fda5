import pytest
import torch

from firm.federation.fedcmoo.approx_gram import broadcast, two_way_reply
from firm.federation.sharing import (
    CorrectionRequest,
    JacobianRequest,
    correct_gram,
    share_jacobian,
    shared_columns,
)
from firm.federation.training import served_objectives
from firm.gradients import (
    LowRankCompressor,
    message_from_dict,
    message_to_dict,
)


def _request(start, kind=JacobianRequest, **changes):
    fields = {"round": 1, "objectives": start.objectives, "adapter": start.adapter, "seed": 5}
    return kind(**fields, **changes)


def _first_jacobian(client, start, number=0):
    client.load(start.adapter)
    batch = list(client.batches(number + 1))[number]
    return client.gradients(batch.whole).jacobian


@pytest.mark.parametrize("num_skipped", [0, 2])
def test_the_jacobian_is_that_of_the_batch_that_training_draws_next(new_client, start, num_skipped):
    content = share_jacobian(new_client(), _request(start, skipped_batches=num_skipped))
    expected = _first_jacobian(new_client(), start, num_skipped)
    assert torch.equal(content.jacobian, expected)
    assert content.served == [0, 1]
    assert content.message is None
    assert content.start_losses is None


def test_only_shared_columns_and_served_rows_travel(new_plain_client, start):
    targets = [[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]
    client = new_plain_client("a", targets, sums=True, served=(1,))
    content = share_jacobian(client, _request(start))
    assert content.jacobian.shape == (2, 2)
    assert torch.equal(content.jacobian[0], torch.zeros(2))
    torch.testing.assert_close(content.jacobian[1], torch.tensor([0.1, -2.8]))
    assert content.served == [1]


def test_a_batch_without_losses_of_an_objective_says_so(new_plain_client, start):
    targets = [[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]
    content = share_jacobian(new_plain_client("a", targets, scored=(1,)), _request(start))
    assert (content.served, content.scored, content.in_batch) == ([0, 1], [1], [1])
    whole = share_jacobian(new_plain_client("a", targets, scored=(0, 1)), _request(start))
    assert (whole.scored, whole.in_batch) == (None, [0, 1])


def test_losses_travel_when_asked(new_client, start):
    client = new_client()
    content = share_jacobian(client, _request(start, share_losses=True))
    assert content.start_losses == client.losses().tolist()


def test_a_message_is_the_compressed_jacobian_and_repeats_itself(new_client, start, same):
    request = _request(start, compressor="quantizing", budget=2.0)
    first = share_jacobian(new_client(), request).message
    assert same(first, share_jacobian(new_client(), request).message)
    other = share_jacobian(new_client("b", stream_name="client_0"), request).message
    assert not same(first, other)  # the clients' rounding is independent
    truth = _first_jacobian(new_client(), start)
    error = (message_from_dict(first).reconstruct() - truth).abs().max()
    assert 0 < error < 0.2 * truth.abs().max()


def test_the_correction_is_of_the_message_that_was_sent(new_client, start):
    asked = {"compressor": "low_rank", "budget": 2.0}
    message = message_from_dict(share_jacobian(new_client(), _request(start, **asked)).message)
    answer = broadcast([message], LowRankCompressor(6), generator=torch.Generator())
    request = _request(start, CorrectionRequest, **asked, broadcast=message_to_dict(answer))
    content = correct_gram(new_client(), request)
    expected = two_way_reply(_first_jacobian(new_client(), start), message, answer)
    torch.testing.assert_close(content.own_gram, expected.own_gram)
    torch.testing.assert_close(content.correction, expected.correction)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (0.1, "an upload budget of 0.1 times"),
        (1.0, "a budget of 3 numbers is too small"),
    ],
)
def test_a_budget_without_a_rank_is_refused(new_client, start, budget, message):
    with pytest.raises(ValueError, match=message):
        share_jacobian(new_client(), _request(start, compressor="low_rank", budget=budget))


def test_everything_is_served_and_shared_unless_a_client_says_otherwise(new_client, start):
    client = new_client()
    assert served_objectives(client) == (0, 1)
    assert shared_columns(client, start.adapter) == slice(0, 3)
