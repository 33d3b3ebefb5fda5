"""Secure aggregation: the server learns the mean of updates without seeing single updates.

A client's site masks w_c (θ_c - θ_t) and w_c (``masking``), the server adds the masked messages,
and one of the sites unmasks the sum: θ_t + Σ w_c (θ_c - θ_t) / Σ w_c. All sites share a key, which
the server does not have. This hides single updates from a server that follows the protocol and
repeats no round. A malicious server can ask a client twice, or request the unmasking of sums that
differ by one client.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np
import torch
from annotated_types import Len
from pydantic import PlainValidator, Strict, StringConstraints, ValidationInfo

from firm.federation.aggregation import ServerStep, Transform, flat, unflattened
from firm.federation.client import Adapter, Client, Failure, Reply, State
from firm.federation.engines.engine import Engine, checked_reply, divided, request_sizes
from firm.federation.errors import RoundFailed
from firm.federation.messages import (
    DECIDED_BY_SERVER,
    Answer,
    Request,
    Sizes,
    Update,
)
from firm.federation.option import Need, Option, Requests
from firm.federation.options import masking
from firm.federation.outside import by_reason
from firm.federation.round_config import RoundConfig
from firm.federation.rounds import Round
from firm.federation.schema import (
    Metrics,
    Parameters,
    Text,
    context,
    invalid,
)
from firm.federation.serialization import pack
from firm.federation.server import too_long
from firm.federation.tasks import task
from firm.federation.training import LocalTraining
from firm.quantities import Quantity, register
from firm.schema import Count, NonNegative

Secure = Literal["masks"]

EXAMPLES_PER_WEIGHT = 256
"""Examples of a client that weighs 1, where clients count by their number of examples: so large
weights and small ones are both exact enough."""

FEWEST = 2
"""Fewest updates in a sum that does not tell of each."""


class SecureFigures(TypedDict):
    """Metrics of a secure sum, in the row of its round."""

    num_updates: Count
    masked_bytes: NotRequired[Count]
    seconds: NotRequired[NonNegative]
    rounding: NotRequired[NonNegative]


register(Quantity("secure", kind="round", type=SecureFigures))


def _masked_numbers(value: Any, info: ValidationInfo) -> torch.Tensor:
    shape = (context(info).num_parameters + 1, masking.NUM_BYTES)
    is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided
    if not is_tensor or value.dtype != torch.uint8 or value.shape != shape:
        raise invalid(f"uint8 of shape {list(shape)}", value)
    return value


MaskedNumbers = Annotated[torch.Tensor, PlainValidator(_masked_numbers)]
"""Masked numbers, one for each parameter of θ_t and one for the weight: uint8 [d + 1, 6]."""
Nonce = Annotated[str, StringConstraints(pattern=f"^[0-9a-f]{{{2 * masking.NONCE_BYTES}}}$")]
"""A nonce in hexadecimal digits."""


@dataclass(frozen=True)
class MaskedUpdate(Answer):
    """Answer to a local training with an update that is hidden from the server."""

    client: Text
    masked: MaskedNumbers
    """w_c (θ_c - θ_t) and w_c under a mask, uint8 [d + 1, 6]."""
    nonce: Nonce
    """Which mask it is."""
    metrics: Metrics
    """Registered metrics of the local training."""


@dataclass(frozen=True, kw_only=True)
class MaskedTraining(LocalTraining):
    """Requests a masked update after a local training."""

    task: ClassVar[str] = "masked_training"
    answer: ClassVar[type[Answer]] = MaskedUpdate

    aggregation: Literal["uniform", "by_examples"] = "uniform"
    """What the client's weight w_c is: 1, or its number of examples over EXAMPLES_PER_WEIGHT."""
    max_update_norm: NonNegative | None = None
    """Longest update that leaves the site."""

    def parameter_bytes(self, num_parameters: int, adapter_bytes: int) -> int:
        """Returns the size of the masked update in bytes."""
        return masking.NUM_BYTES * num_parameters

    def plain(self) -> LocalTraining:
        """Returns the request without masking, as the client itself receives it."""
        values = {each.name: getattr(self, each.name) for each in fields(LocalTraining)}
        return LocalTraining(**values)

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an example update without its parameters; see ``parameter_bytes``."""
        update = self.plain().example(client, sizes)
        assert isinstance(update, Update)
        weight = torch.zeros(1, masking.NUM_BYTES, dtype=torch.uint8)
        return MaskedUpdate(client, weight, "0" * 2 * masking.NONCE_BYTES, update.metrics)


@dataclass(frozen=True)
class OpenedMean(Answer):
    """The mean of the clients' adapters."""

    adapter: Parameters
    """θ_t + Σ w_c (θ_c - θ_t) / Σ w_c."""


@dataclass(frozen=True, kw_only=True)
class OpenSum(Request):
    """Requests that a client's site unmask a sum of masked updates."""

    task: ClassVar[str] = "open_sum"
    answer: ClassVar[type[Answer]] = OpenedMean
    tells_of_data: ClassVar[bool] = False  # the updates in the sum have been counted already

    total: MaskedNumbers
    """The sum, uint8 [d + 1, 6]."""
    nonces: Annotated[list[Nonce], Strict(False), Len(1, masking.MAX_MESSAGES)]
    """Of the updates that are in it."""

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns the request's own adapter; see ``Request``."""
        return OpenedMean(self.adapter)


@task(MaskedTraining)
def masked_training(client: Client, request: MaskedTraining) -> MaskedUpdate:
    """Raises ``RuntimeError``: the ``SecureEngine`` of the site has the key and masks updates."""
    raise RuntimeError(f"{client.name} has no key of its own; ask it through a SecureEngine.")


@task(OpenSum)
def open_sum(client: Client, request: OpenSum) -> OpenedMean:
    """Raises ``RuntimeError``; see ``masked_training``."""
    raise RuntimeError(f"{client.name} has no key of its own; ask it through a SecureEngine.")


class SecureSums(Option):
    """Reveals only the mean of updates to the server; sites mask and unmask the updates."""

    key: ClassVar[str] = "secure"
    scope: ClassVar[str] = "adapters"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("upload", None, "masks hide whole numbers of 48 bits, whatever was rounded before"),
        Need("normalize_updates", False, "the server cannot tell the length of a hidden update"),
        Need("lora_mean", "factors", "secure aggregation adds A and B, and not their products"),
        Need("robust.rule", "none", "a robust rule compares single updates, which are hidden"),
        Need("privacy.at", "client", "a server that adds noise has to check clipping"),
    )

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` if the server's steps need single updates."""
        super().check(cfg)
        if not FEWEST <= (cfg.clients_per_round or FEWEST) <= masking.MAX_MESSAGES:
            raise ValueError(
                f"secure aggregation adds {FEWEST} to {masking.MAX_MESSAGES} updates; "
                f"clients_per_round must be in that range, got {cfg.clients_per_round}."
            )

    def around(self, engine: Engine) -> Engine:
        """Wraps the engine of a run without separate sites, with a new key.

        Secure aggregation protects no one in such a run, but it has the same cost and the same
        results as between sites.
        """
        return SecureEngine(engine, masking.Key.generate())

    def requests(self, requests: Requests, cfg: RoundConfig) -> Requests:
        """Returns requests for masked updates and for unmasking their sum."""
        masked = {"aggregation": cfg.aggregation, "max_update_norm": cfg.max_update_norm}
        return {
            MaskedTraining: {**requests[LocalTraining], **masked},
            OpenSum: {"total": DECIDED_BY_SERVER, "nonces": DECIDED_BY_SERVER},
        }

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns 2, because the mean of a single update would reveal it."""
        return FEWEST, ""

    def collected(self, this_round: Round, replies: list[Reply]) -> list[Reply]:
        """Replaces each update by the mean of all, which leaves any weighted mean unchanged."""
        mean = _opened(this_round, replies)
        return [
            replace(reply, content=Update(reply.client, mean, 1, reply.content.metrics))
            for reply in replies
        ]

    def steps(self, steps: Sequence[Transform], cfg: RoundConfig) -> Sequence[Transform]:
        """Returns the steps without logging the drift, which needs single updates."""
        return [*steps, _without_drift]


def _without_drift(step: ServerStep) -> ServerStep:
    return replace(step, hidden=(*step.hidden, "drift"))


def _opened(this_round: Round, replies: Sequence[Reply]) -> Adapter:
    """Returns the mean of masked updates, from the first of their clients that can unmask it.

    The client that is asked first rotates with the round.

    Raises:
        RoundFailed: No client can unmask the sum.
    """
    start = time.perf_counter()
    updates = [reply.content for reply in replies]
    total = masking.added([update.masked for update in updates])
    nonces = [update.nonce for update in updates]
    request = this_round.request(OpenSum, {"total": total, "nonces": nonces})
    turn = this_round.number % len(replies)
    for reply in (*replies[turn:], *replies[:turn]):
        if answers := this_round.ask(request, [reply.client], may_fail=True):
            this_round.entries["secure"] = {
                "num_updates": len(updates),
                "masked_bytes": total.numel() * len(updates),
                "seconds": time.perf_counter() - start,
                "rounding": masking.STEP / 2,
            }
            return answers[0].content.adapter
    reasons = by_reason((each.client, each.reason) for each in this_round.failures)
    raise RoundFailed(
        f"no client could open the sum of round {this_round.number} ({'; '.join(reasons)}); repair "
        f"the cause, then resume from round {this_round.number - 1}."
    )


def masked_update(
    request: MaskedTraining, update: Update, key: masking.Key
) -> tuple[str, torch.Tensor]:
    """Returns the nonce and the masked values of a client's update.

    Raises:
        ValueError: The update is too large for the sum.
    """
    weight = 1.0
    if request.aggregation == "by_examples":
        weight = update.num_examples / EXAMPLES_PER_WEIGHT
    delta = flat(update.adapter, torch.float64) - flat(request.adapter, torch.float64)
    nonce, numbers = masking.masked(np.append(weight * delta.numpy(), weight), key)
    return nonce.hex(), numbers


def opened_mean(request: OpenSum, key: masking.Key) -> Adapter:
    """Returns θ_t + Σ w_c (θ_c - θ_t) / Σ w_c in the adapter's dtypes.

    Raises:
        ValueError: The unmasked message is not a sum of updates.
    """
    nonces = [bytes.fromhex(nonce) for nonce in request.nonces]
    numbers = masking.opened(request.total, nonces, key)
    limit = len(nonces) * masking.LARGEST
    if not 0 < numbers[-1] <= limit or np.abs(numbers).max() > limit:
        raise ValueError(
            f"the sum is not that of these {len(nonces)} updates, or was masked with another key."
        )
    mean = flat(request.adapter, torch.float64) + torch.from_numpy(numbers[:-1] / numbers[-1])
    return unflattened(mean, request.adapter)


class SecureEngine:
    """Masks the clients' updates before they are sent, and unmasks sums; implements ``Engine``.

    All other calls are forwarded to the wrapped engine.

    Args:
        engine: Engine that runs the clients.
        key: Key of the federation.
        least_in_mean: Minimum number of updates in a sum to be unmasked.
    """

    def __init__(self, engine: Engine, key: masking.Key, *, least_in_mean: int = FEWEST) -> None:
        self._engine, self._key, self._least_in_mean = engine, key, least_in_mean

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the replies in the given order, and the failures; see ``Engine``."""
        if isinstance(request, OpenSum):
            return self._open(request, clients)
        if not isinstance(request, MaskedTraining):
            return self._engine.map(request, clients)
        replies, failures = self._engine.map(request.plain(), clients)
        kept, own_failures = divided(self._masked(request, reply) for reply in replies)
        return kept, [*failures, *own_failures]

    def client_states(self, accepted: Mapping[str, int]) -> State:
        """Returns the client states of the wrapped engine."""
        return self._engine.client_states(accepted)

    def restore_client_states(self, states: State) -> None:
        """Restores the states returned by ``client_states``."""
        self._engine.restore_client_states(states)

    def close(self) -> None:
        """Closes the wrapped engine."""
        self._engine.close()

    def _masked(self, request: MaskedTraining, reply: Reply) -> Reply | Failure:
        """Returns a client's masked reply, or a failure if its update must not leave the site."""
        update = reply.content
        assert isinstance(update, Update)
        begin = time.perf_counter()
        try:
            if reason := too_long(update.adapter, request.adapter, request.max_update_norm):
                raise ValueError(f"{reason}, and stays at its site")
            nonce, numbers = masked_update(request, update, self._key)
        except ValueError as error:
            return Failure(reply.client, str(error), reply.bytes_down, kind=type(error).__name__)
        metrics = update.metrics
        if "seconds" in metrics:
            seconds = {**metrics["seconds"], "mask": time.perf_counter() - begin}
            metrics = {**metrics, "seconds": seconds}
        content = MaskedUpdate(update.client, numbers, nonce, metrics)
        return replace(reply, content=content, bytes_up=len(pack(content)))

    def _open(self, request: OpenSum, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        """Returns the unmasked mean for each requested client, or failures.

        A sum of too few updates is refused, because it would reveal information about each.
        """
        size_of = request_sizes(request)
        try:
            if len(set(request.nonces)) < max(self._least_in_mean, len(request.nonces)):
                raise ValueError(
                    f"a sum of {len(set(request.nonces))} different updates is not opened here, "
                    f"only one of at least {self._least_in_mean}"
                )
            content = OpenedMean(opened_mean(request, self._key))
        except ValueError as error:
            kind = type(error).__name__
            return [], [Failure(name, str(error), size_of(name), kind=kind) for name in clients]
        size = len(pack(content))
        outcomes = (checked_reply(request, name, content, size_of(name), size) for name in clients)
        return divided(outcomes)
