import pytest
import torch

from firm.alignment.attacks import as_attacker, attacked_judges
from firm.alignment.calibration import Calibration
from firm.alignment.client_config import AttackConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rewards import Judges, ScoringRequest, scored_together
from firm.federation.attackers import Attacker

OBJECTIVES = ("length", "vowels")
PROMPTS, REPLIES = [Prompt("x")] * 4, ["a", "bb", "ccc", "eeee"]
MAPS = {
    "length": Calibration("sigmoid", mean=2.0, scale=0.7),
    "vowels": Calibration("minmax", low=0.0, high=4.0),
}


class Length:
    """A reward model that says what it has cut."""

    name = "length"

    def __call__(self, prompts, completions, **kwargs):
        self.truncated = [len(text) > 2 for text in completions]
        return [float(len(text)) for text in completions]


async def vowels(prompts, completions, **kwargs):
    return [sum(letter in "ae" for letter in text) for text in completions]


def judges(calibrations=MAPS):
    return Judges({"length": Length(), "vowels": vowels}, calibrations)


def scored(judges, objectives=OBJECTIVES):
    (begun,) = scored_together([ScoringRequest(judges, objectives, PROMPTS, REPLIES, [[1]] * 4)])
    return begun if isinstance(begun, ValueError) else begun()


def scores(attack, calibrations=MAPS):
    """Raw scores and rewards, shape [2, 2, B]."""
    attacked = attacked_judges(judges(calibrations), attack)
    raw = scored(attacked).scores
    return torch.stack([raw, attacked.rewards(OBJECTIVES, raw)])


def test_an_attack_leaves_replies_without_a_score_as_they_are():
    honest = Judges({"few": lambda **_: [1.0, None, None, 2.0]})
    attacked = attacked_judges(honest, AttackConfig("reward_bias", bias=1.0))
    assert scored(attacked, ["few"]).scores.nan_to_num(nan=-1).tolist() == [[2, -1, -1, 3]]


@pytest.mark.parametrize("objective", [None, *OBJECTIVES])
@pytest.mark.parametrize(
    ("kind", "options", "attacked"),
    [
        ("reward_bias", {"bias": -0.5}, lambda raw: raw - 0.5),
        ("reward_scaling", {"scale": 3.0}, lambda raw: raw * 3),
    ],
)
def test_raw_scores_are_attacked_of_the_objectives_that_are_named(
    kind, options, attacked, objective
):
    honest, lies = scores(None), scores(AttackConfig(kind, objective=objective, **options))
    for j, name in enumerate(OBJECTIVES):
        is_attacked = objective in (None, name)
        assert (
            lies[0, j].tolist()
            == (attacked(honest[0, j]) if is_attacked else honest[0, j]).tolist()
        )
        assert torch.equal(lies[1, j], MAPS[name](lies[0, j]))


@pytest.mark.parametrize("objective", [None, *OBJECTIVES])
def test_flipped_labels_have_the_reward_one_minus_the_true_one(objective):
    honest, lies = scores(None), scores(AttackConfig("label_flip", objective=objective))
    for j, name in enumerate(OBJECTIVES):
        expected = 1 - honest[1, j] if objective in (None, name) else honest[1, j]
        torch.testing.assert_close(lies[1, j], expected)


@pytest.mark.parametrize("calibrations", [None, {name: Calibration("none") for name in OBJECTIVES}])
def test_flipped_scores_that_no_map_follows_are_negated(calibrations):
    honest = scores(None, calibrations)
    assert torch.equal(scores(AttackConfig("label_flip"), calibrations), -honest)


def test_an_attacked_reward_model_says_what_the_true_one_has_cut():
    honest = judges()
    lying = attacked_judges(honest, AttackConfig("label_flip"))
    assert scored(lying).truncated == {"length": [False, False, True, True]}
    assert lying.reward_fns["length"].name == "length"
    assert lying.calibrations is honest.calibrations


def test_a_broken_reward_is_told_as_of_an_honest_client():
    broken = Judges({"length": lambda **_: [1.0, float("nan"), 1.0, 1.0]})
    attacked = attacked_judges(broken, AttackConfig("reward_scaling", scale=2.0))
    error = scored(attacked, OBJECTIVES[:1])
    assert isinstance(error, ValueError)
    assert "nan at index 1" in str(error)


def test_an_attack_is_on_the_judges_or_on_the_client():
    class Trained:
        name, objectives, num_examples = "client_0", OBJECTIVES, 3

    client, own = Trained(), judges()
    for attack in (None, AttackConfig("label_flip"), AttackConfig("reward_bias", bias=1.0)):
        assert as_attacker(client, attack, seed=0) is client
    for attack in (None, AttackConfig("sign_flip"), AttackConfig("collusion", scale=2.0)):
        assert attacked_judges(own, attack) is own
    assert isinstance(as_attacker(client, AttackConfig("sign_flip"), seed=0), Attacker)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "noise"}, "kind must be one of sign_flip, .*, label_flip, got 'noise'"),
        ({"kind": "sign_flip", "scale": -1.0}, "scale must be positive, got -1.0"),
        ({"kind": "reward_bias"}, "must be non-zero for reward_bias and zero otherwise, got 0.0"),
        ({"kind": "reward_bias", "bias": float("nan")}, "bias must be a finite number, got nan"),
        ({"kind": "sign_flip", "bias": 1.0}, "bias must be non-zero for reward_bias"),
        ({"kind": "scaling"}, "scaling by 1 has no effect; choose another scale"),
        ({"kind": "reward_scaling"}, "reward_scaling by 1 has no effect"),
        ({"kind": "label_flip", "scale": 2.0}, "label_flip has no scale, got 2.0"),
        (
            {"kind": "collusion", "objective": "length"},
            "objective is supported for attacks on rewards",
        ),
    ],
)
def test_attacks_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttackConfig(**options)


def test_one_objective_of_a_function_that_returns_several_is_attacked():
    def judge(completions, **kwargs):
        values = [float(len(text)) for text in completions]
        return {"length": values, "brevity": [-value for value in values]}

    judge.output = "brevity"
    attack = AttackConfig("reward_bias", bias=1.0, objective="vowels")
    attacked = attacked_judges(Judges({"length": judge, "vowels": judge}), attack)
    assert scored(attacked).scores.tolist() == [[-1, -2, -3, -4], [0, -1, -2, -3]]
