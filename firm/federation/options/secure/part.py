"""A client's part in one secure sum, and the record of the sums that it has helped to open.

The part answers each step once, and keeps its secrets in memory only: a site that restarts in the
middle of a round has dropped out of it.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from firm.federation.options.secure.config import Neighbours
from firm.federation.options.secure.masking import SEED_BYTES, as_bytes, mask, whole_numbers
from firm.federation.options.secure.protocol import (
    Identities,
    Plan,
    PrivateKeys,
    PublicKeys,
    add_pair_mask,
    check_keys,
    has_signed,
    members_statement,
    plan_sum,
    seal,
    unseal,
)
from firm.federation.options.secure.shamir import SHARE_BYTES, split


class SumLedger(Protocol):
    """Record of the sums that clients have helped to open; a site keeps it on its disk."""

    sums: list[dict[str, Any]]
    """Rows of ``note_sum``, the oldest first."""

    def note_sum(self, row: dict[str, Any]) -> None:
        """Adds a row, before the client answers."""
        ...


class MemoryLedger:
    """Record of sums in memory, of clients that end with this process; a ``SumLedger``."""

    def __init__(self) -> None:
        self.sums: list[dict[str, Any]] = []

    def note_sum(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self.sums.append(row)


@dataclass(frozen=True)
class Terms:
    """Terms of a sum to which a client's site has agreed, and which the server cannot change."""

    run: str
    """Name of the run, which signatures contain."""
    num_colluders: int
    """Clients of the federation that may collude with the server."""
    neighbours: Neighbours
    """Pairs of clients that share a mask: all, or each client and a few neighbours."""
    least_in_mean: int
    """Fewest updates in a sum."""
    repeats: bool = False
    """True if updates of the same origin may be in sums of different clients."""


@dataclass(frozen=True)
class Origin:
    """Origin of an update."""

    base: int
    """Last round with an accepted update of the client."""
    model: str
    """Digest of θ_t."""


class Part:
    """A client's part in one sum.

    Args:
        client: The client.
        round_number: The round.
        origin: Origin of the update.
        values: Numbers to add, float64 [d + 1].
        num_bytes: Bytes of a number as it travels.
        terms: Terms that the site has agreed to.
        identities: Signs the client's keys, and checks those of others.
        ledger: Record of sums.
        noise: Returns noise to add, of the same shape, for a number of clients that do not collude.
    """

    def __init__(
        self,
        client: str,
        round_number: int,
        *,
        origin: Origin,
        values: np.ndarray,
        num_bytes: int,
        terms: Terms,
        identities: Identities,
        ledger: SumLedger,
        noise: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        whole_numbers(values, num_bytes)  # raises if a value is too large, before others wait
        self.client, self.round_number = client, round_number
        self._origin, self._values, self._num_bytes, self._noise = origin, values, num_bytes, noise
        self._terms, self._identities, self._ledger = terms, identities, ledger
        self._private = PrivateKeys()
        self.public = self._private.public(client, terms.run, round_number, identities)
        self._self_seed = os.urandom(SEED_BYTES)
        self._next = "share"
        self._plan: Plan
        self._keys: dict[str, PublicKeys] = {}
        self._shares: dict[str, tuple[bytes, bytes]] = {}
        """Opened shares of neighbours: of the self-mask's seed and of the masking key."""
        self._own_share = b""
        self._members: tuple[str, ...] = ()

    def share(self, keys: Mapping[str, PublicKeys]) -> dict[str, str]:
        """Returns sealed shares of the self-mask's seed and of the masking key, by receiver.

        Raises:
            ValueError: The keys are too few, not signed, or lack this client's.
        """
        with self._step("share", then="mask"):
            if keys.get(self.client) != self.public:
                raise ValueError("the keys of this sum do not have those of its client")
            check_keys(keys, self._terms.run, self.round_number, self._identities)
            self._keys = dict(keys)
            self._plan = plan = plan_sum(
                self.round_number,
                keys,
                num_colluders=self._terms.num_colluders,
                neighbours=self._terms.neighbours,
            )
            self._check_count(keys)
            holders = plan.holders(self.client)
            seeds = split(self._self_seed, list(holders.values()), plan.share_threshold)
            key = self._private.masking.private_bytes_raw()
            masking_keys = split(key, list(holders.values()), plan.share_threshold)
            self._own_share = seeds[holders[self.client]]
            return {
                name: seal(
                    self._private.sealing,
                    keys[name].sealing,
                    plan.session,
                    (self.client, name),
                    seeds[holders[name]] + masking_keys[holders[name]],
                )
                for name in plan.neighbours[self.client]
            }

    def mask(self, shares: Mapping[str, str]) -> torch.Tensor:
        """Returns the numbers under masks, uint8 [d + 1, num_bytes].

        Args:
            shares: Sealed shares for this client by sender; neighbours without shares have dropped
                out.
        """
        with self._step("mask", then="confirm"):
            plan, size = self._plan, len(self._values)
            if strangers := sorted(set(shares) - set(plan.neighbours[self.client])):
                raise ValueError(f"{strangers[0]} is no neighbour of {self.client} in this sum")
            self._shares = {name: self._unseal(name, text) for name, text in shares.items()}
            values = self._values
            if self._noise is not None:
                values = values + self._noise(plan.num_honest)
            total = whole_numbers(values, self._num_bytes) + mask(self._self_seed, size)
            for name in shares:
                key = self._keys[name].masking
                pair = (self.client, name)
                add_pair_mask(total, self._private.masking, key, plan.session, pair)
            return as_bytes(total, self._num_bytes)

    def confirm(self, members: Sequence[str]) -> str:
        """Returns the client's signature of the members of the sum.

        Raises:
            ValueError: The members are too few, or a repeated sum has other ones.
        """
        with self._step("confirm", then="reveal"):
            plan, members = self._plan, tuple(sorted(set(members)))
            silent = set(plan.neighbours[self.client]) - set(self._shares)
            if not {self.client} <= set(members) <= set(plan.numbers) - silent:
                raise ValueError("the members of this sum are not those that share secrets in it")
            self._check_count(members)
            self._check_repeated(members)
            self._members = members
            return self._private.signing.sign(members_statement(plan.session, members)).hex()

    def reveal(
        self, members: Sequence[str], signatures: Mapping[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Returns shares of the members' self-masks, and of the masking keys of the others.

        Never both of one client; the sum is recorded before.

        Raises:
            ValueError: Other members were confirmed, or too few clients have confirmed them.
        """
        with self._step("reveal", then="nothing"):
            plan = self._plan
            if tuple(sorted(set(members))) != self._members:
                raise ValueError(f"{self.client} has confirmed other members of this sum")
            statement = members_statement(plan.session, self._members)
            confirmed = [
                name
                for name in self._members
                if name in signatures and has_signed(self._keys[name], statement, signatures[name])
            ]
            if len(confirmed) < plan.threshold:
                raise ValueError(
                    f"{len(confirmed)} clients have confirmed the members of this sum, "
                    f"{plan.threshold} must"
                )
            self._check_repeated(self._members)
            masks = {n: seed.hex() for n, (seed, _) in self._shares.items() if n in self._members}
            keys = {n: key.hex() for n, (_, key) in self._shares.items() if n not in self._members}
            self._ledger.note_sum(
                {
                    "run": self._terms.run,
                    "round": self.round_number,
                    "session": plan.session,
                    "client": self.client,
                    "base": self._origin.base,
                    "model": self._origin.model,
                    "members": list(self._members),
                    "self_masks": sorted(masks),
                    "masking_keys": sorted(keys),
                }
            )
            return {**masks, self.client: self._own_share.hex()}, keys

    @contextmanager
    def _step(self, step: str, *, then: str) -> Iterator[None]:
        """Carries out a step at its turn, and once; a step that fails ends the client's part."""
        if self._next != step:
            raise ValueError(
                f"{self.client} does not {step} now in the sum of round {self.round_number}: its "
                f"next step is {self._next}"
            )
        self._next = "nothing"
        yield
        self._next = then

    def _unseal(self, sender: str, content: str) -> tuple[bytes, bytes]:
        key = self._keys[sender].sealing
        pair = (sender, self.client)
        both = unseal(self._private.sealing, key, self._plan.session, pair, content)
        return both[:SHARE_BYTES], both[SHARE_BYTES:]

    def _check_count(self, clients: Collection[str]) -> None:
        least = max(self._plan.threshold, self._terms.least_in_mean)
        if len(clients) < least:
            raise ValueError(
                f"a sum of {len(clients)} updates is not opened here, only one of at least {least}"
            )

    def _check_repeated(self, members: tuple[str, ...]) -> None:
        """Raises ``ValueError`` if an update of the same origin is in a sum of other clients.

        The two sums would tell of the clients that are in one alone: updates from the same model
        and state are alike, or equal. An update of zeros tells of nothing.
        """
        if self._terms.repeats or not self._values[:-1].any():
            return
        own = self._origin
        for row in self._ledger.sums:
            is_same = (row["run"], row["base"]) == (self._terms.run, own.base)
            is_same |= row["model"] == own.model
            if row["client"] == self.client and is_same and row["members"] != list(members):
                raise ValueError(
                    f"{self.client} has helped to open a sum of other clients from the same model, "
                    f"in round {row['round']}: the two would tell of those that are in one alone; "
                    "repeat the round with the same clients, or set policy.repeats at the sites"
                )
