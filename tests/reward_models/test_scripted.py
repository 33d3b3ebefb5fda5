import pytest
from hypothesis import given
from hypothesis import strategies as st

from firm.miniature import World
from recipes.miniature.replies import ReplyWriter
from reward_models import (
    RewardModelConfig,
    brevity,
    length,
    load_reward_model,
    matches,
    politeness,
    positivity,
)
from reward_models.scripted import COURTEOUS_PHRASES, RUDE_PHRASES

TEXTS = ["Thanks, love!", "", "Please shut up and go away now."]
CHATS = [[{"role": "assistant", "content": text}] for text in TEXTS]
PARTS = [
    [{"role": "assistant", "content": [{"type": "text", "text": text}, {"type": "image"}]}]
    for text in TEXTS
]
CALL = [{"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}]


@pytest.mark.parametrize("reward", [brevity, length, positivity, politeness])
def test_replies_to_chats_are_scored_as_their_texts(reward):
    assert reward(CHATS) == reward(PARTS) == reward(TEXTS)
    assert len({*reward(TEXTS)}) == 3
    assert reward([CALL]) == reward([""])


def test_the_true_scores_of_the_miniature_take_chats():
    rows = ReplyWriter(World.conflict()).demonstrations(8, seed=0)
    prompts, replies = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    questions = [
        text.removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:") for text in prompts
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    messages = [[{"role": "assistant", "content": reply}] for reply in replies]
    for name in ("true_helpful", "true_harmless", "parse"):
        true = load_reward_model(RewardModelConfig(name=name), name)
        assert true(chats, messages) == true(prompts, replies)


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


def test_length_is_best_at_its_target():
    below, exact, above, none = length(["a b", "a b c d", "a " * 8, ""], num_words=4)
    assert (below, exact, above, none) == (0.5, 1.0, 0.5, 0.0)
    with pytest.raises(ValueError, match="num_words must be positive, got 0"):
        length(["a"], num_words=0)


def test_matches_reads_the_whole_reply():
    assert matches([" I see.\n", "I see", "See? Yes!", "i see.", ""]) == [1.0, 0.0, 1.0, 0.0, 0.0]
    steps = "1. Stir.\n2. Serve."
    assert matches([steps, "Stir."], pattern=r"(\d\. [^\n]+\n?)+") == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"pattern '\(' is invalid"):
        matches(["a"], pattern="(")
