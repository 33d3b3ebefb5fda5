"""Runs on models, rewards and prompts that a program passes as objects."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firm.alignment.adapters.lora import adapted_modules
from firm.alignment.held_out import HELD_OUT, hold_out
from firm.alignment.policy import borrowed, is_stored_at, read_tokenizer
from firm.alignment.prompt_data import load_prompts, read_prompts
from firm.alignment.prompts import Prompt
from firm.base.devices import accelerator_type
from firm.base.inside import whole_folder
from firm.base.sanitize import printable
from firm.jobs.alignment import Result, run_folder
from firm.jobs.alignment import align as run_alignment
from firm.jobs.alignment_config import DEFAULT_SPLITS, GIVEN, AlignmentConfig, hold_out_seed
from firm.jobs.alignment_loading import Given
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import keep_test_prompts
from firm.jobs.sources import trained_settings
from firm.run.config import compose, lay_out, to_dict
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.resuming import Resume
from firm.run.shipped import with_shipped_paths
from reward_models.config import RewardModelConfig
from reward_models.registry import given_reward

Reward = Callable[..., Any] | str | Mapping[str, Any] | RewardModelConfig
"""A reward function, a text as in `reward_settings`, or the settings of a reward model."""
Prompts = str | Path | datasets.Dataset | datasets.DatasetDict | Iterable[str | Mapping[str, Any]]
"""Texts or rows, a dataset, or its path (a file, a folder or a name on the hub)."""


def align_objects(
    model: str | Path | PreTrainedModel,
    rewards: Mapping[str, Reward] | None,
    prompts: Prompts | None,
    *,
    pairs: Mapping[str, Prompts] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    validation_prompts: Prompts | None,
    test_prompts: Prompts | None,
    config: str | Path | Sequence[str | Path],
    settings: Mapping[str, Any] | None,
    out: str | Path | None,
    resume: Resume,
) -> Result | None:
    """Returns the result of `firm.align`, whose arguments are the same."""
    is_object = isinstance(model, PreTrainedModel)
    settings = dict(settings or {})
    _check_arguments(model, rewards, pairs, tokenizer, settings)
    if hasattr(model, "peft_config") or (is_object and adapted_modules(model)):
        raise UserError(
            "model must have no adapter of its own, which the run would replace: merge or unload "
            "it first. To go on from it, pass settings={'start': {FOLDER: 1}}."
        )
    if not isinstance(model, str | Path | PreTrainedModel):
        raise UserError(
            "model must be a folder, a name on the hub or a loaded transformers model, got "
            f"{type(model).__name__}."
        )
    path = str(model.name_or_path or "") if is_object else str(model)
    if not is_object:
        fetch_policy(path)
    path = with_shipped_paths(path)
    if is_object and not path and tokenizer is None:
        raise UserError(
            "tokenizer must be given, since the model does not know the path it was loaded from; "
            "pass the model's tokenizer."
        )
    is_stored = not is_object or (bool(path) and is_stored_at(path, model))
    files = [config] if isinstance(config, str | Path) else config
    overrides = {
        "policy.path": path if is_stored else "base",
        **({"policy.dtype": str(model.dtype).removeprefix("torch.")} if is_object else {}),
        **_objectives(rewards, pairs),
        **({} if pairs is None else _learner_from_pairs(files, settings)),
        **settings,
        **({f"data.{split}.source": GIVEN for split in DEFAULT_SPLITS} if pairs is None else {}),
        **{
            f"data.{split}.source": str(own)
            for split, own in (("validation", validation_prompts), ("test", test_prompts))
            if isinstance(own, str | Path)
        },
        "resume": resume,
        **({"out": str(out)} if out else {}),
    }
    cfg = compose(AlignmentConfig, files, list(overrides.items()), source="settings")
    out = run_folder(cfg)
    cfg = replace(cfg, out=out)
    share = cfg.data.hold_out or 1 / HELD_OUT
    if pairs is None:  # `_splits` holds out
        cfg = replace(cfg, data=replace(cfg.data, hold_out=0.0))
    if not is_stored:
        cfg = replace(cfg, policy=replace(cfg.policy, path=str(out.resolve() / "base")))
    tokenizer = tokenizer or read_tokenizer(path)
    given = Given(
        model=model if is_object else None,
        tokenizer=tokenizer,
        reward_fns={
            name: given_reward(reward, cfg.rewards[name], name)
            for name, reward in (rewards or {}).items()
            if callable(reward)
        },
        rows=_pair_rows(pairs, cfg)
        if prompts is None
        else _splits(prompts, validation_prompts, test_prompts, cfg, tokenizer, share=share),
    )
    with _as_in_a_program():
        with borrowed(given.model):
            result = run_alignment(cfg, given)
        if is_object and not is_stored and result:
            with whole_folder(result.path / "base", may_exist=True) as draft:
                model.save_pretrained(draft)
                tokenizer.save_pretrained(draft)
    if (
        result
        and "test" in given.rows
        and cfg.data.test.source == GIVEN
        and cfg.evaluation.num_shown_samples
    ):
        keep_test_prompts(result.path, given.rows["test"])
    return result


def _check_arguments(
    model: Any, rewards: Any, pairs: Any, tokenizer: Any, settings: Mapping[str, Any]
) -> None:
    """Raises ``UserError`` on arguments of other types, and on settings of what they give."""
    for name, own in (("rewards", rewards), ("pairs", pairs)):
        if own is None:
            continue
        if not isinstance(own, Mapping):
            raise UserError(
                f"{name} must be given by objective, such as {name}={{'helpful': ...}}, got "
                f"{type(own).__name__}."
            )
        if name in settings:
            raise UserError(
                f"settings must not have {name} beside the argument {name}, which it would "
                f"replace: pass all of them in one, or single keys such as "
                f"{name}.{next(iter(own), 'helpful')}.normalization."
            )
    policy = settings.get("policy")
    if "policy.path" in settings or (isinstance(policy, Mapping) and "path" in policy):
        raise UserError("settings must not have policy.path: pass it as the argument model.")
    dtype = settings.get("policy.dtype", isinstance(policy, Mapping) and policy.get("dtype"))
    own = str(getattr(model, "dtype", dtype)).removeprefix("torch.")
    if dtype and str(dtype) != own:
        raise UserError(
            f"settings must not have another policy.dtype than the model, which has {own}, got "
            f"{dtype}: leave it out, or convert the model first."
        )
    sources = {f"data.{split}.source": split for split in DEFAULT_SPLITS}
    for key, _ in leaves(settings if pairs is None else {}):
        for source, split in sources.items():
            if f"{key}.".startswith(f"{source}."):  # or an entry of a list
                own = "prompts" if split == "train" else f"{split}_prompts"
                raise UserError(f"settings must not have {source}: pass it as the argument {own}.")
    if settings.get("plan"):
        raise UserError("settings must not have plan: `firm plan` prints the plan of a run.")
    if isinstance(tokenizer, str | Path):
        raise UserError(
            "tokenizer must be a loaded tokenizer: pass "
            f"AutoTokenizer.from_pretrained({str(tokenizer)!r})."
        )
    if isinstance(model, PreTrainedModel):
        if not model.can_generate():
            raise UserError(
                f"model must generate texts, got {type(model).__name__}: load it by "
                "AutoModelForCausalLM."
            )
        if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(
                f"model must be float32, bfloat16 or float16, got {model.dtype}: call "
                "model.float()."
            )
        if model.device.type == "meta":
            raise UserError("model must have weights, got one on the device meta.")


@contextmanager
def _as_in_a_program() -> Iterator[None]:
    """Sets what a run expects of this process, and restores what the caller had set."""
    had_progress = transformers.utils.logging.is_progress_bar_enabled()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    transformers.utils.logging.disable_progress_bar()
    try:
        with ExitStack() as settings:
            settings.enter_context(torch.inference_mode(False))
            settings.enter_context(torch.enable_grad())
            for kind in sorted({"cpu", accelerator_type() or "cpu"}):
                settings.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        torch.set_default_dtype(dtype)
        if had_progress:
            transformers.utils.logging.enable_progress_bar()


def _objectives(
    rewards: Mapping[str, Reward] | None, pairs: Mapping[str, Prompts] | None
) -> dict[str, Any]:
    """Returns the settings of the objectives, by key."""
    if rewards is not None:
        return {"rewards": {name: _reward_settings(name, own) for name, own in rewards.items()}}
    sources = {
        name: {"source": str(own) if isinstance(own, str | Path) else GIVEN}
        for name, own in (pairs or {}).items()
    }
    return {"pairs": sources}


def _learner_from_pairs(files: Sequence[str | Path], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the setting of DPO, unless the files' estimator learns from pairs."""
    plugins = [(key, own) for key, own in settings.items() if key == "plugins"]
    tree = lay_out(AlignmentConfig, files, plugins, source="settings")
    return {} if tree.values["estimator"].form.learns_from == "pairs" else {"estimator.name": "dpo"}


def _pair_rows(
    pairs: Mapping[str, Prompts] | None, cfg: AlignmentConfig
) -> dict[str, list[Prompt]]:
    """Returns the rows of pairs that were passed as objects; see `Given`."""
    rows = {}
    for name, source in (pairs or {}).items():
        if isinstance(source, str | Path):
            continue
        config = cfg.pairs[name]
        splits = {name: config.split}
        splits |= {f"{name}/{use}": getattr(config, use) for use in ("validation", "test")}
        for key, split in splits.items():
            if split is not None or key == name:
                rows[key] = read_prompts(
                    source, split, reader=config.reader, name=f"the pairs of {name}"
                )
    return rows


def _reward_settings(name: str, reward: Reward) -> dict[str, Any]:
    """Returns the settings of a reward model."""
    if isinstance(reward, RewardModelConfig):
        return to_dict(reward)
    if isinstance(reward, str):
        return trained_settings(reward)
    if isinstance(reward, Mapping):
        return dict(reward)
    if callable(reward):
        kind: Any = reward if hasattr(reward, "__qualname__") else type(reward)
        return {"name": f"{kind.__module__}.{kind.__qualname__}"}
    raise UserError(
        f"rewards: {name!r} must be a function, a name, a path or settings of a reward model, got "
        f"{type(reward).__name__}."
    )


def _splits(
    train: Prompts,
    validation: Prompts | None,
    test: Prompts | None,
    cfg: AlignmentConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    share: float,
) -> dict[str, list[Prompt]]:
    """Returns the prompts by split; missing ones are a share of the training prompts each.

    They are drawn from what the filters of `data.train` leave, as on the command line.
    """
    given = {"validation": validation, "test": test}
    missing = [use for use, own in given.items() if own is None]
    rows = _rows(train, "train", "prompts", cfg)
    if missing and rows:
        rows = load_prompts(
            cfg.data.train,
            tokenizer,
            given=rows,
            prompt_format=cfg.policy.prompt,
            on_note=lambda text: print(f"note: data.train: {printable(text)}", file=sys.stderr),
        )
    held_out = hold_out(rows, missing, share, seed=hold_out_seed(cfg), key="prompts")
    if not cfg.evaluation.num_validation_prompts:  # they are not measured
        held_out["train"] = held_out["train"] + held_out.pop("validation", [])
    own = {
        use: _rows(each, use, f"{use}_prompts", cfg)
        for use, each in given.items()
        if each is not None
    }
    return held_out | own


def _rows(given: Prompts, use: str, argument: str, cfg: AlignmentConfig) -> list[Prompt]:
    source = with_shipped_paths(given) if isinstance(given, str | Path) else given
    config = getattr(cfg.data, use)
    return read_prompts(
        source,
        config.split,
        reader=config.reader,
        default_split=DEFAULT_SPLITS[use],
        name=argument,
    )
