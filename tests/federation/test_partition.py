from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firm.federation import dirichlet_partition, iid_partition
from firm.federation.partition import (
    balanced_dirichlet_partition,
    natural_partition,
    shard_partition,
    split_shard,
)


@given(num_clients=st.integers(1, 12), extra=st.integers(0, 60), seed=st.integers(0, 99))
def test_an_iid_partition_gives_each_example_to_one_client_in_even_shards(num_clients, extra, seed):
    num_examples = num_clients + extra
    shards = iid_partition(num_examples, num_clients, seed=seed)
    assert sorted(index for shard in shards for index in shard) == list(range(num_examples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(shard == sorted(shard) for shard in shards)


@given(
    num_clients=st.integers(1, 8),
    labels=st.lists(st.sampled_from("abc"), min_size=24, max_size=80),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    min_examples=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_dirichlet_partition_gives_each_example_to_one_client_and_each_client_enough(
    num_clients, labels, alpha, min_examples, seed
):
    shards = dirichlet_partition(
        labels, num_clients, alpha=alpha, seed=seed, min_examples=min_examples
    )
    assert len(shards) == num_clients
    assert sorted(index for shard in shards for index in shard) == list(range(len(labels)))
    assert min(map(len, shards)) >= min_examples
    assert all(shard == sorted(shard) for shard in shards)


def test_small_alpha_separates_labels_and_large_alpha_mixes_them():
    labels = [index % 4 for index in range(4000)]

    def unevenness(alpha):
        shards = dirichlet_partition(labels, 8, alpha=alpha, seed=0)
        counts = [Counter(labels[index] for index in shard) for shard in shards]
        return np.std([[count[label] for label in range(4)] for count in counts])

    assert unevenness(1000.0) < 10 < 100 < unevenness(0.1)


def test_the_seed_decides():
    labels = [index % 3 for index in range(60)]
    for partition in (
        lambda seed: iid_partition(60, 4, seed=seed),
        lambda seed: dirichlet_partition(labels, 4, alpha=1.0, seed=seed),
        lambda seed: balanced_dirichlet_partition(labels, 4, alpha=1.0, seed=seed),
        lambda seed: shard_partition(labels, 4, shards_per_client=2, seed=seed),
        lambda seed: natural_partition(range(60), 4, seed=seed),
        lambda seed: split_shard(range(60), (0.5, 0.5), seed=seed),
    ):
        assert partition(0) == partition(0)
        assert partition(0) != partition(1)


@pytest.mark.parametrize(
    "partition",
    [
        lambda count, **options: iid_partition(count, 4, seed=0, **options),
        lambda count, **options: dirichlet_partition(
            ["a"] * count, 4, alpha=1.0, seed=0, **options
        ),
    ],
)
def test_too_few_examples_are_refused_with_a_remedy(partition):
    with pytest.raises(ValueError, match=r"3 examples cannot give 4 clients .* use fewer clients"):
        partition(3)
    with pytest.raises(ValueError, match="at least 2 each"):
        partition(7, min_examples=2)
    with pytest.raises(ValueError, match="min_examples 0"):
        partition(7, min_examples=0)
    assert [len(shard) for shard in partition(8, min_examples=2)] == [2, 2, 2, 2]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("partition", [dirichlet_partition, balanced_dirichlet_partition])
def test_alpha_out_of_range_is_refused(alpha, partition):
    with pytest.raises(ValueError, match="alpha must be positive"):
        partition(["a"] * 9, 2, alpha=alpha, seed=0)


@given(
    num_clients=st.integers(1, 8),
    labels=st.lists(st.sampled_from("abc"), min_size=24, max_size=80),
    alpha=st.sampled_from([1e-4, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_a_balanced_dirichlet_partition_gives_every_client_as_many_examples(
    num_clients, labels, alpha, seed
):
    shards = balanced_dirichlet_partition(labels, num_clients, alpha=alpha, seed=seed)
    assert [len(shard) for shard in shards] == [len(labels) // num_clients] * num_clients
    together = [index for shard in shards for index in shard]
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(len(labels)))
    assert all(shard == sorted(shard) for shard in shards)


def test_the_shares_of_a_balanced_dirichlet_partition_are_dirichlet():
    # Var(p) = (1/L)(1 - 1/L) / (L alpha + 1) for L equal labels; only the last draws find one empty
    labels = [index % 4 for index in range(50_000)]
    for alpha in (0.3, 3.0):
        shards = balanced_dirichlet_partition(labels, 1000, alpha=alpha, seed=0)
        shares = np.array(
            [np.bincount([labels[i] for i in shard], minlength=4) for shard in shards]
        )
        p = shares / 50
        sampling = (p * (1 - p)).mean() / 49  # of 50 draws from each client's shares
        assert p.var() - sampling == pytest.approx(0.25 * 0.75 / (4 * alpha + 1), rel=0.15)


@given(
    num_clients=st.integers(1, 6),
    shards_per_client=st.integers(1, 4),
    labels=st.lists(st.integers(0, 3), min_size=24, max_size=80),
    seed=st.integers(0, 99),
)
def test_a_shard_partition_gives_each_example_to_one_client(
    num_clients, shards_per_client, labels, seed
):
    shards = shard_partition(labels, num_clients, shards_per_client=shards_per_client, seed=seed)
    assert len(shards) == num_clients
    assert sorted(index for shard in shards for index in shard) == list(range(len(labels)))
    assert all(shard == sorted(shard) for shard in shards)
    if num_clients * shards_per_client >= len(set(labels)):
        assert max(len({labels[i] for i in shard}) for shard in shards) <= shards_per_client


@pytest.mark.parametrize("counts", [[500] * 10, [592, 674, 596, 613, 584, 542, 592, 626, 585, 595]])
def test_no_client_has_more_labels_than_shards_and_sizes_are_nearly_equal(counts):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), counts))
    shards = shard_partition(labels, 10, shards_per_client=5, seed=0)
    assert max(len({labels[i] for i in shard}) for shard in shards) <= 5
    sizes = [len(shard) for shard in shards]
    if len(set(counts)) == 1:  # the 500 shards of FedMGDA+, smaller
        assert sizes == [500] * 10
    assert max(sizes) - min(sizes) < 0.15 * np.mean(sizes)


def test_a_label_gets_shards_in_proportion_to_its_examples():
    shards = shard_partition([0] * 900 + [1] * 100, 2, shards_per_client=5, seed=0)
    assert [len(shard) for shard in shards] == [500, 500]


def test_shards_hold_neighbouring_labels_where_there_are_more_labels_than_shards():
    labels = [index % 100 for index in range(1000)]
    shards = shard_partition(labels, 10, shards_per_client=2, seed=0)
    assert [len({labels[i] for i in shard}) for shard in shards] == [10] * 10
    assert all(len(shard) == 100 for shard in shards)


def test_a_shard_partition_needs_a_shard_for_each_client_and_an_example_for_each_shard():
    with pytest.raises(ValueError, match="shards_per_client must be at least 1, got 0"):
        shard_partition([0] * 9, 3, shards_per_client=0, seed=0)
    with pytest.raises(ValueError, match="9 examples cannot give 5 clients at least 2"):
        shard_partition([0] * 9, 5, shards_per_client=2, seed=0)


def test_a_natural_partition_gives_each_client_its_own():
    clients = ["b", "a", "b", "c", "a", "b"]
    assert natural_partition(clients, seed=0) == [[0, 2, 5], [1, 4], [3]]
    assert natural_partition(clients, seed=0, min_examples=2) == [[0, 2, 5], [1, 4]]


@given(num_clients=st.integers(1, 6), seed=st.integers(0, 20))
def test_a_natural_partition_draws_among_the_clients_with_enough_examples(num_clients, seed):
    clients = [index // 3 for index in range(18)] + [99]
    shards = natural_partition(clients, num_clients, seed=seed, min_examples=3)
    assert len(shards) == num_clients
    assert shards == sorted(shards)
    assert all(len({clients[i] for i in shard}) == 1 and len(shard) == 3 for shard in shards)


def test_too_few_natural_clients_are_refused():
    for options in ({"num_clients": 3}, {"num_clients": 0}, {"min_examples": 5}):
        with pytest.raises(ValueError, match="natural clients have at least"):
            natural_partition(["a", "b", "a", "b"], **{"seed": 0, **options})


@pytest.mark.parametrize(
    "partition",
    [
        lambda labels: dirichlet_partition(labels, 4, alpha=0.5, seed=0),
        lambda labels: balanced_dirichlet_partition(labels, 4, alpha=0.5, seed=0),
        lambda labels: shard_partition(labels, 4, shards_per_client=2, seed=0),
        lambda labels: natural_partition(labels, 4, seed=0),
    ],
)
def test_labels_may_come_as_a_list_an_array_or_a_tensor(partition):
    labels = [index * 7 % 5 for index in range(60)]
    expected = partition(labels)
    assert partition(np.array(labels)) == partition(torch.tensor(labels)) == expected


def test_a_shard_is_split_in_parts_of_the_wanted_sizes():
    shard = list(range(100, 600))
    parts = split_shard(shard, (0.8, 0.1, 0.1), seed=0)
    assert [len(part) for part in parts] == [400, 50, 50]
    assert sorted(index for part in parts for index in part) == shard
    assert all(part == sorted(part) for part in parts)
    assert parts[0] != shard[:400]


def test_a_split_without_training_examples_or_shares_is_refused():
    with pytest.raises(ValueError, match="a shard of 0 examples leaves none for the first part"):
        split_shard([], (0.8, 0.2), seed=0)
    for fractions in ((0.8, 0.1), (1.5, -0.5), ()):
        with pytest.raises(ValueError, match="fractions must be non-negative and sum to 1"):
            split_shard([1, 2], fractions, seed=0)
