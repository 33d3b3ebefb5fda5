"""Secure aggregation: the server learns the mean of updates, and no update.

``protocol`` has the cryptography, ``part`` a client's side of one sum, ``engine`` the sites' side
of a run, ``option`` and ``opening`` the server's.
"""

from firm.federation.options.secure.engine import FEWEST, SecureEngine
from firm.federation.options.secure.messages import NUM_BYTES, TASKS
from firm.federation.options.secure.option import MasksConfig, Secure, SecureSums
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
