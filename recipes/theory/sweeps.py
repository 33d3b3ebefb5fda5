"""Sweeps over keys, and the dependence of each term by Theorem 1 of FIRM (Nourzad et al.)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from firm.base.fields import PositiveFloat, PositiveInt, configuration
from recipes.theory.laboratory import ExperimentConfig, lemma_1_figures, run_experiment, summarise
from recipes.theory.scaling import Slope, fit_slope
from recipes.theory.terms import measure_lemma_1, measure_terms

Values = dict[tuple[str, str], np.ndarray]
"""Sweep and quantity to values, one row per seed, [S, N]; rows of Lemma 1 lack the point β = 0."""

NUM_POINTS = 16
"""Number of horizons T of the convergence, in addition to T = 1."""


@configuration
class SweepsConfig:
    """One measurement of the theory. Every sweep changes one key of `experiment`."""

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    """Experiment in which one key varies at a time."""
    betas: tuple[PositiveFloat, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    """Values of β; 0 is always measured as well."""
    fit_betas_from: float = 0.3
    """Smallest β of the fitted slopes: below, λ is near its bounds and no power law holds."""
    batch_sizes: tuple[PositiveInt, ...] = (8, 16, 32, 64, 128, 256)
    """B."""
    local_steps: tuple[Annotated[int, Ge(2)], ...] = (2, 4, 8, 16, 32)
    """K; each has to divide experiment.num_steps."""
    step_sizes: tuple[PositiveFloat, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    """α."""
    objectives: tuple[PositiveInt, ...] = (2, 3, 4, 6, 8)
    """M."""
    clients: tuple[Annotated[int, Ge(2)], ...] = (2, 4, 8, 16)
    """C."""
    num_convergence_steps: Annotated[int, Ge(20)] = 1000
    """T of the runs that learn, in local steps; their slope is fitted from T/10 on."""
    convergence_step_size: float = 10.0
    """α of these runs."""
    num_seeds: Annotated[int, Ge(2)] = 6
    """Number of seeds, each with its own MDP and noise; at least 2, for error bars."""
    seed: int = 0
    """The first seed."""

    def __post_init__(self) -> None:
        for name in ("betas", "batch_sizes", "local_steps", "step_sizes", "objectives", "clients"):
            values = getattr(self, name)
            if len(set(values)) < 2:
                raise ValueError(f"{name} must be two or more numbers, got {values}.")
        if not self.experiment.beta > 0:
            raise ValueError(
                f"experiment.beta must be positive, got {self.experiment.beta}: Lemma 1 needs it, "
                "and 0 is measured beside the betas."
            )
        if sum(beta >= self.fit_betas_from for beta in self.betas) < 2:
            raise ValueError(
                f"fit_betas_from must leave two of the betas {self.betas}, got "
                f"{self.fit_betas_from}."
            )
        if self.experiment.num_clients < 2:
            raise ValueError(
                "experiment.num_clients must be at least 2, got 1: with one client there is no "
                "drift."
            )
        for sweep in sweeps(self):  # what a sweep makes of the experiment has to be valid, too
            for x in sweep.xs:
                sweep.experiment(x)


@dataclass(frozen=True)
class Sweep:
    """Experiments that differ in one key."""

    name: str
    xs: Sequence[float]
    experiment: Callable[[Any], ExperimentConfig]
    """The experiment at an x."""


@dataclass(frozen=True)
class Law:
    """Dependence of a quantity on the varied key by the theorem."""

    panel: str
    sweep: str
    quantity: str
    exponent: float
    why: str = ""
    """Reason for a different slope, if any."""


SPREAD, BOUND, SOLVED, DRIFT = "spread", "bound_solved", "drift_solved", "drift"
SECOND = "second order: deviations of λ count twice"
NOISE = "noise, which neither α nor K changes, outweighs it: Eq. 33 adds 1/√B and αK"
PRODUCT = "covariance of two deviations that both fall"
WALK = "local noise adds up as a random walk, not in a line"
CANCEL = "first order cancels in the mean over clients"
AVERAGE = "noise averages over the objectives; the proof takes the worst one"

LAWS = (
    Law("beta", "beta", SPREAD, -1.0),
    Law("beta", "beta", BOUND, -1.0, SECOND),
    Law("beta", "beta", SOLVED, -1.0, SECOND),
    Law("beta", "beta", DRIFT, -1.0, SECOND),
    Law("batch", "batch_size", SPREAD, -0.5, "noise enters the Gram matrix squared at small B"),
    Law("batch", "batch_size", BOUND, -0.5, SECOND),
    Law("batch", "batch_size", SOLVED, -0.5, PRODUCT),
    Law("batch", "batch_size", DRIFT, -0.5, PRODUCT),
    Law("objectives", "num_objectives", SPREAD, 1.5, AVERAGE),
    Law("objectives", "num_objectives", BOUND, 1.5, AVERAGE),
    Law("objectives", "num_objectives", SOLVED, 1.5, AVERAGE),
    Law("objectives", "num_objectives", DRIFT, 1.5, AVERAGE),
    Law("time", "t", SOLVED, 0.0),
    Law("time", "t", DRIFT, 0.0, "averaged λ* forget their noise; the bound does not see it"),
    Law("steps", "num_local_steps", SPREAD, 1.0, NOISE),
    Law("steps", "num_local_steps", DRIFT, 1.0, NOISE),
    Law("alpha", "step_size", SPREAD, 1.0, NOISE),
    Law("alpha", "step_size", DRIFT, 1.0, NOISE),
    Law("steps_alone", "num_local_steps", "spread_steps", 1.0, WALK),
    Law("steps_alone", "num_local_steps", "drift_steps", 1.0, CANCEL),
    Law("steps_alone", "num_local_steps", "t12", 2.0, "θ has moved K - 1 times, not K"),
    Law("alpha_alone", "step_size", "spread_steps", 1.0, "θ leaves the linear range at large α"),
    Law("alpha_alone", "step_size", "drift_steps", 1.0, CANCEL),
    Law("alpha_alone", "step_size", "t12", 2.0, CANCEL),
    Law("variance_clients", "num_clients", "gradient_error", -1.0),
    Law("variance_batch", "exact_batch_size", "gradient_error", -1.0),
    Law("convergence", "T", "stationarity", -1.0, "at the largest T it is not yet asymptotic"),
    Law("convergence", "T", "min_norm", -1.0, "at the largest T it is not yet asymptotic"),
)


def sweeps(cfg: SweepsConfig) -> list[Sweep]:
    """Returns the sweeps, by the name of their varied key."""
    base = cfg.experiment
    exact = _with_exact_critics(base)

    def with_client(experiment: ExperimentConfig, **changes: Any) -> ExperimentConfig:
        return replace(experiment, client=replace(experiment.client, **changes))

    return [
        Sweep("beta", (0.0, *cfg.betas), lambda x: replace(base, beta=x)),
        Sweep("batch_size", cfg.batch_sizes, lambda x: with_client(base, batch_size=x)),
        Sweep("num_local_steps", cfg.local_steps, lambda x: replace(base, num_local_steps=x)),
        Sweep("step_size", cfg.step_sizes, lambda x: with_client(base, step_size=x)),
        Sweep(
            "num_objectives",
            cfg.objectives,
            lambda x: replace(base, mdp=replace(base.mdp, num_objectives=x)),
        ),
        Sweep("num_clients", cfg.clients, lambda x: replace(exact, num_clients=x)),
        Sweep("exact_batch_size", cfg.batch_sizes, lambda x: with_client(exact, batch_size=x)),
    ]


def seeds(cfg: SweepsConfig) -> range:
    """Returns the seeds of every point."""
    return range(cfg.seed, cfg.seed + cfg.num_seeds)


def measure_sweep(sweep: Sweep, cfg: SweepsConfig) -> Values:
    """Returns the means over the local steps of every quantity, at every point of a sweep."""
    rows = []
    for seed in seeds(cfg):
        experiments = [sweep.experiment(x) for x in sweep.xs]
        rows.append([summarise(*run_experiment(e, seed=seed), beta=e.beta) for e in experiments])
    return {
        (sweep.name, quantity): np.array(
            [[figures[quantity] for figures in row if quantity in figures] for row in rows]
        )
        for quantity in rows[0][-1]
    }


def measure_time(cfg: SweepsConfig) -> Values:
    """Returns the drift over the local steps t, with exact critics that need no warming up, "t"."""
    experiment = _with_exact_critics(cfg.experiment)
    rows: dict[str, list[np.ndarray]] = {SOLVED: [], DRIFT: []}
    for seed in seeds(cfg):
        mdp, trace = run_experiment(experiment, seed=seed)
        terms = measure_terms(mdp, trace, beta=experiment.beta)
        for quantity, row in rows.items():
            values = getattr(terms, quantity)
            row.append(np.array([values[low:high].mean() for low, high in pairwise(_edges(cfg))]))
    return {("t", quantity): np.array(row) for quantity, row in rows.items()}


def measure_convergence(cfg: SweepsConfig) -> Values:
    """Returns running means of ‖∇J(θ̄) λ̄‖² and of its minimum over λ in runs that learn, "T"."""
    client = replace(cfg.experiment.client, step_size=cfg.convergence_step_size)
    steps = _horizons(cfg)[-1]
    experiment = replace(cfg.experiment, num_steps=steps, trajectory="learned", client=client)
    ends = np.array(_horizons(cfg))
    rows: dict[str, list[np.ndarray]] = {}
    for seed in seeds(cfg):
        mdp, trace = run_experiment(experiment, seed=seed)
        terms = measure_terms(mdp, trace, beta=experiment.beta)
        for quantity in ("stationarity", "min_norm"):
            means = getattr(terms, quantity).cumsum()[ends - 1] / ends
            rows.setdefault(quantity, []).append(means)
        for quantity, value in lemma_1_figures(mdp, trace, beta=experiment.beta).items():
            rows.setdefault(quantity, []).append(np.array([value]))
    return {("T", quantity): np.array(row) for quantity, row in rows.items()}


def sample_pairs(cfg: SweepsConfig, *, num_shown: int) -> list[dict[str, float]]:
    """Returns "beta" and both sides of Lemma 1, "left" and "right", of pairs of clients.

    Takes the same number of pairs for every β, evenly over the local steps of the first seed's run.
    """
    pairs = []
    for beta in cfg.betas:
        mdp, trace = run_experiment(replace(cfg.experiment, beta=beta), seed=cfg.seed)
        lemma = measure_lemma_1(mdp, trace, beta=beta)
        sides = np.stack([lemma.left.ravel(), lemma.right.ravel()], axis=1)
        for left, right in sides[:: max(1, len(sides) // num_shown)].tolist():
            pairs.append({"beta": beta, "left": left, "right": right})
    return pairs


def positions(sweep: str, cfg: SweepsConfig) -> np.ndarray:
    """Returns the x of a sweep's points; for "t", the centres of its bins."""
    if sweep == "t":
        edges = np.array(_edges(cfg))
        return (edges[:-1] + 1 + edges[1:]) / 2
    if sweep == "T":
        return np.array(_horizons(cfg), dtype=float)
    return np.array(next(s.xs for s in sweeps(cfg) if s.name == sweep), dtype=float)


def fitted_from(sweep: str, cfg: SweepsConfig) -> float:
    """Returns the smallest x used to fit a sweep's slopes; positive."""
    return {"beta": cfg.fit_betas_from, "T": _horizons(cfg)[-1] / 10}.get(sweep, 1e-12)


def fit_law(law: Law, values: Values, cfg: SweepsConfig) -> Slope:
    """Returns the measured slope beside a law's exponent."""
    xs = positions(law.sweep, cfg)
    kept = xs >= fitted_from(law.sweep, cfg)
    return fit_slope(xs[kept], values[law.sweep, law.quantity][:, kept])


def _with_exact_critics(experiment: ExperimentConfig) -> ExperimentConfig:
    critic = replace(experiment.client.critic, name="exact")
    return replace(experiment, client=replace(experiment.client, critic=critic))


def _edges(cfg: SweepsConfig) -> list[int]:
    """Returns bounds of the bins 1, 2, 3 to 4, 5 to 8 and so on; the last one may be short."""
    steps = cfg.experiment.num_steps
    return [0, *(2**power for power in range(steps.bit_length()) if 2**power < steps), steps]


def _horizons(cfg: SweepsConfig) -> list[int]:
    """Returns T of the convergence's points, even on a log axis; the last ends a whole round."""
    last = cfg.num_convergence_steps - cfg.num_convergence_steps % cfg.experiment.num_local_steps
    return sorted({round(last ** (place / NUM_POINTS)) for place in range(NUM_POINTS + 1)})
