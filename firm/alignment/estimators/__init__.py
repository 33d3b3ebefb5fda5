"""Estimators, which compute one loss per objective from scored replies or pairs; one file each.

Configurations select an estimator by its `name` (`firm.alignment.estimator_config`). To add one,
write a file with a configuration decorated with `register_estimator` and an implementation of
`Estimator`.
"""

from firm.alignment.estimator_config import (
    ESTIMATORS,
    CriticFreeConfig,
    DPOConfig,
    EstimatorConfig,
    PPOConfig,
    register_estimator,
)
from firm.alignment.estimators.critic_free import CriticFree
from firm.alignment.estimators.dpo import DPO
from firm.alignment.estimators.estimator import Estimator, Experience, MinibatchGradients, Policy
from firm.alignment.estimators.ppo import PPO

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
