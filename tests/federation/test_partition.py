from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.federation import dirichlet_partition, iid_partition


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
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be positive"):
        dirichlet_partition(["a"] * 9, 2, alpha=alpha, seed=0)
