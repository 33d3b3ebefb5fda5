"""The configuration of a study of classic algorithms."""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval, Le

from firm.federation.engines import ENGINES
from firm.federation.strategies import StrategyConfig
from firm.fields import (
    LARGEST,
    BoundedInt,
    Hint,
    NumClients,
    NumRounds,
    NumWorkers,
    PositiveFloat,
    PositiveInt,
    Seed,
    configuration,
)
from firm.fmoo.attacks import LossAttackConfig
from firm.fmoo.data import DatasetConfig
from firm.fmoo.models import ModelConfig
from firm.fmoo.workspace import LocalConfig
from firm.registry import OneOf, did_you_mean
from firm.run.names import check_folder_name
from firm.run.resuming import Resume, check_out
from firm.run.tracking import TrackingConfig

FREE_KEYS = ("engine", "resume", "plugins", "out", "algorithms", "seeds", "num_workers", "tracking")
"""What may differ when a study is taken up again: algorithms and seeds may join."""


@configuration
class SamplePartitionConfig:
    """How the training samples are divided among the clients."""

    kind: Literal["iid", "dirichlet", "balanced", "shards", "natural"] = "balanced"
    """Equal random parts; shares of each composite label that a Dirichlet distribution draws; the
    same with equal sizes; shards of samples sorted by label; or the data's own users."""
    alpha: PositiveFloat = 0.3
    """Concentration of the Dirichlet distribution; small is uneven."""
    shards_per_client: BoundedInt = 2
    """Shards that a client is given."""
    num_users: PositiveInt | None = None
    """Natural users that are drawn at random to be the clients; null takes all."""
    min_samples: PositiveInt = 1
    """Fewest samples of a client."""
    max_samples: Annotated[int, Le(LARGEST)] | None = None
    """Most samples of a client, a random choice of what it would have; null leaves it all."""
    objectives_per_client: Annotated[PositiveInt | None, Hint("null gives all")] = None
    """Objectives that a client has losses for (FMGDA's matrix A), dealt out in turn so that each
    has as many clients as any other; null gives every client all."""
    test_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Share of its samples that every client keeps from training, to measure its user's accuracy
    on (FedMGDA+, Section 6.1, keeps 0.1). 0 keeps none; natural users may have test samples."""

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < max(1, self.min_samples):
            raise ValueError(
                f"max_samples must be at least min_samples ({self.min_samples}), got "
                f"{self.max_samples}; null leaves all."
            )


@configuration
class AlgorithmConfig:
    """An algorithm with the learning rates that suit it."""

    strategy: StrategyConfig
    """The server's side."""
    local: LocalConfig = field(default_factory=LocalConfig)
    """The clients' side."""
    num_clients: NumClients | None = None
    """C of this algorithm alone; by default the study's."""
    is_centralised: bool = False
    """Whether one client holds the samples of all: with one local step, FSMGDA is then MGD or
    SMGD."""

    rounds: Annotated[NumRounds, Ge(1)] | None = None
    """Rounds of this algorithm alone; by default the study's."""
    attack_amount: float | None = None
    """Amount of the attack on this algorithm alone, as algorithms read losses on scales of their
    own; by default the study's."""


@configuration
class ClassicConfig:
    """A study of algorithms on one data set."""

    algorithms: dict[str, AlgorithmConfig]
    """What is compared, by name. Algorithms whose names are the same up to a comma, and that differ
    in one number alone, are also drawn as a line over that number."""
    data: DatasetConfig = field(default_factory=DatasetConfig)
    """What is learned."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """What learns it."""
    partition: SamplePartitionConfig = field(default_factory=SamplePartitionConfig)
    """Who holds what."""
    attack: LossAttackConfig = field(default_factory=LossAttackConfig)
    """Clients that inflate their losses, in every round; nobody by default."""
    num_clients: NumClients = 20
    """C; a natural partition has as many as there are users."""
    rounds: Annotated[NumRounds, Ge(1)] = 40
    """Rounds of every run."""
    target_loss: Annotated[PositiveFloat | None, Hint("null runs all rounds")] = None
    """Loss at which a run ends, once all objectives have come down to it; the page then tells the
    rounds that each took. null runs all rounds."""
    seeds: tuple[Seed, ...] = (0,)
    """One run of every algorithm for each; a seed draws partition, model, clients and batches."""
    evaluate_every: PositiveInt = 5
    """Rounds between evaluations; the last round always is one."""
    split: Literal["train", "validation", "test"] = "test"
    """Samples that are evaluated on: those of all clients, or others that no client has."""
    improved_share: bool = False
    """Whether every evaluated round also tells the share of its clients that it made no worse, by
    their losses before and after the server's step: two passes over their samples."""
    progress_from: str | None = None
    """An algorithm from whose global models, wherever they are evaluated, the local trainings of
    all algorithms are compared: how far each lowers its clients' losses; null compares none."""
    engine: Annotated[str, OneOf(ENGINES)] | None = None
    """Where clients run, by a name that is registered (`firm.federation.engines.engine`). null
    takes `stacked` where that is faster, for models of dense layers, whose gradients are then those
    of all clients in one pass, and `local` elsewhere; they differ by rounding."""
    device: str = "cpu"
    """Where data and models are and clients train: "cpu", which is fastest for small models and
    gives the same numbers on every machine; "auto" for the accelerator if there is one; or a
    device by its name, such as "cuda", "mps" or "cuda:1"."""
    num_workers: NumWorkers | None = None
    """Clients that are trained at a time by the engine `local`; by default as many as there are
    cores. Results do not depend on it."""
    num_threads: NumWorkers | None = 1
    """Threads of torch in each worker; null leaves them alone, but equal numbers need an equal
    count."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Weights & Biases, a run of its own for every algorithm and seed."""
    plugins: tuple[str, ...] = ()
    """Modules, or Python files, that register strategies and the like. They are run before all
    other keys are read, but not by --help."""
    out: Path | None = None
    """The study's directory; by default runs/fmoo-TIME."""
    resume: Resume = False
    """Continue a study, whose finished runs are kept: `--resume FOLDER` by its own configuration;
    `--out FOLDER --resume` by the one that is given; auto begins it where there is none yet; Python
    files that only the folder names need `--allow_code`, as it may be somebody else's."""

    def __post_init__(self) -> None:
        check_out(self.resume, self.out)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more different numbers, got {self.seeds}.")
        if not self.algorithms:
            raise ValueError("algorithms must name at least one, got none.")
        if self.progress_from not in (None, *self.algorithms):
            raise ValueError(
                f"progress_from must be one of {', '.join(self.algorithms)}, got "
                f"{self.progress_from!r}{did_you_mean(self.progress_from, self.algorithms)}"
            )
        for name, algorithm in self.algorithms.items():
            check_folder_name(name, "algorithms: an algorithm's name")
            _check_participation(self, name, algorithm)
            attack_on(algorithm, self)  # raises on an invalid amount


def _check_participation(cfg: ClassicConfig, name: str, algorithm: AlgorithmConfig) -> None:
    """Raises ``ValueError`` if a strategy requires more clients than the study has."""
    count = algorithm.num_clients or cfg.num_clients
    if cfg.partition.kind == "natural":  # without a number all users: known once data are loaded
        count = cfg.partition.num_users
    if algorithm.is_centralised:
        count = 1
    for key in ("quorum", "clients_per_round"):
        asked = getattr(algorithm.strategy, key)
        if asked is not None and count is not None and asked > count:
            raise ValueError(
                f"algorithms.{name}.strategy.{key} must be at most the number of clients, "
                f"{count}, got {asked}; lower it, or add clients."
            )


def attack_on(algorithm: AlgorithmConfig, cfg: ClassicConfig) -> LossAttackConfig:
    """Returns the attack that an algorithm faces."""
    if algorithm.attack_amount is None:
        return cfg.attack
    return replace(cfg.attack, amount=algorithm.attack_amount)
