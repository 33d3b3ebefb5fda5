"""Secure sums on the server: five exchanges with the clients of a round, and the mean.

    1  MaskedTraining   the client trains, and sends public keys; its update stays at its site
    2  ShareKeys        it gets all keys, and sends shares of its secrets, sealed for its neighbours
    3  SendMasked       it gets its neighbours' shares, and sends its update under masks
    4  ConfirmMembers   it gets the members of the sum, and signs them
    5  RevealShares     it gets the signatures, and sends shares that open the sum

The sum contains the updates of all clients that completed step 3, including those that are lost
later.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from firm.base.errors import RoundFailed
from firm.base.sanitize import by_reason
from firm.federation.aggregation import ServerStep, Transform, flat, unflatten
from firm.federation.client import Reply
from firm.federation.engines.engine import Engine
from firm.federation.messages import Update
from firm.federation.option import DECIDED_BY_SERVER, Need, Option, Requests
from firm.federation.options.secure.config import FEWEST, NUM_BYTES, MasksConfig
from firm.federation.options.secure.engine import SecureEngine
from firm.federation.options.secure.masking import MAX_UPDATES, STEP
from firm.federation.options.secure.messages import (
    ConfirmMembers,
    MaskedTraining,
    RevealShares,
    SendMasked,
    ShareKeys,
    SumRequest,
    transpose,
)
from firm.federation.options.secure.opening import opened_sum
from firm.federation.options.secure.protocol import (
    OwnIdentities,
    assumed_colluders,
    plan_sum,
    threshold,
)
from firm.federation.round_config import RoundConfig
from firm.federation.rounds import Round
from firm.federation.training import LocalTraining


class SecureSums(Option):
    """Reveals only the mean of updates to the server; sites mask their updates.

    Args:
        masks: Assumptions of the masks.
        num_bytes: Bytes of a masked number.
    """

    key: ClassVar[str] = "secure"
    scope: ClassVar[str] = "adapters"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("upload", None, "masks hide whole numbers of 48 bits, whatever was rounded before"),
        Need("normalize_updates", False, "the server cannot tell the length of a hidden update"),
        Need("lora_mean", "factors", "secure aggregation adds A and B, and not their products"),
        Need("robust.rule", "none", "a robust rule compares single updates, which are hidden"),
        Need(
            "privacy.at",
            "sum",
            "a server that adds noise has to check clipping",
            others=("client",),
        ),
        Need(
            "num_local_epochs", None, "the number of a client's steps would tell its shard's size"
        ),
    )

    def __init__(self, masks: MasksConfig, num_bytes: int = NUM_BYTES["uniform"]) -> None:
        self._masks, self._num_bytes = masks, num_bytes

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` if the server's steps need single updates."""
        super().check(cfg)
        if not FEWEST <= (cfg.clients_per_round or FEWEST) <= MAX_UPDATES:
            raise ValueError(
                f"secure aggregation adds {FEWEST} to {MAX_UPDATES} updates; "
                f"clients_per_round must be in that range, got {cfg.clients_per_round}."
            )
        if cfg.clients_per_round is not None and self._masks.num_colluders is not None:
            threshold(cfg.clients_per_round, self._masks.num_colluders)

    def check_federation(self, cfg: RoundConfig, num_clients: int) -> None:
        """Raises ``ValueError`` if a round has too few clients to hide any from the colluders."""
        key = "clients_per_round" if cfg.clients_per_round else "num_clients"
        if (count := cfg.clients_per_round or num_clients) > MAX_UPDATES:
            raise ValueError(
                f"{key}: secure aggregation adds at most {MAX_UPDATES} updates, got {count}; set "
                "clients_per_round to as many."
            )
        try:
            threshold(cfg.clients_per_round or num_clients, self._num_colluders(num_clients))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    def _num_colluders(self, num_clients: int) -> int:
        return assumed_colluders(self._masks.num_colluders, num_clients)

    def around(self, engine: Engine, num_clients: int) -> Engine:
        """Wraps the engine of a run without separate sites.

        Secure aggregation protects no one in such a run, but it has the same cost and the same
        results as between sites. So sums may be repeated with other clients, as after a round that
        the guard has undone.
        """
        return SecureEngine(engine, OwnIdentities(), num_clients=num_clients, repeats=True)

    def requests(self, requests: Requests, cfg: RoundConfig) -> Requests:
        """Returns the requests of a secure sum."""
        agreed = {
            "aggregation": cfg.aggregation,
            "max_update_norm": cfg.max_update_norm,
            "num_colluders": self._masks.num_colluders,
            "neighbours": self._masks.neighbours,
        }
        members = {"members": DECIDED_BY_SERVER}
        return {
            MaskedTraining: {**requests[LocalTraining], **agreed},
            ShareKeys: {"keys": DECIDED_BY_SERVER},
            SendMasked: {
                "shares": DECIDED_BY_SERVER,
                "num_numbers": DECIDED_BY_SERVER,
                "num_bytes": self._num_bytes,
            },
            ConfirmMembers: members,
            RevealShares: {**members, "signatures": DECIDED_BY_SERVER},
        }

    def quorum(self, num_refused: int) -> tuple[int, str]:
        """Returns 2, because the mean of a single update would reveal it."""
        return FEWEST, ""

    def collected(self, this_round: Round, replies: list[Reply]) -> list[Reply]:
        """Replaces each update by the mean of all, which leaves any weighted mean unchanged.

        Raises:
            RoundFailed: Too many clients dropped out.
        """
        start = time.perf_counter()
        keys = {reply.client: reply.content.keys for reply in replies}
        try:
            plan = plan_sum(
                this_round.number,
                keys,
                num_colluders=self._num_colluders(this_round.num_clients),
                neighbours=self._masks.neighbours,
            )
        except ValueError as error:
            raise _round_failure(this_round, str(error)) from error

        # a sum of fewer is not opened: clients would refuse to repeat it with others
        least = max(plan.threshold, this_round.quorum)
        shared = _ask(this_round, least, ShareKeys, keys, keys=keys)
        shares = transpose({name: answer.shares for name, answer in shared.items()})

        size = sum(parameter.numel() for parameter in this_round.adapter.values()) + 1
        fields = {"shares": shares, "num_numbers": size, "num_bytes": self._num_bytes}
        sent = _ask(this_round, least, SendMasked, shared, **fields)
        masked = {name: answer.numbers for name, answer in sent.items()}

        members = {"members": list(masked)}
        confirmed = _ask(this_round, plan.threshold, ConfirmMembers, masked, **members)
        signatures = {name: answer.signature for name, answer in confirmed.items()}

        fields = {**members, "signatures": signatures}
        revealed = _ask(this_round, plan.threshold, RevealShares, confirmed, **fields)

        dropped = [name for name in shared if name not in masked]
        try:
            numbers = opened_sum(plan, keys, masked, dropped, revealed)
        except ValueError as error:
            raise _round_failure(this_round, str(error)) from error
        mean = flat(this_round.adapter, torch.float64) + torch.from_numpy(
            numbers[:-1] / numbers[-1]
        )
        adapter = unflatten(mean, this_round.adapter)
        this_round.entries["secure"] = {
            "num_updates": len(masked),
            "masked_bytes": self._num_bytes * size * len(masked),
            "seconds": time.perf_counter() - start,
            "rounding": float(STEP / 2 * len(masked) / numbers[-1]),
        }
        return [
            replace(reply, content=Update(reply.client, adapter, 1, reply.content.metrics))
            for reply in replies
            if reply.client in masked
        ]

    def steps(self, steps: Sequence[Transform], cfg: RoundConfig) -> Sequence[Transform]:
        """Returns the steps without logging the drift, which needs single updates."""
        return [*steps, _without_drift]


def _without_drift(step: ServerStep) -> ServerStep:
    return replace(step, hidden=(*step.hidden, "drift"))


def _ask(
    this_round: Round, least: int, kind: type[SumRequest], clients: Collection[str], **fields: Any
) -> dict[str, Any]:
    """Returns the clients' answers in a step of the sum, by client.

    Raises:
        RoundFailed: Fewer have answered than this step needs.
    """
    request = replace(this_round.request(kind, fields), adapter={}, accepted={})
    answers = this_round.ask(request, list(clients), may_fail=True)
    if len(answers) < least:
        problem = f"{len(answers)} clients answered {kind.task}, {least} must"
        raise _round_failure(this_round, problem)
    return {reply.client: reply.content for reply in answers}


def _round_failure(this_round: Round, problem: str) -> RoundFailed:
    number = this_round.number
    reasons = "; ".join(by_reason((each.client, each.reason) for each in this_round.failures))
    error = RoundFailed(
        f"the sum of round {number} could not be opened: {problem} ({reasons or 'no failures'})",
        number=number,
        asked=this_round.sampled,
        failed={failure.client: failure.reason for failure in this_round.failures},
    )
    error.spent = this_round.spent
    return error
