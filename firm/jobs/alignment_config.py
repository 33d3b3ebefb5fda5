"""The configuration of an alignment run, and checks that do not load a model."""

from dataclasses import dataclass, field
from math import factorial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval, Le

from firm.alignment.adapters.conditioned import check_estimator
from firm.alignment.calibration import Calibration
from firm.alignment.client_config import CAPABILITIES, AttackConfig
from firm.alignment.estimator_config import EstimatorConfig, PPOConfig
from firm.alignment.kl_guard import GuardConfig
from firm.alignment.pairs import RankedPairsConfig
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.rollout_config import RolloutConfig
from firm.base.comparisons import Comparison
from firm.base.fields import (
    NOT_IN_PAPER,
    BoundedInt,
    Hint,
    NonNegativeFloat,
    NonNegativeInt,
    NumClients,
    NumRounds,
    NumWorkers,
    Paper,
    PositiveFloat,
    PositiveInt,
    Seed,
    configuration,
)
from firm.base.preferences import MAX_CELLS, grid, in_order
from firm.base.registry import OneOf, did_you_mean
from firm.base.sanitize import check_name, check_score_name
from firm.federation.engine_registry import ENGINES
from firm.federation.strategies import StrategyConfig
from firm.federation.strategy_configs import FedMgdaConfig, FirmConfig
from firm.jobs.hub import HubConfig
from firm.run.directory import CheckpointConfig
from firm.run.resuming import Resume, check_out
from firm.run.tracking import TrackingConfig
from reward_models.config import RewardModelConfig


@dataclass(frozen=True)
class DataConfig:
    """Training, validation and test prompts."""

    train: PromptsConfig = field(default_factory=PromptsConfig)
    """Training prompts, which are divided among the clients."""
    validation: PromptsConfig = field(default_factory=lambda: PromptsConfig(split=None))
    """Prompts on which the global model is evaluated after every round; split null: a whole file,
    or the first half of a dataset's split "test"."""
    test: PromptsConfig = field(default_factory=lambda: PromptsConfig(split=None))
    """Prompts for the comparison of base and aligned model only; split null: a whole file, or the
    second half of a dataset's split "test"."""
    hold_out: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """Share of the distinct training prompts that is held out for validation, and as much again for
    testing, in place of `validation` and `test`; 0: these have their own."""
    hold_out_seed: Seed | None = None
    """Seed by which prompts, or pairs without a split, are held out; null: `seed`. Runs of a sweep
    or study that differ in `seed` have that of the first."""


KEYS = {
    "The run": ["out", "resume", "plan", "seed", "rounds", "num_clients"],
    "Models": ["policy.path", "policy.lora.r", "rewards.NAME.path", "rewards.NAME.format"],
    "Prompts and replies": [
        "data.train.source",
        "data.test.source",
        "partition.kind",
        "rollout.max_new_tokens",
        "rollout.temperature",
    ],
    "A local step": [
        "estimator.name",
        "estimator.batch_size",
        "estimator.actor_learning_rate",
        "estimator.kl.coefficient",
    ],
    "A round": [
        "strategy.name",
        "strategy.num_local_steps",
        "strategy.beta",
        "strategy.preference",
    ],
}
"""The most important keys, shown by `--help`, by heading."""
DEFAULT_SPLITS = {"train": "train", "validation": "test[:50%]", "test": "test[50%:]"}
"""Default splits of datasets, by use of the prompts."""


NO_PROMPTS = "none: the run learned from pairs"
"""Source of the test prompts of a run on pairs."""
GIVEN = "given to firm.align"
"""Source of prompts that a Python program passed as objects."""


@configuration
class PromptPartitionConfig:
    """Partition of the training prompts among the clients."""

    kind: Annotated[Literal["iid", "dirichlet"], Paper("A.1")] = "iid"
    """iid: equal random parts; dirichlet: shares of each kind of prompt, drawn from a Dirichlet
    distribution."""
    alpha: Annotated[PositiveFloat, Paper("A.2.2")] = 0.3
    """Concentration of the Dirichlet distribution; smaller is more heterogeneous."""


@configuration
class GroupConfig:
    """A group of clients with other reward models, objectives or preferences, or of attackers."""

    clients: list[NonNegativeInt]
    """Indices of the clients, from 0."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models by objective, which replace the common ones (A.2.1)."""
    objectives: Annotated[list[str] | None, NOT_IN_PAPER] = None
    """Objectives that the clients train; null: all. FMOL's indicator matrix A."""
    preferences: Annotated[list[list[float]] | None, NOT_IN_PAPER] = None
    """Preferences between which the clients draw for a conditioned policy, such as [{helpful: 1},
    {helpful: 0.5, harmless: 0.5}] for clients that favour the first objective; null: any."""
    attack: Annotated[AttackConfig | None, NOT_IN_PAPER] = None
    """Attack by the clients; null: none, the clients are honest."""


@configuration(source=NOT_IN_PAPER)
class EvaluationConfig:
    """Calibration of rewards, and size of the evaluations."""

    num_calibration_prompts: PositiveInt = 256
    """Training prompts to calibrate rewards on, with replies of the base model."""
    calibration_seed: Seed | None = None
    """Seed of the calibration replies; null: the run's seed. Runs whose rewards will be compared
    need the same calibration seed."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Given calibrations by objective, such as {helpful: {method: sigmoid, mean: 0.4, scale: 1.1}},
    as in the first row of a run's metrics.jsonl; other objectives are calibrated in this run."""
    num_validation_prompts: NonNegativeInt = 64
    """Rows of validation prompts, evaluated after every round; 0: no validation."""
    num_test_prompts: Annotated[PositiveInt, Ge(2)] = 256
    """Rows of test prompts, evaluated before and after training."""
    num_samples: BoundedInt = 2
    """Replies sampled per row in evaluations."""
    num_shown_samples: NonNegativeInt = 12
    """Replies shown in the report, before and after training; 0: the run saves no texts."""
    metrics: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further scores to report, by name; they are not trained on."""
    preferences: list[list[float]] | None = None
    """Preferences at which a conditioned policy is evaluated, and folded when the run ends, in the
    order of the objectives or by name, such as `helpful=0.7,harmless=0.3 helpful=1`; null: all
    vectors of multiples of 1/4; []: none."""
    num_refined: Annotated[NonNegativeInt, Le(1_000)] = 0
    """Further preferences at which the final policy is evaluated and folded, each in the middle of
    the widest gap of the front, for even spacing in rewards (SURF, arXiv:2605.20619)."""
    front_every: Annotated[PositiveInt | None, Hint("null for never")] = 4
    """Rounds between evaluations of a conditioned policy at its preferences, on the validation
    prompts; null: never, so that adapters are compared at equal shares, and `firm pick` chooses on
    the test prompts."""

    def __post_init__(self) -> None:
        if self.num_validation_prompts == 1:
            raise ValueError(
                "num_validation_prompts must be 0 or at least 2, got 1: a standard error needs two."
            )


@configuration
class AlignmentConfig:
    """An alignment run."""

    policy: PolicyConfig
    """Language model to align."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models by objective."""
    pairs: Annotated[dict[str, RankedPairsConfig], NOT_IN_PAPER] = field(default_factory=dict)
    """Pairs of ranked replies by objective, for estimators that learn from pairs, such as dpo."""
    name: str = "firm_hh"
    """Prefix of the default run directory."""
    plugins: tuple[str, ...] = ()
    """Modules or Python files that register components, such as strategies. They are run before
    other keys are read, except by --help."""
    out: Path | None = None
    """Run directory; default: runs/NAME-TIME."""
    plan: bool = False
    """Print sizes, shares of prompts, bytes, memory and steps, and exit; reads no weights, and
    prompts only from this machine."""
    paper: bool = False
    """With `plan`, also compare the settings with the paper's."""
    resume: Resume = False
    """Continue from the last checkpoint: `firm resume RUN` uses the configuration saved in
    that folder, `--out RUN --resume` the given one; auto starts a new run if there is none yet.
    Python files named only in the folder need `--allow_code`, since the folder may be from someone
    else."""
    seed: Seed = 0
    """Seed of all random numbers."""
    num_threads: Annotated[NumWorkers | Literal["auto"] | None, Hint("null leaves it to torch")] = (
        "auto"
    )
    """CPU threads. auto: the number with which a short step, measured for about two seconds at the
    start, is fastest; the run's config.yaml records it, and a resumed run uses it again. null:
    torch's default, which auto keeps on accelerators and with several processes. Results for
    different numbers of threads differ by rounding; set a number for runs that must be equal."""
    processes_per_client: NumWorkers = 1
    """Processes that train a client together, each on a share of the batch. The launcher sets the
    total number of processes, and the clients are divided among them."""
    start: Annotated[dict[str, NonNegativeFloat], NOT_IN_PAPER] = field(default_factory=dict)
    """Adapter folders and their shares; training starts from their weighted mean; {}: a fresh
    adapter. With 0 rounds, the run evaluates this mean: Rewarded Soups (arXiv:2306.04488)."""
    start_preference: Annotated[list[float] | None, NOT_IN_PAPER] = None
    """Shares of the objectives, in order or by name, at which conditioned adapters of `start` are
    folded into ordinary ones; null: as saved in their folders, at equal shares."""
    start_merge: Annotated[Literal["mean", "ties", "dare_linear", "dare_ties"], NOT_IN_PAPER] = (
        "mean"
    )
    """How adapters of `start` are merged: by their weighted mean, by TIES (arXiv:2306.01708) or by
    DARE (arXiv:2311.03099), as in PEFT's `add_weighted_adapter`."""
    start_density: Annotated[float, Interval(gt=0, le=1), NOT_IN_PAPER] = 0.5
    """Share of an adapter's values that TIES and DARE keep."""
    engine: Annotated[str, OneOf(ENGINES)] = "local"
    """Registered engine that runs the clients of this process (`firm.federation.engines.engine`):
    "local" trains them sequentially, "stacked" in one batch."""
    max_rows: Annotated[PositiveInt | None, Hint("null takes 128")] = None
    """Maximum rows of a forward pass with engine stacked, to limit memory; null: 128."""
    client_timeout: Annotated[PositiveFloat | None, Hint("null sets no limit")] = None
    """Seconds that a client may take in a round. A slower client is left out of the round; with
    several processes per client, it ends the run. null: no limit."""
    rounds: Annotated[NumRounds, Paper("A.1", (16,))] = 16
    """Communication rounds T."""
    num_clients: Annotated[NumClients, Paper("A.1", (8,))] = 8
    """Number of clients C."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training, validation and test prompts."""
    partition: PromptPartitionConfig = field(default_factory=PromptPartitionConfig)
    """Partition of the training prompts among the clients."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Groups of clients with other reward models or fewer objectives, or of attackers, by name."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies."""
    estimator: EstimatorConfig = field(default_factory=PPOConfig)
    """Policy-gradient estimator and optimizer of a local step."""
    strategy: StrategyConfig = field(default_factory=FirmConfig)
    """Federated algorithm of a round."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Calibration and evaluation."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Protection against policies that run away from the base model, and rules that end the run."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints to keep."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Tracking with W&B, TensorBoard or MLflow."""
    hub: HubConfig = field(default_factory=HubConfig)
    """Upload to the Hugging Face hub."""

    def __post_init__(self) -> None:
        for key in ("start_preference", "groups", "strategy", "evaluation"):
            object.__setattr__(self, key, in_order(getattr(self, key), self.objectives, key))
        check_name(self.name, "name")
        check_out(self.resume, self.out)
        if self.paper and not self.plan:
            raise ValueError("paper needs plan, got paper without it; run `firm plan --paper`.")
        if self.rounds == 0 and not self.start:
            raise ValueError("rounds must be at least 1 without a start, got 0.")
        if self.start and sum(self.start.values()) == 0:
            raise ValueError(f"start must have a share above zero, got {self.start}.")
        if self.start_merge != "mean" and not self.start:
            raise ValueError(
                f"start_merge needs adapters in start, got {self.start_merge} without any."
            )
        _check_engine(self)
        _check_division(self)
        _check_rollout_engine(self)
        _check_participation(self)
        _check_ranks(self)
        if self.strategy.robust.min_updates > self.num_clients:
            raise ValueError(
                f"strategy.robust.rule {self.strategy.robust.rule} with num_attackers "
                f"{self.strategy.robust.num_attackers} needs num_clients of at least "
                f"{self.strategy.robust.min_updates}, got {self.num_clients}."
            )
        _check_objectives(self)
        self.policy.adapter_kind(len(self.objectives)).check(
            lora_mean=self.strategy.lora_mean,
            ranks=self.strategy.ranks,
            start=self.start,
            engine=self.engine,
        )
        _check_conditioning(self)
        _check_aggregation(self)
        for name in self.objectives:
            key = self.objectives_key
            what = f"{key}: the name of an objective"
            check_score_name(name, what, of_replies=key == "rewards")
        for name in self.evaluation.metrics:
            check_score_name(name, "evaluation.metrics: the name of a score")
        if shared := self.rewards.keys() & self.evaluation.metrics.keys():
            raise ValueError(
                f"evaluation.metrics and rewards both have {min(shared)!r}; rename one."
            )
        _check_conditions(self)
        for rule in self.guard.rules:
            rule.check([*self.objectives, *self.evaluation.metrics])
        self.strategy.check(list(self.objectives))
        _check_schedule(self)
        self.strategy.check_clients("AlignmentClient", CAPABILITIES)
        _check_rewards_are_read(self)
        _check_groups(self)
        _check_calibrations(self)

    @property
    def objectives_key(self) -> str:
        """Key whose entries are the objectives: rewards or pairs."""
        return "pairs" if self.estimator.learns_from == "pairs" else "rewards"

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the objectives, in the order of the Jacobian's rows."""
        return tuple(getattr(self, self.objectives_key))


def held_objectives(cfg: AlignmentConfig) -> dict[str, list[str]]:
    """Returns the objectives that each client trains, by its name."""
    held = {name: list(cfg.objectives) for name in client_names(cfg)}
    for group in cfg.groups.values():
        if group.objectives is not None:
            own = [name for name in cfg.objectives if name in group.objectives]
            held |= {f"client_{index}": own for index in group.clients}
    return held


def hold_out_seed(cfg: AlignmentConfig) -> int:
    """Returns the seed by which prompts and pairs are held out."""
    own = cfg.data.hold_out_seed
    return cfg.seed if own is None else own


def training_sources(cfg: AlignmentConfig) -> dict[str, PromptsConfig]:
    """Returns the sources of the training data, by key."""
    if cfg.estimator.learns_from == "pairs":
        return {f"pairs.{name}": own for name, own in cfg.pairs.items()}
    return {"data.train": cfg.data.train}


def every_source(cfg: AlignmentConfig) -> dict[str, PromptsConfig]:
    """Returns the sources of the training and held-out data that a run reads, by key."""
    if cfg.estimator.learns_from == "pairs":  # whose held-out splits have no other sources
        return training_sources(cfg)
    if cfg.data.hold_out:
        return training_sources(cfg)
    unused = set() if cfg.evaluation.num_validation_prompts else {"validation"}
    return {f"data.{use}": getattr(cfg.data, use) for use in DEFAULT_SPLITS if use not in unused}


SERVER_KEYS = (
    *("rollout.engine.urls", "rollout.engine.shared_folder", "rollout.engine.folder_on_servers"),
    *("rollout.engine.num_requests", "rollout.engine.timeout_s", "rollout.engine.num_retries"),
    "rollout.engine.max_mismatch",
)
"""Keys that say where rollout servers are and when they are wrong, and not what they sample."""


def client_names(cfg: AlignmentConfig) -> list[str]:
    """Returns the names of all clients, in the order in which their updates are summed."""
    return [f"client_{index}" for index in range(cfg.num_clients)]


def measured_preferences(cfg: AlignmentConfig) -> list[tuple[float, ...]]:
    """Returns the preferences to evaluate a conditioned policy at, scaled to sum 1; else []."""
    if cfg.policy.conditioning.kind == "none":
        return []
    asked = cfg.evaluation.preferences
    rows = grid(4, len(cfg.objectives)) if asked is None else asked
    return [tuple(share / sum(row) for share in row) for row in rows]


def solves_at_preferences(cfg: AlignmentConfig) -> bool:
    """Returns whether clients solve for weights at each preference of a minibatch (FIRM, Eq. 54).

    Otherwise rows are weighted by their preference.
    """
    if cfg.policy.conditioning.kind == "none":
        return False
    return cfg.strategy.solves_at_preferences(cfg.objectives)


def is_front_due(cfg: AlignmentConfig, round: int) -> bool:
    """Returns whether the validation front is evaluated after this round."""
    every = cfg.evaluation.front_every
    return every is not None and (round % every == 0 or round == cfg.rounds)


def _check_objectives(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` unless the objectives have the form that the estimator needs."""
    needed, estimator = cfg.objectives_key, cfg.estimator.name
    other = {"pairs": "rewards", "rewards": "pairs"}[needed]
    if not cfg.objectives:
        raise ValueError(
            f"{needed} must name at least one objective with estimator {estimator}, got none"
            + (f"; it does not learn from {other}." if getattr(cfg, other) else ".")
        )
    if getattr(cfg, other):
        raise ValueError(
            f"{other} must be left out with estimator {estimator}, which learns from {needed}, got "
            f"{', '.join(getattr(cfg, other))}; remove them, or choose another estimator."
        )
    if needed == "rewards":
        return
    for key, value in (
        ("evaluation.metrics", cfg.evaluation.metrics),
        ("evaluation.calibrations", cfg.evaluation.calibrations),
        *((f"groups.{name}.rewards", group.rewards) for name, group in cfg.groups.items()),
    ):
        if value:
            raise ValueError(
                f"{key} must be left out with estimator {estimator}, which samples no replies, got "
                f"{', '.join(value)}; score the finished run with `firm evaluate`."
            )
    rollout, default = cfg.rollout, RolloutConfig()
    _check_fixed(
        ("rollout.cache", rollout.cache, default.cache),
        ("rollout.compile", rollout.compile, default.compile),
        ("rollout.logprobs", rollout.logprobs, default.logprobs),
        ("rollout.engine.name", rollout.engine.name, default.engine.name),
        wanted="left out",
        why=f"estimator {estimator}, which samples no replies",
    )
    _check_fixed(
        ("data.hold_out", cfg.data.hold_out, 0.0),
        wanted="left out",
        why=f"estimator {estimator}, for which a tenth of the prompts of pairs is held out",
        end="; or set pairs.NAME.validation and pairs.NAME.test.",
    )
    for name, group in cfg.groups.items():
        if group.attack and group.attack.kind in ("reward_bias", "reward_scaling"):
            raise ValueError(
                f"groups.{name}.attack.kind must be label_flip or an attack on updates with "
                f"estimator {estimator}, whose pairs have no scores, got {group.attack.kind}."
            )
    if solves_at_preferences(cfg) and cfg.policy.conditioning.draw_per != "step":
        raise ValueError(
            "policy.conditioning.draw_per must be step with estimator dpo and weights that are "
            "solved at each preference, since a single pair has one objective, got "
            f"{cfg.policy.conditioning.draw_per}; or choose strategy fedavg."
        )


def _check_fixed(
    *settings: tuple[str, Any, Any], why: str, wanted: str = "", end: str = "."
) -> None:
    """Raises ``ValueError`` unless settings (key, value, needed value) have the needed values."""
    for key, value, needed in settings:
        if value != needed:
            shown = wanted or (str(needed).lower() if isinstance(needed, bool) else needed)
            raise ValueError(f"{key} must be {shown} with {why}, got {value}{end}")


def _check_participation(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if a strategy refers to clients that do not exist."""
    for key in ("quorum", "clients_per_round", "gram_clients"):
        count = getattr(cfg.strategy, key, None)  # gram_clients is FedCMOO's
        if count is not None and count > cfg.num_clients:
            raise ValueError(
                f"strategy.{key} must be at most num_clients ({cfg.num_clients}), got {count}; "
                "decrease it, or add clients."
            )
    cfg.strategy.check_federation(cfg.num_clients)
    cfg.strategy.check_names(client_names(cfg))


def _check_ranks(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on ranks above the adapter's rank."""
    for name, rank in cfg.strategy.ranks.items():
        if rank > cfg.policy.lora.r:
            raise ValueError(
                f"strategy.ranks must be at most policy.lora.r ({cfg.policy.lora.r}), got "
                f"{name}: {rank}."
            )


def _check_rewards_are_read(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if a strategy that reads rewards conflicts with other settings."""
    if not cfg.strategy.reads_rewards:
        return
    name = cfg.strategy.name
    if cfg.estimator.learns_from == "pairs":
        raise ValueError(
            f"strategy {name} needs rewards, which estimator {cfg.estimator.name} does not have; "
            "choose another estimator."
        )
    if cfg.policy.conditioning.kind != "none":
        raise ValueError(
            f"strategy {name} cannot train a policy with policy.conditioning.kind "
            f"{cfg.policy.conditioning.kind}, whose replies are weighted by their preferences; "
            "use strategy firm or fedavg, and choose a preference by `firm pick`, or by `firm pick "
            "--require` for minimum rewards."
        )


def _check_conditioning(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if conditioning conflicts with other settings."""
    if cfg.start_preference is not None and not cfg.start:
        raise ValueError(
            f"start_preference needs adapters in start, got {cfg.start_preference} without any."
        )
    preferences = cfg.evaluation.preferences
    if cfg.policy.conditioning.kind == "none":
        own = {
            f"groups.{name}.preferences": group.preferences for name, group in cfg.groups.items()
        }
        refined = cfg.evaluation.num_refined
        settings = {"evaluation.preferences": preferences, "evaluation.num_refined": refined, **own}
        for key, setting in settings.items():
            if setting:
                raise ValueError(
                    f"{key} needs policy.conditioning.kind preference, got {setting} for an "
                    "unconditioned policy."
                )
        return
    if (weights := getattr(cfg.strategy, "weights", None)) is not None:
        raise ValueError(
            "strategy.weights must be null with policy.conditioning.kind preference, where each "
            f"reply counts by its own preference, got {weights}."
        )
    # FedMGDA's server weighs clients
    if cfg.strategy.solves_on_server and not isinstance(cfg.strategy, FedMgdaConfig):
        raise ValueError(
            f"strategy {cfg.strategy.name} cannot train a policy with policy.conditioning.kind "
            "preference, whose replies count by their own preferences and not by weights that the "
            "server solves for; use strategy firm or fedavg."
        )
    if isinstance(cfg.strategy, FirmConfig) and not solves_at_preferences(cfg):
        raise ValueError(
            f"strategy.solver {cfg.strategy.solver} takes no preference, so that it cannot train a "
            "policy with policy.conditioning.kind preference, whose replies count by their own; "
            "use another solver, such as exact or torchjd/upgrad."
        )
    _check_preferences("evaluation.preferences", preferences or [], cfg)
    shown = [tuple(f"{share:.3g}" for share in row) for row in measured_preferences(cfg)]
    if len(set(shown)) < len(shown):
        raise ValueError(
            "evaluation.preferences must differ in the first three digits of their shares, which "
            f"name their metrics, got {preferences}."
        )
    if cfg.evaluation.num_refined and len(shown) < 2:
        raise ValueError(
            f"evaluation.num_refined must be 0 with {len(shown)} evaluation.preferences, got "
            f"{cfg.evaluation.num_refined}: refinement needs at least two preferences."
        )
    num_shown, num_objectives = len(shown) + cfg.evaluation.num_refined, len(cfg.objectives)
    is_large = num_shown * factorial(num_objectives - 1) > MAX_CELLS
    if cfg.evaluation.num_refined and 2 < num_objectives < num_shown and is_large:
        raise ValueError(
            f"evaluation.num_refined must be 0 with {len(shown)} evaluation.preferences of "
            f"{num_objectives} objectives, which have too many gaps to search, got "
            f"{cfg.evaluation.num_refined}; or set fewer preferences."
        )
    for group, config in cfg.groups.items():
        if config.preferences is not None:
            key = f"groups.{group}.preferences"
            if not config.preferences:
                raise ValueError(f"{key} must contain at least one preference, got none.")
            _check_preferences(key, config.preferences, cfg)
    if solves_at_preferences(cfg):
        _check_solves(cfg)
    check_estimator(cfg.estimator.name, compares=cfg.estimator.compares_replies)


def _check_aggregation(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if advantages of a weighted sum do not fit the weights of the run."""
    if not cfg.estimator.sums_rewards:
        return
    from firm.federation.training import LocalTraining

    aggregation = getattr(cfg.estimator, "aggregation", "")
    training = cfg.strategy.requests(cfg.objectives).get(LocalTraining, {})
    is_fixed = training.get("weighting") == "fixed" and "factors" not in training
    if cfg.policy.conditioning.kind != "none":
        raise ValueError(
            "estimator.aggregation must be by_objective with policy.conditioning.kind preference, "
            f"whose replies have weights of their own, got {aggregation}; estimator.scale "
            "group_std normalises each reward in its group."
        )
    if aggregation == "sum_then_normalize" and not is_fixed:
        raise ValueError(
            f"estimator.aggregation must not be {aggregation} with strategy {cfg.strategy.name}, "
            "whose weights are solved from each objective's gradient and cannot weigh rewards "
            "before; use strategy fedavg with strategy.weights, or normalize_then_sum."
        )
    solved = "solve_per batch" if training.get("solve_per") == "batch" else ""
    if solved or "factors" in training:
        raise ValueError(
            f"estimator.aggregation must not be {aggregation} with strategy {cfg.strategy.name} "
            f"{solved or 'whose server solves the weights'}: they are solved from each objective's "
            "gradient, and the step would weigh advantages of another scale; use by_objective, or "
            "strategy firm with solve_per minibatch."
        )
    if is_fixed and cfg.strategy.share_gram:
        raise ValueError(
            f"strategy.share_gram must be false with estimator.aggregation {aggregation}, since "
            "the gradients of one sum of rewards have no Gram matrix, got true."
        )


def _check_conditions(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if a reward's condition names no other reward of the same clients."""
    conditions = {f"rewards.{name}": (name, own) for name, own in cfg.rewards.items()}
    for group, clients in cfg.groups.items():
        own_rewards = clients.rewards.items()
        conditions |= {f"groups.{group}.rewards.{name}": (name, own) for name, own in own_rewards}
    held = held_objectives(cfg).values()
    for key, (name, own) in conditions.items():
        if not own.only_if:
            continue
        other = Comparison.parse(own.only_if, key).name
        others = [each for each in cfg.rewards if each != name]
        if other not in others:
            raise ValueError(
                f"{key}.only_if must compare one of {', '.join(others) or 'several rewards'}, got "
                f"{own.only_if!r}{did_you_mean(other, others)}"
            )
        if any(name in trained and other not in trained for trained in held):
            raise ValueError(
                f"{key}.only_if needs {other} wherever {name} is trained; add it to the objectives "
                "of each group that has the other."
            )
    for name, own in cfg.evaluation.metrics.items():
        if own.only_if:
            raise ValueError(
                f"evaluation.metrics.{name}.only_if must be left out: only rewards have conditions."
            )


def _check_schedule(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if a schedule of weights does not fit the objectives or the policy."""
    schedule = cfg.strategy.schedule
    if schedule is None:
        return
    if cfg.policy.conditioning.kind != "none":
        raise ValueError(
            "strategy.schedule must be left out with policy.conditioning.kind preference, since "
            "each prompt has a preference of its own."
        )
    for number in (
        [] if schedule.function else schedule.rounds or range(1, len(schedule.shares) + 1)
    ):
        cfg.strategy.at_round(number, cfg.objectives).check(list(cfg.objectives))


def _check_solves(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on options that conflict with solving at the drawn preferences."""
    defaults = {"preference": None, "preferences": {}, "solve_per": "minibatch"}
    _check_fixed(
        *(
            (f"strategy.{key}", getattr(cfg.strategy, key, default), default)
            for key, default in defaults.items()
        ),
        why="policy.conditioning.kind preference",
        end=": each minibatch is solved at the preferences drawn for its prompts.",
    )


def _check_preferences(key: str, preferences: list[list[float]], cfg: AlignmentConfig) -> None:
    for preference in preferences:
        if len(preference) != len(cfg.objectives):
            raise ValueError(
                f"{key} must have a share for each of {', '.join(cfg.objectives)}, got "
                f"{preference}."
            )
        if min(preference) < 0 or not 0 < sum(preference) < float("inf"):
            raise ValueError(
                f"{key} must be finite, not negative and not all zero, got {preference}."
            )


def _check_engine(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if the engine does not support the configuration."""
    if cfg.engine != "stacked":
        if cfg.max_rows is not None:
            raise ValueError(
                f"max_rows must be null with engine {cfg.engine}, got {cfg.max_rows}; use "
                "estimator.micro_batch_size to limit the rows of a pass."
            )
        return
    if cfg.processes_per_client > 1:
        raise ValueError(
            f"processes_per_client must be 1 with engine stacked, got {cfg.processes_per_client}."
        )
    if cfg.client_timeout is not None:
        raise ValueError(
            "client_timeout must be null with engine stacked, which cannot interrupt a single "
            f"client, got {cfg.client_timeout:g}; or choose engine local."
        )
    if cfg.rollout.cache == "static":
        raise ValueError(
            "rollout.cache must be dynamic with engine stacked, whose batches shrink as replies "
            "end, got static; or choose engine local."
        )
    if cfg.policy.gradient_checkpointing and cfg.policy.lora.dropout > 0:
        raise ValueError(
            "policy.lora.dropout must be 0 with engine stacked and policy.gradient_checkpointing, "
            "since the recomputed forward pass would draw other dropout masks, got "
            f"{cfg.policy.lora.dropout:g}; or choose engine local."
        )


COMPILED_TOKENS = 5_000
"""Tokens, of all replies of a batch, from which compiling their steps pays on a GPU: each saves
about 30 ms of Python, and the buckets of a run take some minutes to compile."""


def compiles_rollouts(cfg: AlignmentConfig, device_type: str) -> bool:
    """Returns whether a run compiles the steps of its rollouts; see `RolloutConfig.compile`."""
    if cfg.rollout.compile != "auto":
        return cfg.rollout.compile
    if cfg.estimator.learns_from == "pairs":  # which samples no replies
        return False
    if cfg.rollout.engine.samples_itself or cfg.policy.shard or cfg.policy.device_map:
        return False
    batches = 1 if cfg.engine == "stacked" else cfg.num_clients
    steps = cfg.rounds * cfg.strategy.num_local_steps * batches
    is_long = steps * cfg.rollout.max_new_tokens >= COMPILED_TOKENS
    return device_type == "cuda" and cfg.rollout.cache == "dynamic" and is_long


def _check_division(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if the policy cannot be divided among processes or devices."""
    size, estimator = cfg.processes_per_client, cfg.estimator
    if cfg.policy.device_map:
        _check_fixed(
            ("policy.device", cfg.policy.device, "auto"),
            ("policy.shard", cfg.policy.shard, False),
            ("engine", cfg.engine, "local"),
            ("rollout.cache", cfg.rollout.cache, "dynamic"),
            ("rollout.compile", cfg.rollout.compile is True, False),
            why="policy.device_map",
        )
    if not cfg.policy.shard:
        return
    if size == 1:
        raise ValueError("policy.shard needs processes_per_client of at least 2, got 1.")
    if estimator.minibatch_size % size:
        raise ValueError(
            f"estimator.minibatch_size must be a multiple of processes_per_client ({size}) with "
            f"policy.shard, so that all processes run equal passes, got {estimator.minibatch_size}."
        )
    if isinstance(estimator, PPOConfig) and estimator.critic == "network":
        raise ValueError(
            "estimator.critic must be heads with policy.shard, since a value network would not be "
            "sharded, got network."
        )
    _check_fixed(
        ("rollout.cache", cfg.rollout.cache, "dynamic"),
        ("rollout.compile", str(cfg.rollout.compile is True).lower(), "false"),
        why="policy.shard, whose layers cannot be compiled",
    )


def _check_rollout_engine(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if an engine with a copy of the policy does not fit the run."""
    engine = cfg.rollout.engine
    if not engine.samples_itself:
        return
    shared = cfg.processes_per_client if not engine.serves_processes else 1
    _check_fixed(
        ("processes_per_client", shared, 1),
        ("rollout.cache", cfg.rollout.cache, "dynamic"),
        ("policy.shard", str(cfg.policy.shard).lower(), "false"),
        ("rollout.compile", str(cfg.rollout.compile is True).lower(), "false"),
        why=f"rollout.engine.name {engine.name}",
    )
    if cfg.rollout.max_staleness and cfg.strategy.num_local_steps == 1:
        raise ValueError(
            "strategy.num_local_steps must be above 1 with rollout.max_staleness 1, which samples "
            "ahead within a round, got 1."
        )


def _check_groups(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if groups do not match the clients and objectives."""
    taken: dict[int, str] = {}
    for group, config in cfg.groups.items():
        key = f"groups.{check_name(group, 'groups: the name of a group')}"
        for client in config.clients:
            if not 0 <= client < cfg.num_clients:
                raise ValueError(
                    f"{key}.clients must be numbers from 0 to {cfg.num_clients - 1}, got {client}."
                )
            if client in taken:
                raise ValueError(
                    f"{key}.clients: client {client} is already in the group {taken[client]}."
                )
            taken[client] = group
        for name in [*config.rewards, *(config.objectives or [])]:
            if name not in cfg.objectives:
                raise ValueError(
                    f"{key} has the unknown objective {name!r}; choose from "
                    f"{', '.join(cfg.objectives)}{did_you_mean(name, cfg.objectives)}"
                )
        if not config.clients or config.objectives == []:
            raise ValueError(f"{key} needs at least one client and one objective, got none.")
        attacked = config.attack.objective if config.attack else None
        served = list(cfg.objectives) if config.objectives is None else config.objectives
        if attacked is not None and attacked not in served:
            raise ValueError(
                f"{key}.attack.objective must be an objective of the group ({', '.join(served)}), "
                f"got {attacked!r}{did_you_mean(attacked, served)}"
            )
    if len(taken) == cfg.num_clients:  # otherwise a client outside of groups trains all objectives
        theirs = [
            cfg.objectives if c.objectives is None else c.objectives for c in cfg.groups.values()
        ]
        for name in cfg.objectives:
            if not any(name in own for own in theirs):
                raise ValueError(
                    f"groups: no client trains the objective {name!r}; add it to the objectives of "
                    f"a group, or remove it from {cfg.objectives_key}."
                )


def _check_calibrations(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on fixed calibrations that no reward model can use."""
    configs = reward_configs(cfg)
    for key, calibration in cfg.evaluation.calibrations.items():
        if key not in configs:
            raise ValueError(
                f"evaluation.calibrations has the unknown objective {key!r}; choose from "
                f"{', '.join(configs)}{did_you_mean(key, configs)}"
            )
        if calibration.method != configs[key].normalization:
            raise ValueError(
                f"evaluation.calibrations.{key}.method must be the reward's normalization "
                f"{configs[key].normalization!r}, got {calibration.method!r}."
            )


def reward_configs(cfg: AlignmentConfig) -> dict[str, RewardModelConfig]:
    """Returns all reward models, by objective or, for a group's own, by group/objective."""
    return {
        **cfg.rewards,
        **{
            f"{group}/{name}": config
            for group, clients in cfg.groups.items()
            for name, config in clients.rewards.items()
        },
    }
