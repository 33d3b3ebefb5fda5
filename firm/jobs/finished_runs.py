"""Reads finished runs: their settings, adapters and frozen calibrations."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from firm.alignment.adapters.conditioned import PREFERENCE_SAMPLERS
from firm.alignment.adapters.lora import ADAPTERS
from firm.alignment.calibration import Calibration
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.prompts import Prompt
from firm.alignment.rollout_config import ROLLOUT_ENGINES
from firm.base.inside import replace_text
from firm.base.json_text import json_text
from firm.jobs.alignment_config import GIVEN, NO_PROMPTS
from firm.report.record import Record, read_record
from firm.run.command_line import parse, read_arguments, switches_of
from firm.run.config import lay_out, read_config, to_dict
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.files import refuse_links
from firm.run.plugins import code_in
from firm.run.shipped import with_shipped_paths
from reward_models.config import RewardModelConfig

TEST_PROMPTS_NAME = "test_prompts.jsonl"
"""File with the test prompts that were passed as objects, in the run's directory."""
SPEED_KEYS = ("batch_size", "device", "dtype")
"""Settings of a reward model that do not change the meaning of its scores."""

AnyConfig = TypeVar("AnyConfig")


def parse_over_run(
    config_class: type[AnyConfig], argv: Sequence[str] | None, *, key: str, description: str
) -> AnyConfig:
    """Parses a command line with the settings of a run that it names as defaults.

    Args:
        config_class: Configuration to parse; settings of the run fill its fields of equal name.
        argv: Arguments without the program's name; by default sys.argv[1:].
        key: Key of the run, or of a list of runs, of which the first is used.
        description: First line of the help page.

    Returns:
        The configuration; the command line overrides the run's settings.

    Raises:
        UserError: The run does not exist, or the command line is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    run, given = None, []
    with suppress(UserError):  # `parse` explains malformed command lines
        words = [word for word in arguments if word not in ("-h", "--help")]
        files, given = read_arguments(words, switches_of(config_class))
        contents = [own for own in map(read_config, files) if isinstance(own, Mapping)]
        pairs = (pair for own in contents for pair in own.items() if isinstance(pair[0], str))
        given = [*pairs, *given]
        named = [pair for pair in given if pair[0] == key][-1:]
        run = lay_out(config_class, (), named, has_plugins=False).values[key]
        run = next(iter(run), None) if isinstance(run, list) else run
    if run is None:
        return parse(config_class, arguments, description=description)
    run = str(run)
    record = checked_record(Path(run))
    settings = run_settings(record)
    names = {f.name for f in fields(config_class)}  # type: ignore[arg-type]  # a dataclass
    functions = given_functions(record) if "rewards" in names else []
    settings = _without_held_out(settings, given)
    base = {f"the run {run}": {k: v for k, v in settings.items() if k in names}}
    cfg = parse(config_class, arguments, description=description, base=base)
    if missing := [name for name in functions if name not in cfg.rewards]:  # type: ignore[attr-defined]
        print(
            f"note: {', '.join(missing)}: not scored, since these reward functions were passed to "
            "firm.align as objects. To score them, register them in a file with @reward_model and "
            f"pass --rewards '{{{missing[0]}: {{name: NAME, file: FILE.py}}}}'.",
            file=sys.stderr,
        )
    return cfg


def _without_held_out(
    settings: Mapping[str, Any], given: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Returns a run's settings without the share that it held out, if other prompts are given.

    Raises:
        UserError: Keys filter the run's own prompts, of which others would then be drawn.
    """
    own = [(key, value) for key, value in given if key.partition(".")[0] == "prompts"]
    has_source = any(
        key in ("prompts.source", "prompts.split")
        or (isinstance(value, Mapping) and not {"source", "split"}.isdisjoint(value))
        for key, value in own
    )
    if has_source:
        return {key: value for key, value in settings.items() if key != "held_out"}
    if own and settings.get("held_out"):
        raise UserError(
            f"{own[0][0]}: the run held its test prompts out of its training prompts, and other "
            "filters would draw others, among them prompts that it was trained on. Pass "
            "--prompts.source, too, for prompts of your own."
        )
    return dict(settings)


def checked_record(path: Path) -> Record:
    """Reads a run's record; errors name a damaged file, as runs may come from other sources.

    Raises:
        UserError: There is no run at `path`, or a file of it is malformed.
    """
    refuse_links(path)
    run = Run(path)
    if (path / "config.yaml").is_file():
        settings = run.settings()
        sections = ("policy", "rewards", "rollout", "data", "evaluation")
        if not isinstance(settings, Mapping) or not all(
            isinstance(settings.get(key) or {}, Mapping) for key in sections
        ):
            raise UserError(
                f"{path / 'config.yaml'} is not the configuration of a run; restore the file, or "
                "choose another run."
            )
    return read_record(path)


def run_settings(record: Record) -> dict[str, Any]:
    """Returns the settings of a run that concern its model and evaluation."""
    settings = record.settings
    evaluation = settings.get("evaluation") or {}
    data, functions = settings.get("data") or {}, given_functions(record)
    share, seed = data.get("hold_out"), data.get("hold_out_seed")
    prompts = data.get("train" if share else "test")
    rewards = {n: own for n, own in (settings.get("rewards") or {}).items() if n not in functions}
    if isinstance(prompts, Mapping) and prompts.get("source") == GIVEN:
        kept = record.path / TEST_PROMPTS_NAME
        prompts = {**prompts, "source": str(kept), "split": None} if kept.is_file() else prompts
    if settings.get("pairs"):  # the run does not read `data`, which may still name test prompts
        prompts, share = data.get("test") or {}, 0.0
        if prompts.get("source", PromptsConfig().source) == PromptsConfig().source:
            prompts = {"source": NO_PROMPTS}
    given = {
        **_without_plugins(settings),
        **{key: settings.get(key) for key in ("seed", "num_threads")},
        "rewards": rewards,
        "prompts": prompts,
        "held_out": share,
        "held_out_seed": settings.get("seed") if seed is None else seed,
        "num_prompts": evaluation.get("num_test_prompts"),
        "num_samples": evaluation.get("num_samples"),
        "num_shown_samples": evaluation.get("num_shown_samples"),
        "metrics": evaluation.get("metrics"),
    }
    return {key: value for key, value in given.items() if value is not None}


def _without_plugins(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's policy and rollout without what only plugins or a program had registered.

    Saved adapters are plain LoRA whatever their kind, and the model's own passes sample from them.
    """
    policy, rollout = (dict(settings.get(key) or {}) for key in ("policy", "rollout"))
    engine, conditioning = rollout.get("engine"), policy.get("conditioning")
    if isinstance(engine, Mapping) and engine.get("name") not in ROLLOUT_ENGINES:
        rollout = {k: own for k, own in rollout.items() if k not in ("engine", "max_staleness")}
    if policy.get("adapter") not in ADAPTERS:
        policy.pop("adapter", None)
    if isinstance(conditioning, Mapping) and conditioning.get("sampler") not in PREFERENCE_SAMPLERS:
        policy["conditioning"] = {k: own for k, own in conditioning.items() if k != "sampler"}
    return {"policy": policy, "rollout": rollout}


def given_functions(record: Record) -> list[str]:
    """Returns the objectives with reward functions passed to `firm.align` as objects."""
    settings = record.settings
    train = (settings.get("data") or {}).get("train")
    if not (isinstance(train, Mapping) and train.get("source") == GIVEN):
        return []
    rewards = settings.get("rewards") or {}
    return [name for name, own in rewards.items() if is_function(own)]


def is_function(reward: Any) -> bool:
    """Returns whether a reward's settings describe a function passed to `firm.align`."""
    name = reward.get("name") if isinstance(reward, Mapping) else None
    return isinstance(name, str) and "." in name and not reward.get("file")


def keep_test_prompts(run: Path, prompts: Sequence[Prompt]) -> None:
    """Saves held-out prompts that were passed as objects to the run's directory.

    Writes nothing if a field cannot be encoded as JSON.
    """
    rows = [{**prompt.columns, "prompt": prompt.given, "kind": prompt.kind} for prompt in prompts]
    with suppress(TypeError, ValueError):
        text = "".join(f"{json_text(row)}\n" for row in rows)
        replace_text(run / TEST_PROMPTS_NAME, text)


def check_code(
    rewards: Mapping[str, RewardModelConfig], record: Record, *, allow_code: bool
) -> None:
    """Raises `UserError` if a run's folder alone names a Python file to run or a server to ask.

    The folder may come from an untrusted source. What is named on the command line is trusted.

    Args:
        rewards: The reward models that are about to be loaded.
        record: The run that provides the settings.
        allow_code: Whether the files that it names may run, and its servers be asked.
    """
    settings = record.settings
    sections = (settings.get("rewards"), (settings.get("evaluation") or {}).get("metrics"))
    entries = [entry for each in sections if isinstance(each, Mapping) for entry in each.values()]
    known = code_in(entries)
    for name, reward in rewards.items():
        used = [each for each in code_in(to_dict(reward)) if each in known]
        if used and not allow_code:
            what = "run the Python file" if reward.file else "send replies to"
            raise UserError(
                f"{record.path} would {what} {used[0]} for {name!r}; review it, then pass "
                "--allow_code true."
            )


def adapter_folder(path: Path) -> Path:
    """Returns `path` if it is a PEFT folder, or the adapter folder of a finished run.

    Raises:
        UserError: The run has no adapter, or there is a link in it.
    """
    is_run = (path / "run.json").is_file() and not (path / "adapter_config.json").exists()
    if is_run:
        refuse_links(path)
    if is_run and not (path / "adapter").is_dir():
        raise UserError(
            f"the run in {path} has no adapter yet; finish it with `firm resume {path}`."
        )
    return path / "adapter" if is_run else path


def frozen_calibrations(
    rewards: Mapping[str, RewardModelConfig], record: Record
) -> dict[str, Calibration]:
    """Returns a run's calibrations, for rewards whose settings equal the run's."""

    def is_the_runs(config: RewardModelConfig, settings: Mapping[str, Any]) -> bool:
        given = to_dict(with_shipped_paths(config))
        return all(given.get(k) == value for k, value in settings.items() if k not in SPEED_KEYS)

    maps = record.header.get("calibration") or {}
    settings = with_shipped_paths(record.settings.get("rewards") or {})
    return {
        name: Calibration.from_dict(maps[name])
        for name, config in rewards.items()
        if name in maps and name in settings and is_the_runs(config, settings[name])
    }
