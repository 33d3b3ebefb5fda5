import asyncio
import logging
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from firm.alignment.calibration import Calibration
from firm.alignment.prompts import Prompt, prompt_of
from firm.alignment.rewards import (
    Judges,
    ScoringRequest,
    calibrate,
    check_same,
    filled,
    reward_diagnostics,
    score,
    scored_together,
    values_or_none,
)
from firm.base.errors import TimeLimitError
from firm.federation import ProcessLost
from reward_models.config import RewardModelConfig
from reward_models.registry import with_condition

PROMPTS = ["secret one", "secret two", "secret three"]
REPLIES = ["a", "bb", "ccc"]


def length(prompts, completions, **kwargs):
    return [float(len(text)) for text in completions]


def prompts_of(texts):
    return [Prompt(text) for text in texts]


def test_scores_have_one_row_per_objective_in_order():
    def first_letter(completions, **kwargs):
        return [ord(text[0]) - ord("a") for text in completions]

    scores = score({"letter": first_letter, "length": length}, PROMPTS, REPLIES)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


def test_further_fields_of_the_data_are_keywords():
    def right(completions, answer, **kwargs):
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    rows = [Prompt("?", columns=row) for row in ({"answer": "a"}, {}, {"answer": "x"})]
    assert score({"right": right}, rows, REPLIES).tolist() == [[1.0, 0.0, 0.0]]


def test_batches_that_are_scored_together_keep_their_own_fields():
    def right(completions, answer=None, **kwargs):
        return [float(text == a) for text, a in zip(completions, answer, strict=True)]

    judges = Judges({"right": right})
    batches = [
        ScoringRequest(
            judges, ["right"], [Prompt("?", columns={"answer": "a"})] * 2, ["a", "b"], [[1], [2]]
        ),
        ScoringRequest(judges, ["right"], [Prompt("?")], ["b"], [[2]]),
        ScoringRequest(judges, ["right"], [Prompt("?", columns={"answer": "b"})], ["b"], [[2]]),
    ]
    scores = [scored().scores.tolist() for scored in scored_together(batches)]
    assert scores == [[[1.0, 0.0]], [[0.0]], [[1.0]]]


CHAT = Prompt(messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))


def test_texts_come_as_strings_and_chats_as_messages_as_from_trl():
    calls = []

    def seen(prompts, completions, completion_ids, answer, **kwargs):
        calls.append((prompts, completions, completion_ids, answer))
        return [float(ids[0]) for ids in completion_ids]

    prompts = [Prompt("t", columns={"answer": 1}), CHAT, prompt_of("\n\nHuman: x\n\nAssistant:")]
    ids = [[7], [8, 9], [5]]
    scores = score({"seen": seen}, prompts, REPLIES, ids)
    assert scores.tolist() == [[7.0, 8.0, 5.0]]  # in the order of the batch
    first, second, third = REPLIES
    reply = [{"role": "assistant", "content": second}]
    assert sorted(calls, key=lambda call: len(call[0])) == [
        ([list(CHAT.messages)], [reply], [[8, 9]], [None]),
        (["t", "\n\nHuman: x\n\nAssistant:"], [first, third], [[7], [5]], [1, None]),
    ]


def test_a_reward_that_reads_prompts_gets_them_in_one_call():
    class Reader:
        reads_prompts = True

        def __call__(self, prompts, completions, **kwargs):
            assert completions == REPLIES
            self.truncated = [prompt.text is None for prompt in prompts]
            return [float(len(prompt.messages)) for prompt in prompts]

    asked = ScoringRequest(
        Judges({"r": Reader()}), ["r"], [Prompt("t"), CHAT, CHAT], REPLIES, [[1]] * 3
    )
    (scored,) = scored_together([asked])
    assert scored().scores.tolist() == [[1.0, 2.0, 2.0]]
    assert scored().truncated == {"r": [False, True, True]}


def test_what_was_cut_stays_with_its_row_in_a_batch_of_texts_and_chats():
    class Cutter:
        def __call__(self, prompts, completions, **kwargs):
            self.truncated = [isinstance(prompt, list) for prompt in prompts]
            return [0.0] * len(prompts)

    asked = ScoringRequest(
        Judges({"r": Cutter()}), ["r"], [Prompt("t"), CHAT, Prompt("u")], REPLIES, [[1]] * 3
    )
    (scored,) = scored_together([asked])
    assert scored().truncated == {"r": [False, True, False]}


def test_what_was_cut_stays_with_its_call_where_another_begins_before_it_ends():
    class Server:
        def __call__(self, prompts, completions, **kwargs):
            self.truncated = [isinstance(prompt, list) for prompt in prompts]
            return self.answer(len(prompts))

        async def answer(self, count):
            return [0.0] * count

    judges = Judges({"r": Server()})
    of_texts = ScoringRequest(judges, ["r"], [Prompt("t")] * 3, REPLIES, [[1]] * 3)
    of_chats = ScoringRequest(judges, ["r"], [CHAT] * 3, REPLIES, [[1]] * 3)
    (first,), (second,) = scored_together([of_texts]), scored_together([of_chats])
    assert [own().truncated["r"] for own in (first, second)] == [[False] * 3, [True] * 3]


def test_coroutine_functions_and_callables_that_return_awaitables_are_awaited():
    async def slow(prompts, completions, **kwargs):
        return length(prompts, completions)

    class Judge:
        name = "judge"

        async def __call__(self, prompts, completions, **kwargs):
            return length(prompts, completions)

    judge = Judge()
    scores = score({"slow": slow, judge.name: judge}, PROMPTS, REPLIES)
    assert scores.tolist() == [[1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    "values",
    [
        (1, 2, 3),
        np.array([1.0, 2.0, 3.0]),
        [np.float64(1), True, torch.tensor(3.0)],
        [np.bool_(True), np.float32(2), torch.tensor([3.0])],
        [Fraction(1), Decimal(2), np.int64(3)],
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
    ],
)
def test_numbers_of_every_kind_are_taken(values):
    scores = score({"r": lambda **_: values}, PROMPTS, REPLIES)
    assert scores.tolist()[0][::2] == [1.0, 3.0]
    assert not scores.requires_grad


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "'r' returned 2 values: return one finite number for each of the 3"),
        ([1.0, 2.0, math.nan], r"'r' returned nan at index 2 \(1 of 3 values are not finite in"),
        ([math.inf, 2.0, -math.inf], r"'r' returned inf at index 0 \(2 of 3"),
        ([None, math.nan, 1.0], r"'r' returned nan at index 1 \(1 of 3 .*, or None where the rew"),
        ([1.0, None, "secret"], r"'r' returned str at index 2 \(1 of 3 .*, or None where the rew"),
        (["secret", "1", "2"], r"'r' returned str at index 0"),
        (None, "'r' returned NoneType: return one"),
        (3.0, "'r' returned float: return one"),
        ([[1.0], [2.0], [3.0]], r"'r' returned list at index 0 \(3 of 3"),
        (torch.ones(3, 1), r"'r' returned shape \[3, 1\]"),
        (torch.tensor(1.0), r"'r' returned shape \[\]"),
        ([1.0, torch.ones(2), np.ones(2)], r"'r' returned Tensor at index 1 \(2 of 3"),
        ([10**400, 2.0, 3.0], r"'r' returned inf at index 0 \(1 of 3"),
        ([1.0, -(10**400), 3.0], r"'r' returned -inf at index 1 \(1 of 3"),
        ([Fraction(10**400), 2.0, 3.0], r"'r' returned inf at index 0 \(1 of 3"),
        ([Decimal("1e400"), 2.0, 3.0], r"'r' returned inf at index 0 \(1 of 3"),
        ([1e300, 2.0, 3.0], r"'r' returned 1e\+300 at index 0 \(1 of 3 .* not finite in float32"),
        ([Decimal("sNaN"), 2.0, 3.0], r"'r' returned Decimal at index 0 \(1 of 3"),
        ([np.str_("1"), 2.0, 3.0], r"'r' returned str_ at index 0 \(1 of 3"),
        ([1j, 2.0, 3.0], r"'r' returned complex at index 0 \(1 of 3"),
        ("secret"[:3], "'r' returned str: return one"),
        ({1.0, 2.0, 3.0}, "'r' returned set: return one"),
        ((value for value in [1.0, 2.0, 3.0]), "'r' returned generator: return one"),
        ([[1.0], [2.0, 1.0], [3.0]], r"'r' returned list at index 0"),
    ],
)
def test_a_broken_reward_is_named_with_its_place_and_no_text(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        score({"fine": length, "r": lambda **_: values}, PROMPTS, REPLIES)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", [list, tuple, lambda values: np.array(values, dtype=object)])
def test_none_is_no_score(kind):
    async def some(completions, **kwargs):
        return kind([None, 2, 3.0])

    scores = score({"some": some, "none": lambda **_: [None] * 3}, PROMPTS, REPLIES)
    assert values_or_none(scores[0]) == [None, 2.0, 3.0]
    assert values_or_none(scores[1]) == [None] * 3
    (rewards, _) = Judges({"some": some}, {"some": Calibration("minmax", high=4.0)}).rewards(
        ["some", "none"], scores
    )
    assert values_or_none(rewards) == [None, 0.5, 0.75]


def test_what_stands_in_for_a_missing_reward_is_no_advantage():
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, nan, nan, 4.0, 7.0], [nan] * 6, [1.0, 2, 3, 4, 5, 6]])
    expected = torch.tensor([[1.0, 1, 4, 4, 4, 7], [0.0] * 6, [1, 2, 3, 4, 5, 6]])
    assert torch.equal(filled(rewards, 2), expected)  # of the prompt, of the batch (12 / 3), 0
    expected[0, 1] = 4
    assert torch.equal(filled(rewards, 1), expected)


def test_a_reward_that_says_of_too_few_inputs_which_it_cut_is_named():
    class Forgetful:
        truncated = (True,)

        def __call__(self, prompts, completions, **kwargs):
            return [0.0] * len(completions)

    asked = ScoringRequest(
        Judges({"short": Forgetful()}), ["short"], [Prompt("x")] * 3, REPLIES, [[1]] * 3
    )
    (error,) = scored_together([asked])
    assert isinstance(error, ValueError)
    assert "reward 'short' has 1 entries in `truncated` for 3 completions" in str(error)


def test_a_reward_that_raises_is_named_with_its_error_in_one_line():
    def broken(completions, **kwargs):
        raise KeyError(f"no\n{completions[0] * 999}\x1b[2J")

    async def late(completions, **kwargs):
        raise RuntimeError

    with pytest.raises(ValueError, match=r"^reward 'a' raised KeyError: 'no.naaaa") as caught:
        score({"a": broken}, PROMPTS, REPLIES)
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    here = r"\(tests/alignment/test_rewards\.py:\d+\); repair the reward function\.$"
    with pytest.raises(ValueError, match=rf"^reward 'b' raised RuntimeError {here}"):
        score({"b": late}, PROMPTS, REPLIES)


@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError(), GeneratorExit(), TimeoutError("no answer")]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_would_end_the_program_is_an_error_of_the_reward(error, is_async):
    def leaves(completions, **kwargs):
        raise error

    async def leaves_later(completions, **kwargs):
        raise error

    with pytest.raises(ValueError, match=rf"^reward 'a' raised {type(error).__name__}.*repair"):
        score({"a": leaves_later if is_async else leaves}, PROMPTS, REPLIES)


@pytest.mark.parametrize(
    "error", [TimeLimitError("late"), ProcessLost("gone"), torch.OutOfMemoryError("full")]
)
@pytest.mark.parametrize("is_async", [False, True])
def test_who_interrupts_a_reward_is_not_taken_for_its_error(error, is_async):
    def interrupted(completions, **kwargs):
        raise error

    async def interrupted_later(completions, **kwargs):
        raise error

    with pytest.raises(type(error), match=str(error)):
        score({"a": interrupted_later if is_async else interrupted}, PROMPTS, REPLIES)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"method": "zscore"}, "method must be one of sigmoid, minmax, none, got 'zscore'"),
        ({"method": ["none"]}, "method must be one of sigmoid, minmax, none, got \\['none'\\]"),
        ({"method": "sigmoid", "mean": math.nan}, "mean must be at least -3.4.* got nan"),
        ({"method": "sigmoid", "mean": 1e308}, "mean must be at least .* got 1e+"),
        ({"method": "sigmoid", "mean": "0"}, "mean must be a finite number, got '0'"),
        ({"method": "none", "mean": True}, "mean must be a finite number, got True"),
        ({"method": "sigmoid", "mean": 10**400}, "mean must be a finite number, got 10"),
        ({"method": "sigmoid", "scale": math.inf}, "scale must be at least .* got inf"),
        ({"method": "sigmoid", "scale": -1}, "scale must be positive, and low below high, got sc"),
        ({"method": "sigmoid", "scale": 1e-300}, "scale must be positive, and low below high"),
        ({"method": "minmax", "low": 1, "high": 1}, "scale must be positive, and low below high"),
        ({"method": "minmax", "low": 2, "high": 1}, "scale must be positive, and low below high"),
        ({"method": "none", "num_samples": -1}, "num_samples must be non-negative"),
        ({"method": "none", "num_samples": 1.5}, "num_samples must be an integer"),
        ({"method": "none", "width": 1}, "and only the keys .* got {'method': 'none', 'width': 1}"),
        ({"mean": 0.0}, "a calibration must have a method"),
        (["none"], "a calibration must have a method"),
    ],
)
def test_figures_that_are_no_calibration_are_refused(figures, message):
    with pytest.raises(ValueError, match=message) as caught:
        Calibration.from_dict(figures)
    assert len(str(caught.value)) < 300


def test_prompts_and_completions_must_correspond():
    with pytest.raises(ValueError, match="the same length, got 2 and 3"):
        score({"r": length}, PROMPTS[:2], REPLIES)


# Calibration


def test_sigmoid_is_centred_and_scaled_on_its_samples():
    calibration = calibrate("sigmoid", torch.tensor([1.0, 3.0, 5.0]))
    assert calibration == Calibration("sigmoid", mean=3.0, scale=2.0, num_samples=3)
    rewards = calibration(torch.tensor([3.0, 5.0]))
    assert rewards.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1))])


def test_minmax_maps_its_quantiles_to_0_and_1_and_clips():
    calibration = calibrate("minmax", torch.arange(101.0))
    assert (calibration.low, calibration.high) == (5.0, 95.0)
    rewards = calibration(torch.tensor([-9.0, 5.0, 50.0, 95.0, 200.0]))
    assert rewards.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert calibrate("minmax", torch.arange(101)) == calibration


scores = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40)


@given(
    raw=scores,
    method=st.sampled_from(["sigmoid", "minmax"]),
    scale=st.floats(0.01, 100),
    shift=st.floats(-100, 100),
)
def test_rewards_lie_in_the_unit_interval_and_ignore_the_raw_scale(raw, method, scale, shift):
    raw = torch.tensor(raw, dtype=torch.float64)
    if raw.std() < 1e-3 or raw.quantile(0.95) - raw.quantile(0.05) < 1e-3:
        return  # no spread: another test
    rewards = calibrate(method, raw)(raw)
    assert rewards.min() >= 0
    assert rewards.max() <= 1
    moved = raw * scale + shift
    assert torch.allclose(calibrate(method, moved)(moved), rewards, atol=1e-4)


@pytest.mark.parametrize("method", ["sigmoid", "minmax"])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_scores_without_spread_cannot_be_calibrated(method, value):
    with pytest.raises(ValueError, match="scores of 'helpful' do not vary on 64"):
        calibrate(method, torch.full((64,), value), name="helpful")


@pytest.mark.parametrize("method", ["sigmoid", "minmax"])
def test_scores_of_which_rounding_is_most_of_the_spread_cannot_be_calibrated(method):
    scores = score({"r": lambda **_: [1e9, 1e9 + 9, 1e9 + 70]}, PROMPTS, REPLIES)[0]
    with pytest.raises(ValueError, match=r"differ too little for their size .* subtract a"):
        calibrate(method, scores, name="r")
    near = score({"r": lambda **_: [1e5, 1e5 + 9, 1e5 + 70]}, PROMPTS, REPLIES)[0]
    assert calibrate(method, near)(near).max() > 0.7


def test_calibration_refuses_single_scores_and_unknown_methods():
    with pytest.raises(ValueError, match="at least 2 scores, got 1"):
        calibrate("sigmoid", torch.ones(1))
    with pytest.raises(ValueError, match="choose sigmoid, minmax or none"):
        calibrate("zscore", torch.arange(3.0))  # type: ignore[arg-type]


def test_calibrations_survive_being_written_down():
    raw = torch.arange(9.0)
    for method in ("sigmoid", "minmax", "none"):
        calibration = calibrate(method, raw)
        assert Calibration.from_dict(calibration.to_dict()) == calibration
        assert all(isinstance(v, str | float | int) for v in calibration.to_dict().values())
    assert calibrate("sigmoid", raw).to_dict().keys() == {"method", "mean", "scale", "num_samples"}


def test_every_row_is_mapped_by_its_own_calibration():
    raw = torch.tensor([[0.0, 1.0], [5.0, 10.0], [0.25, 7.0]])
    calibrations = {
        "a": Calibration("sigmoid"),
        "b": Calibration("minmax", low=0.0, high=10.0),
        "c": Calibration("none"),
    }
    judges = Judges(dict.fromkeys("abc", len), calibrations)
    rewards = judges.rewards("abc", raw)
    assert rewards[0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1))])
    assert rewards[1:].tolist() == [[0.5, 1.0], [0.25, 7.0]]
    assert calibrations["b"].tail == pytest.approx(5 + 3 * 10 / (2 * 1.645), abs=0.01)
    raw[0, 1], raw[2, 0] = 3.1, math.nan  # one of two above three standard deviations
    assert judges.tail_shares("abcd", torch.cat([raw, raw[:1]])) == pytest.approx(
        [0.5, 0.0, math.nan, math.nan], nan_ok=True
    )


def test_diagnostics_are_means_spreads_and_pearson_correlations():
    raw = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) + 100
    lengths = torch.randint(1, 40, (50,), generator=torch.Generator().manual_seed(1))
    figures = reward_diagnostics(raw, lengths)
    expected = np.corrcoef(np.vstack([raw.double().numpy(), lengths.numpy()]))
    np.testing.assert_allclose(figures["correlation"], expected[[0, 0, 1], [1, 2, 2]], atol=1e-9)
    np.testing.assert_allclose(figures["length_correlation"], expected[3, :3], atol=1e-9)
    torch.testing.assert_close(figures["mean"], raw.mean(1))
    torch.testing.assert_close(figures["spread"], raw.std(1))
    assert figures["saturated"].tolist() == pytest.approx([0.02] * 3)
    passed = torch.tensor([[1.0] * 9 + [0.0], [0.5] * 10, [10.0, 9.95] + [0.0] * 8])
    assert reward_diagnostics(passed, lengths[:10])["saturated"].tolist() == pytest.approx(
        [0.9, 1.0, 0.2]
    )


def test_replies_without_a_score_do_not_count_in_the_figures():
    nan = math.nan
    raw = torch.tensor(
        [[1.0, nan, 3, 2, nan], [nan, 1, 5, 9, 2], [nan] * 5, [nan, nan, 2, nan, nan]]
    )
    lengths = torch.tensor([3, 1, 4, 1, 5])
    figures = reward_diagnostics(raw, lengths)
    of_first = np.corrcoef([1, 3, 2], [3, 4, 1])[0, 1]
    of_second = np.corrcoef([1, 5, 9, 2], [1, 4, 1, 5])[0, 1]
    assert values_or_none(figures["mean"]) == [2.0, 4.25, None, 2.0]
    assert values_or_none(figures["spread"]) == [
        1.0, pytest.approx(np.std([1, 5, 9, 2], ddof=1)), None, 0.0
    ]  # fmt: skip
    assert values_or_none(figures["length_correlation"].double()) == [
        pytest.approx(of_first), pytest.approx(of_second), None, None
    ]  # fmt: skip
    assert values_or_none(figures["correlation"]) == [pytest.approx(-1.0), *[None] * 5]
    assert values_or_none(figures["saturated"]) == [pytest.approx(1 / 3), 0.25, None, 1.0]


def test_what_does_not_vary_has_no_correlation():
    raw = torch.stack([torch.full((4,), 0.1), torch.arange(4.0)])
    figures = reward_diagnostics(raw, torch.tensor([3, 1, 4, 1]))
    assert figures["correlation"].isnan().all()
    assert figures["length_correlation"].isnan().tolist() == [True, False]
    assert reward_diagnostics(raw[:, :1], torch.tensor([3]))["spread"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", ["sigmoid", "minmax", "none"])
def test_a_calibration_is_of_the_replies_with_a_score(method):
    some = torch.tensor([math.nan, 1.0, 4.0, math.nan, 2.0])
    assert calibrate(method, some) == calibrate(method, torch.tensor([1.0, 4.0, 2.0]))


@pytest.mark.parametrize("scores", [[math.nan] * 3, [math.nan, 1.0, math.nan]])
def test_too_few_scores_for_a_calibration_are_refused_with_the_reward(scores):
    count = sum(not math.isnan(value) for value in scores)
    message = f"^calibrating 'maths' .*, got {count} on 3 calibration replies: use more replies,"
    with pytest.raises(ValueError, match=message):
        calibrate("sigmoid", torch.tensor(scores), name="maths")


def test_other_statistics_are_refused_with_the_figure_that_changed():
    frozen = {"a": Calibration("sigmoid", mean=1.0, scale=2.0)}
    check_same(frozen, {"a": Calibration("sigmoid", mean=1.09, scale=2.09)})
    with pytest.raises(ValueError, match=r"'a'.* sigmoid calibration had mean 1, .*now give 1.2 "):
        check_same(frozen, {"a": Calibration("sigmoid", mean=1.2, scale=2.0)})
    with pytest.raises(ValueError, match=r"had scale 2, .*now give 3 "):
        check_same(frozen, {"a": Calibration("sigmoid", mean=1.0, scale=3.0)})
    with pytest.raises(ValueError, match=r"\(minmax\); the base model or the reward model"):
        check_same(frozen, {"a": Calibration("minmax", mean=1.0, scale=2.0)})
    minmax = {"a": Calibration("minmax", low=-100.0, high=100.0)}
    check_same(minmax, {"a": Calibration("minmax", low=-91.0, high=109.0)})
    with pytest.raises(ValueError, match=r"had high 100, .*now give 111"):
        check_same(minmax, {"a": Calibration("minmax", low=-100.0, high=111.0)})


# Functions that return several objectives


def judge(completions, **kwargs):
    values = [float(len(text)) for text in completions]
    return {"long": values, "brief": [-value for value in values], "none": [None] * len(values)}


def test_each_objective_has_the_list_of_its_name():
    scores = score({"brief": judge, "long": judge, "team/long": judge}, PROMPTS, REPLIES)
    assert scores.tolist() == [[-1.0, -2.0, -3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert values_or_none(score({"none": judge}, PROMPTS, REPLIES)[0]) == [None] * 3


class Named:
    """A function with an output that is named."""

    def __init__(self, function, output):
        self.function, self.output = function, output

    def __call__(self, **given):
        return self.function(**given)


def test_an_output_may_be_named_otherwise_than_its_objective():
    assert score({"terse": Named(judge, "brief")}, PROMPTS, REPLIES).tolist() == [[-1, -2, -3]]


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        (judge, "^reward 'terse' uses the output 'terse' of .* outputs 'long', 'brief', 'none': s"),
        (Named(judge, "short"), "^reward 'terse' uses the output 'short' of a function that"),
        (
            Named(length, "long"),
            "^reward 'terse' has the output 'long', but its function returned l",
        ),
        (
            lambda **_: {},
            "'terse' of a function that returned the outputs none: set `output` to one of them",
        ),
        (lambda **_: {"terse": [1.0]}, "^reward 'terse' returned 1 values: return one finite numb"),
        (lambda **_: {"terse": 1.0}, "^reward 'terse' returned float: return one finite number"),
        (lambda **_: {1: [1.0] * 3}, "returned the outputs 1: set `output` to one of them"),
    ],
)
def test_outputs_that_are_missing_or_odd_are_named(reward_fn, message):
    with pytest.raises(ValueError, match=message):
        score({"terse": reward_fn}, PROMPTS, REPLIES)


def test_a_coroutine_is_awaited_in_a_running_loop():
    async def slow(completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    async def notebook():
        return score({"slow": slow, "other": slow}, PROMPTS, REPLIES).tolist()

    assert asyncio.run(notebook()) == [[1.0, 2.0, 3.0]] * 2


# Calls


class Counting:
    """A judge that counts its calls, as a coroutine function or not."""

    def __init__(self, is_async=False):
        self.calls, self.is_async = [], is_async

    def __call__(self, prompts, completions, **kwargs):
        self.calls.append(len(completions))
        return self.later(completions) if self.is_async else judge(completions)

    async def later(self, completions):
        return judge(completions)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_is_called_once_for_all_its_objectives(is_async):
    counting = Counting(is_async)
    scores = score({"brief": counting, "other": length, "long": counting}, PROMPTS, REPLIES)
    assert scores.tolist() == [[-1, -2, -3], [1, 2, 3], [1, 2, 3]]
    assert counting.calls == [3]


def test_clients_and_objectives_share_a_call_and_groups_may_judge_otherwise():
    counting, other = Counting(), Counting()
    all_own = Judges({"brief": counting, "long": counting})
    one = Judges({"long": counting})
    mixed = Judges({"brief": other, "long": counting})
    asked = [
        ScoringRequest(
            all_own, ["brief", "long"], prompts_of(PROMPTS[:2]), ["a", "bb"], [[1], [1, 2]]
        ),
        ScoringRequest(one, ["brief", "long"], prompts_of(PROMPTS[:1]), ["ccc"], [[1]]),
        ScoringRequest(mixed, ["brief", "long"], prompts_of(PROMPTS[:1]), ["dddd"], [[1]]),
    ]
    scores = [scored().scores.tolist() for scored in scored_together(asked)]
    assert scores == [[[-1, -2], [1, 2]], [[0], [3]], [[-4], [4]]]
    assert (counting.calls, other.calls) == ([4], [1])


def test_clients_that_are_not_as_far_are_not_joined():
    seen = []

    def shaped(completions, trainer_state, **kwargs):
        seen.append((trainer_state.global_step, len(completions)))
        return [float(trainer_state.global_step)] * len(completions)

    own = Judges({"r": shaped}), ["r"], prompts_of(["p"]), ["a"], [[1]]
    asked = [ScoringRequest(*own, TrainerState(global_step=step)) for step in (1, 2, 1)]
    assert [scored().scores.tolist() for scored in scored_together(asked)] == [[[1]], [[2]], [[1]]]
    assert sorted(seen) == [(1, 2), (2, 1)]
    assert score({"r": shaped}, ["p"], ["a"]).tolist() == [[0]]


def test_coroutine_functions_of_several_objectives_run_concurrently():
    meeting = {}

    def meets(own, other):
        async def judge(completions, **kwargs):
            meeting.setdefault(own, asyncio.Event()).set()
            await asyncio.wait_for(meeting.setdefault(other, asyncio.Event()).wait(), timeout=30)
            return [1.0] * len(completions)

        return judge

    assert score({"a": meets(1, 2), "b": meets(2, 1)}, PROMPTS, REPLIES).tolist() == [[1] * 3] * 2


def test_a_coroutine_that_is_not_needed_any_more_is_closed_without_a_warning():
    async def slow(completions, **kwargs):
        return [1.0] * len(completions)

    def broken(completions, **kwargs):
        raise KeyError("b")

    with pytest.raises(ValueError, match="reward 'b' raised KeyError"):
        score({"a": slow, "b": broken}, PROMPTS, REPLIES)


def test_functions_may_log_as_with_trl(caplog):
    caplog.set_level(logging.DEBUG, "firm.alignment.rewards")

    def logs(completions, log_metric=None, log_extra=None, **kwargs):
        log_metric("accuracy", 0.5)
        log_extra("answer", ["secret"])
        return [1.0] * len(completions)

    score({"r": logs}, PROMPTS, REPLIES)
    assert "reward 'r': accuracy = 0.5" in caplog.text
    assert "the column answer is not kept" in caplog.text
    assert "secret" not in caplog.text


def test_a_reward_counts_only_where_another_passes():
    scores = torch.tensor([[1.0, 0.0, 0.5, torch.nan], [4.0, 3.0, torch.nan, 2.0], [9.0] * 4])

    def judges(**options):
        plain = RewardModelConfig(name="brevity")
        fns = {name: with_condition(_named(name), plain) for name in ("right", "last")}
        brief = with_condition(_named("brief"), replace(plain, only_if="right>=0.5", **options))
        return Judges({"right": fns["right"], "brief": brief, "last": fns["last"]})

    names = ("right", "brief", "last")
    own = judges().conditional(names, scores)
    assert own[1].isnan().tolist() == [False, True, True, True]
    own = judges(otherwise=-1.0).conditional(names, scores)
    assert own[1, [0, 1, 3]].tolist() == [4.0, -1.0, -1.0]
    assert torch.equal(own[2], scores[2])
    assert scores[1, 1] == 3.0
    for only_if in ("right", "right = 1", "right >= much"):
        with pytest.raises(ValueError, match="only_if must read like"):
            RewardModelConfig(name="brevity", only_if=only_if)
    with pytest.raises(ValueError, match="otherwise is the score where only_if does not hold"):
        RewardModelConfig(name="brevity", otherwise=1.0)


def _named(name):
    def reward(completions, **_):
        return [0.0] * len(completions)

    reward.__name__ = name
    return reward
