import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from firm.federation import LocalEngine, RoundFailed, Update
from firm.federation.aggregation import update_length, weighted_mean
from firm.federation.attackers import Attacker
from firm.federation.options.robust import RobustConfig
from firm.federation.options.robust.krum import krum, krum_scores, squared_distances
from firm.federation.options.robust.median import coordinate_median
from firm.federation.options.robust.norm_clipping import clip_factors
from firm.federation.options.robust.normalization import normalization_factors
from firm.federation.options.robust.trimmed_mean import trimmed_mean
from firm.federation.options.robust.updates import robust_updates
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategies.fedcmoo import fedcmoo
from firm.federation.strategies.fedcmoo_pref import fedcmoo_pref
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy import StrategyConfig
from firm.federation.strategy_configs import (
    AflConfig,
    FedAvgConfig,
    FedCmooConfig,
    FedCmooPrefConfig,
    FedMgdaConfig,
    FirmConfig,
    FsmgdaConfig,
    QFedAvgConfig,
)

RULES = ["median", "trimmed_mean", "krum", "multi_krum", "norm_clipping", "normalization"]


def _start(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return {
        "b": torch.randn(2, 3, generator=generator).to(dtype),
        "a": (1e-4 * torch.randn(5, generator=generator)).to(dtype),
    }


def _near(start, *, seed, count, size=0.1):
    """Updates of clients c0, c1, ...: the start and as many normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Update(
            f"c{index}",
            {
                name: value + size * torch.randn(value.shape, generator=generator).to(value.dtype)
                for name, value in start.items()
            },
            10,
            {},
        )
        for index in range(count)
    ]


def _attacked(start, name, value=1e12):
    return Update(name, {key: torch.full_like(old, value) for key, old in start.items()}, 10, {})


def _mean(start, updates, rule, num_attackers=2):
    found, entry = robust_updates(start, updates, RobustConfig(rule, num_attackers))
    assert json.dumps(entry)
    return _plain_mean(found), entry["robust"]


def _plain_mean(updates):
    return weighted_mean([update.adapter for update in updates], [1] * len(updates))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_clients", [7, 8])
@pytest.mark.parametrize("rule", RULES)
def test_equal_updates_come_back_bit_for_bit(rule, num_clients, dtype, same):
    start = _start(dtype)
    (one,) = _near(start, seed=0, count=1)
    updates = [Update(f"c{i}", one.adapter, 3 + i, {}) for i in range(num_clients)]
    mean, _ = _mean(start, updates, rule)
    assert same(mean, one.adapter)
    unmoved, _ = _mean(start, [Update(f"c{i}", start, 1, {}) for i in range(7)], rule)
    assert same(unmoved, start)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_clients_changes_nothing(rule, same):
    start = _start()
    updates = [*_near(start, seed=1, count=6), _attacked(start, "c6", 5.0)]
    mean, told = _mean(start, updates, rule)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(updates))
        other, told_other = _mean(start, [updates[i] for i in order], rule)
        if rule in ("median", "trimmed_mean", "krum"):
            assert same(mean, other)
        for name in mean:
            torch.testing.assert_close(other[name], mean[name])
        for key, value in told.items():
            if isinstance(value, list):
                assert sorted(told_other[key]) == value
            elif isinstance(value, dict):
                assert told_other[key] == pytest.approx(value)


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
@pytest.mark.parametrize("places", [(0, 1), (3, 7), (6, 7)])
@pytest.mark.parametrize("values", [(1e12, 1e12), (-1e12, 3e12), (1e30, 3.0)])
def test_attackers_cannot_leave_the_range_of_the_honest(rule, places, values):
    start = _start()
    updates = _near(start, seed=2, count=8)
    for place, value in zip(places, values, strict=True):
        updates[place] = _attacked(start, f"c{place}", value)
    honest = [update for i, update in enumerate(updates) if i not in places]
    mean, told = _mean(start, updates, rule)
    plain = _plain_mean(updates)
    for name, value in mean.items():
        rows = torch.stack([update.adapter[name] for update in honest])
        assert (value >= rows.amin(0)).all()
        assert (value <= rows.amax(0)).all()
        assert not ((plain[name] >= rows.amin(0)) & (plain[name] <= rows.amax(0))).all()
    bad = {f"c{place}" for place in places}
    if "chosen" in told:
        assert not bad & set(told["chosen"])
        assert len(told["chosen"]) == (1 if rule == "krum" else 6)
        assert set(sorted(told["scores"], key=told["scores"].get)[-2:]) == bad
    elif rule == "trimmed_mean":
        assert {told["trimmed"][name] for name in bad} == {told["num_coordinates"]} == {11}
    else:
        assert set(sorted(told["distances"], key=told["distances"].get)[-2:]) == bad


@pytest.mark.parametrize("rule", ["norm_clipping", "normalization"])
def test_a_long_update_moves_the_mean_no_more_than_an_honest_length(rule):
    start = _start()
    updates = [*_near(start, seed=2, count=6), *(_attacked(start, f"c{i}") for i in (6, 7))]
    lengths = [update_length(start, update.adapter) for update in updates]
    mean, told = _mean(start, updates, rule)
    assert update_length(start, mean) <= max(lengths[:6])
    assert update_length(start, _plain_mean(updates)) > 1e11
    assert list(told["lengths"].values()) == lengths
    if rule == "norm_clipping":
        assert {"c6", "c7"} <= set(told["clipped"])
        assert told["clip_norm"] == pytest.approx(np.median(lengths))


def test_clipping_bounds_the_step_and_leaves_short_updates_as_they_are(same):
    start = _start()
    updates = _near(start, seed=4, count=5, size=0.01) + _near(start, seed=5, count=3, size=2.0)
    cfg = RobustConfig("norm_clipping", clip_norm=0.5)
    found, entry = robust_updates(start, updates, cfg)
    assert entry["robust"]["clip_norm"] == 0.5
    assert len(entry["robust"]["clipped"]) == 3
    for before, after in zip(updates[:5], found[:5], strict=True):
        assert same(before.adapter, after.adapter)
    for update in found[5:]:
        assert update_length(start, update.adapter) == pytest.approx(0.5, rel=1e-5)
    assert update_length(start, _plain_mean(found)) <= 0.5


def test_normalised_updates_have_one_length_and_their_own_directions():
    start = _start()
    updates = [*_near(start, seed=4, count=4), Update("still", start, 1, {})]
    found, entry = robust_updates(start, updates, RobustConfig("normalization"))
    length = entry["robust"]["length"]
    for before, after in zip(updates[:4], found[:4], strict=True):
        ratio = length / update_length(start, before.adapter)
        assert update_length(start, after.adapter) == pytest.approx(length, rel=1e-5)
        for name, value in start.items():
            expected = value + ratio * (before.adapter[name] - value)
            torch.testing.assert_close(after.adapter[name], expected)
    assert update_length(start, found[4].adapter) == 0


FINITE = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=9))
def test_medians_and_trimmed_means_agree_with_other_libraries(rows):
    matrix = torch.tensor(rows)
    median = coordinate_median(matrix)
    if len(rows) % 2:
        assert torch.equal(median, torch.median(matrix, dim=0).values.double())
    np.testing.assert_allclose(median.numpy(), np.median(matrix.double().numpy(), axis=0))
    for num_trimmed in range((len(rows) - 1) // 2 + 1):
        # SciPy cuts a share; half a value more than b is b for certain
        share = (num_trimmed + 0.5) / len(rows)
        expected = trim_mean(matrix.double().numpy(), min(share, 0.499999), axis=0)
        mean = trimmed_mean(matrix, num_trimmed)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_a_krum_score_by_hand():
    # on a line at 0, 1, 3, 7, 100 with f = 1: the sums of squares to the 2 nearest others
    squares = squared_distances(torch.tensor([[0.0], [1.0], [3.0], [7.0], [100.0]]))
    scores = krum_scores(squares, 1)
    assert scores.tolist() == [1 + 9, 1 + 4, 4 + 9, 16 + 36, 93**2 + 97**2]
    assert krum(squares, 1) == [1]
    assert krum(squares, 1, num_chosen=4) == [0, 1, 2, 3]


def test_distances_of_close_rows_far_from_zero_keep_their_digits():
    rows = torch.tensor([[1e4], [1e4 + 2**-9]])
    assert squared_distances(rows)[0, 1].item() == 2**-18


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 4))
def test_krum_picks_an_update_that_is_no_lone_outlier(seed, num_attackers, more):
    count = 2 * num_attackers + 3 + more
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 4, generator=generator)
    place = seed % count
    rows[place] += 1e3
    (chosen,) = krum(squared_distances(rows), num_attackers)
    assert chosen != place


def test_the_first_of_equal_scores_counts():
    squares = squared_distances(torch.ones(5, 2))
    assert krum(squares, 1) == [0]
    assert krum(squares, 1, num_chosen=3) == [0, 1, 2]


def test_factors_are_one_at_the_limit_and_never_stretch_a_clipped_update():
    lengths = torch.tensor([0.0, 1.0, 2.0, 4.0])
    assert clip_factors(lengths, 2.0).tolist() == [1.0, 1.0, 1.0, 0.5]
    assert clip_factors(lengths).tolist() == [1.0, 1.0, 0.75, 0.375]  # the median is 1.5
    assert normalization_factors(lengths).tolist() == [0.0, 1.5, 0.75, 0.375]


def test_too_few_updates_are_refused():
    with pytest.raises(ValueError, match="median needs 1 updates with 0 attackers left, got 0"):
        robust_updates(_start(), [], RobustConfig("median"))
    updates = [Update("a", _start(), 1, {})] * 4
    with pytest.raises(ValueError, match="multi_krum needs 5 updates with 1 attackers left, got 4"):
        robust_updates(_start(), updates, RobustConfig("multi_krum", 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "mode"}, "rule must be one of none, .*median.*, got 'mode'"),
        ({"rule": "median", "num_attackers": -1}, "must be non-negative, got -1"),
        ({"num_attackers": 2}, "requires a robust rule, got 2"),
        ({"rule": "krum"}, "rule krum needs num_attackers of at least 1, got 0"),
        ({"rule": "trimmed_mean"}, "trimmed_mean needs num_attackers of at least 1, got 0"),
        ({"rule": "krum", "num_attackers": 1, "clip_norm": 1.0}, "clip_norm requires rule norm"),
        ({"rule": "norm_clipping", "clip_norm": 0.0}, "positive, got 0.0"),
    ],
)
def test_rules_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RobustConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "by_examples"}, "with robust, aggregation must be uniform"),
        ({"lora_mean": "products"}, "with robust.rule krum set lora_mean to factors"),
        ({"clients_per_round": 6}, "needs clients_per_round of at least 7, got 6"),
    ],
)
def test_keys_that_do_not_go_with_a_rule_are_refused(options, message):
    cfg = RobustConfig("krum", 2)
    with pytest.raises(ValueError, match=message):
        StrategyConfig(robust=cfg, **options)
    StrategyConfig(robust=cfg, clients_per_round=7)
    StrategyConfig(robust=RobustConfig("multi_krum", 2), lora_mean="products")


@pytest.mark.parametrize("config", [AflConfig, FedMgdaConfig, FsmgdaConfig, QFedAvgConfig])
def test_strategies_that_take_no_mean_have_no_rule(config):
    with pytest.raises(ValueError, match="robust requires a strategy that averages the clients'"):
        config(robust=RobustConfig("median"))


def test_two_normalisations_are_refused():
    with pytest.raises(ValueError, match="with robust, normalize_updates must be false"):
        FedAvgConfig(normalize_updates=True, robust=RobustConfig("median"))


TARGETS = [[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]]
STRATEGIES = {
    "firm": (firm_round, FirmConfig, {}),
    "fedavg": (fedavg, FedAvgConfig, {}),
    "fedcmoo": (fedcmoo, FedCmooConfig, {"communication": "one_way", "compressor": "none"}),
    "fedcmoo_pref": (
        fedcmoo_pref,
        FedCmooPrefConfig,
        {"communication": "one_way", "compressor": "none"},
    ),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [*(("firm", rule) for rule in RULES), *((name, "krum") for name in list(STRATEGIES)[1:])],
)
def test_every_strategy_that_averages_survives_attackers(
    name, rule, new_plain_client, origin, run_rounds, point
):
    strategy, config, options = STRATEGIES[name]

    def end(rule, attack):
        clients = [
            new_plain_client(f"c{index}", [[x + index / 20 for x in row] for row in TARGETS])
            for index in range(8)
        ]
        if attack:
            clients[2:4] = [Attacker(client, "scaling", scale=1e6) for client in clients[2:4]]
        cfg = config(robust=RobustConfig(rule, 2) if rule else RobustConfig(), **options)
        state, rows = run_rounds(strategy, clients, origin, cfg, num_rounds=2)
        assert ("robust" in rows[-1]["round"]) == bool(rule)
        return point(state)

    honest = end(None, False)
    assert (end(rule, True) - honest).norm() < 1.0
    assert (end(None, True) - honest).norm() > 1e4


def test_the_server_learning_rate_goes_on_from_the_robust_mean(
    new_plain_client, origin, run_rounds, point
):
    clients = [
        new_plain_client(f"c{i}", [[2.0 * x, 0.0, 0.0]] * 2) for i, x in enumerate((1, 2, 9))
    ]
    for strategy, config in ((firm_round, FirmConfig), (fedavg, FedAvgConfig)):
        cfg = config(robust=RobustConfig("median"), server_learning_rate=0.5)
        state, _ = run_rounds(strategy, clients, origin, cfg)
        assert point(state).tolist() == [1.0, 0.0, 0.0]  # half of the median step 2


def test_a_round_with_too_few_updates_for_the_rule_fails_and_changes_nothing(
    new_client, start, run_rounds, same
):
    clients = [new_client(f"c{i}", fails_in=(1,) if i == 3 else ()) for i in range(7)]
    before = start.to_state()
    message = (
        r"^6 clients finished round 1, quorum 7 of robust\.rule krum with 2 attackers left \(c3"
    )
    with pytest.raises(RoundFailed, match=message):
        run_rounds(firm_round, clients, start, FirmConfig(robust=RobustConfig("krum", 2)))
    assert same(start.to_state(), before)


def test_an_update_that_is_not_finite_never_reaches_the_rule(new_client, start, run_rounds):
    clients = [
        new_client(f"c{i}", diverges_in=(1,) if i == 1 else (), num_minibatches=1) for i in range(4)
    ]
    cfg = FirmConfig(robust=RobustConfig("median", 1))
    state, rows = run_rounds(firm_round, clients, start, cfg)
    (failure,) = rows[0]["round"]["failures"]
    assert failure == {
        "client": "c1",
        "reason": "its answer is refused: adapter.second is not finite",
    }
    assert set(rows[0]["round"]["robust"]["distances"]) == {"c0", "c2", "c3"}
    assert all(value.isfinite().all() for value in state.adapter.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_refused", [0, 1, 2, 3])
def test_refused_attackers_count_against_those_that_are_assumed(
    rule, num_refused, new_client, start
):
    """Of eight clients with two attackers, six honest ones suffice once both were refused."""
    names = [f"c{i}" for i in range(8)]
    refused = names[1 : 1 + num_refused]
    clients = [new_client(name) for name in names]
    for client in clients:
        if client.name in refused:
            client.adapter = lambda: {"first": torch.tensor([torch.nan])}
    cfg = FirmConfig(robust=RobustConfig(rule, 2))
    state, rows = firm_round(start, names, LocalEngine(clients), cfg)
    assert set(state.accepted) == set(names) - set(refused)
    assert rows["round"]["robust"]["num_attackers"] == max(0, 2 - num_refused)
    if rule == "trimmed_mean" and num_refused >= 2:  # nobody is left to be trimmed
        assert set(rows["round"]["robust"]["trimmed"].values()) == {0}
    if rule == "multi_krum":  # so many of those who are left are taken for honest
        count = len(names) - num_refused - max(0, 2 - num_refused)
        assert len(rows["round"]["robust"]["chosen"]) == count


@pytest.mark.parametrize("rule", RULES)
def test_clients_that_only_fail_are_not_taken_for_attackers(rule, new_client, start):
    names = [f"c{i}" for i in range(8)]
    clients = [new_client(name, fails_in=(1,) if i < 5 else ()) for i, name in enumerate(names)]
    cfg = FirmConfig(robust=RobustConfig(rule, 2))
    with pytest.raises(RoundFailed, match=r"3 clients finished round 1, quorum [57] of"):
        firm_round(start, names, LocalEngine(clients), cfg)


@pytest.mark.parametrize("rule", RULES)
def test_a_round_of_refused_answers_alone_fails(rule, new_client, start):
    names = [f"c{i}" for i in range(7)]
    clients = [new_client(name) for name in names]
    for client in clients:
        client.adapter = dict
    with pytest.raises(RoundFailed, match="no clients finished round 1, quorum 1"):
        firm_round(start, names, LocalEngine(clients), FirmConfig(robust=RobustConfig(rule, 2)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_attackers_left_any_number_of_updates_will_do(rule, count):
    start = _start()
    updates = [_attacked(start, f"c{i}", 2.0) for i in range(count)]
    found, entry = robust_updates(start, updates, RobustConfig(rule, 2), num_refused=2)
    assert entry["robust"]["num_attackers"] == 0
    assert all((parameter == 2.0).all() for one in found for parameter in one.adapter.values())


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_equal_scores_choose_in_the_order_of_the_clients(rule):
    start = _start()
    updates = [_attacked(start, f"c{i}", 2.0) for i in range(7)]
    found, _ = robust_updates(start, updates, RobustConfig(rule, 2))
    count = 1 if rule == "krum" else 5
    assert [update.client for update in found] == [f"c{i}" for i in range(count)]
