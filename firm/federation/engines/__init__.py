"""Engines: where clients run. A strategy asks, an engine carries and counts the bytes."""

from firm.federation.engines.engine import Engine
from firm.federation.engines.local import LocalEngine
from firm.federation.engines.processes import Processes, ProcessesEngine, Team

__all__ = ["Engine", "LocalEngine", "Processes", "ProcessesEngine", "Team"]
