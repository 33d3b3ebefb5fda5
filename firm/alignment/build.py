"""Builds the trainer of a run, for PPO inside TRL's trainer."""

from importlib.util import find_spec
from typing import Any

from firm.alignment.estimator_config import EstimatorConfig, PPOConfig
from firm.alignment.placement import is_placed
from firm.alignment.sharding import ShardedTeam
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.base.randomness import kept_generators


def has_trl_ppo() -> bool:
    """Returns whether the installed TRL still has a `PPOTrainer`."""
    try:
        return find_spec("trl.experimental.ppo") is not None
    except ModuleNotFoundError:  # TRL has no experimental package
        return False


def build_trainer(config: EstimatorConfig, **arguments: Any) -> MultiObjectiveTrainer:
    """Returns a trainer with the stages of a local step; for PPO, inside TRL's if available.

    TRL removed `PPOTrainer` in 1.13, and would move a policy of several devices. Clients train
    bitwise identical adapters with and without it.

    Args:
        config: The estimator.
        **arguments: Arguments of `MultiObjectiveTrainer`.
    """
    is_divided = isinstance(arguments.get("team"), ShardedTeam) or is_placed(arguments["policy"])
    if isinstance(config, PPOConfig) and has_trl_ppo() and not is_divided:
        from firm.alignment.trl_ppo import MultiObjectivePPOTrainer

        with kept_generators():  # TRL seeds them
            trainer = MultiObjectivePPOTrainer(config, **arguments)
        trainer.leave_training_to_clients_()
        return trainer.stages
    return MultiObjectiveTrainer(config, **arguments)
