"""What a strategy's round asks of clients and has them send, in bytes and in kind."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from firm.alignment.plan.settings import RunSettings
from firm.federation import (
    Failure,
    Reply,
    RoundFailed,
    ServerState,
    State,
    Update,
)
from firm.federation.messages import Answer, Request
from firm.federation.serialization import pack
from firm.federation.sharing import (
    CorrectionRequest,
    GramCorrection,
    JacobianRequest,
    JacobianShare,
)
from firm.federation.strategies import STRATEGIES
from firm.federation.training import LocalTraining, ObjectiveTraining, ObjectiveUpdates
from firm.gradients import COMPRESSORS, message_to_dict

SAMPLED_PARAMETERS = 1_000_000
"""Columns of the Jacobian that a planned client compresses; the others' bytes follow by proportion,
which holds but for the rounding of ranks."""

_WHOLE_PARAMETERS = 1_000
"""Columns of one that travels whole, where proportion is exact."""


class Traffic:
    """An engine that counts what a strategy sends and gets; its clients fail to train.

    Their messages hold adapters without entries and Jacobians of few columns. What these lack of
    the real ones is added to the counts.

    Args:
        cfg: The run's configuration.
        adapter: The adapter's parameters, of which sizes alone count.
    """

    def __init__(self, cfg: RunSettings, adapter: Mapping[str, torch.Tensor]) -> None:
        self._cfg = cfg
        self.adapter = {name: torch.empty(0) for name in adapter}
        self._adapter_bytes = sum(parameter.nbytes for parameter in adapter.values())
        num_parameters = sum(parameter.numel() for parameter in adapter.values())
        is_whole = getattr(cfg.strategy, "compressor", "none") == "none"
        most = _WHOLE_PARAMETERS if is_whole else SAMPLED_PARAMETERS
        self._num_columns = min(num_parameters, most) or most
        self._scale = num_parameters / self._num_columns
        self.bytes_down = self.bytes_up = self.uploads = 0
        self.num_clients = 0
        """Clients that train."""
        self.num_trainings = 1
        """Trainings of each in a round."""
        self.solves_by_clients = self.solves_on_server = self.takes_whole_batches = False

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Counts the request and its answers; trainings fail, which ends the round."""
        m = len(self._cfg.rewards)
        content, num_adapters = None, 0
        if isinstance(request, CorrectionRequest):
            content = GramCorrection(own_gram=torch.eye(m), correction=torch.eye(m))
        elif isinstance(request, JacobianRequest):
            self.takes_whole_batches = self.solves_on_server = True
            content = self._jacobian(request)
        elif isinstance(request, LocalTraining):
            self.num_clients, num_adapters = len(clients), 1
            self.solves_by_clients = request.weighting != "fixed"
            self.takes_whole_batches |= self.solves_by_clients and request.solve_per == "batch"
        else:
            self.num_clients, self.num_trainings = len(clients), m
            self.solves_on_server, num_adapters = True, m
        sent = content or self._trained(request, clients[0])
        up = len(pack(sent)) + num_adapters * self._adapter_bytes
        up += self._missing(content) if isinstance(content, JacobianShare) else 0
        down = len(pack(request.of(clients[0]))) + self._adapter_bytes
        down += self._missing(getattr(request, "broadcast", None))
        self.bytes_down += len(clients) * down
        self.bytes_up += len(clients) * up
        self.uploads = max(self.uploads, len(clients) * up)
        if content is None:
            return [], [Failure(name, "only planned") for name in clients]
        return [Reply(name, content, 0, 0) for name in clients], []

    def _jacobian(self, request: JacobianRequest) -> JacobianShare:
        """What a client tells of its gradients, with a Jacobian of few columns."""
        generator = torch.Generator().manual_seed(0)
        m = len(self._cfg.rewards)
        share = JacobianShare(
            served=list(range(m)), start_losses=[1 / 3] * m if request.share_losses else None
        )
        rows = torch.randn(m, self._num_columns, generator=generator)
        if request.compressor is None:
            return replace(share, jacobian=rows)
        compressor: Any = COMPRESSORS[request.compressor]
        message = compressor(int(request.budget * self._num_columns)).compress(
            rows, generator=generator, shared_seed=request.seed
        )
        return replace(share, message=message_to_dict(message))

    def _trained(self, request: Request, client: str) -> Answer:
        """A reply to a training, with an adapter without entries."""
        m, digits = len(self._cfg.rewards), 1 / 3  # 18 digits, as most figures have
        by_objective = dict.fromkeys(self._cfg.rewards, digits)
        # 7 figures by objective, 30 others: near enough, as the solves and the adapter are exact
        figures = {
            **{f"figure of objectives {i}": by_objective for i in range(7)},
            **{f"figure {i:04d}": digits for i in range(30)},
        }
        if isinstance(request, ObjectiveTraining):
            each = {**figures, "weights": [[1.0] * m] * num_passes(self._cfg)}
            return ObjectiveUpdates(
                updates=dict.fromkeys(self._cfg.rewards, self.adapter),
                num_examples=1000,
                num_shared=1,
                metrics={"by_objective": dict.fromkeys(self._cfg.rewards, each)},
            )
        solve = {
            "weights": [digits] * m,
            "gradient_norms": [digits] * m,
            "cosines": [[digits] * m] * m,
            "beta_effect": digits,
        }
        metrics = {
            **{key: [value] * num_solves(self._cfg) for key, value in solve.items()},
            **figures,
            **({"gram": [[digits] * m] * m} if self._cfg.strategy.share_gram else {}),
        }
        return Update(client, self.adapter, 1000, metrics)

    def _missing(self, content: Any) -> int:
        """Bytes of the columns that messages on the Jacobian leave out."""
        return round((self._scale - 1) * _tensor_bytes(content))

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns nothing, since there are no clients."""
        return {}

    def restore_client_states(self, states: State) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, JacobianShare):
        content = vars(content)
    entries = content.values() if isinstance(content, dict) else ()
    return sum(_tensor_bytes(entry) for entry in entries)


def round_traffic(
    cfg: RunSettings, clients: Sequence[str], adapter: Mapping[str, torch.Tensor] | None = None
) -> Traffic:
    """What a strategy's round asks of clients and has them send."""
    traffic = Traffic(cfg, adapter or {})
    state = ServerState(traffic.adapter, objectives=tuple(cfg.rewards), seed=0)
    with suppress(RoundFailed):
        STRATEGIES[cfg.strategy.name](state, clients, traffic, cfg.strategy)  # type: ignore[attr-defined]  # every strategy's configuration has a name
    assert traffic.num_clients
    return traffic


def num_passes(cfg: RunSettings) -> int:
    """Optimizer steps of one local training."""
    num_minibatches = cfg.estimator.batch_size // cfg.estimator.minibatch_size
    return cfg.strategy.num_local_steps * cfg.estimator.num_epochs * num_minibatches


def num_solves(cfg: RunSettings) -> int:
    """Systems of weights of one local training."""
    per_batch = getattr(cfg.strategy, "solve_per", "minibatch") == "batch"
    return cfg.strategy.num_local_steps if per_batch else num_passes(cfg)
