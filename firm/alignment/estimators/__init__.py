"""Estimators, which turn scored replies into one loss per objective; one file per estimator.

A configuration chooses one by its `name`. A new one is a file with a configuration under
`register_estimator` and an implementation of `Estimator`.
"""

from firm.alignment.estimators.critic_free import CriticFree, CriticFreeConfig
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
    "ESTIMATORS",
    "PPO",
    "CriticFree",
    "CriticFreeConfig",
    "Estimator",
    "EstimatorConfig",
    "Experience",
    "MinibatchGradients",
    "PPOConfig",
    "Policy",
    "register_estimator",
]
