"""Recomputes every figure of docs/results.md from the data in the repository.

    python benchmarks/findings.py           # prints the tables
    python benchmarks/findings.py --write   # puts them into docs/results.md, and draws its pictures

The page has each table between `<!-- NAME -->` and `<!-- end -->`; outside of them it states no
measured figure. Comparisons, margins and verdicts are those of docs/protocol.md. The data are
docs/results/data/protocol (benchmarks/protocol_runs.py), docs/fronts and docs/figures.
"""

import argparse
import csv
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.adapter_runs import DELTA, EPSILON, SMALL, WHOLE
from benchmarks.frontier import Gains, stored_gains, words
from benchmarks.frontier import chosen as chosen_rates
from benchmarks.privacy_budget import noise_for
from benchmarks.private import by_adapter, gain_table, needed_table
from benchmarks.protocol_runs import (
    COMMON,
    FIRST,
    FURTHER,
    MULTIPLES,
    REAL,
    SETTINGS,
    WEIGHTED,
    WEIGHTINGS,
)
from firm.fronts import Front, Point, by_preference, non_dominated
from firm.fronts.hypervolume import volumes
from firm.report.drawing import LegendEntry, Series, series_panel
from firm.report.seeds import mean_difference
from firm.report.static import (
    COLUMN_IN,
    PANEL_IN,
    STYLE,
    PaperFigure,
    curves_figure,
    save_figure,
)
from firm.serving.model_card import markdown_table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
PROTOCOL = ROOT / "docs/results/data/protocol"
PICTURE, CURVES = ROOT / "docs/figures/equal_replies", ROOT / "docs/figures/reward_kl"
"""Pictures of families K and L, without their suffixes."""
ALPHA = 0.05
MARGIN = 0.010
TARGETS = np.linspace(0, 1, 21)
OBJECTIVES = ("helpful", "harmless")
ALL = (*FIRST, *FURTHER)
KL_SHARES = (0.5, 0.1, 0.9)
"""Preferences at which models with a smaller B were measured."""
TEN, FIVE, REAL_SEEDS = range(100, 110), range(100, 105), range(300, 303)
PAIR_SEEDS = range(400, 403)
SIXTY = range(110, 170)
WORLDS, WORLD_SEEDS = range(1, 5), (600, 601)
WEIGHTING_SEEDS, REPLY_SEEDS = range(800, 810), range(820, 830)
TRL_SEEDS, UNSEEN_SEEDS = range(840, 843), range(310, 313)
SMOOTHED_SEEDS, HALF_KL_SEEDS = range(860, 870), range(870, 880)
METHODS = ("FIRM", "FIRM with PPO", "TRL's GRPO", "TRL's GDPO")
"""Methods of family L; the first is compared with the others."""
KLS = (1.0, 2.0, 4.0)
"""KLs at which family L compares rewards, the second in its claims."""

Model = Mapping[str, Mapping[str, float]]
"""Figures of a model by split, as benchmarks/protocol_runs.py keeps them."""
Models = Mapping[str, Model]


# --- Statistics -----------------------------------------------------------------------------------


def difference_p(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of a paired t-test."""
    if not any(differences):
        return 1.0
    above = above_p(differences, 0.0)
    return 2 * min(above, 1 - above)


def equality_p(differences: Sequence[float], margin: float) -> float:
    """Returns the larger p-value of two one-sided paired t-tests against ± margin."""
    return max(above_p(differences, -margin), above_p([-each for each in differences], -margin))


def above_p(differences: Sequence[float], bound: float) -> float:
    """Returns the p-value of a one-sided t-test for a mean above a bound."""
    values = np.array(differences)
    error = values.std(ddof=1) / len(values) ** 0.5
    if error == 0:
        return float(values.mean() <= bound)
    return float(stats.t.sf((values.mean() - bound) / error, len(values) - 1))


def holm(p_values: Sequence[float]) -> list[bool]:
    """Returns which hypotheses Holm's method rejects, at a family-wise error of `ALPHA`.

    >>> holm([0.04, 0.01, 0.03])
    [False, True, False]
    """
    rejected = [False] * len(p_values)
    for rank, at in enumerate(np.argsort(p_values)):
        if p_values[at] > ALPHA / (len(p_values) - rank):
            break
        rejected[at] = True
    return rejected


@dataclass(frozen=True)
class Claim:
    """A comparison of the protocol and its differences, first side less second, by seed."""

    name: str
    text: str
    sides: tuple[str, str]
    quantity: str
    planned: int
    """Number of seeds, or of another `unit`, that the protocol names."""
    differences: tuple[float, ...]
    part: str
    """Part of benchmarks/protocol_runs.py."""
    margin: float | None = None
    """Of equality; None for a claim of a difference."""
    script: str = "protocol_runs.py"
    unit: str = "seeds"
    """What `planned` counts."""
    files: str = ""
    """Pattern of the names of the data's files, if they do not start with the part."""
    is_listed: bool = True
    """Whether it has a row among the findings; the others have their verdicts in a table of their
    family."""

    @property
    def is_complete(self) -> bool:
        """Whether all planned seeds are there."""
        return len(self.differences) == self.planned


def verdicts(family: Sequence[Claim]) -> list[str]:
    """Returns the verdict of each claim, corrected for all tests of the family by Holm's method.

    The tests of claims that are not complete count with p = 1.
    """
    tests: list[tuple[int, Literal["difference", "equality"], float]] = []
    for at, claim in enumerate(family):
        whole = claim.is_complete
        tests.append((at, "difference", difference_p(claim.differences) if whole else 1.0))
        if claim.margin is not None:
            p = equality_p(claim.differences, claim.margin) if whole else 1.0
            tests.append((at, "equality", p))
    found: list[set[str]] = [set() for _ in family]
    for (at, kind, _), is_rejected in zip(tests, holm([p for *_, p in tests]), strict=True):
        if is_rejected:
            found[at].add(kind)
    words = []
    for claim, kinds in zip(family, found, strict=True):
        if not claim.is_complete:
            words.append(f"open: {len(claim.differences)} of {claim.planned} {claim.unit}")
            continue
        ahead = claim.sides[0] if fmean(claim.differences) > 0 else claim.sides[1]
        parts = ["equal within the margin"] if "equality" in kinds else []
        parts += [f"{ahead} ahead"] if "difference" in kinds else []
        words.append(", ".join(parts) or "open")
    return words


def interval(differences: Iterable[float], digits: int = 3) -> str:
    """Returns a mean with its 95 % interval, or the mean alone of fewer than two."""
    values = list(differences)
    if len(values) < 2:
        return f"{values[0]:+.{digits}f}" if values else "–"
    return mean_difference(values).text(digits)


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Returns a mean ± its standard error."""
    own = list(values)
    if len(own) < 2:
        return f"{own[0]:.{digits}f}" if own else "–"
    error = np.std(own, ddof=1) / len(own) ** 0.5
    return f"{fmean(own):.{digits}f} ± {error:.{digits}f}"


# --- Quantities of fronts -------------------------------------------------------------------------


def rewards(model: Model, split: str) -> np.ndarray:
    """Returns the rewards of a model, shape [M]."""
    return np.array([value for key, value in model[split].items() if key.startswith("reward ")])


def chosen(models: Sequence[Model]) -> list[Model]:
    """Returns the model for each target, chosen by its rewards on validation prompts."""
    validation = np.stack([rewards(model, "validation") for model in models])  # [N, 2]
    weights = np.stack([TARGETS, 1 - TARGETS])  # [2, targets]
    return [models[at] for at in (validation @ weights).argmax(0)]


def expected_utility(models: Sequence[Model], names: Sequence[str] | None = None) -> float:
    """Returns the mean over the targets of the chosen models' values on test prompts.

    Of their rewards, or of the two scores with these names.
    """
    values = [
        [model["test"][name] for name in names] if names else rewards(model, "test")
        for model in chosen(models)
    ]
    return float((np.array(values) * np.stack([TARGETS, 1 - TARGETS], axis=1)).sum(1).mean())


def gained_volume(models: Sequence[Model], base: Model) -> float:
    """Returns the hypervolume from the base model's rewards, on test prompts.

    Of the models that are non-dominated on validation prompts; those that are not above the base
    model in both rewards add nothing.
    """
    return volume_of(models, rewards(base, "test"))


def volume_of(models: Sequence[Model], corner: np.ndarray) -> float:
    """Returns the hypervolume from a corner, on test prompts, of the non-dominated models."""
    kept = non_dominated(np.stack([rewards(model, "validation") for model in models]))
    points = np.stack([rewards(model, "test") for model in models])[kept]
    return volume_above(points, corner)


def coverage(models: Sequence[Model], others: Sequence[Model]) -> float:
    """Returns the share of others that a model matches in both test rewards, up to the margin."""
    own, theirs = (
        np.stack([rewards(model, "test") for model in side]) for side in (models, others)
    )
    return matched_share(own, theirs)


def at_kl(points: Sequence[tuple[float, float]], kl: float) -> float:
    """Returns the utility at a KL, linear between (KL, utility) of base, shrunk and whole model."""
    kls, values = zip(*sorted(points), strict=True)
    return float(np.interp(kl, kls, values))


# --- Data -----------------------------------------------------------------------------------------


def parts(name: str, seeds: Iterable[int], folder: Path = PROTOCOL) -> dict[int, Models]:
    """Returns the models of a part of the protocol's runs, of each seed that is finished."""
    paths = {seed: folder / f"{name}_{seed}.json" for seed in seeds}
    return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}


def of(models: Models, method: str, shares: Sequence[float] = FIRST) -> list[Model]:
    """Returns a method's models at preferences, in their order."""
    return [models[f"{method} {share:g}"] for share in shares]


def soups(models: Models, count: int) -> list[Model]:
    """Returns the soups of two or three runs at the five preferences, or of five at the nine.

    The runs themselves are among them.
    """
    trained = {2: (0.1, 0.9), 3: (0.1, 0.5, 0.9), 5: FIRST}[count]
    return [
        models[f"{'separate' if share in trained else f'soup{count}'} {share:g}"]
        for share in (ALL if count == len(FIRST) else FIRST)
    ]


UTILITY = "expected utility"
FRONTS: tuple[tuple[str, Callable[[Models], list[Model]]], ...] = (
    ("five separate runs", lambda models: of(models, "separate")),
    ("a soup of two runs", lambda models: soups(models, 2)),
)
"""Sides with which a conditioned run is compared, with their models."""


def family_a(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family A."""
    fronts = parts("front", TEN, folder).values()
    claims = []
    for name, text, margin, (second, side) in zip(
        ("A1", "A2"),
        ("equals five separate runs", "differs from a soup of two runs"),
        (MARGIN, None),
        FRONTS,
        strict=True,
    ):
        sides, less = ("one conditioned run", second), [utility_less(m, side) for m in fronts]
        text = f"One conditioned run {text}"
        claims.append(Claim(name, text, sides, UTILITY, 10, tuple(less), "front", margin))
    return [*claims, *equal_weights(("A3", "A4"), TEN, folder)]


def utility_less(models: Models, side: Callable[[Models], list[Model]]) -> float:
    """Returns the expected utility of the conditioned run less that of another side."""
    return expected_utility(of(models, "conditioned")) - expected_utility(side(models))


EQUAL_WEIGHTS = (
    # text, sides, their models
    ("Training without a critic equals PPO", ("without a critic", "PPO"), ("fixed", "PPO")),
    (
        "FIRM without a preference equals fixed weights",
        ("FIRM", "fixed weights"),
        ("FIRM", "fixed"),
    ),
)


def equal_weights(names: Sequence[str], seeds: range, folder: Path) -> list[Claim]:
    """Returns the two claims about estimator and solver at equal weights, on some seeds."""
    data = parts("baselines", seeds, folder)
    found = []
    for name, (text, sides, (first, second)) in zip(names, EQUAL_WEIGHTS, strict=True):
        less = tuple(
            float((rewards(models[first], "test") - rewards(models[second], "test")).mean())
            for models in data.values()
        )
        quantity = "mean of the rewards"
        found.append(Claim(name, text, sides, quantity, len(seeds), less, "baselines", MARGIN))
    return found


REAL_SOUP = ("separate 0.1", "soup2 0.5", "separate 0.9")
"""Models of a soup of two runs on SmolLM2."""
REAL_PAIRS = (
    # first and second side, their models
    (("training without a critic", "PPO"), ("fixed", "PPO")),
    (("FIRM", "fixed weights"), ("FIRM", "fixed")),
    (("FIRM", "FedCMOO-A"), ("FIRM", "FedCMOO-A")),
    (("FIRM with uploads of 2 bits", "with whole uploads"), ("2 bits", "FIRM")),
)


def smallest_gain(models: Models, setting: str, side: str, *, mean: bool = False) -> float:
    """Returns the smallest gain over the base model among the objectives, or their mean."""
    base, own = (models[f"{setting}: {name}"]["test"] for name in ("base", side))
    gains = [own[key] - base[key] for key in base if key.startswith("reward ")]
    return fmean(gains) if mean else min(gains)


def family_b(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family B."""
    data = parts("weights", FIVE, folder)
    return [
        Claim(
            f"B{number}",
            f"FIRM differs from fixed weights: {setting}",
            ("FIRM", "fixed weights"),
            "smallest gain",
            5,
            tuple(
                smallest_gain(models, setting, "FIRM") - smallest_gain(models, setting, "fixed")
                for models in data.values()
            ),
            "weights",
        )
        for number, setting in enumerate(SETTINGS, start=1)
    ]


def family_c(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family C."""
    return named("C", on_smollm2("real", REAL_SEEDS, folder))


def family_d(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claim of family D."""
    return named("D", [under_a_constraint("real", REAL_SEEDS, folder)])


def family_m(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family M: those of C and D on unseen questions, and one on style."""
    part, sides = "unseen_style", ("preference 0.9 for plain", "0.1")
    less = tuple(
        high["test"]["style"] - low["test"]["style"]
        for models in parts(part, UNSEEN_SEEDS, folder).values()
        for low, high in [(models["conditioned 0.1"], models["conditioned 0.9"])]
    )
    text = "One conditioned run is plainer at 0.9 than at 0.1, as a language model judges"
    claims = [
        *on_smollm2("unseen", UNSEEN_SEEDS, folder),
        under_a_constraint("unseen", UNSEEN_SEEDS, folder),
        Claim("", text, sides, "style, nats per token", len(UNSEEN_SEEDS), less, part),
    ]
    return named("M", claims)


def named(letter: str, claims: Sequence[Claim]) -> list[Claim]:
    """Returns the claims of a family with their names, in their order."""
    return [replace(claim, name=f"{letter}{at}") for at, claim in enumerate(claims, start=1)]


def on_smollm2(questions: str, seeds: range, folder: Path) -> list[Claim]:
    """Returns the seven comparisons of family C, on real or unseen questions."""
    front, baselines = f"{questions}_front", f"{questions}_baselines"
    fronts, others = (parts(name, seeds, folder).values() for name in (front, baselines))
    one, found = "one conditioned run", []
    sides: dict[str, Callable[[Models], list[Model]]] = {
        "three separate runs of equal replies": lambda models: of(models, "short", REAL),
        "three separate runs of equal rounds": lambda models: of(models, "separate", REAL),
        "the soup of two runs": lambda models: [models[name] for name in REAL_SOUP],
    }
    for second, models_of in sides.items():
        less = tuple(
            expected_utility(of(models, "conditioned", REAL)) - expected_utility(models_of(models))
            for models in fronts
        )
        text = f"{one.capitalize()} differs from {second}"
        found.append(Claim("", text, (one, second), UTILITY, len(seeds), less, front))
    for ends, (first, second) in REAL_PAIRS:
        less = tuple(
            float((rewards(models[first], "test") - rewards(models[second], "test")).mean())
            for models in others
        )
        text = f"{ends[0][0].upper()}{ends[0][1:]} differs from {ends[1]}"
        found.append(Claim("", text, ends, "mean of the rewards", len(seeds), less, baselines))
    return found


def under_a_constraint(questions: str, seeds: range, folder: Path) -> Claim:
    """Returns the comparison of family D, on real or unseen questions."""
    part = f"{questions}_constraint"
    sides = ("a run under the constraint", "the conditioned run")
    less = tuple(
        models["constrained"]["test"]["reward rich"] - rich_of_folds(models)
        for models in parts(part, seeds, folder).values()
    )
    text = "A run under a constraint differs from the conditioned run at equal reward of plain"
    return Claim("", text, sides, "reward of rich", len(seeds), less, part)


def rich_of_folds(models: Models) -> float:
    """Returns the conditioned run's reward of rich at the constrained run's reward of plain."""
    folds = sorted(
        (own["test"]["reward plain"], own["test"]["reward rich"])
        for own in of(models, "conditioned", REAL)
    )
    plain, rich = zip(*folds, strict=True)
    return float(np.interp(models["constrained"]["test"]["reward plain"], plain, rich))


def family_e(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claim of family E."""
    whole, small = uploads(folder)
    less = tuple(
        own["rewards"] - 0.9 * all_["rewards"] for own, all_ in zip(small, whole, strict=True)
    )
    sides = "2 bits", "nine tenths of whole uploads"
    text = "Uploads of 2 bits keep nine tenths of the gain of whole uploads"
    quantity, script = "gain in the sum of the rewards", "adapter_runs.py"
    return [Claim("E1", text, sides, quantity, 5, less, "uploads", script=script)]


def family_f(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family F."""
    return equal_weights(("F1", "F2"), SIXTY, folder)


def family_g(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family G: accuracies on held-out pairs."""
    runs = pair_study(folder)
    one, four, quantity = "one conditioned run", "four clients", "mean of the accuracies"
    claims = []
    for name, sides, settings in (
        ("G1", ("FIRM", "fixed weights"), ("FIRM", FIXED)),
        ("G2", (four, "one client with all pairs"), (FIXED, POOLED)),
    ):
        first, second = (runs.get(setting, {}) for setting in settings)
        less = tuple(mean_accuracy(first[seed]) - mean_accuracy(second[seed]) for seed in PAIR_SEEDS
                     if seed in first and seed in second)  # fmt: skip
        text = f"On pairs {sides[0]} {'differ' if sides[0] == four else 'differs'} from {sides[1]}"
        claims.append(Claim(name, text, sides, quantity, 3, less, "hh_pairs", script=STUDY,
                            files="pairs_study.csv"))  # fmt: skip
    folds, separate = (pair_front(folder, method) for method in (FOLDS, SEPARATE))
    less = tuple(folds[seed] - separate[seed] for seed in sorted(folds.keys() & separate.keys()))
    text = "On pairs one conditioned run differs from five separate runs"
    sides = one, "five separate runs"
    claims.append(Claim("G3", text, sides, "mean of p · accuracies", 3, less, "hh_pairs_front",
                        script=SWEEP, files="pairs_front_*.json"))  # fmt: skip
    return claims


STUDY, SWEEP = "firm study --config", "firm sweep --config"
FIXED, POOLED = "fixed weights", "pooled, fixed weights"


def pair_study(folder: Path = PROTOCOL) -> dict[str, dict[int, dict[str, float]]]:
    """Returns the figures of aligned models of the study hh_pairs, by setting and seed."""
    path = folder / "pairs_study.csv"
    found: dict[str, dict[int, dict[str, float]]] = {}
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                own = found.setdefault(row["setting"], {}).setdefault(int(row["seed"]), {})
                own[row["figure"]] = float(row["aligned"])
    return found


def mean_accuracy(figures: Mapping[str, float]) -> float:
    """Returns the mean of a model's accuracies on held-out pairs."""
    return fmean(figures[f"accuracy {name}"] for name in OBJECTIVES)


def pair_points(folder: Path, method: str) -> dict[int, dict[float, Mapping[str, float]]]:
    """Returns the accuracies of finished seeds of the sweep, by seed and share of the first."""
    path = folder / f"pairs_front_{method}.front.json"
    own: dict[int, dict[float, Mapping[str, float]]] = {}
    for point in Front.load(path).points if path.exists() else ():
        assert point.preference is not None
        own.setdefault(point.seed, {})[round(point.preference[0], 6)] = point.rewards
    return {seed: models for seed, models in own.items() if len(models) == len(FIRST)}


def pair_front(folder: Path, method: str) -> dict[int, float]:
    """Returns the mean of p · accuracies over the five preferences, of each finished seed."""
    first, second = OBJECTIVES
    return {
        seed: fmean(p * own[first] + (1 - p) * own[second] for p, own in models.items())
        for seed, models in pair_points(folder, method).items()
    }


def pair_front_table(folder: Path = PROTOCOL) -> str:
    """Returns the accuracies of G3 at each preference, means ± standard errors."""
    sides = {"conditioned": FOLDS, "separate": SEPARATE}
    data = {side: pair_points(folder, method).values() for side, method in sides.items()}
    kinds = [(side, name) for side in sides for name in OBJECTIVES]
    rows = [
        [f"({p:g}, {1 - p:.1g})", str(min(map(len, data.values()))),
         *(spread(models[p][name] for models in data[side]) for side, name in kinds)]
        for p in sorted(FIRST, reverse=True)
    ]  # fmt: skip
    return markdown_table(["p", "n", *(f"{side}: {name}" for side, name in kinds)], rows)


def evaluated(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the "mean" and "change" of each figure in a CSV file of `firm evaluate`, by model."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            own = found.setdefault(row["model"], {"mean": {}, "change": {}})
            for kind, figures in own.items():
                if row[kind]:
                    figures[row["figure"]] = float(row[kind])
    return found


def replies_table(folder: Path = PROTOCOL) -> str:
    """Returns rewards of the base's replies, and how those of G3's models differ from them."""
    rows = []
    for prompts in OBJECTIVES:
        path = folder / f"pairs_replies_{prompts}.csv"
        models = evaluated(path) if path.exists() else {}
        sides: dict[tuple[str, str], list[dict[str, dict[str, float]]]] = {}
        for model, figures in models.items():
            if named := re.fullmatch(r"(\w+)-(\d+)_(\d+)-seed_\d+", model):
                p = f"({int(named[2]) / 100:g}, {int(named[3]) / 100:g})"
                sides.setdefault((named[1].replace("_", " "), p), []).append(figures)
            else:
                own = figures["mean"]
                cells = [*(f"{own[name]:.3f}" for name in OBJECTIVES), "0", f"{own['length']:.1f}"]
                rows.append([prompts, model, "–", "–", *cells])
        for (side, p), runs in sides.items():
            changes = [interval(own["change"][name] for own in runs) for name in OBJECTIVES]
            means = [spread((own["mean"][name] for own in runs), 1) for name in ("kl", "length")]
            rows.append([prompts, side, p, str(len(runs)), *changes, *means])
    kinds = [f"reward {name}" for name in OBJECTIVES]
    return markdown_table(["prompts", "model", "p", "n", *kinds, "KL", "tokens"], rows)


def pairs_table(folder: Path = PROTOCOL) -> str:
    """Returns accuracies and margins of the study of pairs, means ± standard errors."""
    figures = [f"{kind} {name}" for kind in ("accuracy", "margin") for name in OBJECTIVES]
    rows = []
    for setting, runs in pair_study(folder).items():
        cells = [spread(own[figure] for own in runs.values()) for figure in figures]
        uploads = fmean(own["bytes up"] for own in runs.values())
        rows.append([setting, str(len(runs)), *cells, f"{uploads / 1e6:,.0f} MB"])
    return markdown_table(["setting", "n", *figures, "bytes up"], rows)


def family_h(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family H; a world counts once all its seeds are there."""
    claims = []
    for name, (second, side) in zip(("H1", "H2"), FRONTS, strict=True):
        text = f"In other worlds one conditioned run differs from {second}"
        sides = ("one conditioned run", second)
        less = tuple(fmean(own) for own in in_worlds(side, folder).values())
        claims.append(
            Claim(
                name,
                text,
                sides,
                UTILITY,
                len(WORLDS),
                less,
                "front",
                unit="worlds",
                files="front_world_*.json",
            )
        )
    return claims


def in_worlds(side: Callable[[Models], list[Model]], folder: Path) -> dict[int, list[float]]:
    """Returns the conditioned run's utility less a side's by seed, of each finished world."""
    found = {}
    for world in WORLDS:
        fronts = parts(f"front_world_{world}", WORLD_SEEDS, folder)
        if len(fronts) == len(WORLD_SEEDS):
            found[world] = [utility_less(models, side) for models in fronts.values()]
    return found


def uploads(folder: Path = PROTOCOL) -> tuple[list[Gains], list[Gains]]:
    """Returns the gains with whole uploads and with uploads of two bits, by seed."""
    stored = stored_gains(folder, "uploads", "test")
    whole, small = (stored.get(f"LoRA r = 16, {name}", {}) for name in (WHOLE, SMALL))
    seeds = sorted(whole.keys() & small.keys())
    return [whole[seed] for seed in seeds], [small[seed] for seed in seeds]


# --- Older runs -----------------------------------------------------------------------------------


def older_front(folder: str, method: str) -> dict[int, list[Point]]:
    """Returns a method's points of docs/fronts by seed, at preferences that all methods have."""
    paths = sorted((ROOT / "docs/fronts" / folder).glob("*.front.json"))
    fronts = {path.name.removesuffix(".front.json"): Front.load(path) for path in paths}
    common = set.intersection(*(set(by_preference(front)) for front in fronts.values()))
    kept: dict[int, list[Point]] = {}
    for preference, points in by_preference(fronts[method]).items():
        for point in points if preference in common else ():
            kept.setdefault(point.seed, []).append(point)
    return dict(sorted(kept.items()))


def older_volumes(folder: str, method: str, *, true: float | None = None) -> list[float]:
    """Returns each seed's hypervolume: of the rewards from zero, or of true scores from `true`."""
    volumes = []
    for points in older_front(folder, method).values():
        if true is not None:
            rows = [[p.scores[f"true_{name}"] for name in OBJECTIVES] for p in points]
        else:
            rows = [list(p.rewards.values()) for p in points]
        volumes.append(volume_above(np.array(rows), np.full(2, true or 0.0)))
    return volumes


def older_scores(folder: str, method: str, name: str) -> list[float]:
    """Returns the mean of a true score over a method's preferences, of each seed."""
    return [
        fmean(point.scores[name] for point in points)
        for points in older_front(folder, method).values()
    ]


def figure_3() -> dict[str, dict[int, dict[str, float]]]:
    """Returns the rewards of the runs behind docs/figures/figure_3.csv, by setting and seed."""
    with (ROOT / "docs/figures/figure_3.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "single seed"]
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        own = {name: float(row[name]) for name in OBJECTIVES}
        found.setdefault(row["setting"], {})[int(row["seed"])] = own
    return found


FOLDS, SEPARATE, SOUPS = "one_conditioned_run", "separate_runs", "rewarded_soups"
VOLUMES = (
    # world, text, first and second method, reference point if by true scores
    ("aligned", "one conditioned run, nine separate runs", FOLDS, SEPARATE, None),
    ("aligned", "one conditioned run, nine runs with PPO", FOLDS, f"{SEPARATE}_ppo", None),
    ("aligned", "one conditioned run, Rewarded Soups", FOLDS, SOUPS, -1.5),
    ("aligned", "Rewarded Soups, nine separate runs", SOUPS, SEPARATE, -1.5),
    ("aligned", "Rewarded Soups, nine separate runs", SOUPS, SEPARATE, -3.0),
    ("aligned", "Rewarded Soups, nine separate runs", SOUPS, SEPARATE, None),
    ("hh", "one conditioned run, three separate runs", FOLDS, SEPARATE, None),
)
EVEN = "fixed λ = (0.5, 0.5)"
RUNS = (
    # text, first and second setting of figure 3, reward
    ("fixed equal weights, FIRM", EVEN, "FIRM", "helpful"),
    ("fixed equal weights, FIRM", EVEN, "FIRM", "harmless"),
    ("FIRM at p = (0.9, 0.1), at (0.1, 0.9)", "p = (0.9, 0.1)", "p = (0.1, 0.9)", "helpful"),
    ("FIRM at p = (0.1, 0.9), at (0.9, 0.1)", "p = (0.1, 0.9)", "p = (0.9, 0.1)", "harmless"),
    *(
        (f"FIRM at p = {p}, weights fixed there", f"p = {p}", f"fixed λ = {p}", name)
        for p in ("(0.1, 0.9)", "(0.9, 0.1)")
        for name in OBJECTIVES
    ),
)
"""Comparisons of older runs."""


def older_differences() -> dict[tuple[str, str, str], list[float]]:
    """Returns differences by seed of older runs, by text, quantity and data."""
    found = {}
    for world, text, first, second, true in VOLUMES:
        ends = [older_volumes(world, method, true=true) for method in (first, second)]
        kind = "rewards" if true is None else f"true scores from ({true:g}, {true:g})"
        name = {"aligned": "Aligned world", "hh": "HH-RLHF"}[world]
        key = f"{name}: {text}", f"hypervolume, {kind}", f"docs/fronts/{world}"
        found[key] = [a - b for a, b in zip(*ends, strict=True)]
    for score in ("true_helpful", "true_harmless"):
        ends = [older_scores("aligned", method, score) for method in (SOUPS, SEPARATE)]
        quantity = f"{score.replace('_', ' ')}, mean over the preferences"
        key = "Aligned world: Rewarded Soups, nine separate runs", quantity, "docs/fronts/aligned"
        found[key] = [a - b for a, b in zip(*ends, strict=True)]
    runs = figure_3()
    for text, first, second, name in RUNS:
        key = f"With PPO: {text}", f"reward {name}", "docs/figures/figure_3.csv"
        seeds = sorted(runs[first])
        found[key] = [runs[first][seed][name] - runs[second][seed][name] for seed in seeds]
    return found


def older_runs() -> str:
    """Returns the table of older runs: exploratory, with plain 95 % intervals."""
    rows = []
    for (text, quantity, data), values in older_differences().items():
        found = mean_difference(values)
        word = ("first ahead" if found.mean > 0 else "second ahead") if found.is_clear else "open"
        row = [text, quantity, str(len(values)), found.text(), "none", f"exploratory: {word}"]
        rows.append([*row, "`findings.py`", f"`{data}`"])
    return markdown_table(HEADER, rows)


def curve_of(models: Models, method: str) -> list[tuple[float, Mapping[str, float]]]:
    """Returns the KL and the figures of the base model and of a run of family L in its course."""
    rows = [own["test"] for name, own in models.items() if name.rpartition(" ")[0] == method]
    return [(row["KL"], row) for row in (models["base"]["test"], *rows)]


def gain_at(models: Models, method: str, kl: float, *, smaller: bool = False) -> float:
    """Returns the gain over the base model in the mean of the rewards at a KL, or the smaller one.

    NaN beyond the KL at which the run ends; an adapter that its guard undid may have a larger one.
    """
    points = curve_of(models, method)
    if kl > points[-1][0]:
        return float("nan")
    base = models["base"]["test"]
    keys = [key for key in base if key.startswith("reward ")]
    gains = [at_kl([(own, row[key] - base[key]) for own, row in points], kl) for key in keys]
    return min(gains) if smaller else fmean(gains)


def at_common_kl(models: Models, method: str, kl: float) -> float:
    """Returns the mean reward of FIRM at a KL less that of a method, in family L.

    Where one of the two ends at a smaller KL, at the smaller of the two ends.
    """
    sides = METHODS[0], method
    kl = min(kl, *(curve_of(models, side)[-1][0] for side in sides))
    own, other = (gain_at(models, side, kl) for side in sides)
    return own - other


def trl_data(folder: Path = PROTOCOL) -> list[Models]:
    """Returns the models of family L, of each seed on which all methods have finished."""
    data = parts("real_trl", TRL_SEEDS, folder).values()
    return [models for models in data if all(len(curve_of(models, m)) > 1 for m in METHODS)]


def family_l(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family L."""
    first, *others = METHODS
    data, quantity = trl_data(folder), f"mean of the rewards at KL {KLS[1]:g}"
    return [
        Claim(
            f"L{number}",
            f"{first} differs from {other}",
            (first, other),
            quantity,
            len(TRL_SEEDS),
            tuple(at_common_kl(models, other, KLS[1]) for models in data),
            "",
            script="real_trl.py",
            files="real_trl_*.json",
            is_listed=False,
        )
        for number, other in enumerate(others, start=1)
    ]


# --- The page's tables ----------------------------------------------------------------------------


def family_j(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family J: FIRM beside each other way to weigh rewards."""
    data, count = parts("weightings", WEIGHTING_SEEDS, folder).values(), len(WEIGHTING_SEEDS)
    others = [method for method in WEIGHTINGS if method != "FIRM"]
    return [
        Claim(
            f"J{at}",
            f"FIRM differs from {other}: {setting}",
            ("FIRM", other),
            "smallest gain",
            count,
            tuple(
                smallest_gain(models, setting, "FIRM") - smallest_gain(models, setting, other)
                for models in data
            ),
            "weightings",
            is_listed=False,
        )
        for at, (setting, other) in enumerate(product(WEIGHTED, others), start=1)
    ]


def family_k(folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family K: conditioned runs of more replies beside separate runs."""
    data, count = parts("equal_replies", REPLY_SEEDS, folder).values(), len(REPLY_SEEDS)
    claims = []
    for at, multiple in enumerate(reversed(MULTIPLES), start=1):
        less = tuple(
            expected_utility(side) - expected_utility(of(models, "separate"))
            for models in data
            for side in [of(models, f"conditioned {multiple}")]
        )
        first = f"a conditioned run with {multiple} times the replies of one"
        text = f"{first[0].upper()}{first[1:]} equals five separate runs"
        sides = (first, "five separate runs")
        claims.append(Claim(f"K{at}", text, sides, UTILITY, count, less, "equal_replies", MARGIN))
    return claims


CHANGED = (
    # sides, the verb between them, their models, margin
    (
        "one conditioned run",
        "equals",
        "five separate runs",
        "conditioned changed",
        "separate changed",
        MARGIN,
    ),
    (
        "one conditioned run",
        "equals",
        "five separate runs without",
        "conditioned changed",
        "separate",
        MARGIN,
    ),
    (
        "one conditioned run",
        "differs from",
        "one without",
        "conditioned changed",
        "conditioned",
        None,
    ),
    ("five separate runs", "differ from", "five without", "separate changed", "separate", None),
)
"""Comparisons of families N and O; sides have the change unless they are "without"."""


@dataclass(frozen=True)
class Change:
    """A change of settings, tested on a conditioned run and on five separate ones."""

    family: str
    part: str
    words: str
    name: str
    """Of the change, in the names of models."""
    seeds: range

    def fronts(self, method: str, folder: Path) -> list[list[Model]]:
        """Returns the models of a method at `FIRST`, by seed."""
        own = method.replace("changed", self.name)
        return [of(models, own) for models in parts(self.part, self.seeds, folder).values()]


SMOOTHING = Change("N", "smoothed", "smoothing", "smoothed", SMOOTHED_SEEDS)
LESS_KL = Change("O", "half_kl", "half the KL coefficient", "half", HALF_KL_SEEDS)


def changed(change: Change, folder: Path = PROTOCOL) -> list[Claim]:
    """Returns the claims of family N or O: fronts with a change and without."""
    return [
        Claim(
            f"{change.family}{at}",
            f"With {change.words}, {first} {verb} {second}",
            (first, second),
            UTILITY,
            len(change.seeds),
            tuple(
                expected_utility(one) - expected_utility(two)
                for one, two in zip(
                    change.fronts(own, folder), change.fronts(other, folder), strict=True
                )
            ),
            change.part,
            margin,
            is_listed=False,
        )
        for at, (first, verb, second, own, other, margin) in enumerate(CHANGED, start=1)
    ]


FAMILIES = (
    family_a, family_b, family_c, family_d, family_e, family_f, family_g, family_h, family_j,
    family_k, family_l, family_m, partial(changed, SMOOTHING), partial(changed, LESS_KL),
)  # fmt: skip
"""Functions that return the claims of families A to H and J to O, from a folder of data."""
HEADER = (
    *("claim", "quantity, first less second", "n", "95 % interval", "margin", "verdict"),
    *("command", "data"),
)
"""Headings of tables of claims."""


RETESTED = {"A3": "F1", "A4": "F2", "D1": "M8", **{f"C{at}": f"M{at}" for at in range(1, 8)}}
"""Claims by name, and those of later families that test the same with more seeds, or on questions
that chose no setting."""


def findings(folder: Path = PROTOCOL) -> str:
    """Returns the table of findings, without claims that lack seeds or are tested again."""
    families, rows = [claims_of(folder) for claims_of in FAMILIES], []
    complete = {claim.name for family in families for claim in family if claim.is_complete}
    for family in families:
        for claim, verdict in zip(family, verdicts(family), strict=True):
            if (
                claim.name not in complete
                or not claim.is_listed
                or RETESTED.get(claim.name) in complete
            ):
                continue
            margin = "difference" if claim.margin is None else f"± {claim.margin:.3f}"
            rows.append([
                f"{claim.name}: {claim.text}",
                claim.quantity,
                str(len(claim.differences)),
                interval(claim.differences),
                margin,
                verdict,
                f"`{claim.script} {claim.part}`",
                f"`docs/results/data/protocol/{claim.files or f'{claim.part}_*.json'}`",
            ])  # fmt: skip
    return markdown_table(HEADER, rows)


def front_table(folder: Path = PROTOCOL) -> str:
    """Returns the secondary quantities of A1 and A2, means ± standard errors."""
    data = parts("front", TEN, folder).values()
    sides: dict[str, Callable[[Models], list[Model]]] = {
        "base model": lambda models: [models["base"]],
        "one conditioned run": lambda models: of(models, "conditioned"),
        "five separate runs": lambda models: of(models, "separate"),
        "soup of three": lambda models: soups(models, 3),
        "soup of two": lambda models: soups(models, 2),
    }
    true = [f"true_{name}" for name in OBJECTIVES]
    quantities: dict[str, Callable[[list[Model], Models], float]] = {
        "expected utility": lambda own, _: expected_utility(own),
        "hypervolume from the base": lambda own, models: gained_volume(own, models["base"]),
        "coverage": lambda own, models: coverage(own, of(models, "separate")),
        "true scores": lambda own, _: expected_utility(own, true),
        "mean KL": lambda own, _: fmean(model["test"]["KL"] for model in own),
    }
    rows = []
    for name, side in sides.items():
        cells = []
        for read in quantities.values():
            own = [read(side(models), models) for models in data]
            others = [read(of(models, "separate"), models) for models in data]
            less = interval([a - b for a, b in zip(own, others, strict=True)])
            cells.append(spread(own) + ("" if name == "five separate runs" else f"; {less}"))
        rows.append([name, *cells])
    return markdown_table([f"{len(data)} seeds", *quantities], rows)


def number_table(folder: Path = PROTOCOL) -> str:
    """Returns what k separate runs, soups and a warm-started sweep reach, and the conditioned run.

    At the five preferences up to five separate runs, and for soups of two and three; at all nine
    otherwise.
    """
    sides: list[tuple[str, int, Sequence[str], Callable[[Models], list[Model]]]] = []
    for count in range(1, 10):
        shares, needs = ALL[:count], ("front", "nine")[: 1 + (count > len(FIRST))]
        name = "1 separate run" if count == 1 else f"{count} separate runs"
        sides.append((name, count, needs, lambda models, own=shares: of(models, "separate", own)))
    for count, needs in ((2, ["front"]), (3, ["front"]), (5, ["front", "nine"])):
        name = f"soup of {count} runs"
        sides.append((name, count, needs, lambda models, count=count: soups(models, count)))
    sides.append(("warm-started sweep", 3, ("front", "nine", "warm"), warm_sweep))
    data = {name: parts(name, TEN, folder) for name in ("front", "nine", "warm")}
    quantities: tuple[tuple[Callable[[list[Model], Model], float], bool], ...] = (
        # quantity, whether the conditioned run is compared
        (lambda own, _: expected_utility(own), True),
        (gained_volume, True),
        (lambda own, _: volume_of(own, np.zeros(2)), False),
        (lambda own, _: fmean(model["test"]["KL"] for model in own), False),
    )
    rows = []
    for name, runs, needs, side in sides:
        seeds = [seed for seed in TEN if all(seed in data[part] for part in needs)]
        models = [{k: v for part in needs for k, v in data[part][seed].items()} for seed in seeds]
        shares, cells = (FIRST if tuple(needs) == ("front",) else ALL), []
        for read, is_compared in quantities:
            own = [read(side(each), each["base"]) for each in models]
            cells.append(spread(own))
            if is_compared:
                folds = [read(of(each, "conditioned", shares), each["base"]) for each in models]
                cells.append(interval(a - b for a, b in zip(folds, own, strict=True)))
        rows.append([name, f"{runs * 1024:,}", str(len(seeds)), *cells])
    less = "the conditioned run less theirs"
    header = ["replies", "n", "expected utility", less, "hypervolume from the base", less]
    return markdown_table(["", *header, "hypervolume from zero", "mean KL"], rows)


def warm_sweep(models: Models) -> list[Model]:
    """Returns the run at equal shares and the eight short runs that start from it."""
    return [*of(models, "separate", (0.5,)), *of(models, "warm", [p for p in ALL if p != 0.5])]


def kl_table(folder: Path = PROTOCOL) -> str:
    """Returns the utility p·r of the conditioned run less a separate run's, at equal KL."""
    rows = []
    for share in sorted(KL_SHARES):
        plain, equal = [], []
        for whole, at_equal in equal_kl_data(folder):
            weights = np.array([share, 1 - share])
            for less, models in ((plain, whole), (equal, at_equal)):
                folds, others = (
                    rewards(models[f"{method} {share:g}"], "test") @ weights
                    for method in ("conditioned", "separate")
                )
                less.append(folds - others)
        p = f"({share:g}, {1 - share:.1g})"
        rows.append([p, str(len(equal)), interval(plain), interval(equal)])
    return markdown_table(["p", "n", "utility, as they end", "at equal KL"], rows)


def kl_number_table(folder: Path = PROTOCOL) -> str:
    """Returns the conditioned run less k separate runs, with pairs of models at equal KL."""
    rows = []
    for count in range(1, len(KL_SHARES) + 1):
        cells: list[list[float]] = [[], [], [], []]
        for whole, at_equal in equal_kl_data(folder):
            values = []
            for models in (whole, at_equal):
                folds = of(models, "conditioned", KL_SHARES)
                others = of(models, "separate", FIRST[:count])
                values.append(expected_utility(folds) - expected_utility(others))
                base = whole["base"]
                values.append(gained_volume(folds, base) - gained_volume(others, base))
            for cell, value in zip(cells, values, strict=True):
                cell.append(value)
        rows.append([str(count), str(len(cells[0])), *(interval(cell, 4) for cell in cells)])
    header = ["expected utility, as they end", "hypervolume from the base, as they end"]
    equal = ["expected utility, at equal KL", "hypervolume, at equal KL"]
    return markdown_table(["separate runs", "n", *header, *equal], rows)


def equal_kl_data(folder: Path = PROTOCOL) -> list[tuple[Models, Models]]:
    """Returns the models as they end, and at equal KL, of each seed that has both."""
    whole, shrunk = parts("front", TEN, folder), parts("equal_kl", TEN, folder)
    return [
        (whole[seed], at_equal_kl(whole[seed], shrunk[seed])) for seed in whole if seed in shrunk
    ]


def at_equal_kl(whole: Models, shrunk: Models) -> Models:
    """Returns a fold and a separate run at each preference, at the smaller of their two KLs.

    Figures on test prompts are interpolated through the base model and the shrunk one; those on
    validation prompts, which choose models, are the whole one's.
    """
    models = {}
    for share in KL_SHARES:
        keys = [f"{method} {share:g}" for method in ("conditioned", "separate")]
        kl = min(whole[key]["test"]["KL"] for key in keys)
        for key in keys:
            curve = [model["test"] for model in (shrunk["base"], shrunk[key], whole[key])]
            test = {name: at_kl([(row["KL"], row[name]) for row in curve], kl) for name in curve[0]}
            models[key] = {"validation": whole[key]["validation"], "test": test}
    return models


def power_table(folder: Path = PROTOCOL) -> str:
    """Returns the seeds that equality within the margin needs, by the differences' deviations."""
    claims = [claim for claim in family_a(folder) if claim.margin is not None]
    tests = len(claims) + len(family_a(folder))
    rows = []
    for claim in claims:
        deviation = float(np.std(claim.differences, ddof=1))
        cells = [
            str(seeds_for_equality(deviation, MARGIN, power=power, alpha=alpha))
            for alpha in (ALPHA, ALPHA / tests)
            for power in (0.5, 0.8)
        ]
        found = [str(len(claim.differences)), interval(claim.differences), f"{deviation:.3f}"]
        rows.append([claim.name, *found, *cells])
    header = ["claim", "n", "95 % interval", "standard deviation of a seed's difference"]
    ways = [f"seeds, {alone}, power {p}" for alone in ("alone", "after Holm") for p in ("½", "0.8")]
    return markdown_table([*header, *ways], rows)


def seeds_for_equality(deviation: float, margin: float, *, power: float, alpha: float) -> int:
    """Returns the seeds with which two one-sided t-tests show the equality of equal sides.

    >>> seeds_for_equality(0.01, 0.01, power=0.8, alpha=0.05)
    11
    """

    def is_enough(count: int) -> bool:
        bound = stats.t.ppf(1 - alpha, count - 1)
        beyond = stats.nct.sf(bound, count - 1, margin * count**0.5 / deviation)
        return bool(2 * beyond - 1 >= power)

    most = 2
    while not is_enough(most):
        most *= 2
    return bisect_left(range(most), True, lo=2, key=is_enough)


def worlds_table(folder: Path = PROTOCOL) -> str:
    """Returns the differences behind family H by world, each with those of its seeds."""
    rows = []
    for name, side in FRONTS:
        for world, less in in_worlds(side, folder).items():
            cells = ", ".join(f"{each:+.3f}" for each in less)
            rows.append([f"less {name}", str(world), f"{fmean(less):+.3f}", cells])
    return markdown_table(["the conditioned run", "world", "mean", "by seed"], rows)


def baseline_table(folder: Path = PROTOCOL) -> str:
    """Returns the rewards, true scores and KL behind A3, A4, F1 and F2."""
    keys = [*(f"reward {name}" for name in OBJECTIVES), *(f"true_{n}" for n in OBJECTIVES), "KL"]
    rows = []
    for seeds in (TEN, SIXTY):
        data = list(parts("baselines", seeds, folder).values())
        for _, (first, second), (a, b) in EQUAL_WEIGHTS:
            less = (interval([m[a]["test"][key] - m[b]["test"][key] for m in data]) for key in keys)
            rows.append([f"{first} less {second}", str(len(data)), *less])
    return markdown_table(["", "n", *(key.replace("_", " ") for key in keys)], rows)


def weights_table(folder: Path = PROTOCOL) -> str:
    """Returns the gains behind family B."""
    data = list(parts("weights", FIVE, folder).values())
    rows = []
    for setting in SETTINGS:
        cells = []
        for mean in (False, True):
            ends = {
                side: [smallest_gain(models, setting, side, mean=mean) for models in data]
                for side in ("FIRM", "fixed")
            }
            less = [a - b for a, b in zip(ends["FIRM"], ends["fixed"], strict=True)]
            cells += [spread(ends["FIRM"]), spread(ends["fixed"]), interval(less)]
        kls = [[m[f"{setting}: {side}"]["test"]["KL"] for m in data] for side in ("FIRM", "fixed")]
        kl = [a - b for a, b in zip(*kls, strict=True)]
        rows.append([setting, *cells, interval(kl)])
    header = ["smallest gain: FIRM", "fixed", "difference", "mean gain: FIRM", "fixed"]
    return markdown_table([f"{len(data)} seeds", *header, "difference", "KL, difference"], rows)


def weightings_table(folder: Path = PROTOCOL) -> str:
    """Returns family J: gains, KL and verdicts, by setting the largest smallest gain first."""
    data, family = parts("weightings", WEIGHTING_SEEDS, folder).values(), family_j(folder)
    by_text = dict(zip([claim.text for claim in family], verdicts(family), strict=True))
    differences = {claim.text: claim.differences for claim in family}
    rows = []
    for setting in WEIGHTED:
        found = []
        for method in WEIGHTINGS:
            smallest, mean = (
                [smallest_gain(models, setting, method, mean=is_mean) for models in data]
                for is_mean in (False, True)
            )
            kl = [models[f"{setting}: {method}"]["test"]["KL"] for models in data]
            text = f"FIRM differs from {method}: {setting}"
            less = interval(differences[text]) if text in differences else ""
            cells = [spread(smallest), less, by_text.get(text, ""), spread(mean), spread(kl, 2)]
            found.append((sum(smallest), [setting, method, *cells]))
        rows += [row for _, row in sorted(found, key=lambda each: -each[0])]
    header = ["method", "smallest gain", "FIRM less this", "verdict", "mean gain", "KL"]
    return markdown_table([f"n = {len(data)}", *header], rows)


def replies_used_table(folder: Path = PROTOCOL) -> str:
    """Returns the secondary quantities of family K, means ± standard errors."""
    data = list(parts("equal_replies", REPLY_SEEDS, folder).values())
    rows = []
    for name, method, runs in (
        ("five separate runs", "separate", [f"separate_{100 * share:.0f}" for share in FIRST]),
        *(
            (
                f"conditioned, {multiple} times",
                f"conditioned {multiple}",
                [f"conditioned_{multiple}"],
            )
            for multiple in MULTIPLES
        ),
    ):
        size = [sum(m["cost"][run]["bytes"] for run in runs) / 1e6 for m in data]
        sent = f"{fmean(size):.0f} MB" if size else "–"
        rows.append([name, *front_cells([of(models, method) for models in data]), sent])
    return markdown_table([f"n = {len(data)}", *FRONT_HEADER, "sent"], rows)


FRONT_HEADER = ("expected utility", "true scores", "mean KL", "largest KL")


def front_cells(fronts: Sequence[Sequence[Model]]) -> list[str]:
    """Returns means ± standard errors over the seeds' fronts, in the order of `FRONT_HEADER`."""
    true = [f"true_{name}" for name in OBJECTIVES]
    return [
        spread([expected_utility(own) for own in fronts]),
        spread([expected_utility(own, true) for own in fronts]),
        spread([fmean(model["test"]["KL"] for model in own) for own in fronts], 2),
        spread([max(model["test"]["KL"] for model in own) for own in fronts], 2),
    ]


def changed_table(change: Change, folder: Path = PROTOCOL) -> str:
    """Returns the claims of family N or O, and its fronts as means ± standard errors."""
    claims = changed(change, folder)
    decided = [
        [f"{claim.name}: {claim.text}", interval(claim.differences), verdict]
        for claim, verdict in zip(claims, verdicts(claims), strict=True)
    ]
    names = {"five separate runs": "separate", "one conditioned run": "conditioned"}
    methods = {
        words: method
        for name, own in names.items()
        for words, method in ((name, own), (f"{name}, {change.words}", f"{own} changed"))
    }
    fronts = {words: change.fronts(method, folder) for words, method in methods.items()}
    rows = [[words, *front_cells(own)] for words, own in fronts.items()]
    count = len(claims[0].differences)
    verdict = markdown_table(["claim", "expected utility, first less second", "verdict"], decided)
    return f"{verdict}\n\n{markdown_table([f'n = {count}', *FRONT_HEADER], rows)}"


smoothed_table, half_kl_table = partial(changed_table, SMOOTHING), partial(changed_table, LESS_KL)


def draw_equal_replies(stem: Path, folder: Path = PROTOCOL) -> None:
    """Draws family K: the difference from five separate runs against the number of replies."""
    claims = [claim for claim in reversed(family_k(folder)) if len(claim.differences) > 1]
    if not claims:
        return
    found = [mean_difference(claim.differences) for claim in claims]
    multiples = MULTIPLES[: len(claims)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN_IN, PANEL_IN), layout="constrained")
        axes = figure.add_subplot()
        axes.axhspan(-MARGIN, MARGIN, color="0.9", label="margin")
        axes.axhline(0, color="0.4", linewidth=0.8)
        reach = [
            [each.mean - each.low for each in found],
            [each.high - each.mean for each in found],
        ]
        means = [each.mean for each in found]
        axes.errorbar(multiples, means, yerr=reach, fmt="o-", capsize=3, label="conditioned run")
        axes.set(
            xlabel="replies, in those of one separate run", ylabel="expected utility, difference"
        )
        axes.set_xticks(multiples)
        axes.legend(frameon=False)
    rows = [
        [at, d.mean, d.low, d.high, d.num_seeds] for at, d in zip(multiples, found, strict=True)
    ]
    header = ["multiple", "difference", "low", "high", "seeds"]
    save_figure(PaperFigure(figure, header, rows), stem)


def real_table(
    folder: Path = PROTOCOL, questions: str = "real", seeds: Iterable[int] = REAL_SEEDS
) -> str:
    """Returns the models of SmolLM2 behind families C or M: means over the seeds, by model."""
    data = [parts(f"{questions}_{name}", seeds, folder) for name in ("front", "baselines")]
    by_model: dict[str, dict[int, Mapping[str, float]]] = {}
    for own in data:
        for seed, models in own.items():
            for name, model in models.items():
                by_model.setdefault(name, {})[seed] = model["test"]  # both parts measure the base
    if "conditioned 0.1" not in by_model:
        return "No seed has finished."
    keys = list(dict.fromkeys(k for own in by_model.values() for row in own.values() for k in row))
    rows = [
        [name, str(len(own)), *(spread([row[key] for row in own.values()]) for key in keys)]
        for name, own in by_model.items()
    ]
    first, second = (by_model[f"conditioned {share}"] for share in (0.1, 0.9))
    seeds = sorted(first.keys() & second.keys())
    change = [interval([second[s][key] - first[s][key] for s in seeds]) for key in keys]
    rows.append(["conditioned 0.9 less 0.1", str(len(seeds)), *change])
    return markdown_table(["model", "seeds", *keys], rows)


unseen_table = partial(real_table, questions="unseen", seeds=UNSEEN_SEEDS)


def trl_claims(folder: Path = PROTOCOL) -> str:
    """Returns the verdicts of family L, and its differences at the other KLs."""
    claims, data = family_l(folder), trl_data(folder)
    rows = []
    for claim, verdict in zip(claims, verdicts(claims), strict=True):
        others = []
        for kl in (KLS[0], KLS[2]):
            less = [
                gain_at(models, claim.sides[0], kl) - gain_at(models, claim.sides[1], kl)
                for models in data
            ]
            reached = [each for each in less if each == each]  # both runs reach the KL
            others.append(f"{interval(reached)} ({len(reached)})")
        n = str(len(claim.differences))
        rows.append(
            [f"{claim.name}: {claim.text}", n, interval(claim.differences), verdict, *others]
        )
    header = [f"at KL {kl:g} (seeds)" for kl in (KLS[0], KLS[2])]
    return markdown_table(
        ["claim", "n", f"95 % interval at KL {KLS[1]:g}", "verdict", *header], rows
    )


def trl_table(folder: Path = PROTOCOL) -> str:
    """Returns the runs of family L: gains at KLs, KL at the end, CPU seconds and memory."""
    data = trl_data(folder)
    rows = []
    for method in METHODS:
        cells = []
        for smaller in (False, True):
            for kl in KLS:
                own = [gain_at(models, method, kl, smaller=smaller) for models in data]
                reached = [each for each in own if each == each]
                cells.append(f"{spread(reached)} ({len(reached)})")
        ends = [
            own
            for models in data
            for name, own in models.items()
            if name.rpartition(" ")[0] == method and "cost" in own
        ]
        cells += [spread((own["test"]["KL"] for own in ends), 1)]
        cells += [spread((own["cost"]["seconds"] for own in ends), 0)]
        cells += [spread((own["cost"]["memory"] / 1e9 for own in ends), 1)]
        rows.append([method, *cells])
    header = [f"{name} at KL {kl:g}" for name in ("mean gain", "smaller gain") for kl in KLS]
    ends = ("KL at the end", "CPU seconds", "peak memory, GB")
    return markdown_table([f"{len(data)} seeds", *header, *ends], rows)


def draw_reward_kl(stem: Path, folder: Path = PROTOCOL) -> None:
    """Draws the gains of family L against KL: means over the seeds, as far as all runs go."""
    data, panels = trl_data(folder), []
    if not data:
        return
    for smaller, title in ((False, "gain in the mean of the rewards"), (True, "smaller gain")):
        series = []
        for place, method in enumerate(METHODS):
            end = min(curve_of(models, method)[-1][0] for models in data)
            grid = np.linspace(0, end, 21)
            values = [[gain_at(m, method, kl, smaller=smaller) for kl in grid] for m in data]
            series.append(Series.of(LegendEntry(method, f"var(--objective-{place})"), grid, values))
        panels.append(series_panel("gain", title, series, y_title="calibrated rewards"))
    save_figure(curves_figure(panels, x_title="KL from the base model, nats per reply"), stem)


def rates_table(folder: Path = PROTOCOL) -> str:
    """Returns the learning rates of family E with their gains on validation prompts."""
    return markdown_table(*chosen_rates(stored_gains(folder, "rates", "validation")))


def uploads_table(folder: Path = PROTOCOL) -> str:
    """Returns the gains behind E1."""
    whole, small = uploads(folder)
    keys = ("rewards", "true_scores", "helpful", "true_helpful", "parse", "kl")
    rows = [
        [name, *(spread(run[key] for run in runs) for key in keys)]
        for name, runs in ((WHOLE, whole), (SMALL, small))
    ]
    pairs = list(zip(small, whole, strict=True))
    rows.append(
        ["difference", *(interval(own[key] - all_[key] for own, all_ in pairs) for key in keys)]
    )
    return markdown_table([f"{len(whole)} seeds", *map(words, keys)], rows)


def privacy_tables(folder: Path = PROTOCOL) -> str:
    """Returns the gains under the noise of N clients, and the N that keep half of the gain."""
    stored = stored_gains(folder, "privacy", "test")
    seeds = sorted(set.intersection(*(set(runs) for runs in stored.values()))) if stored else []
    if not seeds:
        return "No seed has finished."
    adapters = by_adapter({name: [runs[seed] for seed in seeds] for name, runs in stored.items()})
    epsilons = (EPSILON, 2.0)
    noise = [noise_for(epsilon, COMMON["rounds"], DELTA) for epsilon in epsilons]
    factor = noise[1] / noise[0]
    header, rows = gain_table(adapters, epsilons, factor)
    tables = [markdown_table([f"{len(seeds)} seeds", *header[1:]], rows)]
    for key in ("rewards", "true_scores"):
        header, rows = needed_table(adapters, key, 0.5, "LoRA r = 16", epsilons, factor)
        tables.append(markdown_table([f"half of the {words(key)}", *header[1:]], rows))
    return "\n\n".join(tables)


def older_fronts() -> str:
    """Returns quantities of the older fronts, and their differences from the separate runs'."""
    rows = []
    for world in ("aligned", "hh"):
        paths = sorted((ROOT / "docs/fronts" / world).glob("*.front.json"))
        base = np.array(list(Front.load(paths[0]).base.values()))
        quantities: tuple[Callable[[np.ndarray, np.ndarray, list[Point]], float], ...] = (
            lambda own, _, __: utility_of(own),
            lambda own, _, __, corner=base: volume_above(own, corner),
            lambda own, others, _: matched_share(own, others),
            lambda _, __, points: fmean(point.kl for point in points),
        )
        separate = older_front(world, SEPARATE)
        for path in paths:
            method = path.name.removesuffix(".front.json")
            cells = []
            for read in quantities:
                own, less = [], []
                for seed, points in older_front(world, method).items():
                    others = _rows_of(separate[seed])
                    own.append(read(_rows_of(points), others, points))
                    less.append(own[-1] - read(others, others, separate[seed]))
                cells.append(spread(own) + ("" if method == SEPARATE else f"; {interval(less)}"))
            rows.append([world, method.replace("_", " "), str(len(separate)), *cells])
    header = ["world", "", "n", "expected utility", "hypervolume from the base", "coverage"]
    return markdown_table([*header, "mean KL"], rows)


def older_numbers() -> str:
    """Returns what the first k of nine separate runs of the aligned world reach, for k = 1 to 9."""
    separate, folds = (older_front("aligned", method) for method in (SEPARATE, FOLDS))
    rows = []
    for count in range(1, 10):
        shares, cells = ALL[:count], []
        for measure in (utility_of, lambda own: volume_above(own, np.zeros(2))):
            own, less = [], []
            for seed, points in separate.items():
                kept = [p for p in points if p.preference and round(p.preference[0], 6) in shares]
                own.append(measure(_rows_of(kept)))
                less.append(measure(_rows_of(folds[seed])) - own[-1])
            cells += [spread(own), interval(less)]
        rows.append([str(count), *cells])
    header = ["separate runs", "expected utility", "the conditioned run less theirs"]
    return markdown_table([*header, "hypervolume from zero", header[-1]], rows)


def constraint_table(folder: Path = PROTOCOL) -> str:
    """Returns both sides of D1 and M8 by seed, and the conditioned run as `firm pick` mixes it."""
    rows = []
    seeds = {
        **{f"{s}": own for s, own in parts("real_constraint", REAL_SEEDS, folder).items()},
        **{
            f"{s}, unseen questions": own
            for s, own in parts("unseen_constraint", UNSEEN_SEEDS, folder).items()
        },
    }
    for seed, models in seeds.items():
        trained, picked = (models[name]["test"] for name in ("constrained", "picked"))
        cells = [
            f"{own[key]:.3f}"
            for own in (trained, picked)
            for key in ("reward plain", "reward rich", "KL")
        ]
        cells.insert(3, f"{rich_of_folds(models):.3f}")
        rows.append([seed, *cells])
    header = ["trained: plain", "rich", "KL", "conditioned: rich at equal plain"]
    return markdown_table(["seed", *header, "picked: plain", "rich", "KL"], rows)


def search_table() -> str:
    """Returns the settings of configs/smollm2_settings.yaml, on the validation questions."""
    paths = sorted((ROOT / "docs/results/data/smollm2_settings").glob("*.front.json"))
    fronts = {path.name.removesuffix(".front.json"): Front.load(path) for path in paths}
    base = np.array([list(next(iter(fronts.values())).base.values())])
    rows = [["base model", f"{utility_of(base):.3f}", *["0"] * 3]]
    for name, front in fronts.items():
        kls = [f"{own[0].kl:.1f}" for _, own in sorted(by_preference(front).items(), reverse=True)]
        rows.append([name.replace("_", " "), f"{utility_of(_rows_of(front.points)):.3f}", *kls])
    preferences = ["(0.9, 0.1)", "(0.5, 0.5)", "(0.1, 0.9)"]
    header = ["learning rate", "expected utility", *(f"KL at p = {p}" for p in preferences)]
    return markdown_table(header, rows)


def utility_of(points: np.ndarray) -> float:
    """Returns the expected utility of points [N, 2], chosen and valued on the same prompts."""
    return float((points @ np.stack([TARGETS, 1 - TARGETS])).max(0).mean())


def volume_above(points: np.ndarray, corner: np.ndarray) -> float:
    """Returns the hypervolume of those of the points [N, 2] that are above a corner."""
    return float(volumes(points - corner))


def matched_share(points: np.ndarray, others: np.ndarray) -> float:
    """Returns the share of others [K, 2] that a point matches in both, up to the margin."""
    return float(np.mean([(points >= other - MARGIN).all(1).any() for other in others]))


def _rows_of(points: Sequence[Point]) -> np.ndarray:
    return np.array([list(point.rewards.values()) for point in points])


TABLES: dict[str, Callable[[], str]] = {
    "findings": findings,
    "front": front_table,
    "worlds": worlds_table,
    "number of runs": number_table,
    "equal KL": kl_table,
    "number of runs at equal KL": kl_number_table,
    "power": power_table,
    "baselines": baseline_table,
    "weights": weights_table,
    "weightings": weightings_table,
    "equal replies": replies_used_table,
    "smoothed": smoothed_table,
    "half KL": half_kl_table,
    "rates": rates_table,
    "uploads": uploads_table,
    "privacy": privacy_tables,
    "real model": real_table,
    "unseen questions": unseen_table,
    "constraint": constraint_table,
    "FIRM and TRL": trl_claims,
    "FIRM and TRL by method": trl_table,
    "pairs": pairs_table,
    "front of pairs": pair_front_table,
    "replies": replies_table,
    "search": search_table,
    "older runs": older_runs,
    "older fronts": older_fronts,
    "older numbers": older_numbers,
}


def written(page: str) -> str:
    """Returns a page with each table between its marks as the data give it.

    Raises:
        ValueError: A table has no place on the page.
    """
    for name, table in TABLES.items():
        marks = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(page):
            raise ValueError(f"the page has no place for {name!r}: add <!-- {name} --> and an end.")
        text = f"\n{table()}\n\n"
        page = marks.sub(lambda found, text=text: found[1] + text + found[2], page)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/results.md")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        draw_equal_replies(PICTURE)
        draw_reward_kl(CURVES)
        return
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")


if __name__ == "__main__":
    main()
