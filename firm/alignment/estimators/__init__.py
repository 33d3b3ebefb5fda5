"""Estimators, which compute one loss per objective from scored replies or pairs; one file each.

Configurations select an estimator by its `name`. To add one, write a file with a configuration
decorated with `register_estimator` and an implementation of `Estimator`.
"""

from firm.alignment.estimators.critic_free import CriticFree, CriticFreeConfig
from firm.alignment.estimators.dpo import DPO, DPOConfig
from firm.alignment.estimators.estimator import (
    ESTIMATORS,
    Estimator,
    EstimatorConfig,
    Experience,
    MinibatchGradients,
    Policy,
    register_estimator,
)
from firm.alignment.estimators.ppo import PPO, PPOConfig

__all__ = [
    "DPO",
    "ESTIMATORS",
    "PPO",
    "CriticFree",
    "CriticFreeConfig",
    "DPOConfig",
    "Estimator",
    "EstimatorConfig",
    "Experience",
    "MinibatchGradients",
    "PPOConfig",
    "Policy",
    "register_estimator",
]
