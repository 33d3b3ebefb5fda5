"""Secure aggregation: the server learns the mean of updates, and no update.

``config`` has the settings, ``protocol`` the cryptography, ``part`` a client's side of one sum,
``engine`` the sites' side of a run, ``option`` and ``opening`` the server's.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.federation.options.secure.config import FEWEST, NUM_BYTES, TASKS, MasksConfig, Secure
    from firm.federation.options.secure.engine import SecureEngine
    from firm.federation.options.secure.option import SecureSums
    from firm.federation.options.secure.part import MemoryLedger, SumLedger
    from firm.federation.options.secure.protocol import Identities, KeyRing

__all__ = [
    "FEWEST",
    "NUM_BYTES",
    "TASKS",
    "Identities",
    "KeyRing",
    "MasksConfig",
    "MemoryLedger",
    "Secure",
    "SecureEngine",
    "SecureSums",
    "SumLedger",
]

__getattr__, __dir__ = lazy(__name__)
