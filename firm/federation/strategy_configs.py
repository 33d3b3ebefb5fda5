"""Configurations of all strategies, each of which is in the module of its name in `strategies`.

They are read without torch, so that methods import what computes with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Interval

from firm.base.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    Fraction,
    Hint,
    NonNegativeFloat,
    Paper,
    PositiveFloat,
    PositiveInt,
    configuration,
)
from firm.base.quantities import Quantity, register
from firm.base.registry import OneOf, did_you_mean
from firm.base.schema import ByObjective, Finite, NonNegative
from firm.federation.option import DECIDED_BY_SERVER, Requests
from firm.federation.strategy import StrategyConfig, shipped
from firm.solvers.settings import check_shares, check_steps, check_strength, check_targets
from firm.solvers.torchjd import METHODS, NAMES, PREFIX, check_method

if TYPE_CHECKING:
    from firm.federation.aggregation import Transform

SOLVERS = ("exact", "cvxpy", "raco", *NAMES)
"""Solvers of a client's weights."""
PAPER_BETA = 0.01
"""β of the paper's experiments (A.1), which moves the weights by little."""
BIASED = ("low_rank", "top_k", "random_mask")
"""Compressors that are not unbiased, as Assumption 5 requires."""
CompressorName = Literal[
    "none", "low_rank", "top_k", "random_mask", "count_sketch", "hybrid", "quantizing"
]
ONE_WAY_ONLY = ("none", "count_sketch", "hybrid")
"""Compressors without two-way communication: exact ones, and sketches, whose correlated errors the
two-way formula neglects."""


@configuration
class WeightedConfig(StrategyConfig):
    """Options common to strategies with a weight for each objective."""

    weights: tuple[float, ...] | None = None
    """Weight of each objective, in order or by name, such as `helpful=0.7,harmless=0.3`; scaled to
    sum 1. null weights them equally."""

    preference_key: ClassVar[str | None] = "weights"

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_shares(self.weights, max(1, len(self.weights)), name="weights")
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the weights do not fit these objectives."""
        if self.weights is not None:
            check_shares(self.weights, objectives, name="strategy.weights")


@configuration
class ScalarConfig(WeightedConfig):
    """Options of local training on a fixed weighted sum of the objectives."""

    proximal: Annotated[NonNegativeFloat, Hint("0 is off")] = 0.0
    """Strength μ of the proximal term μ/2 ‖θ - θ_t‖² in the local loss."""
    decay: Annotated[float, Interval(gt=0, le=1), Hint("1 is none")] = 1.0
    """Factor of the server learning rate every 100 rounds, in (0, 1]. FedMGDA+ uses β = D^(100/T)
    for a total decay by D in T rounds: 0.891 for a decay to a tenth in 2000 rounds."""

    def local_training(self) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request."""
        return {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": {"weights": self.weights},
            "proximal": self.proximal,
            "share_losses": self.reads_losses,
        }

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training())

    def solves_at_preferences(self, objectives: Sequence[str]) -> bool:
        """Returns false, since the weights are fixed."""
        return False

    def learning_rate(self, num_rounds: int) -> float:
        """Returns η · decay^⌊t/100⌋ after t finished rounds; it changes every 100 rounds."""
        return self.server_learning_rate * self.decay ** (num_rounds // 100)


@shipped
@configuration
class FedAvgConfig(ScalarConfig):
    """Options of FedAvg on a weighted sum."""

    name: Literal["fedavg"] = "fedavg"
    """Strategy."""
    normalize_updates: bool = False
    """Normalise every update to norm 1 first (FedAvg-n); a zero update stays zero."""

    sends_adapters_only: ClassVar[bool] = True

    def steps(self, num_rounds: int) -> "list[Transform]":
        """Returns the server's steps along the mean of the updates or of the normalised updates."""
        from firm.federation.aggregation import Count, Mean, UnitLengths

        return [
            *([UnitLengths()] if self.normalize_updates else []),
            Count(self.aggregation),
            Mean(self.learning_rate(num_rounds)),
        ]


@shipped
@configuration
class FedMgdaConfig(ScalarConfig):
    """Options of FedMGDA+; FedMGDA is the same without normalisation."""

    name: Literal["fedmgda"] = "fedmgda"
    """Strategy."""
    normalize_updates: bool = True
    """Normalise every update to norm 1 first (FedMGDA+); a zero update stays zero."""
    epsilon: Fraction = 1.0
    """Maximum deviation ε of a client's weight from its aggregation weight λ₀ (Eq. 25): 0 is FedAvg
    (FedAvg-n with normalisation), 1 is unconstrained."""

    averages: ClassVar[bool] = False
    solves_on_server: ClassVar[bool] = True


@shipped
@configuration
class AflConfig(ScalarConfig):
    """Options of AFL; γ_w is the server learning rate."""

    name: Literal["afl"] = "afl"
    """Strategy."""
    weights_learning_rate: NonNegativeFloat = 0.1
    """Step size γ_λ of the ascent on the clients' weights."""
    average_iterates: bool = False
    """Return the mean of all rounds' iterates, as in Mohri et al., instead of the last
    one; training always continues from the last."""

    aggregation: Annotated[Literal["uniform"], Hint("AFL learns the clients' weights")] = "uniform"
    """Fixed, because AFL learns the clients' weights."""

    averages: ClassVar[bool] = False
    reads_losses: ClassVar[bool] = True


@shipped
@configuration
class QFedAvgConfig(ScalarConfig):
    """Options of q-FedAvg."""

    name: Literal["qfedavg"] = "qfedavg"
    """Strategy."""
    q: NonNegativeFloat = 1.0
    """Exponent q of the losses: 0 is FedAvg with uniform weights; large q focuses on the worst
    client."""
    lipschitz: PositiveFloat = 1.0
    """Estimate of the Lipschitz constant L of the losses' gradients at q = 0. Li et al. use one
    over the local learning rate; Hu et al. tried 0.1, 1 and 10."""
    normalize_updates: bool = False
    """Normalise every update to norm 1 first, which Hu et al. found unstable for large
    q. A zero update stays zero."""

    losses: Literal["mean", "total"] = "mean"
    """Definition of F_k: the client's mean loss, as in Li et al., or its total, the mean times the
    number of examples, with which large clients dominate at large q. Hu et al. use the total, as
    the sum of their batches' mean losses."""

    aggregation: Annotated[Literal["uniform"], Hint("q-FedAvg weights clients by their losses")] = (
        "uniform"
    )
    """Fixed, because q-FedAvg weights clients by their losses."""

    averages: ClassVar[bool] = False
    reads_losses: ClassVar[bool] = True


@shipped
@configuration
class FirmConfig(StrategyConfig):
    """Options of FIRM."""

    name: Literal["firm"] = "firm"
    """Strategy."""
    beta: Annotated[float, Paper("A.1", (PAPER_BETA,))] = PAPER_BETA
    """Strength β of the regularisation towards uniform weights (Eq. 9); not used with a
    preference."""
    preference: tuple[float, ...] | None = None
    """Preference p of the objectives (Eq. 54), in order or by name, such as
    `helpful=0.7,harmless=0.3`; scaled to sum 1; 0 excludes an objective."""
    preferences: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Preferences of individual clients by name, which override the common preference."""
    preference_strength: float = 1.0
    """Factor of the preference term Diag(1/p); 1 in the paper."""
    normalize: Annotated[bool, Paper("A.1")] = True
    """Divide the Gram matrix by the mean of its diagonal (Eq. 9; false is Eq. 2)."""
    norm_power: Annotated[float, NOT_IN_PAPER] = 0.0
    """Each gradient is divided by this power of its norm for the solve: 0 as in the paper, 1 for
    unit gradients, as in GAPO (arXiv:2507.01915)."""
    solver: Annotated[str, OneOf(SOLVERS), NOT_IN_PAPER] = "exact"
    """Solver of the weights. exact; cvxpy, an optional package, supports constraints, but takes
    milliseconds per solve. The others are methods of other papers in place of FIRM's, whose weights
    need not sum to 1: raco, CAGrad clipped by the preference (``raco_weights``); torchjd/NAME, by
    the optional package TorchJD."""
    solver_options: Annotated[dict[str, float | str], NOT_IN_PAPER] = field(default_factory=dict)
    """Options of a solver torchjd/NAME that differ from TorchJD's defaults, such as {c: 0.4} of
    torchjd/cagrad; ``firm.solvers.torchjd`` lists them."""
    constraints: Annotated[tuple[str, ...], NOT_IN_PAPER] = ()
    """Linear constraints on the weights, in terms of the objectives' names, such as 'harmless >=
    0.3' or 'helpful <= 2 * harmless'; require solver cvxpy. Where an objective is not trained or
    has no preference, those that name it do not apply."""
    solve_per: Annotated[Literal["minibatch", "batch"], NOT_IN_PAPER, NOT_IN_PAPER] = "minibatch"
    """Scope of a solve for weights: each minibatch, or once per batch; the latter needs only one
    backward pass per minibatch instead of one per objective."""

    preference_key: ClassVar[str | None] = "preference"
    sends_adapters_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        num_objectives = 1 if self.preference is None else max(1, len(self.preference))
        if self.constraints and self.solver != "cvxpy":
            raise ValueError(f"constraints require solver cvxpy, got solver {self.solver}.")
        self._check_solver()
        self._check_weighting(num_objectives)
        for client in self.preferences:
            self.of_client(client)
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the options do not fit these objectives."""
        self._check_weighting(objectives)
        if self.solver != "exact":
            import numpy as np

            from firm.solvers.weightings import WEIGHTINGS

            gram, served = np.eye(len(objectives)), range(len(objectives))
            weighting = WEIGHTINGS[self.weighting]
            weighting(gram, served=served, **self.weighting_options(objectives))
        for client in self.preferences:
            self.of_client(client).check(objectives)

    @property
    def method(self) -> str | None:
        """Name of TorchJD's method that computes the weights; None with FIRM's."""
        is_torchjds = self.solver.startswith(PREFIX)
        return self.solver.removeprefix(PREFIX) if is_torchjds else None

    @property
    def weighting(self) -> str:
        """Name of the weighting in ``LocalTraining`` requests."""
        if self.method is not None:
            return "torchjd"
        return "raco" if self.solver == "raco" else "firm"

    def _check_solver(self) -> None:
        if self.weighting == "firm":
            if self.solver_options:
                raise ValueError(
                    f"solver_options require solver raco or torchjd/NAME, got "
                    f"{self.solver_options} with solver {self.solver}."
                )
            return
        if self.method is not None:
            has_preference = self.preference is not None or bool(self.preferences)
            check_method(self.method, self.solver_options, has_preference=has_preference)
        elif unknown := self.solver_options.keys() - {"c"}:
            raise ValueError(f"solver raco has the option c, got {min(unknown)!r}.")
        own = {"beta": PAPER_BETA, "preference_strength": 1.0, "normalize": True, "norm_power": 0.0}
        for key, default in own.items():
            if (value := getattr(self, key)) != default:
                raise ValueError(
                    f"{key} has no effect with solver {self.solver}, got {value}; leave it out."
                )

    def _check_weighting(self, objectives: int | Sequence[str]) -> None:
        if self.preference is None:
            check_strength("beta", self.beta)
        else:
            check_shares(self.preference, objectives, name="strategy.preference")
            check_strength("preference_strength", self.preference_strength)
        check_strength("norm_power", self.norm_power)

    def steps(self, num_rounds: int) -> "list[Transform]":
        """Returns the server's steps: a step towards the mean with learning rate η."""
        from firm.federation.aggregation import Count, Mean, Rate

        return [Count(self.aggregation), Mean(), Rate(self.server_learning_rate)]

    def alarms(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns an alarm if a β other than the paper's has almost no effect on the weights."""
        if self.preference or self.schedule or self.beta == PAPER_BETA:
            return []
        from firm.federation.diagnostics import beta_alarm

        solves = [row for row in rows if {"gradient_norms", "cosines"} <= row.keys()]
        alarm = beta_alarm(solves, self.beta, normalize=self.normalize)
        return [alarm] if alarm else []

    def solves_at_preferences(self, objectives: Sequence[str]) -> bool:
        """Returns true, since clients solve for weights, except by a method without preferences."""
        return self.method is None or METHODS[self.method].takes_preference

    def of_client(self, name: str) -> Self:
        """Returns the options of a client, with its own preference if it has one."""
        preference = self.preferences.get(name, self.preference)
        return replace(self, preference=preference, preferences={}, schedule=None)

    def weighting_options(self, objectives: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the options of the weighting, without constraints if objectives is None."""
        if self.method is not None:
            asked = {"method": self.method, "options": dict(self.solver_options)}
            takes_preference = METHODS[self.method].takes_preference
            return {**asked, **({"preference": self.preference} if takes_preference else {})}
        if self.weighting == "raco":
            return {"preference": self.preference, **self.solver_options}
        constraints: Sequence[Sequence[float]] = []
        if self.constraints and objectives is not None:
            from firm.solvers.constraints import linear_constraints

            constraints = linear_constraints(self.constraints, objectives)
        return {
            "beta": self.beta,
            "preference": self.preference,
            "preference_strength": self.preference_strength,
            "normalize": self.normalize,
            "norm_power": self.norm_power,
            "solver": self.solver,
            "constraints": constraints,
        }

    def local_training(self, objectives: Sequence[str]) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request."""
        return {
            **self.training(),
            "weighting": self.weighting,
            "weighting_options": self.weighting_options(objectives),
            "options_by_client": {
                name: self.of_client(name).weighting_options(objectives)
                for name in self.preferences
            },
            "solve_per": self.solve_per,
        }

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training(objectives))


register(
    Quantity("rewards", type=ByObjective[Finite | None]),
    Quantity(
        "multipliers",
        "Multipliers of the constraints",
        "multiplier",
        "A constraint's multiplier grows by multiplier_learning_rate times the reward that its "
        "objective lacks, and falls to zero while the constraint holds.",
        kind="round",
        type=ByObjective[NonNegative],
        section="training",
    ),
)


@configuration
class ByRewardConfig(StrategyConfig):
    """Options common to strategies whose server sets the weights by the clients' mean rewards."""

    reads_rewards: ClassVar[bool] = True

    def local_training(self) -> dict[str, Any]:
        """Returns the fields of each round's ``LocalTraining`` request, without the weights."""
        return {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": DECIDED_BY_SERVER,
        }

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the requests of a round; see ``StrategyConfig``."""
        return self.training_requests(self.local_training())


@shipped
@configuration
class ConstrainedConfig(ByRewardConfig):
    """Options of dual ascent on constraints."""

    name: Literal["constrained"] = "constrained"
    """Strategy."""
    min_rewards: dict[str, float] = field(default_factory=dict)
    """Constraints: the minimum expected reward in [0, 1] of objectives by name."""
    weights: Annotated[
        tuple[float, ...] | None, Hint("null weights those without a constraint equally")
    ] = None
    """Weight w of each objective in what is maximised, in order or by name, scaled to sum 1; null
    weights the objectives without a constraint equally, and the others by 0."""
    multiplier_learning_rate: PositiveFloat = 1.0
    """Step size η of the ascent on the constraints' multipliers. The default moves a multiplier by
    0.1 in a round in which its objective lacks a reward of 0.1."""

    def __post_init__(self) -> None:
        for name, bound in self.min_rewards.items():
            if not 0 <= bound <= 1:
                raise ValueError(f"min_rewards.{name} must be in [0, 1], got {bound:g}.")
        if self.weights is not None:
            check_shares(self.weights, len(self.weights), name="weights")
        super().__post_init__()

    def check(self, objectives: Sequence[str]) -> None:
        """Raises ``ValueError`` if the constraints do not fit these objectives."""
        if not self.min_rewards:
            raise ValueError(
                "min_rewards must have at least one constraint, got none: set for example "
                "min_rewards {harmless: 0.6}, or use strategy fedavg."
            )
        for name in self.min_rewards:
            if name not in objectives:
                raise ValueError(
                    f"min_rewards has the unknown objective {name!r}; choose from "
                    f"{', '.join(objectives)}{did_you_mean(name, objectives)}"
                )
        if self.weights is None and len(self.min_rewards) == len(objectives):
            raise ValueError(
                "min_rewards constrains all objectives, so weights must say what is maximised, got "
                "null: set weights, or leave one objective without a constraint."
            )
        self.base_weights(objectives)

    def base_weights(self, objectives: Sequence[str]) -> list[float]:
        """Returns the weights w of what is maximised, shape [M], as given."""
        own = self.weights or [float(name not in self.min_rewards) for name in objectives]
        check_shares(own, objectives, name="strategy.weights")
        return list(own)


@shipped
@configuration
class TchebycheffConfig(ByRewardConfig, WeightedConfig):
    """Options of smooth Tchebycheff scalarisation."""

    name: Literal["tchebycheff"] = "tchebycheff"
    """Strategy."""
    smoothing: PositiveFloat = 0.1
    """Smoothing μ of the largest weighted distance to the ideal: small values train the objective
    that is farthest from its ideal alone, large ones all by their weights."""
    ideal: float = 1.0
    """Ideal reward z of every objective, which none exceeds; 1 for rewards mapped to [0, 1]."""


@shipped
@configuration
class FamoConfig(ByRewardConfig):
    """Options of FAMO."""

    name: Literal["famo"] = "famo"
    """Strategy."""
    weights_learning_rate: PositiveFloat = 0.025
    """Learning rate of the weights' logits ξ, by Adam."""
    weights_decay: NonNegativeFloat = 0.001
    """Decay γ of the logits towards equal weights."""
    ideal: float = 1.0
    """Ideal reward of every objective, at which its loss is 0; 1 for rewards mapped to [0, 1]."""


@configuration
class GramConfig(StrategyConfig):
    """Options of ApproxGramJacobian."""

    compressor: CompressorName = "low_rank"
    """Compressor of the uploaded Jacobians; low_rank is the paper's, none sends them
    uncompressed."""
    upload_budget: PositiveFloat = 1.0
    """Size of a compressed Jacobian in 4-byte numbers, as a multiple of the number of shared
    parameters."""
    communication: Literal["one_way", "two_way", "two_sample"] = "two_way"
    """Estimator of the Gram matrix. one_way: from one upload (Algorithm 3); two_way: corrected
    by a second upload after the server's broadcast (Algorithm 6); two_sample: from two separate
    samples of clients (Algorithm 9, as in the theory)."""

    aggregation: Annotated[
        Literal["uniform"], Hint("the Gram matrix is that of the clients' plain mean")
    ] = "uniform"
    """Fixed, because the Gram matrix is that of the clients' unweighted mean."""

    solves_on_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.communication == "two_way" and self.compressor in ONE_WAY_ONLY:
            raise ValueError(
                f"compressor {self.compressor} supports one-way communication only; set "
                "communication to one_way."
            )
        super().__post_init__()
        if self.share_gram:
            raise ValueError(
                f"{self.name} does not support share_gram: its clients train on one sum, without "
                "Gram matrices of their own."
            )

    def jacobians(self) -> dict[str, Any]:
        """Returns the fields of a ``JacobianRequest`` that are set by the configuration."""
        return {
            "compressor": None if self.compressor == "none" else self.compressor,
            "budget": self.upload_budget,
            "share_losses": self.reads_losses,
        }

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the requests of a round; see ``StrategyConfig``."""
        is_two_sample = self.communication == "two_sample"
        jacobians = {**self.jacobians(), "seed": DECIDED_BY_SERVER}
        training = {
            **self.training(),
            "weighting": "fixed",
            "weighting_options": DECIDED_BY_SERVER,
            "factors": DECIDED_BY_SERVER,
            "skipped_batches": 2 if is_two_sample else 0,
        }
        skipped = {"skipped_batches": DECIDED_BY_SERVER} if is_two_sample else {}
        from firm.federation.sharing import CorrectionRequest, JacobianRequest

        asked = self.training_requests(training)
        asked[JacobianRequest] = {**jacobians, **skipped}
        if self.communication == "two_way":
            asked[CorrectionRequest] = {**jacobians, "broadcast": DECIDED_BY_SERVER}
        return asked


@shipped
@configuration
class FedCmooConfig(GramConfig):
    """Options of FedCMOO."""

    name: Literal["fedcmoo"] = "fedcmoo"
    """Strategy."""
    gram_clients: PositiveInt | None = None
    """Clients n' in each of the two samples; null uses the number of clients that train."""
    solver: Literal["steps", "exact", "upgrad"] = "steps"
    """Solver of the weights. steps: projected gradient steps from the last round's weights
    (Algorithm 2); exact: the exact solution (Eq. 3); upgrad: UPGrad (``torchjd_weights``), a
    different algorithm that needs the extra torchjd."""
    step_size: float = 0.001
    """Step size β of Algorithm 2."""
    num_steps: BoundedInt = 1000
    """Steps K of Algorithm 2; the theory uses 1."""
    normalize_gram: Annotated[bool, NOT_IN_PAPER] = True
    """Normalise the Gram matrix. The steps divide it by the squared mean gradient norm,
    as in the authors' experiments, which makes the step size scale-invariant; the exact solver
    divides it by the mean of its diagonal, which does the same for β (Eq. 9 of FIRM)."""
    beta: Annotated[float, NOT_IN_PAPER] = 0.0
    """Strength of FIRM's regularisation β of the exact solution towards uniform weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver == "upgrad":
            check_method("upgrad", {})
        check_strength("beta", self.beta)
        if self.beta > 0 and self.solver != "exact":
            raise ValueError(f"beta requires solver exact, got {self.beta} with {self.solver}.")
        check_steps(self.step_size)
        if self.communication != "two_sample":
            if self.gram_clients is not None:
                raise ValueError("gram_clients requires communication two_sample.")
            return
        if self.gram_clients is not None and self.gram_clients <= len(self.always):
            raise ValueError(
                f"gram_clients must exceed the number of clients in always, {len(self.always)}, "
                f"got {self.gram_clients}."
            )
        if self.compressor in BIASED:
            raise ValueError(
                f"communication two_sample needs an unbiased compressor, got {self.compressor}; "
                "use quantizing, count_sketch, hybrid or none."
            )
        if self.solver != "steps" or self.normalize_gram:
            raise ValueError(
                "communication two_sample estimates a matrix that may be indefinite; use solver "
                "steps and normalize_gram false, as in the theory."
            )


@shipped
@configuration
class FedCmooPrefConfig(GramConfig):
    """Options of FedCMOO-Pref."""

    name: Literal["fedcmoo_pref"] = "fedcmoo_pref"
    """Strategy."""
    communication: Literal["one_way", "two_way"] = "two_way"
    """Estimator of the Gram matrix. one_way: from one upload (Algorithm 3); two_way: corrected
    by a second upload after the server's broadcast (Algorithm 6)."""
    preference: tuple[float, ...] | None = None
    """Preference r, in order or by name, which targets losses with r₁F₁ = ... = r_M F_M; null
    targets equal losses, by ones. Its scale counts, in the constraints of Eq. (19); a schedule's
    preferences have sum 1."""
    threshold: float = 0.01
    """Divergence ε of the losses from the target ratios; at or below it, the sum of the losses is
    minimised."""
    min_weight: float | None = None
    """Minimum weight of an objective; null uses 1/(5M), the paper's practical improvement. 0
    imposes no minimum."""
    variant: Literal["printed", "released"] = "printed"
    """Linear programme of the weights: as printed in the paper, or as in the authors' released
    code. ``firm.solvers.fedcmoo_pref_weights`` lists the three differences."""

    preference_key: ClassVar[str | None] = "preference"
    reads_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.preference or ("",))

    def check(self, objectives: Sequence[Any]) -> None:
        """Raises ``ValueError`` if the preference does not fit these objectives."""
        multiples = self.multiples(len(objectives))
        check_shares(multiples, len(objectives), name="strategy.preference")
        check_targets(
            self.threshold, self.least(len(objectives)), max(1, sum(map(bool, multiples)))
        )

    def multiples(self, num_objectives: int) -> tuple[float, ...]:
        """Returns the preference r, shape [M]; ones by default."""
        return self.preference or (1.0,) * num_objectives

    def least(self, num_objectives: int) -> float:
        """Returns the minimum weight of each of M objectives."""
        return 1 / (5 * num_objectives) if self.min_weight is None else self.min_weight


@shipped
@configuration
class FsmgdaConfig(StrategyConfig):
    """Options of FSMGDA."""

    name: Literal["fsmgda"] = "fsmgda"
    """Strategy."""
    server_learning_rate: PositiveFloat = 1.0
    """Factor of the combined update, a difference of parameters. The paper's global learning rate
    η_t multiplies sums of gradients; with SGD it equals this factor times the local learning
    rate."""
    gram_columns: Literal["shared", "all"] = "shared"
    """Parameters used to compute the weights: the shared ones, or all, including the objectives'
    heads. The paper's models have shared parameters only."""

    averages: ClassVar[bool] = False
    solves_on_server: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.share_gram:
            raise ValueError(
                "fsmgda does not support share_gram: its clients train one objective at a time."
            )
        if self.upload is not None:
            raise ValueError(
                "upload supports one update per client, but fsmgda sends one per objective; it "
                f"must be null, got {self.upload.bits} bits."
            )
        super().__post_init__()

    def requests(self, objectives: Sequence[str]) -> Requests:
        """Returns the requests of a round; see ``StrategyConfig``."""
        from firm.federation.objective_training import ObjectiveTraining

        return {ObjectiveTraining: self.local_work()}
