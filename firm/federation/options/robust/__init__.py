"""Robust rules, one file each; every module here is imported, and registers itself."""

from importlib import import_module
from pkgutil import iter_modules

from firm.federation.options.robust.rule import RULES, RobustConfig, robust_rule, robust_updates

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["RULES", "RobustConfig", "robust_rule", "robust_updates"]
