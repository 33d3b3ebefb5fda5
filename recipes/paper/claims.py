"""Compares the claims of the FIRM paper's figures and table with measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from firm.fronts.correlation import rank_correlation
from firm.report import Record
from firm.report.seeds import Difference
from firm.serving.model_card import markdown_table
from recipes.paper.drawings import BETAS, PREFERENCES, WORLDS
from recipes.paper.over_seeds import Figure, difference, final_reward, over_seeds
from recipes.paper.trajectories import (
    beta_effect,
    cosine,
    mean_variation,
    megabytes_up,
    reward_within,
    solve_variation,
    weights,
    weights_disagreement,
)

SAME_WEIGHT, SAME_REWARD = 0.05, 0.03
"""Differences of λ and of rewards that count as negligible, fixed before the runs."""

SEEDS_OF_EQUALITY = 10
"""Seeds that a claim of equality takes (docs/protocol.md)."""

Wanted = Literal["larger", "smaller", "at least", "close"]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper and its measurement."""

    what: str
    wanted: Wanted
    measured: Difference
    tolerance: float = 0.0
    values: str = ""
    """Values of both settings."""

    @property
    def verdict(self) -> str:
        """Verdict on the claim, in words."""
        measured = self.measured
        if self.wanted == "close":
            if -self.tolerance < measured.low and measured.high < self.tolerance:
                within = f"the difference is within ± {self.tolerance:g}"
                is_enough = measured.num_seeds >= SEEDS_OF_EQUALITY
                return f"holds: {within}" if is_enough else f"open: {within}, too few seeds"
            if measured.low >= self.tolerance or measured.high <= -self.tolerance:
                return f"does not hold: the difference is beyond ± {self.tolerance:g}"
            return f"open: the interval reaches beyond ± {self.tolerance:g}"
        sign = -1 if self.wanted == "smaller" else 1
        if not measured.is_clear:
            return "open: no clear difference"
        return "holds" if sign * measured.mean > 0 else "does not hold: the opposite is clear"


@dataclass(frozen=True)
class Section:
    """A figure of the paper, replayed."""

    title: str
    claim: str
    """Claim of the paper, paraphrased."""
    findings: Sequence[Finding]
    images: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    """Further lines of Markdown."""


def figure_1(runs: Mapping[str, list[Record]], images: Mapping[str, str]) -> Section:
    """Compares FIRM with a server that solves for the weights."""
    findings = []
    for world, opening in WORLDS.items():
        firm, server = runs[f"{opening}FIRM"], runs[f"{opening}FedCMOO-A"]
        findings += [
            _finding(f"{world}: reward {name}", "at least", firm, server, final_reward(name))
            for name in firm[0].objectives
        ]
        budget = over_seeds(firm, megabytes_up).mean
        findings += [
            _finding(
                f"{world}: training reward {name} within {budget:.1f} MB of upload",
                "at least",
                firm,
                server,
                reward_within(name, budget),
            )
            for name in firm[0].objectives
        ]
        findings += [
            _finding(f"{world}: total variation of λ, {of}", "smaller", firm, server, variation)
            for of, variation in (("mean", mean_variation), ("first solves", solve_variation))
        ]
        findings.append(_finding(f"{world}: MB uploaded", "smaller", firm, server, megabytes_up))
    share = over_seeds(runs["FIRM"], megabytes_up).mean
    share /= over_seeds(runs["FedCMOO-A"], megabytes_up).mean
    return Section(
        "Figure 1: FIRM and FedCMOO-A, 8 clients",
        "With eight clients FIRM's rewards are comparable or better, its weights smoother, and it "
        "sends no gradients.",
        findings,
        [images["figure_1"]],
        [
            f"FIRM uploads {100 * share:.0f} % of what FedCMOO-A does with whole "
            "Jacobians, both measured. All runs draw the same number of replies; *within* an "
            "upload, each algorithm's rounds end when FIRM's whole upload is spent.",
            "Total variation is Σ |λ_t - λ_{t-1}| over the rounds. *Mean*: of λ averaged over a "
            "round's clients and solves. The curves are means over the clients, too, as in the "
            "paper, but averaging alone makes FIRM's smoother than FedCMOO-A's single λ a round. "
            "*First solves* compares like with like: of each client's first λ in a round, found at "
            "the global model as the server's is, and only then averaged over the clients.",
        ],
    )


def figure_2(runs: Mapping[str, list[Record]], images: Mapping[str, str]) -> Section:
    """Compares values of β."""
    findings = []
    for world, opening in WORLDS.items():
        without, with_beta = runs[f"{opening}β = 0, C = 2"], runs[f"{opening}β = 0.05, C = 2"]
        findings.append(
            _finding(
                f"{world}: spread of λ between clients, β = 0 against 0.05",
                "larger",
                without,
                with_beta,
                weights_disagreement,
            )
        )
        findings += [
            _finding(
                f"{world}: reward {name}, β = 0.05 against 0",
                "larger",
                with_beta,
                without,
                final_reward(name),
            )
            for name in without[0].objectives
        ]
        findings.append(
            _finding(
                f"{world}: spread of λ between clients, β = 0 against 0.5",
                "larger",
                without,
                runs[f"{opening}β = 0.5, C = 2"],
                weights_disagreement,
            )
        )
    return Section(
        "Figure 2: with and without β",
        "Without β the clients' weights diverge and the rewards stay lower; with β = 0.05 they are "
        "consistent. Two clients.",
        findings,
        [images["figure_2"], images["beta"]],
        [_beta_table(runs)],
    )


def figure_3(runs: Mapping[str, list[Record]], images: Mapping[str, str]) -> Section:
    """Preferences order the outcomes."""
    notes = []
    of_p = {p: runs[f"p = ({p:g}, {1 - p:.1g})"] for p in PREFERENCES}
    objectives = runs["FIRM"][0].objectives
    for place, name in enumerate(objectives):
        order = PREFERENCES if place == 0 else PREFERENCES[::-1]
        ends_of = {p: over_seeds(of_p[p], final_reward(name)) for p in order}
        means = [ends_of[p].mean for p in order]
        falls = [f"{a:.3f} to {b:.3f}" for a, b in pairwise(means) if b < a]
        shares = [p if place == 0 else 1 - p for p, own in ends_of.items() for _ in own.values]
        rewards = [end for own in ends_of.values() for end in own.values]
        correlation = rank_correlation(np.array(shares), np.array(rewards)) or 0.0
        steps = ", ".join(f"{mean:.3f}" for mean in means)
        verdict = "rises at every step" if not falls else f"falls at {', '.join(falls)}"
        notes.append(
            f"- **{name}**, its preference rising from 0.1 to 0.9: mean reward {steps}; it "
            f"{verdict}; Spearman's rank correlation over all runs {correlation:.2f}."
        )
    ends = [
        _finding(f"reward {name}, p = {high} against {low}", "larger", first, second, read)
        for name, high, low, first, second, read in (
            (objectives[0], 0.9, 0.1, of_p[0.9], of_p[0.1], final_reward(objectives[0])),
            (objectives[1], 0.9, 0.1, of_p[0.1], of_p[0.9], final_reward(objectives[1])),
        )
    ]
    for p in (0.1, 0.9):
        key = f"({p:g}, {1 - p:.1g})"
        ends += [
            _finding(
                f"reward {name}, p = {key} against weights fixed at p",
                "close",
                of_p[p],
                runs[f"fixed λ = {key}"],
                final_reward(name),
                tolerance=SAME_REWARD,
            )
            for name in objectives
        ]
    return Section(
        "Figure 3: preferences",
        "A larger preference for an objective gives a model with a higher reward in it.",
        ends,
        [images["figure_3"]],
        notes,
    )


def heterogeneity(runs: Mapping[str, list[Record]], images: Mapping[str, str]) -> list[Section]:
    """Figures 4 to 6: other reward models, other prompts, more clients."""
    sections = {
        "figure_4": (
            "Figure 4: two helpfulness reward models",
            "two helpful reward models",
            "Half of the clients use another helpfulness model; weights are nearly the same and "
            "rewards comparable.",
        ),
        "figure_5": (
            "Figure 5: prompts by Dirichlet(0.3)",
            "Dirichlet 0.3",
            "Weights are nearly the same with uneven prompts; harmlessness is comparable, "
            "helpfulness a little lower.",
        ),
        "figure_6": (
            "Figure 6: 16 clients",
            "16 clients",
            "Weights are nearly the same with 16 clients as with 8, rewards competitive.",
        ),
    }
    return [
        Section(title, claim, _like_the_baseline(runs[setting], runs["FIRM"]), [images[figure]])
        for figure, (title, setting, claim) in sections.items()
    ]


def table_1(runs: Mapping[str, list[Record]]) -> Section:
    """Shows one prompt's replies of four models."""
    models: dict[str, tuple[Record, Literal["first", "last"]]] = {
        "base": (runs["p = (0.5, 0.5)"][0], "first"),
        "balanced, p = (0.5, 0.5)": (runs["p = (0.5, 0.5)"][0], "last"),
        "harmlessness-focused, p = (0.1, 0.9)": (runs["p = (0.1, 0.9)"][0], "last"),
        "helpfulness-focused, p = (0.9, 0.1)": (runs["p = (0.9, 0.1)"][0], "last"),
    }
    replies = {name: _replies(record, which) for name, (record, which) in models.items()}
    first = runs["p = (0.1, 0.9)"][0]
    helpful, harmless = first.objectives

    def apart(prompt: str) -> float:
        """Returns the difference in true harm between the focused models' replies."""
        ends = [replies[name][prompt]["scores"]["true_harmless"] for name in list(models)[2:]]
        return ends[0] - ends[1]

    prompt = max(sorted(set.intersection(*map(set, replies.values()))), key=apart)
    scores = (helpful, harmless, "true_helpful", "true_harmless")
    rows = []
    for name in models:
        reply = replies[name][prompt]
        cells = [f"{reply['scores'][score]:.2f}" for score in scores]
        rows.append([name, plain(reply["completion"]), *cells])
    lines = [
        f"The first {len(next(iter(replies.values())))} test prompts, the one on which the focused "
        f"models differ most in true harm: *{plain(prompt)}*",
        markdown_table(["model", "reply", *(name.replace("_", " ") for name in scores)], rows),
    ]
    return Section(
        "Table 1: one prompt",
        "The base model refuses or evades, the balanced one answers with care, the "
        "harmlessness-focused one warns, the helpfulness-focused one goes along.",
        [],
        [],
        lines,
    )


def _like_the_baseline(changed: list[Record], baseline: list[Record]) -> list[Finding]:
    name_of_weight = baseline[0].objectives[0]
    found = [
        _finding(
            f"λ of {name_of_weight}, mean of the second half",
            "close",
            changed,
            baseline,
            _late_weight,
            tolerance=SAME_WEIGHT,
        )
    ]
    return found + [
        _finding(
            f"reward {name}", "close", changed, baseline, final_reward(name), tolerance=SAME_REWARD
        )
        for name in baseline[0].objectives
    ]


def _late_weight(record: Record) -> float:
    curve = weights(record)
    return float(curve[len(curve) // 2 :, 0].mean())


def _finding(
    what: str,
    wanted: Wanted,
    first: list[Record],
    second: list[Record],
    figure: Figure,
    *,
    tolerance: float = 0.0,
) -> Finding:
    values = " / ".join(over_seeds(records, figure).text() for records in (first, second))
    return Finding(what, wanted, difference(first, second, figure), tolerance, values)


# --- The page -------------------------------------------------------------------------------------


def _beta_table(runs: Mapping[str, list[Record]]) -> str:
    header = ["world", "C", "β", "spread of λ", "variation of λ, mean", "first solves"]
    header += ["effect of β", "cosine", "rewards"]
    rows = []
    for world, opening in WORLDS.items():
        for num_clients in (2, 8):
            for beta in BETAS:
                name = f"{opening}β = {beta}, C = {num_clients}"
                of_setting = runs.get(name) or runs[f"{opening}FIRM"]
                variations = (mean_variation, solve_variation)
                figures = (weights_disagreement, *variations, beta_effect, cosine)
                cells = [over_seeds(of_setting, figure).text() for figure in figures]
                rewards = ", ".join(
                    over_seeds(of_setting, final_reward(n)).text() for n in of_setting[0].objectives
                )
                rows.append([world, str(num_clients), beta, *cells, rewards])
    about = (
        "Spread of λ: standard deviation over the clients, of one solve each, mean of all solves. "
        "Variation of λ: total variation over the rounds, as in Figure 1. Effect of β: ‖λ(β) - "
        "λ(0)‖ / ‖1/M - λ(0)‖. Cosine: of the two gradients in a solve."
    )
    return f"{markdown_table(header, rows)}\n\n{about}"


def _replies(record: Record, which: Literal["first", "last"]) -> dict[str, dict]:
    """Returns the sample rows of the base model or of the final one, by prompt."""
    rounds = [row["round"] for row in record.samples]
    wanted = min(rounds) if which == "first" else max(rounds)
    return {row["prompt"]: row for row in record.samples if row["round"] == wanted}


def plain(text: str) -> str:
    """Escapes a text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")
