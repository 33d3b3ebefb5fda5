"""Strategies: one file is one paper's algorithm, written as one round, and registers itself.

Every module here is imported, so that ``STRATEGIES`` has all of them; those of other packages
register themselves with the same decorator when they are imported (a configuration's ``plugins``).
"""

from importlib import import_module
from pkgutil import iter_modules

from firm.federation.strategy import STRATEGIES, StrategyConfig, strategy

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["STRATEGIES", "StrategyConfig", "strategy"]
