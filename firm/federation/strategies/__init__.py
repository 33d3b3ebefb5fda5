"""Strategies: each file implements and registers one paper's algorithm, written as one round.

Every module in this package is imported, so that ``STRATEGIES`` contains all of them. Strategies of
other packages are registered by the same decorator when they are imported (a configuration's
``plugins``).
"""

from importlib import import_module
from pkgutil import iter_modules

from firm.federation.strategy import STRATEGIES, StrategyConfig, strategy

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["STRATEGIES", "StrategyConfig", "strategy"]
