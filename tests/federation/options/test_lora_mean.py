"""The mean of LoRA's products: what it is, what it does not depend on, and what it costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lora_errors import averaging_error, truncation_error
from firm.federation.aggregation import weighted_mean
from firm.federation.options.lora_mean import lora_pairs, product_mean
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import (
    AflConfig,
    FedAvgConfig,
    FedCmooConfig,
    FedMgdaConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
)

A, B = "layer.q.lora_A.weight", "layer.q.lora_B.weight"
RANK, NUM_IN, NUM_OUT = 3, 10, 7

seeds = st.integers(0, 2**31 - 1)
scales = st.sampled_from([1e-4, 0.1, 1.0, 30.0])


def adapter_of(seed, *, scale_b=0.1, rank=RANK, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return {A: normal(rank, NUM_IN), B: scale_b * normal(NUM_OUT, rank), "bias": normal(2)}


def clients_of(seed, *, num_clients=4, spread=0.1, **options):
    """Adapters about a common one."""
    start = adapter_of(seed, **options)
    parts = [adapter_of(seed + 1 + index, **options) for index in range(num_clients)]
    return [{name: start[name] + spread * part[name] for name in start} for part in parts]


def product(adapter):
    return adapter[B].double() @ adapter[A].double()


def mean_product(adapters, weights):
    """By hand, as a whole matrix [out, in]."""
    terms = [weight * product(adapter) for adapter, weight in zip(adapters, weights, strict=True)]
    return torch.stack(terms).sum(dim=0) / sum(weights)


def best_approximation(matrix, rank):
    u, sizes, vh = torch.linalg.svd(matrix)
    return u[:, :rank] @ torch.diag(sizes[:rank]) @ vh[:rank]


def assert_same(adapter, other, **tolerance):
    assert list(adapter) == list(other)
    for name in adapter:
        torch.testing.assert_close(adapter[name], other[name], **tolerance)


@given(seeds, scales, st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_equal_adapters_come_back_equal(seed, scale_b, num_clients):
    adapter = adapter_of(seed, scale_b=scale_b)
    mean = product_mean([adapter] * num_clients, [1.0 + i for i in range(num_clients)])
    assert_same(mean, adapter, rtol=1e-6, atol=1e-8 * max(1.0, scale_b))


@pytest.mark.parametrize("rank_of_b", [0, 1, 2])
def test_equal_adapters_come_back_equal_where_b_is_zero_or_of_small_rank(rank_of_b):
    adapter = adapter_of(0)
    adapter[B][:, rank_of_b:] = 0.0  # a fresh adapter has B = 0
    assert_same(product_mean([adapter] * 3, [1, 1, 1]), adapter, rtol=1e-9, atol=1e-12)


@given(seeds, st.sampled_from([0.01, 0.3, 3.0]))
@settings(max_examples=30, deadline=None)
def test_the_product_is_the_mean_products_best_approximation_of_rank_r(seed, spread):
    clients, weights = clients_of(seed, spread=spread), [1, 2, 0.5, 3]
    expected = best_approximation(mean_product(clients, weights), RANK)
    mean = product_mean(clients, weights)
    torch.testing.assert_close(product(mean), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(mean["bias"], weighted_mean(clients, weights)["bias"])


def conditioned_clients(seed, num_clients=4, spread=0.1):
    """Clients whose layer has two further matrices of B."""
    rest = [
        clients_of(seed + 100 * index, num_clients=num_clients, spread=spread) for index in (1, 2)
    ]
    further = ["layer.q.lora_B1.weight", "layer.q.lora_B2.weight"]
    return [
        {
            A: own[A],
            B: own[B],
            **{name: part[index][B] for name, part in zip(further, rest, strict=True)},
            "bias": own["bias"],
        }
        for index, own in enumerate(clients_of(seed, num_clients=num_clients, spread=spread))
    ]


@given(seed=seeds)
def test_all_products_of_a_conditioned_adapter_are_averaged_at_once(seed):
    clients, weights = conditioned_clients(seed), [1.0, 2.0, 3.0, 4.0]
    names = [name for name in clients[0] if "lora_B" in name]
    terms = [
        weight * torch.cat([own[name] for name in names]) @ own[A]
        for own, weight in zip(clients, weights, strict=True)
    ]
    expected = best_approximation(torch.stack(terms).sum(0) / sum(weights), RANK)
    mean = product_mean(clients, weights)
    assert list(mean) == list(clients[0])
    assert {name: value.shape for name, value in mean.items()} == {
        name: value.shape for name, value in clients[0].items()
    }
    products = torch.cat([mean[name] for name in names]) @ mean[A]
    torch.testing.assert_close(products, expected, rtol=1e-8, atol=1e-10)


def test_a_mean_product_of_rank_r_is_kept_exactly():
    shared = adapter_of(0)  # one A for all: the mean of B is exact, and both ways agree
    clients = [{**adapter_of(seed), A: shared[A]} for seed in range(1, 5)]
    mean = product_mean(clients, [1, 1, 2, 1])
    assert_same(mean, weighted_mean(clients, [1, 1, 2, 1]), rtol=1e-9, atol=1e-10)
    assert truncation_error(clients, [1] * 4) == pytest.approx(0, abs=1e-12)
    assert averaging_error(clients, [1] * 4) == pytest.approx(0, abs=1e-12)


def test_the_order_of_clients_does_not_matter():
    clients, weights, order = clients_of(5), [1.0, 2.0, 0.5, 3.0], [2, 0, 3, 1]
    mean = product_mean(clients, weights)
    again = product_mean([clients[i] for i in order], [weights[i] for i in order])
    assert_same(again, mean, rtol=1e-9, atol=1e-11)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_the_coordinates_of_a_clients_factors_do_not_matter_to_the_product(seed):
    clients, weights = clients_of(seed), [1, 1, 2, 1]
    generator = torch.Generator().manual_seed(seed)
    turned = []
    for client in clients:
        noise = torch.randn(RANK, RANK, generator=generator, dtype=torch.float64)
        q = torch.linalg.qr(noise).Q
        turned.append({**client, A: q.T @ client[A], B: client[B] @ q})
    ours, theirs = product_mean(clients, weights), product_mean(turned, weights)
    torch.testing.assert_close(product(theirs), product(ours), rtol=1e-8, atol=1e-9)
    plain = [product(weighted_mean(which, weights)) for which in (clients, turned)]
    assert (plain[0] - plain[1]).norm() > 0.1 * plain[0].norm()  # which plain means cannot say


def test_the_factors_stay_near_the_plain_means():
    clients = clients_of(3, spread=0.05)
    mean, plain = product_mean(clients, [1] * 4), weighted_mean(clients, [1] * 4)
    for name in (A, B):
        assert (mean[name] - plain[name]).norm() < 0.02 * plain[name].norm()


def test_a_direction_that_the_mean_a_lacks_is_shared_by_both_factors():
    """Two clients whose A cancel: a mean A of zero would need an infinite B."""
    client = adapter_of(1, rank=1)
    other = {**client, A: -client[A], B: -client[B]}
    mean = product_mean([client, other], [1, 1])
    torch.testing.assert_close(product(mean), product(client))
    assert mean[A].norm().item() == pytest.approx(mean[B].norm().item())


def test_errors_are_those_of_the_whole_matrices():
    clients, weights = clients_of(2, spread=0.5), [1, 2, 1, 1]
    exact = mean_product(clients, weights)
    lost = exact - best_approximation(exact, RANK)
    expected = (lost.norm() / exact.norm()).item()
    assert truncation_error(clients, weights) == pytest.approx(expected)
    off = product(weighted_mean(clients, weights)) - exact
    assert averaging_error(clients, weights) == pytest.approx((off.norm() / exact.norm()).item())
    assert truncation_error(clients, weights) < averaging_error(clients, weights)
    zero = {name: torch.zeros_like(value) for name, value in clients[0].items()}
    assert truncation_error([zero], [1]) == averaging_error([zero], [1]) == 0.0


def test_types_stay_and_nothing_is_changed():
    clients = clients_of(4, dtype=torch.float32)
    kept = [{name: value.clone() for name, value in client.items()} for client in clients]
    mean = product_mean(clients, [1] * 4)
    assert {value.dtype for value in mean.values()} == {torch.float32}
    for client, before in zip(clients, kept, strict=True):
        assert_same(client, before, rtol=0, atol=0)


def test_a_rank_above_the_layers_size_works():
    clients = clients_of(6, rank=12)
    expected = mean_product(clients, [1] * 4)
    torch.testing.assert_close(product(product_mean(clients, [1] * 4)), expected)


def test_pairs_are_found_by_pefts_names():
    weight = torch.zeros(2, 2)
    names = ["x.lora_B.default.weight", "x.lora_A.default.weight", A, B, "x.lora_B.bias", "head"]
    names += ["e.lora_embedding_A", "e.lora_embedding_B"]
    pairs = lora_pairs(dict.fromkeys(names, weight))
    found = [(pair.a, pair.b) for pair in pairs]
    assert found == [("x.lora_A.default.weight", "x.lora_B.default.weight"), (A, B)]


@pytest.mark.parametrize(("name", "partner"), [(A, B), (B, A)])
def test_a_factor_without_its_partner_is_refused_by_name(name, partner):
    with pytest.raises(ValueError, match=f"'{name}' has no partner '{partner}'.* to factors"):
        lora_pairs({name: torch.zeros(2, 2)})


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"got \[3, 4\] and \[5, 2\]; set lora_mean to factors"):
        lora_pairs({A: torch.zeros(3, 4), B: torch.zeros(5, 2)})


def test_an_adapter_without_pairs_is_refused():
    with pytest.raises(
        ValueError, match=r"no pairs of lora_A and lora_B .* first parameter is 'bias'"
    ):
        product_mean([{"bias": torch.zeros(2)}], [1])


# --- The option -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "config"),
    [(firm_round, FirmConfig), (fedavg, FedAvgConfig), (fedcmoo, FedCmooConfig)],
)
def test_strategies_that_average_hand_the_option_on(
    strategy, config, new_client, start, run_rounds
):
    """The quadratic clients have no LoRA layers, which the mean of products refuses."""
    options = {"compressor": "none", "communication": "one_way"} if strategy is fedcmoo else {}
    clients = [new_client("a"), new_client("b")]
    run_rounds(strategy, clients, start, config(**options))
    with pytest.raises(ValueError, match="no pairs of lora_A and lora_B"):
        run_rounds(strategy, clients, start, config(lora_mean="products", **options))


@pytest.mark.parametrize("config", [AflConfig, FedMgdaConfig, QFedAvgConfig, FsmgdaConfig])
def test_strategies_that_combine_updates_otherwise_refuse_products(config):
    with pytest.raises(
        ValueError, match="lora_mean requires a strategy that averages the clients'"
    ):
        config(lora_mean="products")
    assert config().lora_mean == "factors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_learning_rate": 0.5}, "server_learning_rate must be 1, got 0.5"),
        ({"normalize_updates": True}, "normalize_updates must be false"),
        ({"decay": 0.9}, "decay must be 1, got 0.9"),
    ],
)
def test_products_are_for_the_mean_itself(options, message):
    with pytest.raises(ValueError, match=message):
        FedAvgConfig(lora_mean="products", **options)
    FedAvgConfig(**options)
    with pytest.raises(ValueError, match="lora_mean must be one of factors, products, got 'sums'"):
        FirmConfig(lora_mean="sums")
