import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_models import brevity, positivity

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
