"""Alignment of language models: one policy gradient per reward model.

`prompts`, `rollout`, `rewards` and an estimator in `estimators` implement the stages of a local
step, as pure functions where possible. `trainer` combines them, and `trl_ppo` does so inside TRL's
trainer; `client` implements the federation's client; `evaluation` measures a policy on held-out
prompts.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.alignment.adapter_files import (
        fill_adapter_,
        load_adapters,
        refold_adapter_,
        save_adapter,
        save_folded,
        select_adapter,
    )
    from firm.alignment.adapters import LoraSettings
    from firm.alignment.adapters.target_modules import default_target_modules
    from firm.alignment.build import build_trainer
    from firm.alignment.calibration import Calibration
    from firm.alignment.client import AlignmentClient
    from firm.alignment.estimator_config import EstimatorConfig, KLConfig, PPOConfig
    from firm.alignment.evaluation import (
        Evaluation,
        MetricComparison,
        Replies,
        evaluate,
        sample_replies,
    )
    from firm.alignment.kl_alarms import kl_alarm, mismatch_alarm, ratio_alarm
    from firm.alignment.policy import (
        copy_adapter,
        load_adapter_,
        load_base_model,
        load_policy,
        load_tokenizer,
        take_device,
    )
    from firm.alignment.policy_config import PolicyConfig
    from firm.alignment.prompt_data import (
        PromptsConfig,
        load_prompts,
        read_prompts,
    )
    from firm.alignment.prompts import (
        ChatMessage,
        Prompt,
        PromptFormat,
        prompt_of,
    )
    from firm.alignment.rewards import Judges, RewardFn, calibrate, score
    from firm.alignment.rollout_config import RolloutConfig
    from firm.alignment.self_check import check_passes, check_rows
    from firm.alignment.trainer import MultiObjectiveTrainer

__all__ = [
    "AlignmentClient",
    "Calibration",
    "ChatMessage",
    "EstimatorConfig",
    "Evaluation",
    "Judges",
    "KLConfig",
    "LoraSettings",
    "MetricComparison",
    "MultiObjectiveTrainer",
    "PPOConfig",
    "PolicyConfig",
    "Prompt",
    "PromptFormat",
    "PromptsConfig",
    "Replies",
    "RewardFn",
    "RolloutConfig",
    "build_trainer",
    "calibrate",
    "check_passes",
    "check_rows",
    "copy_adapter",
    "default_target_modules",
    "evaluate",
    "fill_adapter_",
    "kl_alarm",
    "load_adapter_",
    "load_adapters",
    "load_base_model",
    "load_policy",
    "load_prompts",
    "load_tokenizer",
    "mismatch_alarm",
    "prompt_of",
    "ratio_alarm",
    "read_prompts",
    "refold_adapter_",
    "sample_replies",
    "save_adapter",
    "save_folded",
    "score",
    "select_adapter",
    "take_device",
]

__getattr__, __dir__ = lazy(__name__)
