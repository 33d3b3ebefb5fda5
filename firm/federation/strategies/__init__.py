"""Strategies: one file is one paper's algorithm, written as one round.

A strategy is a function ``(state, clients, engine, cfg) -> (state, metrics)`` of the server's
state, the names of all clients, the engine that reaches them, and the configuration beside it.
"""

from collections.abc import Callable
from typing import Any

from firm.federation.strategies.fedavg import FedAvgConfig, fedavg
from firm.federation.strategies.firm import FirmConfig, firm

STRATEGIES: dict[str, Callable[..., Any]] = {"firm": firm, "fedavg": fedavg}
"""Every strategy by its configuration's ``name``."""

__all__ = ["STRATEGIES", "FedAvgConfig", "FirmConfig", "fedavg", "firm"]
