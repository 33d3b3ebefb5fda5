import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models import brevity, politeness, positivity
from reward_models.scripted import COURTEOUS_PHRASES, RUDE_PHRASES

texts = st.lists(st.sampled_from(["happy", "Love", "rain", "glad!", "x"]), max_size=30)


@given(words=texts, more=texts)
def test_a_longer_reply_is_never_briefer_nor_less_positive(words, more):
    short, long = " ".join(words), " ".join(words + more)
    short_score, long_score = brevity([short, long])
    assert 0 < long_score <= short_score <= 1
    assert positivity([long]) >= positivity([short])


def test_brevity_is_one_half_at_its_length():
    assert brevity(["one two three", ""], half_words=3) == [0.5, 1.0]
    with pytest.raises(ValueError, match="half_words must be positive, got 0"):
        brevity(["a"], half_words=0)


def test_positivity_counts_words_and_not_parts_of_them():
    assert positivity(["Happy, happy! She LOVED it.", "unhappy lovers", ""]) == [3.0, 0.0, 0.0]
    assert positivity(["dog cat dog"], words="dog Cat") == [3.0]


def test_politeness_counts_courteous_phrases_less_rude_ones():
    replies = ["Thanks! You\u2019re welcome.", "PLEASE, please\nshut  up, idiot", "Rain.", ""]
    assert politeness(replies) == [2.0, 0.0, 0.0, 0.0]
    assert politeness(["Damn you."]) == [-1.0]


def test_politeness_takes_whole_words_and_the_longest_phrase():
    assert politeness(["displeased thankless pleaser hello", "'Please'"]) == [0.0, 1.0]
    assert politeness(["a b c, b. c"], courteous="b, a b, A B c", rude="") == [2.0]
    assert politeness(["a b c"], courteous="", rude="c,") == [-1.0]


@given(reply=st.text(max_size=40), phrase=st.sampled_from(COURTEOUS_PHRASES.split(", ")))
def test_a_courteous_phrase_always_counts(reply, phrase):
    score, more = politeness([reply, f"{reply}\n{phrase} x"], rude="")
    assert more >= score
    assert politeness([phrase]) == [1.0]


def test_no_phrase_counts_for_and_against_a_reply():
    assert all(politeness([phrase]) == [-1.0] for phrase in RUDE_PHRASES.split(", "))
