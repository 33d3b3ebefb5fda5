"""Engines run clients: they deliver a strategy's requests and count the bytes."""

from firm.federation.engines.engine import ENGINES, Engine, engine
from firm.federation.engines.local import ClientStates, LocalEngine, MemoryStates
from firm.federation.engines.processes import ProcessesEngine
from firm.federation.engines.stacked import StackedEngine
from firm.federation.processes import Processes, Team

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
