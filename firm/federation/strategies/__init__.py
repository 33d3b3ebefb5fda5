"""Strategies: each file implements and registers one paper's algorithm, written as one round.

Their configurations are in ``firm.federation.strategy_configs``; a strategy is imported when it is
first used. Strategies of other packages are registered, with their configurations, by the decorator
``strategy`` when they are imported (a configuration's ``plugins``).
"""

import firm.federation.strategy_configs  # noqa: F401  # registers the shipped ones
from firm.federation.strategy import STRATEGIES, StrategyConfig, strategy

__all__ = ["STRATEGIES", "StrategyConfig", "strategy"]
