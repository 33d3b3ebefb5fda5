"""The guard: silent while the KL is inside its trust region, and undoing what runs away."""

import pytest
import torch

from firm.alignment.kl_guard import GuardConfig, KLGuard, round_kl
from firm.federation import ServerState
from firm.run import UserError
from tests.smoke import config

LENGTH = 10.0


def server(round: int, value: float = 0.0) -> ServerState:
    return ServerState(
        {"a": torch.full((2,), value)}, ("x", "y"), 0, round, memory={"momentum": value}
    )


def clients(*kls: float, **more) -> list[dict]:
    return [{"kl": kl, "response_length": LENGTH, **more} for kl in kls]


def rounds(guard: KLGuard, kls: list[float]) -> tuple[ServerState, list[str]]:
    """Returns the state and all alarms after rounds whose replies have these KLs.

    The adapter that a round reaches holds the round's number.
    """
    state, texts = server(0), []
    for number, kl in enumerate(kls, start=1):
        after = state.advance(
            {"a": torch.full((2,), float(number))}, [], memory={"momentum": number}
        )
        state, alarms = guard.judge(clients(kl), state, after)
        texts += alarms
    return state, texts


def test_a_healthy_run_is_left_as_it_is():
    guard, state = KLGuard(GuardConfig()), server(0)
    for number, kl in enumerate([0.0, 0.9, 1.5, 2.0, 1.2, 2.4], start=1):
        after = server(number, value=number)
        state, alarms = guard.judge(clients(kl), state, after)
        assert state is after
        assert alarms == []
    assert guard.stopped == ""


def test_an_update_after_which_the_kl_leaves_the_trust_region_is_undone_at_half_the_rate():
    guard = KLGuard(GuardConfig(kl_growth=2.0, kl_slack=0.1))
    # largest KL 1.0, so that the limit is 2 * 1.0 + 0.1 * 10 = 3.0
    state, alarms = rounds(guard, [0.0, 1.0, 0.8, 3.1])
    # round 3 reached the adapter that round 4 sampled from; round 2's was fine
    assert state.adapter["a"].tolist() == [2.0, 2.0]
    # what the strategy has counted, such as the clients' ε, has happened
    assert (state.round, state.rate, state.memory) == (4, 0.5, {"momentum": 4})
    (alarm,) = alarms
    assert "3.1 nats, is above the trust region's 3" in alarm
    assert "adapter of round 2" in alarm
    assert "times 0.5" in alarm
    assert guard.limit == pytest.approx(3.0)  # the runaway is no part of the history


@pytest.mark.parametrize(("kl", "is_undone"), [(2.999, False), (3.001, True)])
def test_the_limit_is_a_multiple_of_the_recent_kls_plus_some_per_token(kl, is_undone):
    state, _ = rounds(KLGuard(GuardConfig()), [0.0, 1.0, 0.8, kl])
    assert (state.rate < 1) == is_undone


def test_kls_of_more_than_five_rounds_ago_do_not_count():
    state, _ = rounds(KLGuard(GuardConfig()), [0.0, 1.0, 1.9, *[0.1] * 5, 1.3])
    assert state.rate == 0.5
    state, _ = rounds(KLGuard(GuardConfig()), [0.0, 1.0, 1.9, *[0.1] * 4, 1.3])
    assert state.rate == 1.0


def test_clients_that_run_away_in_the_first_round_go_back_to_the_base_model():
    guard, start = KLGuard(GuardConfig()), server(0)
    state, alarms = guard.judge(clients(1.1), start, server(1, 1.0))
    assert "the trust region's 1" in alarms[0]
    assert state.adapter["a"].tolist() == [0.0, 0.0]


def test_a_start_that_is_far_from_the_base_model_is_where_the_limits_count_from():
    guard = KLGuard(GuardConfig(max_kl=0.5), is_fresh=False)
    state, alarms = rounds(guard, [50.0, 52.0, 54.9])
    assert (alarms, state.rate) == ([], 1.0)
    assert guard.limit == pytest.approx(2 * 54.9 + 0.1 * LENGTH)
    rounds_after, alarms = rounds(KLGuard(GuardConfig(max_kl=0.5), is_fresh=False), [50.0, 56.0])
    assert "the ceiling of 55" in alarms[0]
    assert rounds_after.adapter["a"].tolist() == [2.0, 2.0]


def test_the_first_round_defines_the_length_of_replies():
    guard = KLGuard(GuardConfig())
    state, _ = guard.judge(clients(0.0), server(0), server(1, 1.0))
    guard.judge([{"kl": 0.5, "response_length": 1.0}], state, server(2, 2.0))
    assert guard.limit == pytest.approx(2 * 0.5 + 0.1 * LENGTH)


def test_one_client_that_claims_long_replies_does_not_switch_the_guard_off():
    guard = KLGuard(GuardConfig())
    hostile = {"kl": 0.0, "response_length": 1e30}
    state, _ = guard.judge([*clients(0.0, 0.0), hostile], server(0), server(1, 1.0))
    _, alarms = guard.judge([*clients(9.0, 9.0), hostile], state, server(2, 2.0))
    assert "the trust region's 1" in alarms[0]


def test_a_round_without_kls_makes_no_adapter_a_good_one():
    guard = KLGuard(GuardConfig())
    state, _ = rounds(guard, [0.0, 0.5])
    hidden, alarms = guard.judge([{"num_steps": 1}], state, server(3, 3.0))
    assert alarms == []
    assert hidden.adapter["a"].tolist() == [3.0, 3.0]
    back, _ = guard.judge(clients(90.0), hidden, server(4, 4.0))
    assert back.adapter["a"].tolist() == [1.0, 1.0]  # the last whose KL was seen


def test_a_guard_that_sees_no_lengths_says_so_once():
    guard = KLGuard(GuardConfig())
    hidden = [{"kl": 0.5}]
    assert guard.judge(hidden, server(0), server(1, 1.0))[1] == []  # nothing is undone
    assert "no client reports response_length" in guard.blind_alarms(hidden)[0]
    assert KLGuard(GuardConfig(kl_growth=None, max_kl=None)).blind_alarms(hidden) == []
    seeing = KLGuard(GuardConfig())
    seeing.judge(clients(0.5), server(0), server(1, 1.0))
    assert seeing.blind_alarms(clients(0.5)) == []


def test_a_slow_rise_above_the_ceiling_ends_the_run():
    guard = KLGuard(GuardConfig(max_kl=0.5))  # 5 nats
    state, alarms = rounds(guard, [0.0, 1.0, 2.5, 4.0, 5.1])
    assert "the ceiling of 5 (guard.max_kl 0.5 per token)" in guard.stopped
    assert guard.stopped in alarms[-1]
    assert "estimator.actor_learning_rate" in alarms[-1]
    assert guard.good(state).adapter["a"].tolist() == [3.0, 3.0]
    assert guard.good_round == 3


def test_too_many_undone_updates_end_the_run_with_the_last_good_adapter():
    guard = KLGuard(GuardConfig(max_rollbacks=2))
    state, alarms = rounds(guard, [0.0, 1.0, 9.0, 9.0])
    assert (state.rate, guard.stopped) == (0.25, "")
    state, alarms = rounds(
        guard := KLGuard(GuardConfig(max_rollbacks=2)), [0.0, 1.0, 9.0, 9.0, 9.0]
    )
    assert "after 2 undone updates" in guard.stopped
    assert state.adapter["a"].tolist() == [1.0, 1.0]
    assert len(alarms) == 3


def test_a_limit_that_is_lowered_below_the_updates_undone_ends_the_run_at_the_next():
    before = KLGuard(GuardConfig())
    state, _ = rounds(before, [0.0, 1.0, 9.0, 9.0])
    guard = KLGuard(GuardConfig(max_rollbacks=1))
    guard.restore(before.state())
    guard.judge(clients(9.0), state, server(5, 5.0))
    assert "after 2 undone updates" in guard.stopped


def test_an_undone_round_has_the_adapter_of_an_earlier_one():
    guard = KLGuard(GuardConfig())
    state, alarms = rounds(guard, [0.0, 9.0, 0.0, 9.0])  # round 3 starts from round 2's state
    assert state.adapter["a"].tolist() == [0.0, 0.0]
    assert guard.good_round == 0
    assert all("continues from the adapter of round 0" in alarm for alarm in alarms)


@pytest.mark.parametrize("config", [GuardConfig(kl_growth=None, max_kl=None)])
def test_a_guard_that_is_off_does_nothing(config):
    guard = KLGuard(config)
    state, alarms = rounds(guard, [0.0, 1.0, 500.0, 9000.0])
    assert (state.rate, alarms, guard.stopped) == (1.0, [], "")
    assert state.adapter["a"].tolist() == [4.0, 4.0]


def test_a_restored_guard_judges_as_the_original_would():
    first = KLGuard(GuardConfig())
    state, _ = rounds(first, [0.0, 1.0, 0.8, 3.1, 0.9])
    second = KLGuard(GuardConfig())
    second.restore(first.state())
    after = state.advance({"a": torch.full((2,), 6.0)}, [])
    results = [guard.judge(clients(7.0), state, after) for guard in (first, second)]
    assert results[0][1] == results[1][1] != []
    assert results[0][0].rate == results[1][0].rate == 0.25
    assert torch.equal(results[0][0].adapter["a"], results[1][0].adapter["a"])
    assert first.state() == second.state()


def test_the_kl_of_a_round_is_the_clients_median():
    assert round_kl(clients(1.0, 2.0, 90.0)) == 2.0  # one client with an unlikely reply
    assert round_kl(clients(30.0, 20.0, 1.0)) == 20.0


def test_a_conditioned_policy_is_judged_at_its_worst_preference():
    rows = [{"kl": 1.0, "kl_by_preference": {"x": 0.5, "y": 7.0 + n}} for n in range(3)]
    assert round_kl(rows) == 8.0
    rows = [{"kl": 1.0, "kl_by_preference": {"x": None, "y": 7.0}}]
    assert round_kl(rows) == 7.0


def test_with_pairs_the_loss_of_the_preferred_replies_takes_the_kls_place():
    assert round_kl([{"preferred_log_ratio": -4.0}, {"preferred_log_ratio": -2.0}]) == 3.0


def test_objectives_that_are_trained_separately_count_each():
    rows = [{"by_objective": {"x": {"kl": 1.0}, "y": {"kl": 5.0 + n}}} for n in range(2)]
    assert round_kl(rows) == 3.0
    guard, state = KLGuard(GuardConfig()), server(0)
    for kl in (0.0, 9.0):
        own = {"kl": kl, "response_length": LENGTH}
        state, alarms = guard.judge([{"by_objective": {"x": own}}], state, server(1))
    assert "the KL of its replies, 9 nats" in alarms[0]


def test_noisy_and_hidden_kls_do_not_count():
    noisy = {"kl": 900.0, "clipped": 1.0, "response_length": LENGTH}
    assert round_kl([noisy, {"kl": 1.0}]) == 1.0
    assert round_kl([noisy]) is None
    guard = KLGuard(GuardConfig())
    after = server(1)
    assert guard.judge([{"num_steps": 1}], server(0), after) == (after, [])
    assert guard.is_inside(None)


@pytest.mark.parametrize(
    ("key", "value"), [("kl_growth", "0.5"), ("max_kl", "-1"), ("stop_when", '["kl is 8"]')]
)
def test_limits_out_of_range_are_refused_by_the_command(key, value):
    with pytest.raises(UserError, match=key):
        config(f"--guard.{key}", value)
