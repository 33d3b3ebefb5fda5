"""The model shared by the clients of a process, with input preparation and evaluation."""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.func import functional_call

from firm.base.quantities import Quantity, register
from firm.base.schema import ByObjective, Finite, Share
from firm.base.user_code import user_code
from firm.federation.client import Adapter
from firm.federation.lockstep import outcome_of, together
from firm.fmoo.config import LocalConfig
from firm.fmoo.modules import Dropout, MultiTaskModel
from firm.fmoo.stacked import GradientRequest, gradients_together, is_stackable
from firm.fmoo.task_data import CLASS_LOSSES, LOSSES, TaskData, check_finite
from firm.gradients.jacobian import jacobian

EVALUATION_BATCH = 2048
"""Samples per forward pass without gradients."""


_evaluated = partial(Quantity, kind="evaluation", section="")
register(
    _evaluated(
        "accuracies",
        "accuracy",
        "accuracy",
        type=ByObjective[Share | None],
        axis={"tickformat": "~%"},
        better="higher",
    ),
    _evaluated("losses", "loss", "loss", type=ByObjective[Finite | None], axis={}, better="lower"),
)


@dataclass(frozen=True, eq=False)
class ObjectiveMetrics:
    """Evaluation results of a model, by objective."""

    losses: torch.Tensor
    """Mean losses, float64 [M]."""
    accuracies: torch.Tensor | None
    """Shares of correct labels, float64 [M]; None for regression."""


class Replica:
    """A copy of a model, with or without convolutions in channels-last layout."""

    def __init__(self, model: nn.Module, *, is_channels_last: bool) -> None:
        self.model = copy.deepcopy(model)
        if is_channels_last:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.generator = torch.Generator(next(self.model.parameters()).device)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.generator = self.generator


@dataclass(eq=False)
class _Lease:
    """Marks a replica as in use for the lifetime of this object."""

    replica: Replica


_LEASES: "ContextVar[WeakKeyDictionary[Workspace, _Lease]]" = ContextVar("leases")
"""Leases of the current thread, or of the current client in lockstep."""


class Workspace:
    """Data and model replicas shared by all clients of a process.

    A client holds only indices, 8 bytes per sample; each worker thread has one replica of the
    model. In lockstep every client has a replica.

    Args:
        model: Any module that returns a list of M outputs, one for each objective's loss; clients
            train copies of it. It is called with a batch of the data's inputs, images as normalised
            floats. All its parameters that require grad are trained and shared by all objectives,
            except for the heads of a ``MultiTaskModel``.
        data: The training data, into which clients hold indices. Clients train on its device.
        cfg: Configuration of local training.

    Raises:
        ValueError: When the model does not match the data or the losses; its parameters are not
            float32 on the CPU, or an encoder's parameters do not come first; it draws from torch's
            global generator, which threads would share; or it keeps running statistics, which are
            not parameters and are therefore not aggregated.
    """

    def __init__(self, model: nn.Module, data: TaskData, cfg: LocalConfig) -> None:
        self.data, self.cfg = data, cfg
        _check_modules(model)
        self._model = copy.deepcopy(model).to(data.inputs.device)
        self.is_stackable = is_stackable(model, data.losses)
        """Whether clients in lockstep compute their gradients in one batched pass."""
        self._idle: list[Replica] = []
        # fastest on the CPU; elsewhere torch's group normalization may not take it
        self._is_channels_last = data.inputs.ndim == 4 and data.inputs.device.type == "cpu"
        self.mean, self.std = _statistics(data.inputs)
        names, has_heads = list(self.parameters), isinstance(model, MultiTaskModel)
        shared = [name for name in names if name.startswith("encoder.") or not has_heads]
        if names[: len(shared)] != shared:
            raise ValueError(f"The encoder's parameters must come first, got the order {names}.")
        self.shared = slice(0, sum(self.parameters[name].numel() for name in shared))
        self._check_losses()

    @property
    def model(self) -> nn.Module:
        """This thread's model."""
        return self._replica.model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of this thread's model, by name."""
        return self._replica.parameters

    @property
    def linear_heads(self) -> list[nn.Linear] | None:
        """Heads of this thread's model if ``linear.descend_`` supports it and the losses."""
        model = self.model
        if not isinstance(model, MultiTaskModel) or not isinstance(model.encoder, nn.Flatten):
            return None
        heads = [head for head in model.heads if isinstance(head, nn.Linear)]
        if not 2 * len(model.heads) == 2 * len(heads) == len(self.parameters):
            return None  # a head is not linear, has no bias or is frozen
        if self.data.inputs.device.type != "cpu":
            return None
        is_known = set(self.data.losses) in ({"binary"}, {"squared"})
        return heads if is_known and self.data.inputs.dtype == torch.float32 else None

    @property
    def generator(self) -> torch.Generator:
        """Dropout generator of this thread's model."""
        return self._replica.generator

    @property
    def _replica(self) -> Replica:
        leases = _LEASES.get(None)
        if leases is None:
            _LEASES.set(leases := WeakKeyDictionary())
        if self not in leases:
            try:
                replica = self._idle.pop()
            except (
                IndexError
            ):  # no check before pop: another thread might take the last one in between
                replica = Replica(self._model, is_channels_last=self._is_channels_last)
            leases[self] = lease = _Lease(replica)
            weakref.finalize(lease, self._idle.append, replica)
        return leases[self].replica

    def load(self, adapter: Adapter) -> None:
        """Copies an adapter's parameters into this thread's model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(adapter[name])

    def prepare(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns inputs prepared for the model: images as normalised floats."""
        if inputs.dtype != torch.uint8:
            return inputs
        if self._is_channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        images = inputs.float()
        return (images / 255 - self.mean) / self.std

    def gradients(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        select: Callable[[torch.Tensor], torch.Tensor],
        *,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns mean losses [M] on prepared inputs, and gradients [k, d] of selected ones.

        Args:
            inputs: Inputs of a client's batch.
            targets: Targets of the same batch.
            select: Maps the losses [M] to the losses, or sums of losses, to differentiate, [k].
            count: Number k of selected losses.

        Raises:
            ValueError: As in ``firm.gradients.jacobian``.
        """
        asked = GradientRequest(self.parameters, inputs, targets, select)
        if not self.is_stackable:
            return self._own_gradients(asked)
        return together(self._gradients, asked, key=(inputs.shape, targets.shape, count))

    def _gradients(self, asked: list[GradientRequest]) -> Sequence[Any]:
        if len(asked) == 1:
            return [outcome_of(self._own_gradients, asked[0])]
        objectives = self.data.objectives
        return gradients_together(
            asked, model=self.model, losses=self._losses, objectives=objectives
        )

    def _own_gradients(self, asked: GradientRequest) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = functional_call(self.model, dict(asked.parameters), (asked.inputs,))
        losses = self._losses(outputs, asked.targets)
        asked.check_losses(losses.detach(), self.data.objectives)
        return losses.detach(), jacobian(asked.select(losses), asked.parameters)

    @torch.no_grad()
    def _check_losses(self) -> None:
        """Raises ``ValueError`` unless the model and losses return M scalars for two samples."""
        data = self.data
        inputs, targets = self.prepare(data.inputs[:2]), data.targets[:2]
        with user_code(f"the model on inputs of shape {list(inputs.shape)}"):
            outputs = self._model.eval()(inputs)
        self._model.train()
        count = len(outputs) if isinstance(outputs, list | tuple) else None
        if count != len(data.objectives):
            got = type(outputs).__name__ if count is None else count
            raise ValueError(
                f"the model must return a list of {len(data.objectives)} outputs, one for each of "
                f"{', '.join(data.objectives)}, got {got}."
            )
        for j, (name, objective) in enumerate(zip(data.losses, data.objectives, strict=True)):
            what = f"the loss {name} of {objective!r}"
            with user_code(what):
                value = LOSSES[name](outputs[j], targets[:, j])
            is_tensor = isinstance(value, torch.Tensor)
            if not is_tensor or value.ndim:
                got = f"shape {list(value.shape)}" if is_tensor else type(value).__name__
                raise ValueError(f"{what} must be a scalar tensor, such as a mean, got {got}.")

    def _losses(self, outputs: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [
                LOSSES[loss](output, targets[:, j])
                for j, (loss, output) in enumerate(zip(self.data.losses, outputs, strict=True))
            ]
        )

    @torch.no_grad()
    def evaluate(self, data: TaskData, indices: torch.Tensor | None = None) -> ObjectiveMetrics:
        """Evaluates this thread's model on the samples at the indices, by default all.

        Raises:
            ValueError: When there are no samples, none has a target of an objective, or a loss is
                not finite; names the objective.
        """
        chosen = torch.arange(len(data)) if indices is None else indices
        if len(chosen) == 0:
            raise ValueError("There are no samples to evaluate on.")
        self.model.eval()
        losses = torch.zeros(len(data.objectives), dtype=torch.float64)
        counts, hits = torch.zeros_like(losses), torch.zeros_like(losses)
        for part in chosen.split(EVALUATION_BATCH):
            outputs = self.model(self.prepare(data.inputs[part]))
            for j, (loss, output) in enumerate(zip(data.losses, outputs, strict=True)):
                targets = data.targets[part, j]
                # a loss is a mean over the targets that it knows
                if num_known := int((~targets.isnan()).sum()):
                    losses[j] += LOSSES[loss](output, targets).cpu().double() * num_known
                    counts[j] += num_known
                hits[j] += _accuracy(loss, output, targets) * len(part)
        self.model.train()
        for name, count in zip(data.objectives, counts.tolist(), strict=True):
            if not count:
                raise ValueError(
                    f"all {len(chosen)} targets of {name!r} are NaN: give each client, and the "
                    "test samples, at least one known target of every objective."
                )
        losses /= counts
        check_finite(losses, data.objectives)
        return ObjectiveMetrics(losses, hits / len(chosen) if data.has_accuracies else None)


def _check_modules(model: nn.Module) -> None:
    """Raises ``ValueError`` if a part of the model cannot be shared by clients."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter that requires grad.")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"parameter {name} must be float32 on the CPU, got {parameter.dtype} on "
                f"{parameter.device}: call .float().cpu()."
            )
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        rate = module.p if is_dropout else getattr(module, "dropout", 0.0)
        if isinstance(rate, int | float) and rate > 0:  # also nn.LSTM and nn.MultiheadAttention
            raise ValueError(
                f"{name} is a torch {kind}, which draws from the global generator; use "
                "firm.fmoo.Dropout."
            )
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"{name} is a torch {kind}, whose running statistics would mix clients; use "
                "nn.GroupNorm or nn.LayerNorm."
            )


def rotate(images: torch.Tensor, degrees: float, generator: torch.Generator) -> torch.Tensor:
    """Rotates images [B, C, H, W] about their centres, bilinearly and with replicated borders.

    Each angle is drawn uniformly from [-degrees, degrees].
    """
    angles = (torch.rand(len(images), generator=generator) * 2 - 1) * torch.pi * degrees / 180
    angles = angles.to(images.device)
    cosines, sines = angles.cos()[:, None, None], angles.sin()[:, None, None]
    height, width = images.shape[2:]
    ratio = height / width
    x, y = (_centres(size).to(images.device) for size in (width, height))
    y = y[:, None]
    # twenty times faster than torch's affine_grid, which multiplies small matrices
    grid = torch.stack(
        [cosines * x - sines * ratio * y, sines / ratio * x + cosines * y], dim=1
    )  # [B, 2, H, W]
    return nn.functional.grid_sample(
        images, grid.movedim(1, 3), padding_mode="border", align_corners=False
    )


def _centres(size: int) -> torch.Tensor:
    """Returns the pixel centres along a side that spans [-1, 1], shape [size]."""
    return torch.linspace(-1, 1, size) * (size - 1) / size


def _statistics(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and standard deviation by channel of pixels in [0, 1], shape [C, 1, 1]."""
    if inputs.dtype != torch.uint8:
        return inputs.new_zeros(()), inputs.new_ones(())
    channels = inputs.transpose(0, 1).flatten(1)  # [C, N H W]
    counts = torch.stack([torch.bincount(c, minlength=256) for c in channels]).cpu().double()
    levels = torch.arange(256) / 255
    total = counts.sum(dim=1)
    mean = counts @ levels.double() / total
    variance = counts @ levels.double().square() / total - mean.square()
    std = variance.clamp(min=1e-12).sqrt()
    mean, std = (figure.float()[:, None, None].to(inputs.device) for figure in (mean, std))
    return mean, std


def _accuracy(loss: str, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Returns the share of correct labels; 0 for regression, which has none."""
    if loss in CLASS_LOSSES:
        return (outputs.argmax(dim=1) == targets).cpu().double().mean().item()
    if loss == "binary":
        is_correct = (outputs > 0) == (targets.reshape(outputs.shape) > 0.5)
        return is_correct.cpu().double().mean().item()
    return 0.0
