import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firm.alignment import KLConfig, PPOConfig, kl_alarm, mismatch_alarm, ratio_alarm
from firm.alignment.advantages import adapted_kl_coefficient

examples = settings(max_examples=30, derandomize=True)

ADAPTIVE = KLConfig(controller="adaptive", target=0.03, horizon=10_000)


def reached(config, num_steps, kl):
    """The coefficient after local steps of this KL."""
    coefficient = config.kl.coefficient
    for _ in range(num_steps):
        coefficient = adapted_kl_coefficient(
            coefficient, kl, num_responses=config.batch_size, config=config.kl
        )
    return coefficient


def test_the_controller_of_the_papers_run_is_inert_and_the_horizon_that_is_told_is_not():
    config = PPOConfig()
    told = kl_alarm(config.kl, batch_size=config.batch_size, num_steps=16 * 4)
    assert told is not None
    low, high = reached(config, 64, 0.0), reached(config, 64, 1.0)
    assert (low, high) == (pytest.approx(0.1959, abs=5e-5), pytest.approx(0.2041, abs=5e-5))
    assert "with almost no effect on the KL coefficient" in told
    assert "set estimator.kl.controller to fixed" in told
    assert "64 local steps of 16 responses take" in told
    assert "from 0.2 to 0.1959 or 0.2041 at most" in told
    assert "horizon of about 4,200 would allow 5%" in told
    shorter = dataclasses.replace(config, kl=KLConfig(horizon=4_200))
    assert reached(shorter, 64, 1.0) == pytest.approx(1.05 * 0.2, rel=1e-3)


@examples
@given(
    batch_size=st.sampled_from([8, 16, 128]),
    num_steps=st.integers(1, 200),
    horizon=st.floats(100.0, 1e6),
)
def test_a_controller_is_inert_where_no_kl_moves_its_coefficient(batch_size, num_steps, horizon):
    config = PPOConfig(batch_size=batch_size, kl=KLConfig(horizon=horizon))
    changes = [abs(reached(config, num_steps, kl) / 0.2 - 1) for kl in (0.0, 1.0)]
    if abs(max(changes) - 0.05) > 1e-9:
        assert (kl_alarm(config.kl, batch_size=config.batch_size, num_steps=num_steps) is None) == (
            max(changes) > 0.05
        )


def test_a_fixed_coefficient_or_no_step_raises_no_alarm_and_a_coefficient_of_zero_does():
    assert kl_alarm(KLConfig(controller="fixed"), batch_size=16, num_steps=1) is None
    assert kl_alarm(KLConfig(), batch_size=16, num_steps=0) is None
    zero = kl_alarm(KLConfig(coefficient=0.0, horizon=100), batch_size=16, num_steps=1000)
    assert zero is not None
    assert "estimator.kl.coefficient, which is 0" in zero


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coefficient": -0.1}, r"^coefficient must be non-negative, got -0.1"),
        ({"target": 0.0}, r"^target must be positive, got 0.0"),
        ({"horizon": -1.0}, r"^horizon must be positive, got -1.0"),
    ],
)
def test_a_kl_config_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        KLConfig(**changes)


@pytest.mark.parametrize("controller", ["adaptive", "fixed"])
def test_rounding_that_is_not_small_beside_the_kl_is_told_once(controller):
    config = KLConfig(controller=controller, target=0.03)

    def told(mismatch, kl, *, rounds):
        rows = [{"kind": "run"}]
        for number in range(1, rounds + 1):
            measured = {"logprob_mismatch_per_reply": mismatch} if number == 1 else {}
            rows += [
                {"kind": "client", "round": number, "kl": kl * number / 3, **measured},
                {"kind": "client", "round": number},  # with privacy there may be no figures
                {"kind": "round", "round": number, "kl": 9.0},
            ]
        return mismatch_alarm(rows, config)

    first = 1 if controller == "adaptive" else 3
    for rounds in range(1, 6):
        alarm = told(0.18, 0.03, rounds=rounds)
        assert (alarm is not None) == (rounds == first)
    assert "by 0.18 nats per reply" in told(0.18, 0.03, rounds=first)
    assert "KL of 0.03" in told(0.18, 0.03, rounds=first)
    assert told(0.18, 5.0, rounds=3) is None  # beside a KL of 5, or not the round to tell
    assert told(2e-6, 0.03, rounds=first) is None
    assert mismatch_alarm([], config) is None


def test_ratios_other_than_one_are_told_once_with_the_reason():
    rows = [
        {"kind": "client", "client": "client_0", "round": 1, "first_log_ratio": 2e-6},
        {"kind": "client", "client": "client_1", "round": 1, "first_log_ratio": 0.02},
        {"kind": "client", "client": "client_2", "round": 1},  # with privacy there are no figures
    ]
    asked = {"dtype": "float32", "temperature": 1.0, "key": "first_log_ratio"}
    alarm = ratio_alarm(rows, **asked)
    assert alarm is not None
    assert "of client_1 at sampling and in its first update differ by 0.02 nats" in alarm
    assert "The model's outputs differ between training" in alarm
    rows[1]["logprob_mismatch"] = 0.02
    assert "Generation and a forward pass differ: set rollout.logp" in str(
        ratio_alarm(rows, **{**asked, "key": "logprob_mismatch"})
    )
    assert ratio_alarm(rows, **{**asked, "dtype": "bfloat16"}) is None
    assert ratio_alarm(rows, **{**asked, "temperature": 0.01}) is None
    assert ratio_alarm(rows[:1], **asked) is None
    assert ratio_alarm([*rows, {"kind": "client", "round": 2}], **asked) is None
    assert ratio_alarm([], **asked) is None


def test_a_run_of_any_length_can_be_asked_about():
    assert kl_alarm(KLConfig(controller="adaptive"), batch_size=16, num_steps=10**8) is None
