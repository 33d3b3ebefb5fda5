"""Data sets in memory: inputs, with one target and one loss per objective."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import default_collate

from firm.base.registry import Registry, did_you_mean
from firm.base.user_code import user_code
from firm.fmoo.config import CallableT

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps an objective's outputs and targets, one row per sample, to the mean loss, a scalar."""


def binary(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean binary cross-entropy over the samples and the attributes of a group."""
    return functional.binary_cross_entropy_with_logits(outputs, targets.reshape(outputs.shape))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean squared error."""
    return functional.mse_loss(outputs, targets.reshape(outputs.shape))


def l2(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean ℓ2 distance of the predicted probabilities from the one-hot labels.

    The "ℓ2-norm loss" of the FedCMOO paper's Table 2, which does not define the norm's argument.
    """
    labels = functional.one_hot(targets, outputs.shape[1])
    return torch.linalg.vector_norm(outputs.softmax(dim=1) - labels, dim=1).mean()


LOSSES: Registry[str, Loss] = Registry(
    "loss",
    {
        "cross_entropy": functional.cross_entropy,
        "binary": binary,
        "squared": squared,
        "l2": l2,
    },
)
"""Losses by name."""

CLASS_LOSSES = frozenset({"cross_entropy", "l2"})
"""Losses with class labels as targets."""
SHIPPED_LOSSES = frozenset(LOSSES)
"""Losses of this package; targets of user-defined losses are not checked."""


def check_finite(losses: torch.Tensor, objectives: Sequence[str]) -> None:
    """Raises ``ValueError`` with the first objective whose loss, of shape [M], is not finite."""
    for name, value in zip(objectives, losses.tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"the loss of {name!r} is {value}: look for NaN, infinity or very large values in "
                "the data, or lower lr."
            )


def loss(name: str) -> Callable[[CallableT], CallableT]:
    """Returns a decorator that registers a ``Loss`` under a name, for ``TaskData.losses``.

    The loss is called with the model's outputs for an objective and the targets [B] (or [B, A]) of
    the same samples. Targets may be int64 or float32, with NaN for unknown values.

    Raises:
        ValueError: When the name is taken.
    """
    return LOSSES.register(name)


@dataclass(frozen=True, eq=False)
class TaskData:
    """N samples with targets for M objectives, in memory.

    Raises:
        ValueError: When shapes or dtypes do not match, or labels are out of range; names the
            objective.
    """

    inputs: torch.Tensor
    """uint8 images [N, C, H, W], float32 features [N, ...], or int64 tokens [N, T]."""
    targets: torch.Tensor
    """int64 class labels, or float32 values and binary labels, shape [N, M]; [N, M, A] if each
    objective is a group of A binary attributes, or a user's loss takes A numbers per sample."""
    objectives: tuple[str, ...]
    """Names of the M objectives."""
    losses: tuple[str, ...]
    """Name of each objective's loss, a key of ``LOSSES``."""
    groups: torch.Tensor | None = None
    """Composite label of each sample, int64 [N], used by Dirichlet and shard partitions."""
    natural: torch.Tensor | None = None
    """Index of each sample's natural client (writer, role, domain), int64 [N]."""
    natural_names: tuple[str, ...] | None = None
    """Names of the natural clients, by index."""
    num_outputs: tuple[int, ...] | None = None
    """Width of each objective's head: number of classes or attributes; derived from the targets by
    default."""
    num_tokens: int | None = None
    """Vocabulary size of token inputs; derived from the inputs by default."""

    def __post_init__(self) -> None:
        _check_inputs(self.inputs)
        _check_targets(self)
        for name in {"mean", "se"}.intersection((*self.objectives, *(self.natural_names or ()))):
            raise ValueError(
                f"objectives and clients must not be called {name}, which is a figure of a score: "
                f"choose another name, such as {name}_."
            )
        if self.num_outputs is None:
            object.__setattr__(self, "num_outputs", _default_outputs(self))
        if self.num_tokens is None and self.inputs.dtype == torch.int64:
            size = int(self.inputs.max()) + 1 if self.inputs.numel() else 0
            object.__setattr__(self, "num_tokens", size)
        _check_ranges(self)
        for name in ("groups", "natural"):
            ids = getattr(self, name)
            if ids is not None and (ids.shape != (len(self),) or ids.dtype != torch.int64):
                raise ValueError(
                    f"{name} must be int64 of shape [{len(self)}], one number per sample, got "
                    f"{ids.dtype} of shape {list(ids.shape)}."
                )

    @classmethod
    def of_clients(cls, clients: Mapping[str, Any], losses: Mapping[str, str]) -> "TaskData":
        """Creates data with natural clients from one torch data set per client.

        Args:
            clients: Data sets by client: lists or ``torch.utils.data.Dataset`` with a length, of
                samples (input, targets), where targets are a tensor or tuple of M numbers. Floats
                are converted to float32.
            losses: Names of losses, keys of ``LOSSES``, by objective.

        Raises:
            ValueError: When there is no client, a client has no samples, or samples do not match;
                names the client.
        """
        if not clients:
            raise ValueError("clients must contain at least one data set, got none.")
        parts = {name: _stack_samples(name, samples) for name, samples in clients.items()}
        (first, (inputs, targets)), *others = parts.items()
        for name, part in others:
            for what, own, wanted in (
                ("inputs", part[0], inputs),
                ("targets", part[1], targets),
            ):
                if (own.shape[1:], own.dtype) != (wanted.shape[1:], wanted.dtype):
                    raise ValueError(
                        f"the {what} of client {name!r} must match those of {first!r}, "
                        f"{wanted.dtype} of shape {list(wanted.shape[1:])}, got {own.dtype} of "
                        f"shape {list(own.shape[1:])}."
                    )
        sizes = torch.tensor([len(own) for own, _ in parts.values()])
        return cls(
            torch.cat([own for own, _ in parts.values()]),
            torch.cat([own for _, own in parts.values()]),
            tuple(losses),
            tuple(losses.values()),
            natural=torch.arange(len(parts)).repeat_interleave(sizes),
            natural_names=tuple(parts),
        )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def has_accuracies(self) -> bool:
        """True if all objectives predict labels and therefore have accuracies."""
        return set(self.losses) <= SHIPPED_LOSSES - {"squared"}

    def indices_by_client(self) -> dict[str, torch.Tensor]:
        """Returns the indices of each natural client's samples; empty without client names."""
        if self.natural is None or self.natural_names is None:
            return {}
        return {
            name: (self.natural == number).nonzero().flatten()
            for number, name in enumerate(self.natural_names)
        }

    def take(self, indices: torch.Tensor) -> "TaskData":
        """Returns the samples at these indices."""
        rows = ("inputs", "targets", "groups", "natural")
        columns = {name: getattr(self, name) for name in rows}
        return replace(
            self,
            **{name: None if own is None else own[indices] for name, own in columns.items()},
        )

    def to(self, device: torch.device) -> "TaskData":
        """Returns the same samples on a device; what partitions go by stays on the CPU."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def with_losses(self, losses: Mapping[str, str]) -> "TaskData":
        """Returns the same samples with the losses of some objectives replaced."""
        for objective in losses:
            if objective not in self.objectives:
                raise ValueError(
                    f"there is no objective {objective!r} to set the loss of: choose one of "
                    f"{', '.join(self.objectives)}{did_you_mean(objective, self.objectives)}"
                )
        pairs = zip(self.objectives, self.losses, strict=True)
        return replace(self, losses=tuple(losses.get(name, loss) for name, loss in pairs))


@dataclass(frozen=True)
class Splits:
    """A data set split into train, validation and test samples."""

    train: TaskData
    """Partitioned among the clients."""
    validation: TaskData
    """Used to choose hyperparameters; empty if the paper has no validation split."""
    test: TaskData
    """Used for reports only."""

    def __post_init__(self) -> None:
        for name, part in (("validation", self.validation), ("test", self.test)):
            if part.objectives != self.train.objectives:
                raise ValueError(
                    f"{name} samples must have the objectives of the training samples, "
                    f"{', '.join(self.train.objectives)}, got {', '.join(part.objectives)}."
                )
            if part.losses != self.train.losses:
                raise ValueError(
                    f"{name} samples must have the losses of the training samples, "
                    f"{', '.join(self.train.losses)}, got {', '.join(part.losses)}."
                )
        parts = {name: getattr(self, name) for name in ("train", "validation", "test")}
        widths = zip(*(part.num_outputs for part in parts.values()), strict=True)
        num_outputs = tuple(map(max, widths))  # also of classes that only one part has
        num_tokens = max((p.num_tokens for p in parts.values() if p.num_tokens), default=None)
        for name, part in parts.items():
            if (part.num_outputs, part.num_tokens) != (num_outputs, num_tokens):
                own = replace(part, num_outputs=num_outputs, num_tokens=num_tokens)
                object.__setattr__(self, name, own)

    def to(self, device: torch.device) -> "Splits":
        """Returns the same parts on a device."""
        return Splits(*(part.to(device) for part in (self.train, self.validation, self.test)))


def _stack_samples(name: str, samples: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a client's inputs [N, ...] and targets [N, M] or [N, M, A], floats in float32."""
    needs = "which needs a length and samples (input, targets)"
    with user_code(f"the data set of client {name!r}, {needs},"):
        rows = [samples[index] for index in range(len(samples))]
        if rows:
            inputs, targets = default_collate(rows)
            if isinstance(targets, list | tuple):
                targets = torch.stack(targets, dim=1)
            targets = targets[:, None] if targets.ndim == 1 else targets
            return _as_float32(inputs), _as_float32(targets)
    raise ValueError(f"client {name!r} has no samples: remove it, or add samples.")


def _as_float32(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.is_floating_point() else values


def _check_inputs(inputs: torch.Tensor) -> None:
    num_dims = {torch.uint8: 4, torch.int64: 2}.get(inputs.dtype)
    if num_dims is None and inputs.dtype != torch.float32:
        raise ValueError(
            "inputs must be uint8 images, float32 features or int64 tokens, got "
            f"{inputs.dtype}: convert them."
        )
    if inputs.ndim < 2 or (num_dims is not None and inputs.ndim != num_dims):
        raise ValueError(
            "inputs must have the shape [N, C, H, W] as images, [N, T] as tokens or [N, F] as "
            f"features, got {inputs.dtype} of shape {list(inputs.shape)}."
        )
    if inputs.dtype == torch.float32 and not bool(inputs.isfinite().all()):
        raise ValueError("inputs must be finite, got NaN or infinities: drop or repair those rows.")


def _check_targets(data: TaskData) -> None:
    num_objectives = len(data.objectives)
    if num_objectives < 1 or len(set(data.objectives)) < num_objectives:
        raise ValueError(f"objectives must be distinct names, at least one, got {data.objectives}.")
    if len(data.losses) != num_objectives:
        raise ValueError(
            f"losses must have one name for each of the {num_objectives} objectives, "
            f"got {data.losses}."
        )
    for name in data.losses:
        LOSSES[name]
    shape = tuple(data.targets.shape)
    if shape[:2] != (len(data.inputs), num_objectives) or len(shape) > 3:
        raise ValueError(
            f"targets must have the shape [{len(data.inputs)}, {num_objectives}], one column per "
            f"objective, got {list(shape)}."
        )
    known = [loss for loss in data.losses if loss in SHIPPED_LOSSES]
    if len(shape) == 3 and not set(known) <= {"binary"}:
        raise ValueError(
            f"targets of shape [N, M, A] require the binary loss, got losses {data.losses}."
        )
    is_class = [loss in CLASS_LOSSES for loss in known]
    if any(is_class) and (not all(is_class) or data.targets.dtype != torch.int64):
        raise ValueError(
            "cross_entropy and l2 need int64 class labels for all objectives, got "
            f"{data.targets.dtype} for losses {data.losses}."
        )
    if known and not any(is_class) and data.targets.dtype != torch.float32:
        raise ValueError(
            f"binary and squared need float32 targets, got {data.targets.dtype}: convert them."
        )


def _default_outputs(data: TaskData) -> tuple[int, ...]:
    if data.targets.dtype == torch.float32 or data.targets.ndim == 3:
        return (1 if data.targets.ndim == 2 else data.targets.shape[2],) * len(data.objectives)
    if not len(data):
        raise ValueError("num_outputs cannot be derived from zero samples: set it explicitly.")
    return tuple((data.targets.amax(dim=0) + 1).tolist())


def _check_ranges(data: TaskData) -> None:
    assert data.num_outputs is not None
    if len(data.num_outputs) != len(data.objectives):
        raise ValueError(
            f"num_outputs must have one width for each of the {len(data.objectives)} objectives, "
            f"got {data.num_outputs}."
        )
    for j, (name, loss) in enumerate(zip(data.objectives, data.losses, strict=True)):
        column = data.targets[:, j]
        if loss in CLASS_LOSSES:
            _check_below(column, data.num_outputs[j], f"labels of {name!r}")
        elif loss == "binary" and not bool(((column == 0) | (column == 1)).all()):
            raise ValueError(f"labels of {name!r} must be 0 or 1, got others: repair the data.")
        elif loss == "squared" and not bool(column.isfinite().all()):
            raise ValueError(f"targets of {name!r} must be finite: drop or repair those rows.")
    if data.num_tokens is not None:
        _check_below(data.inputs, data.num_tokens, "tokens")


def _check_below(values: torch.Tensor, size: int, what: str) -> None:
    if values.numel():
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            raise ValueError(
                f"{what} must be in 0..{size - 1}, got {low if low < 0 else high}: repair the data."
            )
