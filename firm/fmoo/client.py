"""Client with supervised losses on its own shard; all clients share one model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from firm.base.quantities import Quantity, register
from firm.base.randomness import derive_seed
from firm.base.schema import ByObjective, Finite, Items
from firm.base.state import State
from firm.federation.client import Adapter, Client, Gradients
from firm.fmoo import linear
from firm.fmoo.attacks import attacked_gradients, attacked_losses
from firm.fmoo.config import LossAttackConfig
from firm.fmoo.task_data import check_finite
from firm.fmoo.workspace import Workspace, rotate

register(Quantity("losses", type=ByObjective[Items[Finite]]))


@dataclass(frozen=True)
class SampleBatch:
    """The samples of one local step."""

    number: int
    """Number of batches the client has drawn before, over all rounds."""
    indices: torch.Tensor
    """Indices into the training data, shape [B]."""

    @property
    def whole(self) -> "SampleBatch":
        """The batch itself."""
        return self

    def minibatches(self) -> Iterator["SampleBatch"]:
        """Yields the batch itself: each local step is a single optimizer step."""
        yield self


class SupervisedClient(Client):
    """A client with a shard of supervised data.

    Samples are reshuffled every epoch. An epoch has floor(N / B) full batches: the remaining
    samples, fewer than B, are dropped until the next shuffle, whereas Hu et al. (arXiv:2006.11489,
    Algorithm 1) use all N. A shard of fewer than B samples is a single batch. The order,
    augmentation and dropout of batch n depend only on the seed, the client's name and n, so that
    the number of batches is the client's entire state.

    Args:
        name: Unique in the federation.
        workspace: Data and model, shared by all clients of this process.
        indices: Indices of the client's samples in the workspace's data, shape [N], N ≥ 1.
        seed: Seed of the run.
        served: Objectives for which the client has losses (FMOL's indicator matrix A); all by
            default. The other objectives' gradients are zero.
        attack: Attack on the losses; none by default.
    """

    capabilities = frozenset({"losses", "epochs", "weighted_gradients"})

    def __init__(
        self,
        name: str,
        workspace: Workspace,
        indices: torch.Tensor,
        *,
        seed: int,
        served: Sequence[int] | None = None,
        attack: LossAttackConfig | None = None,
    ) -> None:
        self.name, self.num_examples = name, len(indices)
        self.objectives = workspace.data.objectives
        self.served = tuple(range(len(self.objectives)) if served is None else served)
        self.shared = workspace.shared
        if self.num_examples == 0:
            raise ValueError(f"{name} has no samples; use fewer clients or a larger alpha.")
        if not self.served or not set(self.served) <= set(range(len(self.objectives))):
            raise ValueError(
                f"{name} must serve some of the objectives 0 to {len(self.objectives) - 1}, "
                f"got {self.served}."
            )
        self._workspace, self._indices = workspace, indices
        self._seed, self._num_batches, self._num_drawn = seed, 0, 0
        self._attack = attack or LossAttackConfig()
        self._order: tuple[int, torch.Tensor] | None = None
        self._memo: tuple[int, torch.Tensor, Gradients] | None = None

    def load(self, adapter: Adapter, round: int = 1) -> None:
        """Starts local training from the server's parameters with a fresh optimizer."""
        self._workspace.load(adapter)
        cfg, parameters = self._workspace.cfg, list(self._workspace.parameters.values())
        options: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "foreach": True}
        self._optimizer: torch.optim.Optimizer
        if cfg.optimizer == "adam":
            self._optimizer = torch.optim.Adam(parameters, **options)
        else:
            self._optimizer = torch.optim.SGD(parameters, momentum=cfg.momentum, **options)
        self._losses: list[list[float]] = []
        self._num_drawn = 0

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass over the shard, at least 1."""
        return self.num_examples // self._batch_size

    def batches(self, num_steps: int) -> Iterator[SampleBatch]:
        """Yields one batch per local step."""
        size, per_epoch = self._batch_size, self.batches_per_epoch
        for _ in range(num_steps):
            number = self._num_batches
            epoch, place = divmod(number, per_epoch)
            if self._order is None or self._order[0] != epoch:
                generator = torch.Generator().manual_seed(self._derive_seed("order", epoch))
                order = torch.randperm(self.num_examples, generator=generator)
                self._order = epoch, self._indices[order]
            chosen = self._order[1][place * size : (place + 1) * size]
            self._num_batches += 1
            self._num_drawn += 1
            yield SampleBatch(number, chosen)

    def gradients(self, minibatch: SampleBatch) -> Gradients:
        """Returns the gradients of all objectives, [M, d], zero for unserved objectives.

        The result is cached until the next step: a repeated request for the same batch at the same
        parameters, as in FedCMOO's second phase or first local step, needs no backward pass.
        """
        known = self._cached_gradients(minibatch)
        if known is None:
            served = list(self.served)
            losses, own = self._batch_gradients(
                minibatch, lambda losses: losses[served], len(served)
            )
            rows = own.new_zeros(len(self.objectives), own.shape[1])
            rows[served] = own
            known = Gradients(rows, losses)
            self._memo = minibatch.number, self._flat_parameters(), known
        return self._gradients_to_send(known)

    def weighted_gradients(self, minibatch: SampleBatch, weights: torch.Tensor) -> Gradients:
        """Returns the gradient of Σⱼ wⱼ Lⱼ as a Jacobian of one row, from one backward pass.

        Weights w [M] of unserved objectives are ignored.
        """
        factors = self.of_served(weights).to(self._workspace.data.inputs.device)
        if known := self._cached_gradients(minibatch):
            return self._gradients_to_send(Gradients(factors[None] @ known.jacobian, known.losses))
        losses, row = self._batch_gradients(minibatch, lambda losses: (factors @ losses)[None], 1)
        return self._gradients_to_send(Gradients(row, losses))

    def weighted_steps(self, num_steps: int, weights: torch.Tensor, *, proximal: float) -> int:
        """Takes plain SGD steps on Σⱼ wⱼ Lⱼ + μ/2 ‖θ - θ_t‖², if the model is linear.

        Equivalent to ``batches``, ``weighted_gradients`` and ``step`` up to rounding, but faster on
        small batches: see ``firm.fmoo.linear``. Weights w [M] of unserved objectives are ignored;
        ``proximal`` is μ.

        Returns:
            Number of steps taken: all, or 0 if the model, losses, optimizer, attack or rotation of
            images are not supported.

        Raises:
            ValueError: When a loss is not finite; names the objective.
        """
        workspace, cfg = self._workspace, self._workspace.cfg
        heads = workspace.linear_heads
        is_plain = cfg.optimizer == "sgd" and cfg.momentum == cfg.weight_decay == 0
        is_scaled = self._attack.kind == "scaling" and self._attack.has_attacker(self.name)
        is_rotated = bool(cfg.rotation) and workspace.data.inputs.ndim == 4
        if heads is None or not is_plain or is_scaled or is_rotated:
            return 0
        batches = torch.stack([batch.indices for batch in self.batches(num_steps)])
        factors = self.of_served(weights)
        widths = torch.tensor([head.out_features for head in heads])
        weight = torch.cat([head.weight.detach() for head in heads])
        bias = torch.cat([head.bias.detach() for head in heads])
        losses = linear.descend_(
            weight.numpy(),
            bias.numpy(),
            inputs=workspace.data.inputs.flatten(1).numpy(),
            targets=workspace.data.targets.flatten(1).numpy(),
            batches=batches.numpy(),
            factors=(factors / widths).repeat_interleave(widths).numpy(),
            is_binary=workspace.data.losses[0] == "binary",
            lr=cfg.lr,
            proximal=proximal,
        )
        with torch.no_grad():
            for head, rows, row_biases in zip(
                heads, weight.split(widths.tolist()), bias.split(widths.tolist()), strict=True
            ):
                head.weight.copy_(rows)
                head.bias.copy_(row_biases)
        by_row = torch.from_numpy(losses).split(widths.tolist(), dim=1)
        by_objective = torch.stack([rows.mean(dim=1) for rows in by_row], dim=1)  # [K, M]
        check_finite(by_objective.sum(dim=0), self.objectives)
        reported = attacked_losses(by_objective, client=self.name, attack=self._attack)
        self._losses.extend(reported.tolist())
        self._memo = None
        return num_steps

    def step(self, gradients: Gradients, weights: torch.Tensor) -> None:
        """Takes one optimizer step along the weighted sum of the gradients."""
        self._memo = None
        self._losses.append(gradients.losses.tolist())
        direction = weights.float().to(gradients.jacobian.device) @ gradients.jacobian
        parameters = list(self._workspace.parameters.values())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, direction.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()

    def losses(self) -> torch.Tensor:
        """Returns the mean losses over the whole shard at the loaded parameters, float64 [M]."""
        losses = self._workspace.evaluate(self._workspace.data, self._indices).losses
        return attacked_losses(losses, client=self.name, attack=self._attack)

    def adapter(self) -> Adapter:
        """Returns a copy of the model's parameters, on the CPU."""
        parameters = self._workspace.parameters
        return {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}

    def state(self) -> State:
        """Returns the number of batches drawn, from which everything else follows."""
        return {"num_batches": self._num_batches}

    def restore(self, state: State) -> None:
        """Restores a state returned by ``state``."""
        self._num_batches = state["num_batches"]

    def skip_failed_batches(self) -> None:
        """Skips as many batches as were drawn since ``load``."""
        self._num_batches += self._num_drawn

    def metrics(self) -> dict[str, Any]:
        """Returns the losses of every local step, by objective."""
        columns = list(zip(*self._losses, strict=True)) or [() for _ in self.objectives]
        return {"losses": dict(zip(self.objectives, map(list, columns), strict=True))}

    @property
    def _batch_size(self) -> int:
        return min(self._workspace.cfg.batch_size or self.num_examples, self.num_examples)

    def _cached_gradients(self, batch: SampleBatch) -> Gradients | None:
        if self._memo is None or self._memo[0] != batch.number:
            return None
        _, parameters, gradients = self._memo
        return gradients if torch.equal(parameters, self._flat_parameters()) else None

    def _gradients_to_send(self, gradients: Gradients) -> Gradients:
        return attacked_gradients(gradients, client=self.name, attack=self._attack)

    def _batch_gradients(
        self, batch: SampleBatch, select: Callable[[torch.Tensor], torch.Tensor], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the losses [M], and the gradients [k, d] of the selected ones."""
        workspace, seed = self._workspace, self._derive_seed("batch", batch.number)
        inputs = workspace.prepare(workspace.data.inputs[batch.indices])
        if workspace.cfg.rotation and inputs.ndim == 4:
            inputs = rotate(inputs, workspace.cfg.rotation, torch.Generator().manual_seed(seed))
        workspace.generator.manual_seed(seed)
        targets = workspace.data.targets[batch.indices]
        return workspace.gradients(inputs, targets, select, count=count)

    def _flat_parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self._workspace.parameters.values()])

    def _derive_seed(self, *purpose: str | int) -> int:
        return derive_seed(self._seed, "client", self.name, *map(str, purpose))
