"""Writes a configuration for the user's own model, data and reward models."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from firm.alignment.inspection import Inspection, fast_dtype, inspect_policy
from firm.alignment.policy import read_tokenizer
from firm.alignment.policy_config import is_gguf
from firm.alignment.prompt_data import read_prompts
from firm.alignment.prompts import Prompt
from firm.base.fields import field_docstrings
from firm.base.inside import replace_text
from firm.base.sanitize import legible, printable
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_data import HELD_OUT, USES, hold_out
from firm.jobs.configs import InitConfig
from firm.jobs.sources import check_data, check_policy, check_reward, is_file
from firm.run.config import compose
from firm.run.errors import UserError
from firm.run.shipped import CONFIGS, with_shipped_paths
from reward_models.registry import reward_settings

TEMPLATE = CONFIGS / "own.yaml"


ASKED = ("policy", "prompts", "rewards")
"""Required keys."""


BATCH_SIZE, MAX_CLIENTS = 16, 8
"""Values of the template; a client needs enough prompts for a batch."""
MAX_NEW_TOKENS, MAX_TOKENS = 128, 512
"""Values of the template: tokens of a reply, and of prompt and reply together."""
MIN_SMALL, MAX_SMALL = 50_000_000, 500_000_000
"""Numbers of parameters for which the settings of `SMALL` take the place of the template's."""
SMALL = {
    "num_epochs: 3": "num_epochs: 1 # more leave the base model at this learning rate",
    "6.0e-5 # the paper's for 1B parameters; smaller models take more": (
        "5.0e-4 # as configs/smollm2.yaml, measured with 135M parameters"
    ),
    "coefficient: 0.05 }": "coefficient: 0.02 }",
    "num_local_steps: 4": "num_local_steps: 1",
}
"""Settings of configs/smollm2.yaml, which moved a model of 135 million parameters in 12 rounds."""


@dataclass(frozen=True)
class Written:
    """A written configuration."""

    path: Path
    config: AlignmentConfig
    inspection: Inspection | None
    """Properties of the model; None if its files cannot be read."""
    notes: list[str]
    """Reasons why the model's files cannot be read."""
    num_rows: int | None
    """Training rows, if the data are a file."""


def init(cfg: InitConfig, ask: Callable[[str], str] | None = None) -> Written:
    """Writes the configuration, and returns it as parsed from the file.

    Args:
        cfg: The policy, reward models and prompts to configure.
        ask: Prompts the user for missing values; if None, missing values are an error.

    Raises:
        UserError: A value is missing or malformed, a file or folder does not exist, or the output
            file already exists.
    """
    if cfg.out.exists():
        raise UserError(f"{cfg.out} already exists; choose another --out, or remove it.")
    answers = {key: getattr(cfg, key) or _ask(key, ask) for key in ASKED}
    for name, reward in answers["rewards"].items():
        check_reward(f"rewards.{name}", **reward_settings(reward))
    splits = _splits(answers["prompts"], cfg.test_prompts)
    rows = _rows("prompts", answers["prompts"], splits["train"])
    if len(splits) == 1 and rows is not None:
        try:
            rows = hold_out(rows, USES, 1 / HELD_OUT, seed=0, key="prompts")["train"]
        except UserError as error:
            raise UserError(
                f"prompts: {answers['prompts']} has too few rows to hold any out; add prompts to "
                "it, or pass --test_prompts."
            ) from error
    num_rows = None if rows is None else len(rows)
    for name in list(splits)[1:]:
        _rows("test_prompts", cfg.test_prompts or answers["prompts"], splits[name])
    check_policy("policy", answers["policy"])
    errors: list[ValueError] = []
    policy = with_shipped_paths(answers["policy"])
    inspection = inspect_policy(policy, on_error=errors.append)
    if errors and not _may_be_on_hub(policy, errors[0]):
        raise UserError(str(errors[0]).replace("policy.path", "policy", 1)) from errors[0]
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("path: POLICY", f"path: {_quote(answers['policy'])}")
    text = _fit(text, inspection, num_rows)
    text = _with_section(text, "rewards", _rewards(answers["rewards"]))
    text = _with_section(text, "data", _data(answers["prompts"], cfg.test_prompts, splits))
    text = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))
    replace_text(cfg.out, text)
    try:
        config = compose(AlignmentConfig, [cfg.out], [])
        return Written(cfg.out, config, inspection, list(map(str, errors)), num_rows)
    except UserError:
        cfg.out.unlink()
        raise


def _may_be_on_hub(path: str, error: ValueError) -> bool:
    """Returns whether a policy that cannot be read here may yet be on the Hugging Face hub.

    A model of the form OWNER/NAME may be private, or the hub out of reach of this machine.
    """
    owner, slash, _ = path.partition("/")
    if not slash or is_gguf(path) or Path(owner).expanduser().is_dir():
        return False
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    is_missing = any(isinstance(each, RepositoryNotFoundError) for each in causes)
    return not is_missing or any(isinstance(each, GatedRepoError) for each in causes)


def _rows(key: str, prompts: str, split: str) -> list[Prompt] | None:
    """Returns a file's rows in a split; None for other sources.

    Raises:
        UserError: The file does not exist, a row of it is malformed, or the split is empty.
    """
    check_data(key, prompts)
    if not is_file(prompts):
        return None
    rows = read_prompts(prompts, split)
    if not rows:
        part = "" if split == "[:]" else f" in its part {split}"
        raise UserError(f"{key}: {prompts} has no rows{part}; add prompts to it.")
    return rows


def _fit(text: str, inspection: Inspection | None, num_rows: int | None) -> str:
    """Returns the template, adapted to the model, the data and this machine."""
    changes = {"dtype: bfloat16 # of the frozen": f"dtype: {fast_dtype()} # of the frozen"}
    if num_rows is not None:
        num_clients = max(1, min(MAX_CLIENTS, num_rows // BATCH_SIZE))
        changes["num_clients: 8"] = f"num_clients: {num_clients}"
    if inspection and inspection.target_modules:
        names = ", ".join(map(_quote, inspection.target_modules))
        changes["[q_proj, k_proj, v_proj, o_proj]"] = f"[{names}]"
    if inspection and (context := inspection.context or MAX_TOKENS) < MAX_TOKENS:
        num_new = max(1, min(MAX_NEW_TOKENS, context // 4))
        changes["max_prompt_tokens: 384"] = f"max_prompt_tokens: {context - num_new}"
        changes["max_new_tokens: 128"] = f"max_new_tokens: {num_new}"
    if inspection and MIN_SMALL <= inspection.num_parameters <= MAX_SMALL:
        changes |= SMALL
    for old, new in changes.items():
        assert old in text, old  # the template contains each
        text = text.replace(old, new)
    return text


def _ask(key: str, ask: Callable[[str], str] | None) -> Any:
    """Returns the user's answer; for rewards, a mapping."""
    if ask is None:
        raise UserError(f"{key} is missing; pass --{key}, or run this in a terminal to be asked.")
    question = " ".join(field_docstrings(InitConfig)[key].split())
    answer = ask(f"{key}: {question}\n> ").strip()
    if not answer:
        raise UserError(f"{key} must not be empty; enter a value, or pass --{key}.")
    return answer if key != "rewards" else _parse_named(answer)


def _parse_named(answer: str) -> dict[str, str]:
    """Parses `a: x, b: y`, with or without braces, to a mapping."""
    try:
        named = yaml.safe_load("{" + answer.strip().removeprefix("{").removesuffix("}") + "}")
    except yaml.YAMLError:
        named = None
    if not isinstance(named, Mapping) or not all(isinstance(v, str) for v in named.values()):
        raise UserError(
            f"rewards must be names with a reward model each, got {answer!r}; for example: "
            "helpful: models/helpful, brief: brevity."
        )
    return {str(name): value for name, value in named.items()}


def _with_section(text: str, key: str, lines: list[str]) -> str:
    """Returns a YAML text with the lines below a top-level key replaced."""
    section = "\n".join([f"{key}:", *lines, ""])
    return re.sub(rf"(?m)^{key}:.*\n(?: .*\n)+", lambda _: section, text)


def _rewards(rewards: Mapping[str, str]) -> list[str]:
    lines = []
    for name, reward in rewards.items():
        settings, comment = reward_settings(reward), ""
        if "path" in settings:
            settings["format"] = _likely_format(settings["path"])
            comment = " # as in its training; or hh_pair, question_answer, plain, response"
        entries = ", ".join(f"{key}: {_quote(value)}" for key, value in settings.items())
        lines.append(f"  {_quote(name)}: {{ {entries} }}{comment}")
    return lines


def _likely_format(path: str) -> str:
    """Returns the chat template, unless a reward model's folder is here and has none."""
    folder = Path(with_shipped_paths(path)).expanduser()
    if not folder.is_dir():
        return "chat_template"
    try:
        return "chat_template" if read_tokenizer(str(folder)).chat_template else "plain"
    except (OSError, ValueError):  # the run will say what is wrong with it
        return "chat_template"


def _splits(prompts: str, test_prompts: str) -> dict[str, str]:
    """Returns the split of each use of the prompts; of a file of its own, only for training."""
    if is_file(prompts) and not test_prompts:
        return {"train": "[:]"}
    test = "" if is_file(test_prompts) else "test"
    return {
        "train": "[:]" if is_file(prompts) else "train",
        "validation": f"{test}[:50%]",
        "test": f"{test}[50%:]",
    }


def _data(prompts: str, test_prompts: str, splits: Mapping[str, str]) -> list[str]:
    lines = []
    for name, split in splits.items():
        source = _quote(prompts if name == "train" else test_prompts or prompts)
        lines.append(f'  {name}: {{ source: {source}, split: "{split}", max_tokens: 256 }}')
    if len(splits) == 1:
        lines.append(f"  hold_out: {1 / HELD_OUT} # of the prompts for validation, and for testing")
    return lines


def _quote(text: str) -> str:
    """Returns a text as a YAML scalar, quoted if necessary."""
    return text if re.fullmatch(r"[A-Za-z_][\w./-]*", text) else json.dumps(text)


def main(cfg: InitConfig) -> None:
    """Writes the configuration, and prints the next commands."""
    written = init(cfg, input if sys.stdin.isatty() else None)
    print(legible(f"wrote {written.path}"))
    for line in _in_words(written):
        print(printable(line, max_length=5_000))
    file = shlex.quote(str(written.path))
    print(legible(f"plan it   firm plan --config {file}"))
    print(legible(f"run it    firm align --config {file}"))


def _in_words(written: Written) -> list[str]:
    """Returns lines that summarize the inspection and the resulting settings."""
    config, found = written.config, written.inspection
    lines = [f"{config.policy.path} is aligned to {' and '.join(config.rewards)}"]
    if found is None:
        lines += [f"model    default settings; {note}" for note in written.notes]
    else:
        context = f"{found.context:,} positions" if found.context else "any length"
        format = {"chat": "its chat template", "hh": "no chat template, so HH-RLHF's format"}
        lines += [
            f"model    {found.model_type}, {context}, {format.get(found.prompt_format)}",
            f"ends     {' '.join(found.ends) or 'none'}",
        ]
    lines.append(f"adapter  on {', '.join(config.policy.lora.target_modules or [])}")
    lines.append(f"dtype    {config.policy.dtype}, the faster one here")
    if written.num_rows is not None:
        lines.append(f"data     {written.num_rows:,} rows for {config.num_clients} clients")
    return lines
