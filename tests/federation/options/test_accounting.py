"""ε: against the Gaussian mechanism's own formulas, and in the directions that it must go."""

import math
import re

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from firm.base.extras import install_command
from firm.federation import Update
from firm.federation.options import accounting
from firm.federation.options.accounting import gaussian_epsilon, spend
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.strategy_configs import FirmConfig

DELTA = 1e-5


def cfg(**options):
    return PrivacyConfig(**{"clip_norm": 1.0, "noise_multiplier": 1.0, **options})


def updates(names, **metrics):
    return [Update(name, {}, 1, {"num_steps": 1, **metrics}) for name in names]


def spent(privacy, num_rounds, asked, num_clients, **options):
    """The entry of the last of some equal rounds."""
    ledger = {}
    for _ in range(num_rounds):
        ledger, entry = spend(
            privacy, ledger, updates(asked), asked=asked, num_clients=num_clients, **options
        )
    return entry


def exact_epsilon(multiplier, num_rounds, delta):
    """ε of T Gaussian mechanisms, which are one with the noise over √T.

    Balle and Wang (2018), arXiv:1805.06530, Theorem 5.
    """
    mu = num_rounds**0.5 / multiplier

    def excess(epsilon):
        first = norm.cdf(mu / 2 - epsilon / mu)
        second = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return first - second - delta

    return brentq(excess, 0.0, 10_000.0)


def renyi_epsilon(multiplier, num_rounds, delta):
    """The least over α of Tα/(2z²), turned into ε.

    Canonne, Kamath and Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    orders = [1 + x / 1000 for x in range(1, 60_000)]
    return min(
        num_rounds * a / (2 * multiplier**2)
        + math.log1p(-1 / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )


@pytest.mark.parametrize("num_rounds", [1, 16, 100])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 10.0])
def test_full_participation_is_the_gaussian_mechanisms_composition(multiplier, num_rounds):
    epsilon = gaussian_epsilon({multiplier: num_rounds}, DELTA)
    assert epsilon == pytest.approx(renyi_epsilon(multiplier, num_rounds, DELTA), rel=0.01)
    exact = exact_epsilon(multiplier, num_rounds, DELTA)
    assert exact <= epsilon <= 1.2 * exact + 0.02


def test_replacing_a_client_moves_the_sum_by_twice_the_limit():
    entry = spent(cfg(noise_multiplier=3.0), 16, list("abcd"), 4)
    assert entry["epsilon"] == pytest.approx(renyi_epsilon(1.5, 16, DELTA), rel=0.01)
    assert set(entry) == {"epsilon", "delta"}


def test_the_limit_itself_does_not_matter():
    one, other = (spent(cfg(clip_norm=s), 3, ["a", "b"], 2) for s in (0.01, 100.0))
    assert one == other


def test_different_noise_composes_as_one_gaussian_mechanism():
    both = gaussian_epsilon({3.0: 9, 1.0: 1}, DELTA)  # 9 / 9 + 1
    assert both == pytest.approx(gaussian_epsilon({1.0: 2}, DELTA), rel=1e-9)


@pytest.mark.parametrize("sample", [None, (10, 40), (1, 1000)])
def test_epsilon_falls_with_noise_and_rises_with_rounds(sample):
    by_noise = [gaussian_epsilon({z: 20}, DELTA, sample=sample) for z in (0.5, 1.0, 2.0, 8.0)]
    assert by_noise == sorted(by_noise, reverse=True)
    assert len(set(by_noise)) == 4
    by_rounds = [gaussian_epsilon({1.0: count}, DELTA, sample=sample) for count in (0, 1, 5, 50)]
    assert by_rounds[0] == 0.0
    assert by_rounds == sorted(by_rounds)
    assert len(set(by_rounds)) == 4


@pytest.mark.parametrize("multiplier", [0.25, 0.5, 1.0, 4.0])
def test_epsilon_falls_with_the_share_that_is_drawn_and_no_draw_ever_costs(multiplier):
    shares = [(1, 1000), (1, 100), (1, 10), (1, 4), (1, 2), (1, 1)]
    by_share = [gaussian_epsilon({multiplier: 16}, DELTA, sample=sample) for sample in shares]
    assert by_share == sorted(by_share)
    assert by_share[0] < by_share[-1] == gaussian_epsilon({multiplier: 16}, DELTA)


def test_a_client_pays_for_its_own_rounds_alone():
    ledger = {}
    for asked in (["a", "b"], ["b", "c"], ["c", "d"]):
        ledger, entry = spend(cfg(), ledger, updates(asked), asked=asked, num_clients=4)
    assert ledger.pop("largest") == 2
    assert ledger == {"rounds": {"a": 1, "b": 2, "c": 2, "d": 1}, "sizes": [2, 2, 2]}
    assert entry["epsilon"] == gaussian_epsilon({0.5: 2}, DELTA)
    assert entry["epsilon_if_unknown"] == entry["epsilon"]  # three draws of 2 of 4 give more


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("at", ["server", "client"])
def test_who_knows_less_learns_no_more(multiplier, at):
    privacy, ledger = cfg(noise_multiplier=multiplier, at=at), {}
    for first in range(8):  # of 8 clients, each takes part in two rounds
        names = [f"client_{first}", f"client_{(first + 1) % 8}"]
        ledger, entry = spend(privacy, ledger, updates(names), asked=names, num_clients=8)
    assert 0 < entry["epsilon_if_unknown"] <= entry["epsilon"]


def test_strong_noise_and_few_of_many_clients_are_hidden_by_the_draw():
    entry = spent(cfg(noise_multiplier=4.0), 16, [f"client_{i}" for i in range(10)], 1000)
    assert entry["epsilon_if_unknown"] < entry["epsilon"] / 10


@pytest.mark.parametrize("sample", [(10, 1000), (1, 1000)])
def test_epsilon_of_sampled_rounds_is_that_of_a_finer_choice_of_orders(sample, monkeypatch):
    epsilon = gaussian_epsilon({2.0: 16}, DELTA, sample=sample)
    monkeypatch.setattr(accounting, "_SAMPLED_ORDERS", tuple(range(30, 64)))
    accounting._epsilon.cache_clear()
    assert epsilon == pytest.approx(gaussian_epsilon({2.0: 16}, DELTA, sample=sample), rel=0.01)
    accounting._epsilon.cache_clear()


def test_a_client_that_failed_has_paid_all_the_same():
    ledger, _ = spend(cfg(), {}, updates(["a"]), asked=["a", "b"], num_clients=2)
    assert ledger == {"rounds": {"a": 1, "b": 1}, "sizes": [1], "largest": 2}


def test_a_round_that_asked_more_clients_counts_for_all():
    privacy, names = cfg(noise_multiplier=4.0), [f"client_{i}" for i in range(6)]
    ledger, first = spend(privacy, {}, updates(names[3:]), asked=names, num_clients=100)
    _, second = spend(privacy, ledger, updates(names[:3]), asked=names[:3], num_clients=100)
    assert second["epsilon_if_unknown"] > first["epsilon_if_unknown"]


def test_clients_that_always_take_part_are_not_hidden_by_the_draw():
    assert "epsilon_if_unknown" in spent(cfg(), 1, ["a", "b"], 4)
    assert "epsilon_if_unknown" not in spent(cfg(), 1, ["a", "b"], 4, has_regulars=True)
    assert "epsilon_if_unknown" not in spent(cfg(), 1, ["a", "b"], 2)


def test_noise_of_each_client_hides_from_the_server_and_together_from_all_others():
    entry = spent(cfg(at="client"), 5, list("abcd"), 4)
    assert entry["epsilon_server"] == gaussian_epsilon({0.5: 5}, DELTA)
    assert entry["epsilon"] == gaussian_epsilon({1.0: 5}, DELTA)  # √4 times the noise
    assert entry["epsilon"] < entry["epsilon_server"]


def test_the_rounds_of_fewest_updates_count_where_clients_add_the_noise():
    privacy, ledger = cfg(at="client"), {}
    for names in ("abcd", "a", "abcd"):
        ledger, entry = spend(privacy, ledger, updates(names), asked=list("abcd"), num_clients=4)
    assert entry["epsilon"] == pytest.approx(gaussian_epsilon({0.5: 1, 1.0: 2}, DELTA))


def test_noisy_statistics_count_as_much_as_another_message():
    entry = spent(cfg(statistics="noisy"), 4, ["a", "b"], 2)
    assert entry["epsilon"] == gaussian_epsilon({0.5: 8}, DELTA)
    entry = spent(cfg(statistics="noisy", at="client"), 4, list("abcd"), 4)
    assert entry["epsilon"] == gaussian_epsilon({1.0: 4, 0.5: 4}, DELTA)
    assert entry["epsilon_server"] == gaussian_epsilon({0.5: 8}, DELTA)


def test_what_is_not_covered_has_no_epsilon():
    assert spent(cfg(noise_multiplier=0.0, at="client"), 2, ["a", "b"], 4) == {
        "epsilon": None,
        "epsilon_if_unknown": None,
        "epsilon_server": None,
        "delta": DELTA,
    }
    assert spent(cfg(statistics="exact", at="client"), 2, ["a"], 1)["epsilon_server"] is None


def test_the_share_of_clipped_clients_is_told_as_far_as_clients_tell_it():
    def entry(**metrics):
        return spend(cfg(), {}, updates("ab", **metrics), asked=["a", "b"], num_clients=2)[1]

    assert "clipped" not in entry()
    assert entry(clipped=1.0)["clipped"] == 1.0


def test_a_missing_library_is_one_line_at_the_configuration(monkeypatch):
    monkeypatch.setattr(accounting, "find_spec", lambda name: None)
    FirmConfig()
    with pytest.raises(ValueError, match=re.escape(install_command("privacy"))) as error:
        FirmConfig(privacy=cfg())
    assert "\n" not in str(error.value)
