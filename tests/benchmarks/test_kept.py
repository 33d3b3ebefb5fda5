"""How often requirements are kept on fresh questions, from stored rewards."""

import numpy as np
import pytest

from benchmarks import kept
from benchmarks.kept import SHARES, Rewards


def rewards(noise: float) -> Rewards:
    """Two objectives that are linear in the share, on 200 questions."""
    random = np.random.default_rng(0)
    means = np.array([[share, 1 - share] for share in SHARES])[:, None]  # [9, 1, 2]
    return Rewards(("plain", "rich"), means + noise * random.normal(size=(1, 200, 2)))


@pytest.fixture(autouse=True)
def _few_trials(monkeypatch):
    monkeypatch.setattr(kept, "NUM_TRIALS", 200)


@pytest.mark.parametrize("is_validated", [False, True])
def test_without_noise_every_requirement_is_kept_and_every_target_reached(is_validated):
    exact = rewards(0.0)
    found, gaps, others = kept.required(exact, 0.95, is_validated=is_validated)
    assert len(found) + others == 200
    assert 100 < len(found) < 200  # equal values are no certainty
    assert min(gaps) > 0
    assert np.abs(kept.targeted(exact)).max() < 1e-9


@pytest.mark.parametrize("confidence", [0.6, 0.95])
def test_a_bound_is_kept_at_least_as_often_as_it_says(confidence):
    found, gaps, _ = kept.required(rewards(0.5), confidence)
    assert np.mean(found) >= confidence - 0.03
    assert found == [gap >= 0 for gap in gaps]


def test_rewards_of_fresh_questions_decide(monkeypatch):
    at = Rewards.at
    monkeypatch.setattr(Rewards, "at", lambda *arguments: at(*arguments) - 2)
    assert not any(kept.required(rewards(0.1), 0.95)[0])


def test_the_stored_rewards_give_the_tables(capsys, monkeypatch):
    monkeypatch.setattr(kept, "NUM_TRIALS", 20)
    kept.main([])
    printed = capsys.readouterr().out
    assert "kept on fresh" in printed
    stored = Rewards.load(kept.DATA)
    assert stored.values.shape == (len(SHARES), 200, 2)
    assert (np.diff(stored.values.mean(1)[::4], axis=0) * [1, -1] > 0).all()  # a true front
