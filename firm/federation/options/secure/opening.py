"""Opening of a secure sum by the server, from the shares that clients reveal."""

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from firm.federation.options.secure.masking import add_messages, largest, mask, real_numbers
from firm.federation.options.secure.messages import Revealed
from firm.federation.options.secure.protocol import Plan, PublicKeys, add_pair_mask
from firm.federation.options.secure.shamir import combine


def opened_sum(
    plan: Plan,
    keys: Mapping[str, PublicKeys],
    masked: Mapping[str, torch.Tensor],
    dropped: Iterable[str],
    revealed: Mapping[str, Revealed],
) -> np.ndarray:
    """Returns the sum of the members' numbers, float64 [d + 1].

    Args:
        plan: Plan of the sum.
        keys: Public keys by client.
        masked: The members' masked numbers, uint8 [d + 1, num_bytes] each.
        dropped: Clients that shared keys and did not send masked numbers.
        revealed: Clients' answers to ``RevealShares``.

    Raises:
        ValueError: There are too few shares of a secret, or a client sent other numbers than it
            should have.
    """
    total = add_messages(list(masked.values()))
    for member in masked:
        total -= mask(_secret(plan, revealed, member, "self_masks"), len(total))
    for client in dropped:
        private = X25519PrivateKey.from_private_bytes(
            _secret(plan, revealed, client, "masking_keys")
        )
        if private.public_key().public_bytes_raw().hex() != keys[client].masking:
            raise ValueError(f"the shares of the masking key of {client} are not those of its key")
        for member in plan.neighbours[client]:
            if member in masked:
                # the member added its mask for the client, and the client's cancels it
                pair = (client, member)
                add_pair_mask(total, private, keys[member].masking, plan.session, pair)
    (num_bytes,) = {message.shape[1] for message in masked.values()}
    numbers = real_numbers(total, num_bytes)
    limit = len(masked) * largest(num_bytes)
    if not 0 < numbers[-1] <= limit or np.abs(numbers).max() > limit:
        raise ValueError(
            f"what is left under the masks is not the sum of {len(masked)} updates: a client sent "
            "other numbers or shares than it should have"
        )
    return numbers


def _secret(
    plan: Plan,
    revealed: Mapping[str, Revealed],
    client: str,
    kind: Literal["self_masks", "masking_keys"],
) -> bytes:
    """Returns a secret of a client from the shares that its neighbours have revealed."""
    shares = {
        number: bytes.fromhex(getattr(revealed[holder], kind)[client])
        for holder, number in plan.holders(client).items()
        if holder in revealed and client in getattr(revealed[holder], kind)
    }
    try:
        return combine(shares, plan.share_threshold)
    except ValueError as error:
        raise ValueError(f"{client} stays under its mask: {error}") from error
