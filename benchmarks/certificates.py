"""How often a certificate passes although its requirement is missed, in ten settings.

    python benchmarks/certificates.py                   # 2,000 trials each, half a minute

A model's true mean misses the requirement by a hair, so that every pass is wrong; at 95 %
confidence at most 5 % of the trials may pass. Settings have few prompts, ties, skewed values and
values without a bound; in the last two the model is the best of nine, chosen on other prompts or on
the same ones. Each row also has the median distance of the bound from the mean.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import quiet
from firm.fronts import Front, Point
from firm.fronts.confidence import lower_bound, upper_bound
from firm.fronts.requirements import Requirement, best_meeting, certify, free_weights
from firm.run import print_table

CONFIDENCE = 0.95
Draw = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Setting:
    """Independent values of prompts, and the side on which their mean is bounded."""

    draw: Draw
    mean: float
    num_prompts: int
    is_bounded: bool = True
    is_lower: bool = True


def _proportion(share: float) -> Draw:
    return lambda rng, num: (rng.random(num) < share).astype(float)


def _ties(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.choice([0.0, 0.5, 1.0], num, p=[0.1, 0.3, 0.6])


def _rare_failures(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.where(rng.random(num) < 0.04, 0.0, 0.95)


SETTINGS = {
    "proportion 0.9, 5 prompts": Setting(_proportion(0.9), 0.9, 5),
    "proportion 0.6, 20 prompts": Setting(_proportion(0.6), 0.6, 20),
    "beta(2, 2), 8 prompts": Setting(lambda rng, num: rng.beta(2, 2, num), 0.5, 8),
    "beta(8, 4), 300 prompts": Setting(lambda rng, num: rng.beta(8, 4, num), 2 / 3, 300),
    "0, 1/2 and 1, 40 prompts": Setting(_ties, 0.75, 40),
    "rare failures, 50 prompts": Setting(_rare_failures, 0.96 * 0.95, 50),
    "normal, no bound, 5 prompts": Setting(
        lambda rng, num: rng.normal(0, 1, num), 0.0, 5, is_bounded=False
    ),
    "KL as gamma(2), 20 prompts": Setting(
        lambda rng, num: rng.gamma(2, 1, num), 2.0, 20, is_bounded=False, is_lower=False
    ),
    "KL as lognormal, 50 prompts": Setting(
        lambda rng, num: rng.lognormal(0, 0.75, num),
        float(np.exp(0.75**2 / 2)),
        50,
        is_bounded=False,
        is_lower=False,
    ),
    "counts with ties, 15 prompts": Setting(
        lambda rng, num: rng.poisson(1.5, num).astype(float), 1.5, 15, False, is_lower=False
    ),
}
NUM_MODELS, NUM_PROMPTS = 9, 40


def wrong_passes(setting: Setting, num_trials: int) -> tuple[float, float]:
    """Returns the share of trials whose bound passes the mean, and the median distance."""
    rng, num_wrong, distances = np.random.default_rng(0), 0, []
    for _ in range(num_trials):
        values = setting.draw(rng, setting.num_prompts)
        bound = lower_bound if setting.is_lower else upper_bound
        found = bound(values, CONFIDENCE, is_bounded=setting.is_bounded)
        num_wrong += found > setting.mean if setting.is_lower else found < setting.mean
        distances.append(abs(values.mean() - found))
    return num_wrong / num_trials, float(np.median(distances))


def wrong_choices(num_trials: int, *, is_validated: bool) -> float:
    """Returns the share of trials in which the best of nine models passes, which all miss."""
    rng, num_wrong = np.random.default_rng(0), 0
    requirement = Requirement("a", is_minimum=True, bound=0.6)
    for _ in range(num_trials):
        front = drawn_front(rng, 0.599, is_validated=is_validated)
        weights = free_weights(front, [requirement])
        parts, margin = best_meeting(
            front, [requirement], weights, confidence=CONFIDENCE, is_mixed=True
        )
        certificate = certify(front, parts, [requirement], confidence=CONFIDENCE)
        num_wrong += margin >= 0 and certificate.passes
    return num_wrong / num_trials


def drawn_front(rng: np.random.Generator, mean: float, *, is_validated: bool) -> Front:
    """Returns a front of models with one mean of "a", with values by prompt."""

    def values() -> dict[str, dict[str, tuple[float, ...]]]:
        return {
            f"p{at}": {
                "a": tuple(rng.beta(4 * mean, 4 * (1 - mean), NUM_PROMPTS).tolist()),
                "b": (0.5,) * NUM_PROMPTS,
            }
            for at in range(NUM_MODELS)
        }

    test, errors = values(), {"a": 0.03, "b": 0.03}
    points = []
    for at in range(NUM_MODELS):
        share = at / (NUM_MODELS - 1)
        rewards = {"a": float(np.mean(test[f"p{at}"]["a"])), "b": 0.5}
        points.append(Point(f"p{at}", (share, 1 - share), 0, rewards, errors, {}, 1.0, "x"))
    return Front(
        objectives=("a", "b"),
        points=tuple(points),
        reference=(0.0, 0.0),
        calibrations={"a": {"method": "sigmoid"}, "b": {"method": "sigmoid"}},
        base={"a": 0.5, "b": 0.5},
        strategy="FIRM",
        num_prompts=NUM_PROMPTS,
        is_conditioned=True,
        test_values=test,
        validation_values=values() if is_validated else {},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2000)
    options = parser.parse_args(arguments)
    quiet()
    rows = []
    for name, setting in SETTINGS.items():
        share, distance = wrong_passes(setting, options.trials)
        rows.append([name, f"{share:.1%}", f"{distance:.3f}"])
    for is_validated in (True, False):
        share = wrong_choices(options.trials // 10, is_validated=is_validated)
        prompts = "others" if is_validated else "the same prompts"
        rows.append([f"best of {NUM_MODELS} on {prompts}", f"{share:.1%}", ""])
    print_table(
        f"Wrong passes at {CONFIDENCE:.0%} confidence, {options.trials} trials",
        ["setting", "wrong passes", "distance"],
        rows,
    )


if __name__ == "__main__":
    main()
