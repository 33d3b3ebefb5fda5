"""Configurations of classic runs, and the registries of their data sets and models."""

from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Interval, Le, MinLen

from firm.base.fields import (
    LARGEST,
    BoundedInt,
    FiniteFloat,
    Hint,
    NonNegativeFloat,
    NumClients,
    NumRounds,
    PositiveFloat,
    PositiveInt,
    Seed,
    configuration,
)
from firm.base.registry import OneOf, Registry
from firm.federation.strategies import StrategyConfig

CallableT = TypeVar("CallableT", bound=Callable[..., Any])

DATASETS: Registry[str, Callable[["DatasetConfig"], Any]] = Registry(
    "data set",
    dict.fromkeys(
        [
            *("two_digits", "multi_mnist", "mnist_fmnist", "cifar10_mnist"),
            *("mnist", "fashion_mnist", "cifar10", "femnist", "celeba", "celeba5"),
            *("adult", "river_flow", "qm9", "shakespeare"),
        ],
        "firm.fmoo.data",
    ),
)
"""Loaders by the name that a configuration gives; `firm.fmoo.data` has the shipped ones."""
MODELS: Registry[str, Callable[["ModelConfig", Any], Any]] = Registry(
    "model",
    dict.fromkeys(
        [
            "lenet",
            "cifar_mnist_cnn",
            "resnet18",
            "cifar_cnn",
            "fashion_cnn",
            "femnist_cnn",
            "molecule_net",
            "character_lstm",
            "linear",
            "mlp",
        ],
        "firm.fmoo.models",
    ),
)
"""Models by the name that a configuration gives; `firm.fmoo.models` has the shipped ones."""


@configuration
class DatasetConfig:
    """Data set, and how it is split into train, validation and test samples."""

    name: Annotated[str, OneOf(DATASETS)] = "two_digits"
    """Data set. A file under `plugins` may register others with `firm.fmoo.dataset`."""
    path: str | None = None
    """A .npz file or a folder in the layout described in `firm.fmoo.loaders`, a Hugging Face
    dataset's folder, or its name on the hub; by default the data set's copy on the hub, if there is
    one."""
    second_path: str | None = None
    """Path of the second images of mnist_fmnist (Fashion-MNIST) and cifar10_mnist (MNIST)."""
    seed: Seed = 0
    """Seed of the splits and image pairs; separate from the run's seed, so that runs with different
    seeds use the same data."""
    validation_fraction: Annotated[float | None, Interval(ge=0, le=0.5)] = None
    """Share of the training data used for validation if the source has no validation split; 0
    leaves the split empty. Defaults follow the papers: 0.2 (FedCMOO, Appendix D.3), 0.1 of each
    natural client's data (FedMGDA+, Section 6.1), and 0 for adult, whose PhD client has only 413
    rows."""
    pairs_per_image: BoundedInt | None = None
    """Pairs per first image, for data sets whose samples combine two images; by default 1, and 4
    for two_digits."""
    losses: dict[str, str] = field(default_factory=dict)
    """Overrides the loss of objectives, such as {"left": "l2"}, with keys of
    `firm.fmoo.data.LOSSES`."""
    image_size: Annotated[int, Interval(ge=1, le=4_096)] = 32
    """Side length in pixels to which CelebA's images are resized. Not in the paper; images in a
    .npz file are not resized."""
    window_stride: PositiveInt = 10
    """Characters between the starts of consecutive samples of shakespeare. Not in the paper; 1 uses
    all samples, at 640 bytes of memory per character."""


@configuration
class ModelConfig:
    """Model that clients train."""

    name: Annotated[str, OneOf(MODELS)] = "lenet"
    """Model. A file under `plugins` may register others with `firm.fmoo.model`."""
    dropout: Annotated[float | None, Interval(ge=0, lt=1)] = None
    """Probability of all dropout layers; by default 0.5 as in the papers, and 0.25 after
    femnist_cnn's pooling. resnet18, molecule_net, character_lstm and linear have no dropout; mlp
    has 0 by default."""
    hidden: Annotated[list[BoundedInt], MinLen(1)] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of mlp. Not in the papers."""


@configuration
class LocalConfig:
    """Local training of a client."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """Local optimizer; its state is reset every round."""
    lr: PositiveFloat = 0.1
    """Local learning rate η_c."""
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Momentum of SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty of the optimizer."""
    batch_size: PositiveInt | None = 128
    """Samples per local step; null uses the whole shard, for exact local gradients."""
    rotation: Annotated[float, Interval(ge=0, le=180)] = 0.0
    """Maximum angle of random rotations of training images, in degrees."""

    def __post_init__(self) -> None:
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum is supported with sgd only, got {self.momentum} with adam.")


@configuration
class LossAttackConfig:
    """Attack on the clients' losses; off by default."""

    kind: Literal["none", "bias", "scaling"] = "none"
    """bias adds ``amount`` to every loss of an attacker and leaves its gradients unchanged. scaling
    multiplies losses and gradients by ``amount``. none disables the attack; the other keys are then
    ignored."""
    clients: tuple[str, ...] = ()
    """Names of the attackers, who take part in every round, as in the paper."""
    amount: FiniteFloat = 0.0
    """The added constant (bias) or the positive factor (scaling)."""

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if not self.clients:
            raise ValueError(f"A {self.kind} attack needs attackers: list them in clients.")
        if len(set(self.clients)) < len(self.clients):
            raise ValueError(f"clients must name each attacker once, got {list(self.clients)}.")
        if self.kind == "scaling" and self.amount <= 0:
            raise ValueError(f"amount must be positive in a scaling attack, got {self.amount}.")

    def has_attacker(self, client: str) -> bool:
        """Returns whether the client attacks."""
        return self.kind != "none" and client in self.clients


@configuration
class SamplePartitionConfig:
    """Partition of the training samples among the clients."""

    kind: Literal["iid", "dirichlet", "balanced", "shards", "natural"] = "balanced"
    """iid: equal random parts; dirichlet: shares of each composite label, drawn from a Dirichlet
    distribution; balanced: the same with equal sizes; shards: shards of samples sorted by label;
    natural: the data set's own users."""
    alpha: PositiveFloat = 0.3
    """Concentration of the Dirichlet distribution; smaller is more heterogeneous."""
    shards_per_client: BoundedInt = 2
    """Shards per client, for kind shards."""
    num_users: PositiveInt | None = None
    """Number of users drawn at random as clients, for kind natural; null: all users. Losses and
    accuracies are over the held-out samples of all users, ``users`` over those of the clients."""
    min_samples: PositiveInt = 1
    """Minimum samples of a client."""
    max_samples: Annotated[int, Le(LARGEST)] | None = None
    """Maximum samples of a client; larger shards are subsampled at random. null: no limit."""
    objectives_per_client: Annotated[PositiveInt | None, Hint("null gives all")] = None
    """Objectives that each client trains (FMGDA's matrix A), assigned round-robin, so that all
    objectives have equally many clients; null: every client trains all objectives."""
    test_fraction: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Share of a client's samples held out to measure its user's accuracy (0.1 in FedMGDA+,
    Section 6.1). 0: none; natural users may have separate test samples."""

    def __post_init__(self) -> None:
        if self.max_samples is not None and self.max_samples < max(1, self.min_samples):
            raise ValueError(
                f"max_samples must be at least min_samples ({self.min_samples}), got "
                f"{self.max_samples}; null sets no limit."
            )


@configuration
class AlgorithmConfig:
    """An algorithm with its learning rates."""

    strategy: StrategyConfig
    """Federated algorithm."""
    local: LocalConfig = field(default_factory=LocalConfig)
    """Local training of the clients."""
    num_clients: NumClients | None = None
    """Number of clients for this algorithm; null: the study's."""
    is_centralised: bool = False
    """Give all samples to a single client; with one local step, FSMGDA is then MGD or SMGD."""

    rounds: Annotated[NumRounds, Ge(1)] | None = None
    """Rounds of this algorithm; null: the study's."""
    attack_amount: float | None = None
    """Amount of the attack on this algorithm, since algorithms use losses on different scales;
    null: the study's."""
