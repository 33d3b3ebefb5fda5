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
        check_settings,
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
        comparison_table,
        evaluate,
        sample_replies,
    )
    from firm.alignment.kl_alarms import kl_alarm, mismatch_alarm, ratio_alarm
    from firm.alignment.policy import (
        borrowed,
        check_context,
        check_vocabulary,
        copy_adapter,
        is_stored_at,
        load_adapter_,
        load_base_model,
        load_policy,
        load_tokenizer,
        read_tokenizer,
        take_device,
    )
    from firm.alignment.policy_config import PolicyConfig
    from firm.alignment.prompt_data import (
        PromptsConfig,
        load_prompts,
        loose_text,
        overlap_notes,
        read_prompts,
    )
    from firm.alignment.prompts import (
        ChatMessage,
        Prompt,
        PromptFormat,
        as_prompt,
        check_prompts,
        prompt_of,
        reader_of,
    )
    from firm.alignment.rewards import Judges, RewardFn, calibrate, check_same, score
    from firm.alignment.rollout import logprobs_from
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
    "as_prompt",
    "borrowed",
    "build_trainer",
    "calibrate",
    "check_context",
    "check_passes",
    "check_prompts",
    "check_rows",
    "check_same",
    "check_settings",
    "check_vocabulary",
    "comparison_table",
    "copy_adapter",
    "default_target_modules",
    "evaluate",
    "fill_adapter_",
    "is_stored_at",
    "kl_alarm",
    "load_adapter_",
    "load_adapters",
    "load_base_model",
    "load_policy",
    "load_prompts",
    "load_tokenizer",
    "logprobs_from",
    "loose_text",
    "mismatch_alarm",
    "overlap_notes",
    "prompt_of",
    "ratio_alarm",
    "read_prompts",
    "read_tokenizer",
    "reader_of",
    "refold_adapter_",
    "sample_replies",
    "save_adapter",
    "save_folded",
    "score",
    "select_adapter",
    "take_device",
]

__getattr__, __dir__ = lazy(__name__)
