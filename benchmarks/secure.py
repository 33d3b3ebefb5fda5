"""What it costs to hide updates from the server that adds them, beside the plain mean.

    python benchmarks/secure.py
    python benchmarks/secure.py --num_parameters 4096 --num_clients 100

Masks (``options.masking``) beside homomorphic encryption by TenSEAL, where the extra
`bench` is installed: CKKS, which is approximate, and BFV, which is exact on whole numbers. All
three give every site one key and the server none. By number of parameters: the bytes of an update
in multiples of its float32 numbers, the seconds that a client takes to hide it, the server to add
all, and a site to open the sum (medians of five), and the largest error of the mean.

CKKS as TenSEAL recommends it for sums, in 8,192 coefficients of 60 + 40 + 60 bits; BFV in 4,096
coefficients of 54 + 55 bits, for integers modulo a prime below 2⁴⁰. Both have 128 bits of security.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from firm.federation.options.masking import Key, added, masked, opened
from firm.run import print_table

NUM_REPEATS = 5
STEP = 2.0**-24
"""Fixed-point step of BFV: as the modulus is smaller than that of masks, a coarser one."""

Scheme = tuple[Callable[[np.ndarray], Any], Callable[[Any], int], Callable[..., Any], Callable]
"""hide(values), size(message) in bytes, add(messages), open(total, messages)."""


def masks() -> Scheme:
    key = Key.generate()

    def undo(total: Any, messages: Sequence[Any]) -> np.ndarray:
        return opened(total, [nonce for nonce, _ in messages], key)

    return (
        partial(masked, key=key),
        lambda message: len(message[0]) + message[1].numel(),
        lambda messages: added([content for _, content in messages]),
        undo,
    )


def homomorphic(tenseal: Any, name: str) -> Scheme:
    """Returns CKKS or BFV; messages travel as bytes, and the server has no key."""
    secret_key = tenseal.ENCRYPTION_TYPE.SYMMETRIC
    if name == "CKKS":
        sizes = [60, 40, 60]
        scheme = tenseal.SCHEME_TYPE.CKKS
        context = tenseal.context(scheme, 8192, -1, sizes, secret_key)
        context.global_scale = 2.0**40
        slots, make, read = 4096, tenseal.ckks_vector, tenseal.ckks_vector_from
    else:
        modulus = prime_below(2**40, 2 * 4096)
        context = tenseal.context(tenseal.SCHEME_TYPE.BFV, 4096, modulus, [54, 55], secret_key)
        slots, make, read = 4096, tenseal.bfv_vector, tenseal.bfv_vector_from
    public = tenseal.context_from(
        context.serialize(
            save_public_key=False,
            save_secret_key=False,
            save_galois_keys=False,
            save_relin_keys=False,
        )
    )

    def hide(values: np.ndarray) -> list[bytes]:
        whole = values if name == "CKKS" else np.rint(values / STEP).astype(np.int64)
        parts = [whole[start : start + slots] for start in range(0, len(whole), slots)]
        return [make(context, part.tolist()).serialize() for part in parts]

    def add(messages: Sequence[list[bytes]]) -> list[bytes]:
        totals = []
        for parts in zip(*messages, strict=True):
            total = read(public, parts[0])
            for part in parts[1:]:
                total += read(public, part)
            totals.append(total.serialize())
        return totals

    def undo(total: list[bytes], messages: Sequence[Any]) -> np.ndarray:
        numbers = np.concatenate([read(context, part).decrypt() for part in total])
        return numbers if name == "CKKS" else numbers * STEP

    return hide, lambda message: sum(map(len, message)), add, undo


def prime_below(limit: int, step: int) -> int:
    """Returns the largest prime below a limit that is 1 modulo ``step``, as BFV's batches need."""
    candidate = limit - limit % step + 1
    while candidate >= limit or not is_prime(candidate):
        candidate -= step
    return candidate


def is_prime(number: int) -> bool:
    """Returns whether a number below 2⁶⁴ is prime, by Miller and Rabin's test with fixed bases."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the median time in seconds, and a result."""
    seconds, result = [], None
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return median(seconds), result


def row(name: str, scheme: Scheme, updates: np.ndarray) -> list[Any]:
    hide, size, add, undo = scheme
    hiding, message = timed(lambda: hide(updates[0]))
    messages = [message, *(hide(update) for update in updates[1:])]
    adding, total = timed(lambda: add(messages))
    opening, numbers = timed(lambda: undo(total, messages))
    error = np.abs(np.asarray(numbers) - updates.sum(0)).max() / len(updates)
    num_bytes = size(message)
    return [
        name,
        f"{updates.shape[1]:,}",
        f"{num_bytes:,}",
        f"{num_bytes / (4 * updates.shape[1]):.1f}",
        f"{hiding:.4f}",
        f"{adding:.4f}",
        f"{opening:.4f}",
        f"{error:.1e}",
    ]


def main(sizes: Sequence[int], num_clients: int) -> None:
    schemes = {"masks": masks()}
    try:
        tenseal = import_module("tenseal")
    except ImportError:
        print('without CKKS and BFV: pip install "firm-align[bench]"')
    else:
        schemes |= {name: homomorphic(tenseal, name) for name in ("CKKS", "BFV")}
    rows = []
    for size in sizes:
        updates = 0.01 * np.random.default_rng(0).standard_normal((num_clients, size))
        rows += [row(name, scheme, updates) for name, scheme in schemes.items()]
    header = ["", "parameters", "bytes", "/ plain", "hide s", "add s", "open s", "error"]
    print_table(f"the mean of {num_clients} updates that the server cannot read", header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_parameters", type=int, nargs="+", default=[4_096, 65_536, 1_048_576])
    parser.add_argument("--num_clients", type=int, default=8)
    given = parser.parse_args()
    main(given.num_parameters, given.num_clients)
