"""The configuration of a study of classic algorithms."""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from firm.base.fields import (
    Hint,
    NumClients,
    NumRounds,
    NumWorkers,
    PositiveFloat,
    PositiveInt,
    Seed,
    configuration,
)
from firm.base.registry import OneOf, did_you_mean
from firm.federation.engine_registry import ENGINES
from firm.fmoo.config import (
    AlgorithmConfig,
    DatasetConfig,
    LossAttackConfig,
    ModelConfig,
    SamplePartitionConfig,
)
from firm.run.names import check_folder_name
from firm.run.resuming import Resume, check_out
from firm.run.tracking import TrackingConfig

FREE_KEYS = ("engine", "resume", "plugins", "out", "num_workers", "tracking")
"""Keys that may differ on resume, beside rounds; algorithms and seeds may be added."""


@configuration
class ClassicConfig:
    """A study of algorithms on one data set."""

    algorithms: dict[str, AlgorithmConfig]
    """Algorithms to compare, by name. Algorithms that differ in a single number and whose names are
    equal up to a comma are also drawn as a line over that number."""
    data: DatasetConfig = field(default_factory=DatasetConfig)
    """Data set and objectives."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model to train."""
    partition: SamplePartitionConfig = field(default_factory=SamplePartitionConfig)
    """Partition of the training samples among the clients."""
    attack: LossAttackConfig = field(default_factory=LossAttackConfig)
    """Attackers, which inflate their losses in every round; none by default."""
    num_clients: NumClients = 20
    """Number of clients C; a natural partition has one per user."""
    rounds: Annotated[NumRounds, Ge(1)] = 40
    """Rounds of every run."""
    target_loss: Annotated[PositiveFloat | None, Hint("null runs all rounds")] = None
    """End a run once all losses are at or below this value; the page then also reports the rounds
    until each loss reached it. null: run all rounds."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds of the runs of every algorithm; a seed determines partition, model, clients and
    batches."""
    evaluate_every: PositiveInt = 5
    """Rounds between evaluations; the last round is always evaluated."""
    split: Literal["train", "validation", "test"] = "test"
    """Samples to evaluate on; train: the clients' own; validation, test: held out from all
    clients."""
    improved_share: bool = False
    """Also log, in evaluated rounds, the share of participants whose losses the server's step did
    not raise; takes two passes over their samples."""
    progress_from: str | None = None
    """Algorithm at whose global models the local trainings of all algorithms are compared, by the
    reduction of the clients' losses, in evaluated rounds; null: no such comparison."""
    engine: Annotated[str, OneOf(ENGINES)] | None = None
    """Registered engine that runs the clients (`firm.federation.engines.engine`). null: `stacked`
    for models of dense layers, where it is faster since one pass computes the gradients of all
    clients, otherwise `local`; results differ by rounding."""
    device: str = "cpu"
    """Device of data and models: "cpu", which is fastest for small models and gives the same
    numbers on every machine; "auto" for the accelerator if there is one; or the name of a device,
    such as "cuda", "mps" or "cuda:1"."""
    num_workers: NumWorkers | None = None
    """Clients that engine `local` trains concurrently; null: the number of cores. Does not affect
    results."""
    num_threads: NumWorkers | None = 1
    """Threads of torch in each worker; null: torch's default. Equal results need equal numbers of
    threads."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Tracking with W&B, TensorBoard or MLflow, with a run for every algorithm and seed."""
    plugins: tuple[str, ...] = ()
    """Modules or Python files that register components, such as strategies. They are run before
    other keys are read, except by --help."""
    out: Path | None = None
    """Directory of the study; default: runs/fmoo-TIME."""
    resume: Resume = False
    """Continue a study and keep its finished runs: `firm resume FOLDER` uses the configuration
    saved in that folder, `--out FOLDER --resume` the given one; auto starts a new study if there is
    none yet. Python files named only in the folder need `--allow_code`, since the folder may be
    from someone else."""

    def __post_init__(self) -> None:
        check_out(self.resume, self.out)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more distinct numbers, got {self.seeds}.")
        if not self.algorithms:
            raise ValueError("algorithms must have at least one entry, got none.")
        if self.progress_from not in (None, *self.algorithms):
            raise ValueError(
                f"progress_from must be one of {', '.join(self.algorithms)}, got "
                f"{self.progress_from!r}{did_you_mean(self.progress_from, self.algorithms)}"
            )
        source = self.algorithms.get(self.progress_from or "")
        for name, algorithm in self.algorithms.items():
            if source and _clients(algorithm) != _clients(source):
                raise ValueError(
                    f"progress_from requires algorithms with the same clients, but {name} and "
                    f"{self.progress_from} differ in num_clients or is_centralised."
                )
            if source and getattr(algorithm.strategy, "secure", None):
                raise ValueError(
                    f"progress_from compares single clients, which secure sums hide, got "
                    f"strategy.secure {algorithm.strategy.secure} of {name}; leave one of them out."
                )
            check_folder_name(name, "algorithms: an algorithm's name")
            check_participation(self, name, algorithm, num_users=self.partition.num_users)
            attack_on(algorithm, self)  # raises on an invalid amount


def _clients(algorithm: AlgorithmConfig) -> tuple[int | None, bool]:
    return algorithm.num_clients, algorithm.is_centralised


def check_participation(
    cfg: ClassicConfig, name: str, algorithm: AlgorithmConfig, *, num_users: int | None
) -> None:
    """Raises ``ValueError`` if a strategy requires more clients than the study has.

    `num_users` is the number of clients of a natural partition; null: not known before loading.
    """
    count = algorithm.num_clients or cfg.num_clients
    if cfg.partition.kind == "natural":
        if algorithm.num_clients is not None:
            raise ValueError(
                f"algorithms.{name}.num_clients must be null with partition.kind natural, which "
                f"has a client per user, got {algorithm.num_clients}; set partition.num_users."
            )
        count = num_users
    if algorithm.is_centralised:
        count = 1
    for key in ("quorum", "clients_per_round", "gram_clients"):
        asked = getattr(algorithm.strategy, key, None)  # gram_clients is FedCMOO's
        if asked is not None and count is not None and asked > count:
            raise ValueError(
                f"algorithms.{name}.strategy.{key} must be at most the number of clients, "
                f"{count}, got {asked}; decrease it, or add clients."
            )
    if count is not None:
        try:
            algorithm.strategy.check_federation(count)
        except ValueError as error:
            raise ValueError(f"algorithms.{name}.strategy: {error}") from error


def attack_on(algorithm: AlgorithmConfig, cfg: ClassicConfig) -> LossAttackConfig:
    """Returns the attack that an algorithm faces."""
    if algorithm.attack_amount is None:
        return cfg.attack
    return replace(cfg.attack, amount=algorithm.attack_amount)
