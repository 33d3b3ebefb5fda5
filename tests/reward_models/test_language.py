import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.base.extras import install_command
from reward_models import RewardModelConfig, load_reward_model, reading_ease, sentiment, vocabulary
from reward_models.language import num_syllables

PLAIN = "The cat sat on the mat. It was warm there. A dog came in and the cat ran up a tree."
DENSE = (
    "Photosynthesis transforms electromagnetic radiation into carbohydrates, sustaining "
    "practically every terrestrial ecosystem and replenishing atmospheric oxygen."
)
DEGENERATE = {
    "empty": "",
    "punctuation": "... !!! ?",
    "one word": "Yes.",
    "a repeated word": "go " * 30,
    "a repeated sentence": "Go on. " * 15,
    "letters": "xq zt bk pl mn qr st vw xy zz aa bb cc",
    "short gibberish": "bla fub gom. tib rad zon. wek lup. " * 3,
    "long gibberish": "flurbistication dimmensionalized structuralitization " * 5,
    "a repeated long word": "transportation " * 20,
    "digits": "12 34 56. 78.",
}


@pytest.mark.parametrize("reward", [sentiment, reading_ease, vocabulary])
def test_replies_to_chats_are_scored_as_their_texts(reward):
    texts = [PLAIN, DENSE, "I love this happy day, and I hate that sad, ugly one less."]
    assert reward([[{"role": "assistant", "content": text}] for text in texts]) == reward(texts)
    assert len({*reward(texts)}) > 1
    assert reward([[{"role": "assistant", "content": None}]]) == reward([""]) == [0.0]


def test_sentiment_reads_negations():
    good, not_good, bad = sentiment(["It is good.", "It is not good.", "It is horrible."])
    assert good > 0 > not_good > bad


def test_reading_ease_is_flesch_s_formula_on_sound_english():
    # 11 words in 2 sentences, 17 syllables: ri-vers car-ry wa-ter; an-i-mals
    text = "Rivers carry water to the sea. Many animals drink from them."
    ease = 206.835 - 1.015 * 11 / 2 - 84.6 * 17 / 11
    assert reading_ease([text]) == [pytest.approx(ease)]
    # a reply that was cut off has one sentence more; "3.5" and "!?" end none and one
    assert reading_ease([text + " They"]) == [pytest.approx(206.835 - 1.015 * 4 - 84.6 * 1.5)]
    same = "The small dog ate about 3.5 pounds of meat {} it was ill"
    assert reading_ease([same.format("!?")]) == reading_ease([same.format(".")])


def test_plain_and_dense_english_are_at_opposite_ends():
    (plain, dense), (poor, rich) = reading_ease([PLAIN, DENSE]), vocabulary([PLAIN, DENSE])
    assert plain > 90
    assert dense < 5
    assert poor == 0
    assert rich > 1


@pytest.mark.parametrize("text", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_replies_win_neither(text):
    assert reading_ease([text])[0] < 20
    assert vocabulary([text])[0] < 0.35


def test_a_list_of_rare_words_gains_nothing_over_dense_prose():
    words = "perspicacity magnanimous circumlocution verisimilitude grandiloquent antediluvian"
    assert vocabulary([words])[0] == pytest.approx(2 / 6**0.5)
    prose = f"The {words.split()[0]} of {words.split()[1]} men"
    assert vocabulary([f"{prose} is"])[0] == pytest.approx(2 / 6**0.5)


@given(words=st.lists(st.sampled_from((DENSE + PLAIN).split()), min_size=1, max_size=30))
def test_saying_it_twice_raises_no_score(words):
    text = " ".join(words).rstrip(".") + "."
    ease, twice = reading_ease([text, f"{text} {text}"])
    if len(words) >= 10:
        assert twice <= ease + 1e-9
    once, again = vocabulary([text, f"{text} {text}"])
    assert again <= once * 2**0.5 + 1e-9
    assert 0 <= ease <= 100
    assert once >= 0


def test_forms_of_basic_words_are_not_advanced():
    assert vocabulary(["Everything stopped working when the happiest drivers started"]) == [0.0]
    assert vocabulary(["The committee deliberated"])[0] > 0.5


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("the", 1), ("table", 2), ("make", 1), ("makes", 1), ("boxes", 2), ("wanted", 2),
        ("called", 1), ("settled", 2), ("being", 2), ("idea", 3), ("radio", 3), ("doesn't", 2),
        ("somebody", 3), ("everything", 3), ("science", 2), ("quiet", 2), ("criticism", 4),
        ("education", 4), ("beautiful", 3), ("it's", 1), ("rhythm", 2), ("people", 2),
        ("beyond", 2),
    ],
)  # fmt: skip
def test_syllables(word, count):
    assert num_syllables(word) == count


@pytest.mark.parametrize(
    ("name", "package"),
    [("sentiment", "vaderSentiment"), ("reading_ease", "spellchecker"), ("vocabulary", "spellch")],
)
def test_a_missing_package_names_the_extra_in_one_line(name, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "reward_models.registry.find_spec",
        lambda module: None if module in ("vaderSentiment", "spellchecker") else find(module),
    )
    with pytest.raises(ValueError, match=rf"'{name}' needs the package {package}") as error:
        load_reward_model(RewardModelConfig(name=name), "x")
    assert str(error.value).endswith(f"{install_command('real')}.")
    assert "\n" not in str(error.value)
    assert load_reward_model(RewardModelConfig(name="brevity"), "x")
