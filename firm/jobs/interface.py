"""The Python interface: aligns a model to rewards, passed as objects or by name."""

from __future__ import annotations  # only a run imports the types of its arguments

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firm.run.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from firm.jobs.alignment import Result
    from firm.jobs.objects import Prompts, Reward
    from firm.run.resuming import Resume


def align(
    model: str | Path | PreTrainedModel,
    rewards: Mapping[str, Reward] | None = None,
    prompts: Prompts | None = None,
    *,
    pairs: Mapping[str, Prompts] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    validation_prompts: Prompts | None = None,
    test_prompts: Prompts | None = None,
    config: str | Path | Sequence[str | Path] = (),
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: Resume = False,
) -> Result | Any:  # Any for None, which single processes need not check for
    """Aligns a language model to rewards or ranked pairs, and evaluates the result.

    The objectives are given by reward models, which score replies to the prompts, or by pairs of
    replies that people ranked.

    Example::

        from firm import align

        def brief(completions, **kwargs):
            return [-float(len(text)) for text in completions]

        result = align(
            "Qwen/Qwen2.5-0.5B-Instruct",
            rewards={"brief": brief, "positive": "positivity"},
            prompts=["Name a colour.", "What is a lake?", ...],
            settings={"rounds": 4, "num_clients": 2, "strategy.beta": 0.1},
        )
        result.rewards

    From pairs alone, by DPO::

        result = align(
            "Qwen/Qwen2.5-0.5B-Instruct",
            pairs={
                "helpful": [{"prompt": "Name a lake.", "chosen": "Como.", "rejected": "No."}, ...],
                "harmless": "rankings/harmless.jsonl",
            },
        )

    A model passed as an object is trained in place and restored before this returns, except for
    its device; the adapter is in `result.adapter`. If its weights differ from those at the path
    that it was loaded from, it is saved as `base` in the run's directory, so that PEFT and commands
    that take the run, such as `firm evaluate`, apply the adapter to the right base model.

    Args:
        model: The policy: a folder, a name on the Hugging Face hub, or a loaded model.
        rewards: Reward models by objective, in the order of the objectives. See `Reward`. A
            function has the signature of TRL's reward functions: it receives `prompts`,
            `completions` and the data's other fields as keywords, and returns one number for each
            completion, or None if it does not apply.
        prompts: Training prompts. See `Prompts`, and `load_prompts` for the format of rows. The
            settings `data.train.split`, `data.validation.split` and `data.test.split` select parts
            of these and the following prompts, as for files.
        pairs: Pairs by objective, instead of rewards and prompts: rows with `prompt`, `chosen` and
            `rejected`. See `load_pairs` for their forms. The settings `pairs.NAME.split`,
            `validation` and `test` select parts; by default, a tenth of the prompts is held out for
            validation and another one for testing.
        tokenizer: The policy's tokenizer; by default the one stored beside the model.
        validation_prompts: Prompts to evaluate on after each round; by default a tenth of
            `prompts`, sampled by the seed and excluded from training.
        test_prompts: Prompts to compare base and aligned model on; by default another tenth.
        config: YAML files or names of shipped configurations, as in `--config`.
        settings: Values by dotted key, as listed by `firm align --help`; they override `config`.
        out: The run's directory; by default runs/NAME-TIME.
        resume: Continues from the last checkpoint in `out`; "auto" starts a run if there is none
            yet.

    Returns:
        The result; None in a launcher's processes other than the first, which only serve it.

    Raises:
        UserError: An argument is malformed, a named resource is not available, or the run's
            directory is in use.
    """
    if pairs is not None and not (rewards is None and prompts is None):
        raise UserError(
            "pairs must be passed without rewards and prompts, since people have ranked the "
            "replies; leave them out, or pass rewards and prompts alone."
        )
    if pairs is None and (rewards is None or prompts is None):
        raise UserError("rewards and prompts must be given, or pairs; pass either.")
    if pairs is not None and not (validation_prompts is None and test_prompts is None):
        raise UserError(
            "validation_prompts and test_prompts must be left out with pairs, which are held out "
            "themselves: set pairs.NAME.validation and pairs.NAME.test."
        )
    with warnings.catch_warnings():  # about notebook progress bars, which no run uses
        warnings.filterwarnings("ignore", message="IProgress not found")
        import tqdm.auto  # noqa: F401

    from firm.jobs.objects import align_objects

    return align_objects(
        model,
        rewards,
        prompts,
        pairs=pairs,
        tokenizer=tokenizer,
        validation_prompts=validation_prompts,
        test_prompts=test_prompts,
        config=config,
        settings=settings,
        out=out,
        resume=resume,
    )
