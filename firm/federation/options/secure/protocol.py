"""Functions of the protocol: keys of one round, neighbours, thresholds, sealed shares, signatures.

Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving Machine Learning"
(doi:10.1145/3133956.3133982), in its form against an active server, with signed keys and a check
that all clients open the same sum; and the sparse graph of neighbours of Bell et al. (2020),
"Secure Single-Server Aggregation with (Poly)Logarithmic Overhead" (doi:10.1145/3372297.3417885).

Every key is derived for one purpose by HKDF, with the session in its label. A session is the hash
of a round's number, its clients, and their public keys with signatures, which cover the run. As
each client's keys are fresh, no two sums share a session.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lgamma, log
from typing import Annotated, Protocol, Self

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import StringConstraints

from firm.federation.options.secure.config import Neighbours
from firm.federation.options.secure.masking import mask
from firm.federation.options.secure.shamir import SHARE_BYTES

SECURITY_BITS = 40
"""A sparse graph fails to protect with a probability of at most 2⁻⁴⁰."""
DROPPED_SHARE = 0.1
"""Share of a round's clients that may drop out of a sparse graph."""
ABORT_BITS = 20
"""Such a sum fails with a probability of at most 2⁻²⁰."""


def _hex(num_bytes: int, most: int | None = None) -> StringConstraints:
    return StringConstraints(pattern=f"^([0-9a-f]{{2}}){{{num_bytes},{most or num_bytes}}}$")


PublicKey = Annotated[str, _hex(32)]
"""A public key of X25519 or Ed25519 in hexadecimal digits."""
Signature = Annotated[str, _hex(64, 1024)]
"""A signature by Ed25519 or RSA in hexadecimal digits."""
Share = Annotated[str, _hex(SHARE_BYTES)]
"""A share of a secret in hexadecimal digits."""
SealedShares = Annotated[str, _hex(2 * SHARE_BYTES + 16)]
"""A sealed pair of shares, with the tag of its cipher, in hexadecimal digits."""


# --- Identities -----------------------------------------------------------------------------------

SigningKey = Ed25519PrivateKey | RSAPrivateKey
VerifyingKey = Ed25519PublicKey | RSAPublicKey
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


class Identities(Protocol):
    """Signs for clients of this party, and checks signatures of all clients."""

    def sign(self, client: str, statement: bytes) -> str:
        """Returns the client's signature in hexadecimal digits."""
        ...

    def check(self, client: str, statement: bytes, signature: str) -> None:
        """Raises ``ValueError`` if the client has not signed the statement."""
        ...


class KeyRing:
    """Long-term keys: private ones of a party's own clients, public ones of all clients.

    Args:
        own: Signing keys by client.
        public: Public keys by client.
    """

    def __init__(
        self, own: Mapping[str, SigningKey], public: Mapping[str, VerifyingKey] | None = None
    ) -> None:
        self._own = dict(own)
        self._public = {name: key.public_key() for name, key in own.items()} | dict(public or {})

    @classmethod
    def generate(cls, clients: Sequence[str]) -> Self:
        """Returns new keys of clients of one party."""
        return cls({name: Ed25519PrivateKey.generate() for name in clients})

    def sign(self, client: str, statement: bytes) -> str:
        """Returns the client's signature in hexadecimal digits."""
        key = self._own[client]
        if isinstance(key, Ed25519PrivateKey):
            return key.sign(statement).hex()
        return key.sign(statement, _PSS, hashes.SHA256()).hex()

    def check(self, client: str, statement: bytes, signature: str) -> None:
        """Raises ``ValueError`` if the client has not signed the statement."""
        key = self._public.get(client)
        try:
            if isinstance(key, Ed25519PublicKey):
                key.verify(bytes.fromhex(signature), statement)
                return
            if isinstance(key, RSAPublicKey):
                key.verify(bytes.fromhex(signature), statement, _PSS, hashes.SHA256())
                return
        except InvalidSignature:
            pass
        raise ValueError(f"the keys of {client} are not signed by its site")


class OwnIdentities(KeyRing):
    """The key ring of a process that has all clients: each gets a key when it first signs."""

    def __init__(self) -> None:
        super().__init__({})

    def sign(self, client: str, statement: bytes) -> str:
        """Returns the client's signature in hexadecimal digits."""
        if client not in self._own:
            self._own[client] = Ed25519PrivateKey.generate()
            self._public[client] = self._own[client].public_key()
        return super().sign(client, statement)


# --- Keys of one round ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PublicKeys:
    """A client's public keys of one sum, signed with its long-term key."""

    sealing: PublicKey
    """X25519: seals shares that are sent to the client."""
    masking: PublicKey
    """X25519: agrees on a mask with each neighbour."""
    signing: PublicKey
    """Ed25519: signs the members of the sum."""
    signature: Signature
    """Signature of the three keys, the run, the round and the client."""


class PrivateKeys:
    """A client's private keys of one sum."""

    def __init__(self) -> None:
        self.sealing = X25519PrivateKey.generate()
        self.masking = X25519PrivateKey.generate()
        self.signing = Ed25519PrivateKey.generate()

    def public(
        self, client: str, run: str, round_number: int, identities: Identities
    ) -> PublicKeys:
        """Returns the signed public keys."""
        keys = [
            key.public_key().public_bytes_raw().hex()
            for key in (self.sealing, self.masking, self.signing)
        ]
        signature = identities.sign(client, _keys_statement(client, run, round_number, keys))
        return PublicKeys(keys[0], keys[1], keys[2], signature)


def check_keys(
    keys: Mapping[str, PublicKeys], run: str, round_number: int, identities: Identities
) -> None:
    """Raises ``ValueError`` unless each client's keys are signed for this round, and distinct."""
    for client, own in keys.items():
        statement = _keys_statement(
            client, run, round_number, [own.sealing, own.masking, own.signing]
        )
        identities.check(client, statement, own.signature)
    parts = [key for own in keys.values() for key in (own.sealing, own.masking, own.signing)]
    if len(set(parts)) < len(parts):
        raise ValueError("two clients of a sum have the same key")


def session_of(round_number: int, keys: Mapping[str, PublicKeys]) -> str:
    """Returns the name of a sum, which its round and all its public keys determine."""
    content = [[name, *vars(own).values()] for name, own in sorted(keys.items())]
    return hashlib.sha256(_statement("session", round_number, content)).hexdigest()


def _keys_statement(client: str, run: str, round_number: int, keys: Sequence[str]) -> bytes:
    return _statement("keys", run, round_number, client, list(keys))


def _statement(kind: str, *content: object) -> bytes:
    return json.dumps(["firm secure sum", kind, *content], separators=(",", ":")).encode()


# --- Neighbours and thresholds --------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Neighbours of the clients in a sum, and numbers of clients that it requires."""

    session: str
    """Name of the sum."""
    threshold: int
    """Fewest clients in the sum, and fewest that must confirm it."""
    num_honest: int
    """Fewest clients in the sum that do not collude."""
    share_threshold: int
    """Shares that determine a secret."""
    neighbours: Mapping[str, tuple[str, ...]]
    """Clients that share a mask, by client; in order, without the client itself."""
    numbers: Mapping[str, int]
    """The clients' numbers as holders of shares, from 1."""

    def holders(self, client: str) -> dict[str, int]:
        """Returns the clients that hold shares of a client's secrets, with their numbers."""
        return {name: self.numbers[name] for name in (client, *self.neighbours[client])}


def assumed_colluders(num_colluders: int | None, num_clients: int) -> int:
    """Returns how many of a federation's clients may collude with the server; a third by default.

    Args:
        num_colluders: The configured number, if any.
        num_clients: Clients of the federation, not of a round.
    """
    return num_clients // 3 if num_colluders is None else num_colluders


def threshold(num_clients: int, num_colluders: int) -> int:
    """Returns the fewest clients that open a sum: more than (n + f) / 2.

    A client that does not collude reveals, of each other, a share of its self-mask or of its
    masking key. For both, a server with f colluders needs 2t shares of n + f. The same bound makes
    any two sets of t clients share one that does not collude.

    Raises:
        ValueError: No number of clients is enough.
    """
    if num_colluders > num_clients - 2:
        raise ValueError(
            f"a sum of {num_clients} clients hides nothing from {num_colluders} that collude; it "
            f"requires {num_colluders + 2} clients, or masks.num_colluders of at most "
            f"{max(0, num_clients - 2)}."
        )
    return (num_clients + num_colluders) // 2 + 1


def plan_sum(
    round_number: int,
    keys: Mapping[str, PublicKeys],
    *,
    num_colluders: int,
    neighbours: Neighbours = "all",
) -> Plan:
    """Returns the plan of a sum, which all parties derive from the public keys.

    The number of colluders comes from what they have agreed to, never from the keys: the server
    chooses whose keys it shows.

    Args:
        round_number: The round.
        keys: Public keys by client.
        num_colluders: Clients of the federation that may collude with the server, f.
        neighbours: Whether all pairs of clients share a mask, or each has few neighbours.
    """
    session = session_of(round_number, keys)
    count = len(keys)
    fewest = threshold(count, num_colluders)
    degree, share_threshold = count - 1, fewest
    if neighbours == "few" and (sparse := sparse_graph(count, num_colluders)):
        degree, share_threshold = sparse
    names = sorted(keys)
    ring = sorted(names, key=lambda name: hashlib.sha256(f"{session} {name}".encode()).digest())
    near = {}
    for place, name in enumerate(ring):
        steps = range(1, count) if degree == count - 1 else range(-(degree // 2), degree // 2 + 1)
        near[name] = tuple(sorted(ring[(place + step) % count] for step in steps if step))
    return Plan(
        session=session,
        threshold=fewest,
        num_honest=fewest - num_colluders,
        share_threshold=share_threshold,
        neighbours=near,
        numbers={name: number for number, name in enumerate(names, start=1)},
    )


@lru_cache(maxsize=64)
def sparse_graph(num_clients: int, num_colluders: int) -> tuple[int, int] | None:
    """Returns the number of neighbours and of shares of a sparse graph; None if it takes all pairs.

    The clients are on a ring in random order, and each has the k/2 nearest on both sides as
    neighbours (Bell et al. 2020). With a probability of at least 1 - 2⁻⁴⁰, no client has so many
    colluders among its neighbours that they and the server learn both of its secrets, and those
    that neither collude nor drop out are connected, however many may drop out. A sum from which a
    tenth drops out fails with a probability of at most 2⁻²⁰.
    """
    from scipy.stats import hypergeom  # takes half a second to import, and few runs need it

    others, log_count = num_clients - 1, log(num_clients)
    num_lost = num_clients - threshold(num_clients, num_colluders)
    for degree in range(2, num_clients - 1, 2):
        half = degree // 2
        # a ring falls apart only where half of a client's neighbours in a row are gone
        gone, log_risk = num_colluders + num_lost, -SECURITY_BITS * log(2)
        if gone >= half and log_count + _log_ratio(gone, num_clients, half) > log_risk:
            continue
        near = int(hypergeom.isf(2.0**-SECURITY_BITS / num_clients, others, num_colluders, degree))
        share_threshold = (degree + 1 + near) // 2 + 1
        spare = degree + 1 - share_threshold
        dropped = int(DROPPED_SHARE * num_clients)
        if (
            spare < 0
            or num_clients * hypergeom.sf(spare - 1, others, dropped, degree) > 2.0**-ABORT_BITS
        ):
            continue
        return degree, share_threshold
    return None


def _log_ratio(part: int, whole: int, count: int) -> float:
    """Returns the logarithm of the probability that ``count`` draws all come from a part."""
    return (
        lgamma(part + 1) - lgamma(part - count + 1) - lgamma(whole + 1) + lgamma(whole - count + 1)
    )


# --- Masks and shares -----------------------------------------------------------------------------


def add_pair_mask(
    total: np.ndarray,
    own: X25519PrivateKey,
    other: PublicKey,
    session: str,
    pair: tuple[str, str],
) -> None:
    """Adds in place the mask that the first client of a pair has for the second, or subtracts it.

    The two clients' masks for each other add up to zero. ``own`` is the masking key of one of the
    two, ``other`` the public one of the other.
    """
    client, neighbour = pair
    seed = _derive_key(own, other, _statement("mask", session, sorted(pair)))
    if client < neighbour:
        total += mask(seed, len(total))
    else:
        total -= mask(seed, len(total))


def seal(
    own: X25519PrivateKey, other: PublicKey, session: str, pair: tuple[str, str], content: bytes
) -> str:
    """Returns content that only the second client of a pair can read, as the first one's."""
    label = _statement("shares", session, pair)
    # the key is that of one message, so that the nonce may be constant
    return ChaCha20Poly1305(_derive_key(own, other, label)).encrypt(bytes(12), content, label).hex()


def unseal(
    own: X25519PrivateKey, other: PublicKey, session: str, pair: tuple[str, str], content: str
) -> bytes:
    """Returns the content of a sealed message, with the second client's private key.

    Raises:
        ValueError: It is not that of the first client to the second in this session.
    """
    label = _statement("shares", session, pair)
    try:
        cipher = ChaCha20Poly1305(_derive_key(own, other, label))
        return cipher.decrypt(bytes(12), bytes.fromhex(content), label)
    except InvalidTag:
        sender, receiver = pair
        raise ValueError(
            f"the shares are not those that {sender} sealed for {receiver} in this sum"
        ) from None


def _derive_key(own: X25519PrivateKey, other: PublicKey, label: bytes) -> bytes:
    secret = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    return HKDF(hashes.SHA256(), length=32, salt=None, info=label).derive(secret)


# --- Members --------------------------------------------------------------------------------------


def members_statement(session: str, members: Sequence[str]) -> bytes:
    """Returns the statement that a client signs before it helps to open a sum."""
    return _statement("members", session, sorted(members))


def has_signed(keys: PublicKeys, statement: bytes, signature: str) -> bool:
    """Returns whether a statement is signed with a client's key of this sum."""
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(keys.signing))
    try:
        public.verify(bytes.fromhex(signature), statement)
    except InvalidSignature:
        return False
    return True
