"""Robust rules, one per file; ``rule`` has their registry and configuration."""

from firm.federation.options.robust.rule import RULES, RobustConfig, robust_rule

__all__ = ["RULES", "RobustConfig", "robust_rule"]
