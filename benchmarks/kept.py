"""How often a certified requirement is kept on fresh prompts, and by how much targets miss.

    python benchmarks/kept.py --run runs/smollm2_front      # half an hour and more, then the table
    python benchmarks/kept.py                               # the table, from the stored rewards

RUN is the conditioned run of `firm demo --model smollm2_front`. Its adapter replies to each of the
200 shipped questions at nine preferences, and the rewards are stored. Each of 2,000 trials draws 50
questions at random, on which the front is measured at five preferences, as a run does, and 50 more
as validation questions; the other 100 are fresh. A trial picks by a random requirement and by a
random target, mixing neighbouring preferences as `firm pick --merge` does, with and without the
validation questions. Rewards on the fresh questions at the picked preference are linear between
the nine.

The adapter was trained on 130 of the questions. Questions that measure and fresh ones are drawn
from the same 200, so this tests the bound and the interpolation, not the step to other questions.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import quiet
from firm.alignment import evaluate, load_prompts
from firm.alignment.evaluation import Calibration
from firm.federation import RandomStream
from firm.fronts.front import Front, Point
from firm.fronts.nearest import expected_rewards
from firm.fronts.reach import mean_preference, reaching
from firm.fronts.requirements import Requirement, best_meeting, certify, free_weights
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import SpeakersConfig
from firm.jobs.pick import conditioned_front
from firm.jobs.speakers import Speakers
from firm.run import compose, print_table
from firm.run.shipped import with_shipped_paths

DATA = Path(__file__).parent.parent / "docs/results/data/kept.json"
SHARES = [k / 8 for k in range(9)]
"""Shares of the first objective at which rewards are stored."""
MEASURED = [0, 2, 4, 6, 8]
"""Places in `SHARES` of the preferences on a trial's front."""
NUM_MEASURED = 50
"""Questions of a trial on which the front is measured."""
NUM_TRIALS = 2000
CONFIDENCES = (0.8, 0.9, 0.95, 0.99)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="the run; without one the stored rewards count")
    parser.add_argument("--data", type=Path, default=DATA, help="file of the rewards")
    options = parser.parse_args(arguments)
    if options.run is not None:
        store(options.run, options.data)
    print_tables(Rewards.load(options.data))


@dataclass(frozen=True)
class Rewards:
    """Rewards of every question at every preference."""

    objectives: tuple[str, ...]
    values: np.ndarray
    """[9, N, M]"""

    @classmethod
    def load(cls, path: Path) -> "Rewards":
        """Reads a file that `store` wrote."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(tuple(stored["objectives"]), np.array(stored["rewards"]))

    def front(self, questions: np.ndarray, validation: np.ndarray | None = None) -> Front:
        """Returns the front as measured on some questions, and on validation questions."""
        points, own = [], dict(zip(self.objectives, range(len(self.objectives)), strict=True))

        def values(chosen: np.ndarray) -> dict[str, dict[str, tuple[float, ...]]]:
            return {
                f"{place}": {
                    name: tuple(self.values[place, chosen, at].tolist()) for name, at in own.items()
                }
                for place in MEASURED
            }

        method = "sigmoid" if self.values.min() >= 0 and self.values.max() <= 1 else "none"
        for place in MEASURED:
            rows = self.values[place, questions]
            errors = rows.std(0, ddof=1) / len(questions) ** 0.5
            points.append(
                Point(
                    name=f"{place}",
                    preference=(SHARES[place], 1 - SHARES[place]),
                    seed=0,
                    rewards=dict(zip(self.objectives, rows.mean(0).tolist(), strict=True)),
                    errors=dict(zip(self.objectives, errors.tolist(), strict=True)),
                    scores={},
                    kl=0.0,
                    adapter=f"{place}",
                )
            )
        zeros = dict.fromkeys(self.objectives, 0.0)
        return Front(
            objectives=self.objectives,
            points=tuple(points),
            reference=(0.0,) * len(self.objectives),
            calibrations={name: {"method": method} for name in self.objectives},
            base=zeros,
            strategy="run",
            num_prompts=len(questions),
            is_conditioned=True,
            test_values=values(questions) if method == "sigmoid" else {},
            validation_values={} if validation is None else values(validation),
        )

    def at(self, share: float, questions: np.ndarray) -> np.ndarray:
        """Returns mean rewards [M] at a preference, linear between the stored ones."""
        means = self.values[:, questions].mean(1)
        return np.array([np.interp(share, SHARES, column) for column in means.T])


def print_tables(rewards: Rewards) -> None:
    """Prints how often requirements are kept, and the errors of targets."""
    rows = []
    for is_validated in (False, True):
        for confidence in CONFIDENCES:
            kept, gaps, num_others = required(rewards, confidence, is_validated=is_validated)
            rows.append(
                [
                    "validation" if is_validated else "test",
                    f"{confidence:.0%}",
                    f"{len(kept)}",
                    f"{np.mean(kept):.1%}",
                    f"{np.mean(gaps):+.3f}",
                    f"{np.quantile(gaps, 0.05):+.3f}",
                    f"{num_others}",
                ]
            )
    print_table(
        f"{NUM_TRIALS} requirements on one objective, drawn from its range on the front",
        [
            *("chosen on", "confidence", "passed", "kept on fresh", "reward less bound"),
            *("5 % quantile", "did not pass"),
        ],
        rows,
    )
    errors = targeted(rewards)
    print_table(
        f"{NUM_TRIALS} random targets: expected less fresh reward",
        ["objective", "mean", "mean of its absolute value", "95 % quantile of that"],
        [
            [
                name,
                f"{own.mean():+.3f}",
                f"{np.abs(own).mean():.3f}",
                f"{np.quantile(np.abs(own), 0.95):.3f}",
            ]
            for name, own in zip(rewards.objectives, errors.T, strict=True)
        ],
    )


def required(
    rewards: Rewards, confidence: float, *, is_validated: bool = False
) -> tuple[list[bool], list[float], int]:
    """Draws a requirement in each trial.

    Returns:
        For each requirement whose certificate passes: whether it is kept, and the reward less the
        bound; and the number of other requirements.
    """
    random = np.random.default_rng(0)
    means = rewards.values.mean(1)  # [9, M]
    kept, gaps, num_others = list[bool](), list[float](), 0
    for _ in range(NUM_TRIALS):
        measured, validation, fresh = split_outcomes(rewards, random)
        front = rewards.front(measured, validation if is_validated else None)
        objective = int(random.integers(len(rewards.objectives)))
        bound = random.uniform(means[:, objective].min(), means[:, objective].max())
        requirement = Requirement(rewards.objectives[objective], is_minimum=True, bound=bound)
        parts, margin = best_meeting(
            front,
            [requirement],
            free_weights(front, [requirement]),
            confidence=confidence,
            is_mixed=True,
        )
        certificate = certify(front, parts, [requirement], confidence=confidence)
        if margin < 0 or not certificate.passes:
            num_others += 1
            continue
        gap = rewards.at(mean_preference(parts)[0], fresh)[objective] - bound
        kept.append(gap >= 0)
        gaps.append(float(gap))
    return kept, gaps, num_others


def targeted(rewards: Rewards) -> np.ndarray:
    """Returns expected less fresh rewards of random targets, [trials, M]."""
    random, errors = np.random.default_rng(1), []
    for _ in range(NUM_TRIALS):
        measured, _, fresh = split_outcomes(rewards, random)
        share = random.uniform()
        parts = reaching(rewards.front(measured), [share, 1 - share])
        expected = expected_rewards(parts).rewards
        own = np.array([expected[name] for name in rewards.objectives])
        errors.append(own - rewards.at(mean_preference(parts)[0], fresh))
    return np.array(errors)


def split_outcomes(
    rewards: Rewards, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the test questions of a trial, its validation questions and the fresh ones."""
    order = random.permutation(rewards.values.shape[1])
    return order[:NUM_MEASURED], order[NUM_MEASURED : 2 * NUM_MEASURED], order[2 * NUM_MEASURED :]


def store(run: Path, path: Path) -> None:
    """Writes the rewards of a run's adapter on all shipped questions, after every preference."""
    quiet()
    front = conditioned_front(run, "kept.py")
    cfg = with_shipped_paths(compose(AlignmentConfig, [run / "config.yaml"], []))
    speakers = Speakers(
        SpeakersConfig(policy=cfg.policy, rewards=cfg.rewards, rollout=cfg.rollout, num_threads=1),
        [run / "adapter"],
        cfg.rewards,
        preference=[1.0, 0.0],
    )
    prompts = [
        prompt
        for split in (cfg.data.test, cfg.data.validation, cfg.data.train)
        for prompt in load_prompts(split, speakers.tokenizer, prompt_format=cfg.policy.prompt)
    ]
    maps = {name: Calibration(**own) for name, own in front.calibrations.items()}
    found: list[Any] = []
    for share in SHARES:
        speakers.refold([share, 1 - share])
        with speakers.speaking(0) as sample:
            own = evaluate(
                sample,
                prompts,
                speakers.reward_fns,
                calibrations=maps,
                stream=RandomStream(0, "evaluation", "kept", f"{share}"),
                num_samples=1,
                batch_size=100,
            )
        columns = [own.rewards[name].tolist() for name in front.objectives]
        found.append([[round(value, 4) for value in row] for row in zip(*columns, strict=True)])
        print(f"share {share:g}: {np.mean(found[-1], axis=0).round(3).tolist()}", flush=True)
    rows = ",\n".join(json.dumps(own) for own in found)
    names = json.dumps(front.objectives)
    path.write_text(f'{{"objectives": {names}, "shares": {SHARES}, "rewards": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
