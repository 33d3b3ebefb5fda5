"""Robust rules, one per file; every module in this package is imported and registers its rule."""

from importlib import import_module
from pkgutil import iter_modules

from firm.federation.options.robust.rule import RULES, RobustConfig, robust_rule, robust_updates

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "RobustConfig", "robust_rule", "robust_updates"]
