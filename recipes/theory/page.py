"""The page and the tables of a measurement of the theory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from firm.report.drawing import INK, MUTED, LegendEntry, Panel, Series, figure, scatter, ticks_at
from firm.report.formats import CONFIG, measure
from firm.report.page import Page, Provenance, Section, Table
from firm.run import to_yaml
from firm.run.comparison import Measure
from recipes.theory.panels import Fit, log_axis, points_trace, reference_line, scaling_panel
from recipes.theory.scaling import Slope, geometric_mean, verdict
from recipes.theory.sweeps import (
    BOUND,
    DRIFT,
    LAWS,
    SOLVED,
    SPREAD,
    Law,
    SweepsConfig,
    Values,
    fitted_from,
    positions,
    seeds,
)

PAGE_NAME = "theory.html"
NUM_SHOWN_PAIRS = 100
"""Number of pairs of clients shown in the figure of Lemma 1 for each β."""
COLORS = [f"var(--objective-{place})" for place in range(4)]
KEYS = {
    SPREAD: LegendEntry("spread of λ*", COLORS[0]),
    BOUND: LegendEntry("bound on the drift of λ*", COLORS[1]),
    SOLVED: LegendEntry("drift of λ*", COLORS[2]),
    DRIFT: LegendEntry("drift of λ (Eq. 7)", COLORS[3]),
    "spread_steps": LegendEntry("spread of λ*, no noise", COLORS[0]),
    "drift_steps": LegendEntry("drift of λ*, no noise", COLORS[2]),
    "t12": LegendEntry("client drift T₁,₂", COLORS[1]),
    "gradient_error": LegendEntry("gradient error", COLORS[0]),
    "stationarity": LegendEntry("‖∇J(θ̄) λ̄‖², mean up to T", COLORS[0]),
    "min_norm": LegendEntry("min ‖∇J(θ̄) λ‖², mean up to T", COLORS[1]),
}
"""Legend entry of each quantity."""
LINES = [LegendEntry("fitted slope", MUTED), LegendEntry("theorem's slope", INK, "dot")]
AXES = {
    "beta": "β",
    "batch_size": "B",
    "num_local_steps": "K",
    "step_size": "α",
    "num_objectives": "M",
    "num_clients": "C",
    "t": "t",
    "T": "T",
}
PANELS = {
    "beta": "Against the regularisation β",
    "batch": "Against the batch size B",
    "objectives": "Against the number of objectives M",
    "time": "Against the local step t",
    "steps": "Against the local steps K",
    "alpha": "Against the step size α",
    "steps_alone": "Without noise, against K",
    "alpha_alone": "Without noise, against α",
    "variance_clients": "Against the number of clients C",
    "variance_batch": "Against the batch size B",
    "convergence": "Against the horizon T",
}


def lemma_1_summary(values: Values) -> str:
    """Returns a sentence on Lemma 1 in all runs."""

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([v.ravel() for (_, key), v in values.items() if key == name])

    comparisons, violations = all_of("lemma_1_comparisons"), all_of("lemma_1_violations")
    ratio, prior = all_of("lemma_1_ratio").max(), all_of("lemma_1_prior_ratio").max()
    fate = "held in all" if not violations.sum() else f"failed in {violations.sum():,.0f} of"
    return (
        f"Lemma 1 {fate} {comparisons.sum():,.0f} comparisons of two clients in a local step: its "
        f"left side was at most {ratio:.3f} of the right one with R the largest gradient of the "
        f"pair, and {prior:.1e} with Lemma 7's, which is {all_of('lemma_7_bound').min():,.0f} or "
        f"more where the largest gradient was {all_of('lemma_7_largest').max():.2f}."
    )


def unregularised_summary(values: Values, cfg: SweepsConfig) -> str:
    """Returns a sentence on the distance of the clients' λ* with β = 0 and the experiment's β."""
    spreads = values["beta", SPREAD]  # [S, N], beta = 0 first
    near = min(range(len(cfg.betas)), key=lambda place: abs(cfg.betas[place] - cfg.experiment.beta))
    (ratio,), (se,) = geometric_mean(spreads[:, :1] / spreads[:, near + 1 : near + 2])
    count = int((spreads[:, 0] > spreads[:, 1:].max(axis=1)).sum())
    return (
        f"With β = 0 the clients' λ* lie {spreads[:, 0].mean():.3f} apart (root mean square), "
        f"{ratio:.2g} times as far (± {100 * se:.0f} %) as with β = {cfg.betas[near]:g}; in "
        f"{count} of {len(spreads)} seeds farther than with any positive β."
    )


def slopes_summary(slopes: Mapping[Law, Slope]) -> str:
    """Returns a sentence on the number of slopes that equal the theorem's."""
    verdicts = [verdict(slope, law.exponent) for law, slope in slopes.items()]
    return (
        f"Of {len(verdicts)} slopes {verdicts.count('as the theorem')} are the theorem's; where "
        "the others depart, and why, the table of all slopes says."
    )


def law_cells(law: Law, slope: Slope) -> list[str]:
    """Returns a law's row of the table."""
    return [
        KEYS[law.quantity].label,
        AXES[law.sweep.removeprefix("exact_")],
        slope_text(slope),
        f"{law.exponent:+g}".replace("-", "−") if law.exponent else "0",
        verdict(slope, law.exponent),
    ]


def slope_text(slope: Slope) -> str:
    """Returns mean ± standard error, to the digits that the error leaves."""
    return measure(Measure(slope.mean, slope.se), is_signed=True)


def slope_rows(slopes: Mapping[Law, Slope]) -> list[dict[str, Any]]:
    """Rows of slopes.csv."""
    return [
        {
            "sweep": law.sweep,
            "quantity": law.quantity,
            **asdict(slope),
            "exponent": law.exponent,
            "verdict": verdict(slope, law.exponent),
        }
        for law, slope in slopes.items()
    ]


def point_rows(values: Values, cfg: SweepsConfig) -> list[dict[str, Any]]:
    """Rows of theory.csv: every quantity at every point of every seed."""
    rows = []
    for (sweep, quantity), table in values.items():
        xs = positions(sweep, cfg)[-table.shape[1] :].tolist()
        for seed, row in zip(seeds(cfg), table.tolist(), strict=True):
            for x, value in zip(xs, row, strict=True):
                key = {"sweep": sweep, "x": x, "seed": seed}
                rows.append({**key, "quantity": quantity, "value": value})
    return rows


# --- The page -------------------------------------------------------------------------------------

LAW_SECTIONS = {
    "disagreement": (
        "The disagreement drift",
        "Theorem 1 bounds it by M^(3/2) α K / (β √B). The exponents are those of the "
        "clients' spread of λ*, which Lemma 1 bounds and in which the proof ends. Eq. 7 itself "
        "is the squared covariance of gradients and weights over the clients, as the "
        "deviations of λ sum to zero; it is of higher order, and falls faster. The proof's "
        "bound between them lies above it in every step.",
        ("beta", "batch", "objectives", "time", "steps", "alpha"),
        (SPREAD, BOUND, SOLVED, DRIFT),
    ),
    "local-steps": (
        "What the local steps alone do",
        "Theorem 1 prints α K / √B as a product; the proof's last line (Eq. 33) has "
        "the sum of 1/√B and αK, and above, noise hides the second. Here λ* is solved from "
        "exact gradients at each client's own θ, so that nothing but the local steps is left. "
        "Beside it the classical client drift, which the theorem bounds by α²K².",
        ("steps_alone", "alpha_alone"),
        ("spread_steps", "drift_steps", "t12"),
    ),
    "variance": (
        "The gradient error",
        "The first part of Eq. 7, with the critics at their TD fixed point: what "
        "remains is sampling noise, and falls as 1/(CB).",
        ("variance_clients", "variance_batch"),
        ("gradient_error",),
    ),
    "convergence": (
        "Convergence",
        "T-FIRM as it is, with TD critics: mean over the local steps up to T of the "
        "squared norm that Theorem 1 bounds by log T / (α T) and its floors, and of the "
        "smallest one over all λ, which measures Pareto stationarity itself. The slope is "
        "fitted to the last decade.",
        ("convergence",),
        ("stationarity", "min_norm"),
    ),
}
"""Title, text, figures and quantities of the sections on the theorem's terms, by their name."""


def points_of(law: Law, values: Values, cfg: SweepsConfig) -> Series:
    """Returns a quantity's geometric means over the seeds, where x is positive."""
    xs, (means, ses) = positions(law.sweep, cfg), geometric_mean(values[law.sweep, law.quantity])
    kept = xs > 0
    return Series(KEYS[law.quantity], xs[kept], means[kept], ses[kept])


def law_panel(name: str, slopes: Mapping[Law, Slope], values: Values, cfg: SweepsConfig) -> Panel:
    """Draws one figure of all laws that share it."""
    laws = [law for law in slopes if law.panel == name]
    fits = []
    for law in laws:
        points, slope = points_of(law, values, cfg), slopes[law]
        start = fitted_from(law.sweep, cfg)
        fits.append(Fit(points, slope.mean, law.exponent, slope_text(slope), start))
    x_title = AXES[laws[0].sweep.removeprefix("exact_")]
    return scaling_panel(name, PANELS[name], fits, x_title=x_title)


def lemma_panel(pairs: Sequence[Mapping[str, float]]) -> Panel:
    """Draws both sides of Lemma 1, with the line on which they are equal."""
    shown = [pair for pair in pairs if pair["left"] > 0 and pair["right"] > 0]
    rights, lefts = [[pair[key] for pair in shown] for key in ("right", "left")]
    ends = [min(rights), max(rights)]
    marker = {
        "color": [float(np.log10(pair["beta"])) for pair in shown],
        "colorscale": [[0, "var(--round-first)"], [1, "var(--round-last)"]],
        "size": 5,
    }
    points = scatter(
        LegendEntry("", INK),
        rights,
        lefts,
        customdata=[pair["beta"] for pair in shown],
        marker=marker,
        hover="β = %{customdata}<br>right %{x:.3~g}<br>left %{y:.3~g}",
    )
    made = figure(
        [points, reference_line(ends, ends, "dot")],
        log_axis("(4RM/β) max ‖gᶜ − gᶜ′‖"),
        log_axis("‖λ*ᶜ − λ*ᶜ′‖"),
        height=420,
    )
    return Panel("lemma", "Left side of Lemma 1 against its right side", made)


def unregularised_panel(values: Values, cfg: SweepsConfig) -> Panel:
    """Draws the spread of λ* over β, beside that of β = 0."""
    (law,) = (law for law in LAWS if (law.sweep, law.quantity) == ("beta", SPREAD))
    points = points_of(law, values, cfg)
    at_zero = float(geometric_mean(values["beta", SPREAD])[0][0])
    data = [
        reference_line([points.xs[0], points.xs[-1]], [at_zero] * 2, "dash"),
        points_trace(points, "β", mode="lines+markers"),
    ]
    made = figure(data, log_axis("β") | ticks_at(points.xs), log_axis("spread of λ*"))
    return Panel("unregularised", "Spread of the clients' λ*", made)


def page_of(
    cfg: SweepsConfig,
    values: Values,
    slopes: Mapping[Law, Slope],
    pairs: Sequence[Mapping[str, float]],
    *,
    summary: Sequence[str],
) -> Page:
    """Returns the page of a measurement."""
    lemma = Section(
        "lemma-1",
        "Lemma 1",
        "Two clients' weights differ by no more than their gradients do, times 4RM/β. "
        "Each point is a pair of clients in one local step; its colour deepens with β. On the "
        "dotted line both sides would be equal, above it the lemma would be false. R is the "
        "largest gradient of the pair, the smallest value that the proof allows.",
        [lemma_panel(pairs)],
    )
    terms = [
        Section(
            name,
            title,
            text,
            [law_panel(panel, slopes, values, cfg) for panel in panels],
            [*(KEYS[quantity] for quantity in quantities), *LINES],
            is_wide=len(panels) > 4,
        )
        for name, (title, text, panels, quantities) in LAW_SECTIONS.items()
    ]
    unregularised = Section(
        "unregularised",
        "Without regularisation",
        "Root mean square distance of the clients' λ* from their mean. Dashed: β = 0.",
        [unregularised_panel(values, cfg)],
    )
    origin = Provenance(
        "Every seed draws its own MDP and all noise. In the sweeps each round starts from the "
        "uniform policy, so that a term is measured at one place whatever the step size; the runs "
        "of the convergence learn. What T-FIRM's paper prints otherwise, and what it leaves open, "
        "stands in the docstrings of recipes.theory.",
        {CONFIG: to_yaml(cfg)},
    )
    return Page(
        product="FIRM theory laboratory",
        title="The convergence theory, measured",
        summary=summary,
        facts=_facts(cfg),
        blocks=[lemma, *terms, unregularised, _slopes_table(slopes), origin],
    )


def _facts(cfg: SweepsConfig) -> dict[str, str]:
    """Returns facts on the experiment, text by label."""
    base, mdp = cfg.experiment, cfg.experiment.mdp
    return {
        "MDP": f"{mdp.num_states} states, {mdp.num_actions} actions, γ = {mdp.gamma:g}",
        "Objectives": f"M = {mdp.num_objectives}, conflict {mdp.conflict:g}",
        "Features": mdp.features,
        "Clients": f"C = {base.num_clients}",
        "Local steps": f"K = {base.num_local_steps}, {base.num_steps} in all",
        "Batch": f"B = {base.client.batch_size}",
        "Step size": f"α = {base.client.step_size:g}",
        "Regularisation": f"β = {base.beta:g}",
        "Seeds": f"{seeds(cfg)[0]} to {seeds(cfg)[-1]}",
    }


def _slopes_table(slopes: Mapping[Law, Slope]) -> Table:
    """Returns all slopes beside the theorem's."""
    rows = [
        [*cells, "" if cells[-1] == "as the theorem" else law.why]
        for law, cells in ((law, law_cells(law, slope)) for law, slope in slopes.items())
    ]
    return Table(
        "All slopes",
        "Least squares on log-log axes within each seed, mean ± standard error over the seeds, "
        "beside the exponent of Theorem 1, which is an upper bound: a quantity that falls "
        "faster or rises slower keeps it, and so does one of higher order that rises faster "
        "while it is small. A slope within two standard errors, or 5 %, of the exponent counts "
        "as equal. The reasons are ours: what the proof's steps lead one to expect.",
        ["Quantity", "against", "Slope", "Theorem", "Verdict", "Reason"],
        rows,
        words=frozenset({1, 4, 5}),
    )
