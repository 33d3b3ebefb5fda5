"""Reward models on an accelerator."""

from pathlib import Path

import pytest

from reward_models.sequence_classifier import SequenceClassifierReward, load_sequence_classifier
from tests.accelerator.device import NAME

HELPFUL = Path(__file__).parents[2] / "firm/miniature/checkpoints/helpful"
PROMPTS = ["\n\nHuman: How do I bake bread?\n\nAssistant:"] * 3
REPLIES = [" Mix flour and water.", " No.", " Please knead the dough, and wait for an hour."]


def test_a_classifier_goes_where_it_is_told():
    scores = {}
    for device in ("cpu", "auto", f"{NAME}:0"):
        loaded = load_sequence_classifier(HELPFUL, device=device)
        assert loaded[0].device.type == ("cpu" if device == "cpu" else NAME)
        scores[device] = SequenceClassifierReward(*loaded, name="r")(PROMPTS, REPLIES)
    assert len(set(scores["cpu"])) == 3
    assert scores["auto"] == pytest.approx(scores["cpu"], abs=1e-3)
    assert scores[f"{NAME}:0"] == scores["auto"]
