"""The configuration of an alignment run, and checks that do not load a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from firm.alignment.adapters.conditioned import check_estimator
from firm.alignment.attacks import AttackConfig
from firm.alignment.client import AlignmentClient
from firm.alignment.estimators.estimator import EstimatorConfig
from firm.alignment.estimators.ppo import PPOConfig
from firm.alignment.generation import RolloutConfig
from firm.alignment.policy import PolicyConfig
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.rewards import Calibration
from firm.federation.engines import ENGINES
from firm.federation.outside import check_name
from firm.federation.strategies import StrategyConfig
from firm.federation.strategies.firm import FirmConfig
from firm.fields import (
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
from firm.fronts.preferences import grid
from firm.jobs.hub import HubConfig
from firm.registry import OneOf, did_you_mean
from firm.run.directory import CheckpointConfig
from firm.run.resuming import Resume, check_out
from firm.run.tracking import TrackingConfig
from reward_models.registry import RewardModelConfig


@dataclass(frozen=True)
class DataConfig:
    """Prompts: what clients train on, what the curves are measured on, and what is held out."""

    train: PromptsConfig = field(default_factory=PromptsConfig)
    """Divided among the clients."""
    validation: PromptsConfig = field(default_factory=lambda: PromptsConfig(split=None))
    """The model is measured on these after every round; split null: a file whole, of a dataset the
    first half of its split "test"."""
    test: PromptsConfig = field(default_factory=lambda: PromptsConfig(split=None))
    """The base model and the final one are compared on these, and nothing else is; split null: a
    file whole, of a dataset the second half of its split "test"."""


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
"""The keys that matter, which `--help` shows."""
DEFAULT_SPLITS = {"train": "train", "validation": "test[:50%]", "test": "test[50%:]"}
"""Splits of datasets where `split` is null, by what the prompts are for."""


GIVEN = "given to firm.align"
"""Source of prompts that a Python program gave as objects."""


@configuration
class PromptPartitionConfig:
    """How the training prompts are divided among the clients."""

    kind: Annotated[Literal["iid", "dirichlet"], Paper("A.1")] = "iid"
    """Equal random parts, or shares of each kind of prompt that a Dirichlet distribution
    draws."""
    alpha: Annotated[PositiveFloat, Paper("A.2.2")] = 0.3
    """Concentration of the Dirichlet distribution; small is uneven."""


@configuration
class GroupConfig:
    """Clients that differ from the others in their objectives' reward models, or attack."""

    clients: list[NonNegativeInt]
    """Their numbers, from 0."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models in place of those of the same objectives (A.2.1)."""
    objectives: Annotated[list[str] | None, NOT_IN_PAPER] = None
    """Objectives that they serve; null: all. FMOL's indicator matrix A."""
    preferences: Annotated[list[list[float]] | None, NOT_IN_PAPER] = None
    """Preferences between which they draw for a conditioned policy, such as [[1, 0], [0.5, 0.5]]
    for those who care for the first objective most; null: any."""
    attack: Annotated[AttackConfig | None, NOT_IN_PAPER] = None
    """What they do instead of their part; null: nothing, they are honest."""


@configuration(source=NOT_IN_PAPER)
class EvaluationConfig:
    """How much is measured."""

    num_calibration_prompts: PositiveInt = 256
    """Training prompts whose base-model replies fix the maps from scores to rewards."""
    calibration_seed: Seed | None = None
    """Seed of those replies; null takes the run's. Runs whose rewards are to be compared need the
    same maps, whatever their seeds."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Maps that were fixed beforehand, by objective, such as {helpful: {method: sigmoid, mean: 0.4,
    scale: 1.1}}, as the first row of a run's metrics.jsonl has them; the others are measured."""
    num_validation_prompts: NonNegativeInt = 64
    """Rows of prompts per round; 0 leaves the rounds unmeasured."""
    num_test_prompts: Annotated[PositiveInt, Ge(2)] = 256
    """Rows of held-out prompts at the start and the end."""
    num_samples: BoundedInt = 2
    """Replies per held-out row."""
    num_shown_samples: NonNegativeInt = 12
    """Replies that the report shows, before and after; 0 keeps all texts out of the run."""
    metrics: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further scores that are reported and never trained on."""
    preferences: list[list[float]] | None = None
    """Preferences at which a conditioned policy is measured, and folded when the run ends; null
    takes all vectors of multiples of 1/4, and none are measured with []."""
    num_refined: Annotated[NonNegativeInt, Le(1_000)] = 0
    """Further preferences at which the final front is measured and folded, one after the other,
    each in the middle of its widest gap: evenly spaced in rewards (SURF, arXiv:2605.20619)."""
    front_every: Annotated[PositiveInt | None, Hint("null waits for the end")] = 4
    """Rounds between measurements of a conditioned policy at its preferences on the validation
    prompts."""

    def __post_init__(self) -> None:
        if self.num_validation_prompts == 1:
            raise ValueError(
                "num_validation_prompts must be 0 or at least 2, got 1: a standard error needs two."
            )


@configuration
class AlignmentConfig:
    """One run."""

    policy: PolicyConfig
    """The model that is aligned."""
    rewards: dict[str, RewardModelConfig]
    """The objectives: one reward model each."""
    name: str = "firm_hh"
    """Opens the run directory's name."""
    plugins: tuple[str, ...] = ()
    """Modules, or Python files, that register strategies and the like. They are run before all
    other keys are read, but not by --help."""
    out: Path | None = None
    """Run directory; by default runs/NAME-TIME."""
    plan: bool = False
    """Print what would run (sizes, shares of prompts, bytes, memory, steps, what is not in the
    paper) and stop; no weights are read, and prompts only from this machine."""
    resume: Resume = False
    """Continue from the last checkpoint: `--resume RUN` the run in that folder, by its own
    configuration; `--out RUN --resume` by the one that is given; auto begins the run where there is
    none yet; Python files that only the folder names need `--allow_code`, as it may be somebody
    else's."""
    seed: Seed = 0
    """Everything random comes from it."""
    num_threads: Annotated[NumWorkers | None, Hint("null leaves it to torch")] = None
    """CPU threads; by default as many as torch takes."""
    processes_per_client: NumWorkers = 1
    """Processes that work as one on a client, each on its share of a batch. How many there are at
    all is the launcher's to say; the clients are divided among them."""
    start: Annotated[dict[str, NonNegativeFloat], NOT_IN_PAPER] = field(default_factory=dict)
    """Adapter folders that the training starts from, and the share of each in their mean; none: a
    fresh adapter. With no rounds that mean is what the run measures: Rewarded Soups
    (arXiv:2306.04488)."""
    start_preference: Annotated[list[float] | None, NOT_IN_PAPER] = None
    """Shares of the objectives at which the adapters of `start`, which are conditioned, are folded
    into ordinary ones; null takes them as their folders have them, at equal shares."""
    engine: Annotated[str, OneOf(ENGINES)] = "local"
    """Where clients run in this process, by a name that is registered
    (`firm.federation.engines.engine`): "local" takes them in turn, "stacked" all at once."""
    max_rows: Annotated[PositiveInt | None, Hint("null takes 128")] = None
    """Rows that engine stacked takes at once, whatever the number of clients; bounds memory. null
    takes 128."""
    client_timeout: Annotated[PositiveFloat | None, Hint("null sets no limit")] = None
    """Seconds that a client has for its part of a round; whoever needs more is left out of it, or
    with several processes per client ends the run. null: as long as it takes."""
    rounds: Annotated[NumRounds, Paper("A.1", (16,))] = 16
    """Communication rounds T."""
    num_clients: Annotated[NumClients, Paper("A.1", (8,))] = 8
    """Clients C."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    partition: PromptPartitionConfig = field(default_factory=PromptPartitionConfig)
    """Who has which."""
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Clients with other reward models or fewer objectives, or attackers, by a name of the
    group."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    estimator: EstimatorConfig = field(default_factory=PPOConfig)
    """A local step."""
    strategy: StrategyConfig = field(default_factory=FirmConfig)
    """A round."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept to resume from."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases."""
    hub: HubConfig = field(default_factory=HubConfig)
    """The Hugging Face hub."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        check_out(self.resume, self.out)
        if self.rounds == 0 and not self.start:
            raise ValueError("rounds must be at least 1, got 0; 0 rounds need a start.")
        if self.start and sum(self.start.values()) == 0:
            raise ValueError(f"start must have shares that are not all zero, got {self.start}.")
        _check_engine(self)
        _check_participation(self)
        _check_ranks(self)
        if self.strategy.robust.min_updates > self.num_clients:
            raise ValueError(
                f"strategy.robust.rule {self.strategy.robust.rule} with num_attackers "
                f"{self.strategy.robust.num_attackers} needs num_clients of at least "
                f"{self.strategy.robust.min_updates}, got {self.num_clients}."
            )
        if not self.rewards:
            raise ValueError("rewards must name at least one objective, got none.")
        self.policy.adapter_kind(len(self.rewards)).check(
            lora_mean=self.strategy.lora_mean,
            ranks=self.strategy.ranks,
            start=self.start,
            engine=self.engine,
        )
        _check_conditioning(self)
        for name in self.rewards:
            check_name(name, "rewards: the name of an objective")
        for name in self.evaluation.metrics:
            check_name(name, "evaluation.metrics: the name of a score")
        if shared := self.rewards.keys() & self.evaluation.metrics.keys():
            raise ValueError(
                f"evaluation.metrics has {min(shared)!r}, which is an objective too; rename one."
            )
        self.strategy.check(list(self.rewards))
        self.strategy.check_clients(AlignmentClient)
        _check_groups(self)
        _check_calibrations(self)


def client_names(cfg: AlignmentConfig) -> list[str]:
    """Returns the names of all clients, in the order in which their updates are summed."""
    return [f"client_{index}" for index in range(cfg.num_clients)]


def measured_preferences(cfg: AlignmentConfig) -> list[tuple[float, ...]]:
    """Returns the preferences to evaluate a conditioned policy at, scaled to sum 1; else []."""
    if cfg.policy.conditioning.kind == "none":
        return []
    asked = cfg.evaluation.preferences
    rows = grid(4, len(cfg.rewards)) if asked is None else asked
    return [tuple(share / sum(row) for share in row) for row in rows]


def solves_at_preferences(cfg: AlignmentConfig) -> bool:
    """Returns whether clients solve for weights at each preference of a minibatch (FIRM, Eq. 54).

    Otherwise rows are weighted by their preference.
    """
    if cfg.policy.conditioning.kind == "none":
        return False
    requests = cfg.strategy.requests(tuple(cfg.rewards)).values()
    return any("preference" in fields.get("weighting_options", {}) for fields in requests)


def is_front_due(cfg: AlignmentConfig, round: int) -> bool:
    """Returns whether the validation front is evaluated after this round."""
    every = cfg.evaluation.front_every
    return every is not None and (round % every == 0 or round == cfg.rounds)


def _check_participation(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if a strategy refers to clients that do not exist."""
    for key in ("quorum", "clients_per_round"):
        count = getattr(cfg.strategy, key)
        if count is not None and count > cfg.num_clients:
            raise ValueError(
                f"strategy.{key} must be at most num_clients ({cfg.num_clients}), got {count}; "
                "lower it, or add clients."
            )
    names = client_names(cfg)
    preferences = getattr(cfg.strategy, "preferences", {})  # only some strategies have them
    for key, own in (("always", cfg.strategy.always), ("preferences", preferences)):
        for name in own:
            if name not in names:
                raise ValueError(
                    f"strategy.{key} must name clients, {names[0]} to {names[-1]}, got {name!r}"
                    f"{did_you_mean(name, names)}"
                )


def _check_ranks(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on ranks for unknown clients, or above the adapter's rank."""
    names, whole = client_names(cfg), cfg.policy.lora.r
    for name, rank in cfg.strategy.ranks.items():
        if name not in names or rank > whole:
            raise ValueError(
                f"strategy.ranks must name clients, {names[0]} to {names[-1]}, with ranks of at "
                f"most policy.lora.r ({whole}), got {name}: {rank}."
            )


def _check_conditioning(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` if the run cannot train a conditioned policy, or on a wrong fold."""
    if cfg.start_preference is not None and not cfg.start:
        raise ValueError(
            f"start_preference needs a start to be folded, got {cfg.start_preference} without one."
        )
    preferences = cfg.evaluation.preferences
    if cfg.policy.conditioning.kind == "none":
        own = {
            f"groups.{name}.preferences": group.preferences for name, group in cfg.groups.items()
        }
        refined = cfg.evaluation.num_refined
        requests = {"evaluation.preferences": preferences, "evaluation.num_refined": refined, **own}
        for key, asked in requests.items():
            if asked:
                raise ValueError(
                    f"{key} needs policy.conditioning.kind preference, got {asked} for a policy of "
                    "one trade-off."
                )
        return
    _check_preferences("evaluation.preferences", preferences or [], cfg)
    shown = [tuple(f"{share:.3g}" for share in row) for row in measured_preferences(cfg)]
    if len(set(shown)) < len(shown):
        raise ValueError(
            "evaluation.preferences must differ in three digits of their shares, which name their "
            f"figures, got {preferences}."
        )
    if cfg.evaluation.num_refined and len(shown) < 2:
        raise ValueError(
            f"evaluation.num_refined must be 0 with {len(shown)} evaluation.preferences, got "
            f"{cfg.evaluation.num_refined}: a gap is between two."
        )
    for group, config in cfg.groups.items():
        if config.preferences is not None:
            key = f"groups.{group}.preferences"
            if not config.preferences:
                raise ValueError(f"{key} must hold a preference to draw, got none.")
            _check_preferences(key, config.preferences, cfg)
    if solves_at_preferences(cfg):
        _check_solves(cfg)
    check_estimator(cfg.estimator.name, replies_per_prompt=cfg.estimator.replies_per_prompt)


def _check_solves(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on options that conflict with solving at the drawn preferences."""
    for key, left in {"preference": None, "preferences": {}, "solve_per": "minibatch"}.items():
        given = getattr(cfg.strategy, key, left)
        if given != left:
            raise ValueError(
                f"strategy.{key} must be {left} with policy.conditioning.kind preference, got "
                f"{given}: each minibatch is solved at the preferences that its prompts were given."
            )


def _check_preferences(key: str, preferences: list[list[float]], cfg: AlignmentConfig) -> None:
    for preference in preferences:
        if len(preference) != len(cfg.rewards):
            raise ValueError(
                f"{key} must have a share for each of {', '.join(cfg.rewards)}, got {preference}."
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
                f"max_rows must be left out with engine {cfg.engine}, got {cfg.max_rows}: "
                "estimator.micro_batch_size bounds its passes."
            )
        return
    if cfg.processes_per_client > 1:
        raise ValueError(
            f"processes_per_client must be 1 with engine stacked, got {cfg.processes_per_client}."
        )
    if cfg.client_timeout is not None:
        raise ValueError(
            "client_timeout must be left out with engine stacked, which cannot interrupt a single "
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
            "whose second forward pass would draw other masks, got "
            f"{cfg.policy.lora.dropout:g}; or choose engine local."
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
                    f"{key}.clients: client {client} is in the group {taken[client]} already."
                )
            taken[client] = group
        for name in [*config.rewards, *(config.objectives or [])]:
            if name not in cfg.rewards:
                raise ValueError(
                    f"{key} names the objective {name!r}; there are "
                    f"{', '.join(cfg.rewards)}{did_you_mean(name, cfg.rewards)}"
                )
        if not config.clients or config.objectives == []:
            raise ValueError(f"{key} needs clients, and an objective for them, got none.")
        attacked = config.attack.objective if config.attack else None
        served = list(cfg.rewards) if config.objectives is None else config.objectives
        if attacked is not None and attacked not in served:
            raise ValueError(
                f"{key}.attack.objective must be one that they serve ({', '.join(served)}), got "
                f"{attacked!r}{did_you_mean(attacked, served)}"
            )
    if len(taken) == cfg.num_clients:  # no client outside of groups serves all objectives
        theirs = [
            cfg.rewards if c.objectives is None else c.objectives for c in cfg.groups.values()
        ]
        for name in cfg.rewards:
            if not any(name in own for own in theirs):
                raise ValueError(
                    f"groups: no client serves the objective {name!r}; name it in the objectives "
                    "of a group, or remove it from rewards."
                )


def _check_calibrations(cfg: AlignmentConfig) -> None:
    """Raises ``ValueError`` on fixed calibrations that no reward model can use."""
    configs = reward_configs(cfg)
    for key, calibration in cfg.evaluation.calibrations.items():
        if key not in configs:
            raise ValueError(
                f"evaluation.calibrations has {key!r}; there are {', '.join(configs)}"
                f"{did_you_mean(key, configs)}"
            )
        if calibration.method != configs[key].normalization:
            raise ValueError(
                f"evaluation.calibrations.{key}.method must be the reward's normalization "
                f"{configs[key].normalization!r}, got {calibration.method!r}."
            )


def reward_configs(cfg: AlignmentConfig) -> dict[str, RewardModelConfig]:
    """Returns all reward models by objective; those of groups by group/objective."""
    return {
        **cfg.rewards,
        **{
            f"{group}/{name}": config
            for group, clients in cfg.groups.items()
            for name, config in clients.rewards.items()
        },
    }
