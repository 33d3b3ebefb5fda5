"""Engines run clients: they deliver a strategy's requests and count the bytes."""

from firm.federation.engines.engine import ENGINES, Engine, engine
from firm.federation.engines.local import ClientStates, LocalEngine, MemoryStates
from firm.federation.engines.processes import Processes, ProcessesEngine, Team
from firm.federation.engines.stacked import StackedEngine

__all__ = [
    "ENGINES",
    "ClientStates",
    "Engine",
    "LocalEngine",
    "MemoryStates",
    "Processes",
    "ProcessesEngine",
    "StackedEngine",
    "Team",
    "engine",
]
