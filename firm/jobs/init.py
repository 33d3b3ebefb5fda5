"""Writes a configuration for the user's own model, data and reward models."""

import json
import math
import random
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from firm.alignment.held_out import HELD_OUT, USES, hold_out
from firm.alignment.inspection import Inspection, inspect_policy
from firm.alignment.pairs import PairsConfig, load_pairs
from firm.alignment.policy import read_tokenizer
from firm.alignment.policy_config import is_gguf
from firm.alignment.prompt_data import loose_text, read_prompts
from firm.alignment.prompts import Prompt, token_ids
from firm.base.fields import field_docstrings
from firm.base.inside import replace_text
from firm.base.registry import did_you_mean
from firm.base.sanitize import legible, printable
from firm.federation import Processes
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_data import data_of
from firm.jobs.configs import InitConfig
from firm.jobs.plan import make_plan
from firm.jobs.sources import check_data, check_policy, check_reward, is_file, trained_settings
from firm.report.formats import duration
from firm.run.comparison import FEW_PROMPTS
from firm.run.config import compose
from firm.run.errors import UserError
from firm.run.shipped import CONFIGS, with_shipped_paths
from reward_models.registry import reward_settings

TEMPLATES = {"quick": "own.yaml", "full": "own_full.yaml", "pairs": "own_pairs.yaml"}
ASKED = ("policy", "prompts", "rewards")
"""Required keys, unless there are pairs."""
MAX_CLIENTS = {"quick": 4, "full": 8, "pairs": 4}
"""Clients of a template."""
MIN_SHARD = {"quick": 8, "full": 16, "pairs": 16}
"""Training prompts, or pairs of an objective, that a client needs: two batches, or one of PPO's."""
MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 256, 128
"""Longest prompts and replies that are written."""
MAX_TOKENS = 512
"""Tokens of prompt and reply together in a long run."""
NEW_TOKENS = (128, 96, 64, 48, 32, 24, 16, 8)
"""Lengths of replies to choose from."""
SECONDS = 300.0
"""Planned time of a short run. Ten minutes leave room for imports, rewards and a busy machine."""
ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 12, 4, 20
"""Rounds of a short run. Replies are as long as `ROUNDS` allow."""
MAX_HELD_OUT = 100
"""Most held-out pairs of an objective, as `num_test_prompts` in configs/own_pairs.yaml."""
NUM_PAIRS, NUM_SLICES = 1_000, 4
"""Pairs of an objective in a short run, and the parts of a longer file that they come from."""
NUM_MEASURED = 500
"""Prompts, or pairs, whose lengths stand for all."""
MIN_SMALL, MAX_SMALL = 50_000_000, 500_000_000
"""Numbers of parameters for which the settings of `SMALL` take the place of the template's."""
SMALL = {
    "actor_learning_rate": "5.0e-4 # as configs/smollm2.yaml, measured with 135M parameters",
    "kl": "{ controller: fixed, coefficient: 0.02 } # more holds the policy closer to its start",
}
"""Settings of configs/smollm2.yaml, which moved a model of 135 million parameters in 12 rounds."""
SMALL_FULL = {
    **SMALL,
    "num_epochs": "1 # more leave the base model at this learning rate",
    "num_local_steps": "1",
}
TINY = {"actor_learning_rate": "3.0e-3 # as the miniature's, measured with 0.8M parameters"}
"""The setting of configs/miniature_critic_free.yaml and miniature_pairs.yaml, for smaller ones."""


@dataclass(frozen=True)
class NewData:
    """The data of a new configuration, and the sections that name them."""

    sections: dict[str, list[str]]
    """Lines of YAML by top-level key."""
    prompts: list[Prompt] | None
    """Training prompts; None if they are not in a file."""
    num_rows: int | None = None
    """Fewest training rows of an objective, likewise."""
    replies: tuple[str, ...] = ()
    """Replies of pairs."""
    num_test: int | None = None
    """Prompts, or pairs of an objective, that are held out for testing."""


@dataclass(frozen=True)
class Written:
    """A written configuration."""

    path: Path
    config: AlignmentConfig
    inspection: Inspection | None
    """Properties of the model; None if its files cannot be read."""
    notes: list[str]
    """Reasons why the model's files cannot be read."""
    source: NewData
    seconds: float | None
    """Planned time of a short run on this machine, without reward models."""


def init(cfg: InitConfig, ask: Callable[[str], str] | None = None) -> Written:
    """Writes the configuration, and returns it as parsed from the file.

    Args:
        cfg: The policy, reward models and prompts, or pairs, to configure.
        ask: Prompts the user for missing values; if None, missing values are an error.

    Raises:
        UserError: A value is missing or malformed, a file or folder does not exist, or the output
            file already exists.
    """
    if cfg.out.exists():
        raise UserError(f"{cfg.out} already exists; choose another --out, or remove it.")
    if cfg.pairs and (cfg.prompts or cfg.rewards or cfg.test_prompts):
        raise UserError(
            "pairs take the place of prompts and rewards: pass --pairs alone, or --prompts and "
            "--rewards."
        )
    kind = "pairs" if cfg.pairs else "full" if cfg.full else "quick"
    asked = ("policy",) if cfg.pairs else ASKED
    answers = {key: getattr(cfg, key) or _ask(key, ask) for key in asked}
    if cfg.pairs:
        source = _pairs(cfg.pairs, cfg.full)
    else:
        for name, reward in answers["rewards"].items():
            check_reward(f"rewards.{name}", **(settings := reward_settings(reward)))
            _check_function(f"rewards.{name}", **settings)
        source = _prompts(answers["prompts"], cfg.test_prompts, is_full=cfg.full)
        source.sections["rewards"] = _rewards(answers["rewards"])
    check_policy("policy", answers["policy"])
    errors: list[ValueError] = []
    policy = with_shipped_paths(answers["policy"])
    inspection = inspect_policy(policy, on_error=errors.append)
    if errors and not _may_be_on_hub(policy, errors[0]):
        raise UserError(str(errors[0]).replace("policy.path", "policy", 1)) from errors[0]
    text = (CONFIGS / TEMPLATES[kind]).read_text(encoding="utf-8")
    text = text.replace("path: POLICY", f"path: {_quote(answers['policy'])}")
    for key, lines in source.sections.items():
        text = _with_section(text, key, lines)
    text = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#"))
    text = _fit(text, kind, inspection, source)
    lengths = [] if cfg.full or inspection is None else _fit_lengths(policy, inspection, source)
    if lengths:
        text = _set(_set(text, "max_prompt_tokens", lengths[0]), "max_new_tokens", lengths[1])
        text = re.sub(r"\bmax_tokens: \d+", f"max_tokens: {lengths[0]}", text)  # left out if longer
    replace_text(cfg.out, text)
    try:
        config, seconds = compose(AlignmentConfig, [cfg.out], []), None
        if inspection is not None and source.prompts and not cfg.pairs:
            source = _as_read(source, with_shipped_paths(config))
            num_clients = _num_clients(kind, source.num_rows)
            text = _set(text, "num_clients", num_clients)
            replace_text(cfg.out, text)
            config = compose(AlignmentConfig, [cfg.out], [])
        if lengths and (fitted := _fit_time(cfg.out, lengths[1])):
            num_new, rounds, seconds = fitted
            text = _set(_set(text, "max_new_tokens", num_new), "rounds", rounds)
            replace_text(cfg.out, text)
            config = compose(AlignmentConfig, [cfg.out], [])
    except BaseException as error:  # the run would be refused, too, or its time is not fitted yet
        cfg.out.unlink()
        if isinstance(error, ValueError):
            raise UserError(str(error)) from error
        raise
    return Written(cfg.out, config, inspection, list(map(str, errors)), source, seconds)


def _check_function(key: str, *, name: str = "", file: str = "", path: str = "") -> None:
    """Raises `UserError` if a Python file, which is not run, does not mention a function."""
    if not file:
        return
    text = Path(file).expanduser().read_text(encoding="utf-8", errors="replace")
    is_elsewhere = re.search(r"import \*|reward_model\((?!\s*[\"'])", text)
    if not is_elsewhere and not re.search(rf"\b{re.escape(name)}\b", text):
        known = re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.M)
        raise UserError(f"{key}: {file} has no function {name!r}{did_you_mean(name, known)}")


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


def _set(text: str, key: str, value: object) -> str:
    """Returns a YAML text with the value of the first line with this key replaced.

    The line's comment stays, unless the value brings one.
    """
    kept = "" if "#" in str(value) else r"\2"
    pattern = rf"(?m)^( *{key}:) [^#\n]*?( *#.*)?$"
    text, count = re.subn(pattern, lambda m: f"{m[1]} {value}{m.expand(kept)}", text, count=1)
    assert count, key  # the template has each
    return text


def _fit(text: str, kind: str, inspection: Inspection | None, source: NewData) -> str:
    """Returns the template, adapted to the model, the data and this machine."""
    if source.num_rows is not None:
        text = _set(text, "num_clients", _num_clients(kind, source.num_rows))
    if inspection is None:
        return text
    if inspection.target_modules:
        names = ", ".join(map(_quote, inspection.target_modules))
        text = text.replace("[q_proj, k_proj, v_proj, o_proj]", f"[{names}]")
    context = inspection.context or MAX_TOKENS
    if kind == "full" and context < MAX_TOKENS:
        num_new = max(1, min(MAX_NEW_TOKENS, context // 4))
        text = _set(text, "max_prompt_tokens", context - num_new)
        text = _set(text, "max_new_tokens", num_new)
    own = {}
    if MIN_SMALL <= inspection.num_parameters <= MAX_SMALL:
        own = SMALL_FULL if kind == "full" else SMALL
    elif inspection.num_parameters < MIN_SMALL and kind != "full":
        own = TINY
    for key, value in own.items():
        if key != "kl" or kind != "pairs":
            text = _set(text, key, value)
    return text


def _num_clients(kind: str, num_rows: int | None) -> int:
    """Returns as many clients as have enough of so many training rows."""
    return max(1, min(MAX_CLIENTS[kind], (num_rows or 0) // MIN_SHARD[kind]))


def _as_read(source: NewData, config: AlignmentConfig) -> NewData:
    """Returns the data with the numbers of prompts that a run reads, without those too long."""
    splits = data_of(config).load(
        config, read_tokenizer(config.policy.path), {}, measures=True, on_note=lambda _: None
    )
    num_test = source.num_test
    if num_test is not None and len(splits.test) < config.evaluation.num_test_prompts:
        num_test = len(splits.test)
    return replace(source, num_rows=len(splits.train), num_test=num_test)


def _fit_lengths(policy: str, inspection: Inspection, source: NewData) -> list[int]:
    """Returns the maximum tokens of a prompt, and of a reply, that suit nine in ten of the data."""
    context = inspection.context or MAX_PROMPT_TOKENS + MAX_NEW_TOKENS
    longest = [min(MAX_PROMPT_TOKENS, context - max(1, context // 4)), MAX_NEW_TOKENS]
    if source.prompts:
        tokenizer, draw = read_tokenizer(policy), random.Random(0)
        prompts = draw.sample(source.prompts, min(NUM_MEASURED, len(source.prompts)))
        longest[0] = min(longest[0], _most(token_ids(prompts, tokenizer)))
        if source.replies:
            replies = draw.sample(source.replies, min(NUM_MEASURED, len(source.replies)))
            longest[1] = min(longest[1], _most(tokenizer(replies)["input_ids"]))
    return [longest[0], min(longest[1], context - longest[0])]


def _most(rows: Sequence[Sequence[int]]) -> int:
    """Returns a multiple of 16 that is not exceeded by nine in ten rows."""
    lengths = sorted(map(len, rows))
    return 16 * math.ceil(lengths[int(0.9 * len(lengths))] / 16)


def _fit_time(file: Path, max_new_tokens: int) -> tuple[int, int, float] | None:
    """Returns lengths of replies, rounds and seconds of a run that ends in `SECONDS`, if possible.

    The plan's time is linear in the length of replies between the longest and the shortest. None
    if this machine's time is unknown.
    """
    lengths = [num for num in NEW_TOKENS if num <= max_new_tokens] or [max_new_tokens]
    times = []
    for num in (lengths[0], lengths[-1]):
        cfg = with_shipped_paths(
            compose(AlignmentConfig, [file], [("rollout.max_new_tokens", num), ("rounds", 1)])
        )
        times.append(make_plan(cfg, client_names(cfg), Processes()).seconds)
    longest, shortest = times
    if longest is None or shortest is None:
        return None
    num = rounds = 0
    each = fixed = 0.0
    for num in lengths:
        share = (num - lengths[-1]) / max(1, lengths[0] - lengths[-1])
        each = shortest.round + share * (longest.round - shortest.round)
        fixed = shortest.evaluation + share * (longest.evaluation - shortest.evaluation)
        rounds = int((SECONDS - fixed) / max(each, 1e-9))
        if rounds >= ROUNDS:
            break
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
    return num, rounds, fixed + rounds * each


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
        settings, comment = trained_settings(reward), ""
        if "path" in settings:
            settings.setdefault("format", likely_format(settings["path"]))
            comment = " # as in its training; or hh_pair, question_answer, plain, response"
        entries = ", ".join(
            f"{key}: {_quote(value) if isinstance(value, str) else json.dumps(value)}"
            for key, value in settings.items()
        )
        lines.append(f"  {_quote(name)}: {{ {entries} }}{comment}")
    return lines


_FORMATS = {"Ray2333/gpt2-large-": "hh_pair", "OpenAssistant/reward-model-": "question_answer"}
"""Formats of known reward models on the hub, by the beginning of their names."""


def likely_format(path: str) -> str:
    """Returns a known model's format, else the chat template unless a folder here has none."""
    folder = Path(with_shipped_paths(path)).expanduser()
    if not folder.is_dir():
        known = (form for opening, form in _FORMATS.items() if path.startswith(opening))
        return next(known, "chat_template")
    try:
        return "chat_template" if read_tokenizer(str(folder)).chat_template else "plain"
    except (OSError, ValueError):  # the run will say what is wrong with it
        return "chat_template"


def _prompts(prompts: str, test_prompts: str, *, is_full: bool) -> NewData:
    """Returns prompts, and the section `data` that divides them among training and tests.

    A short run measures no validation prompts.

    Raises:
        UserError: A source does not exist, is malformed or has too few rows.
    """
    if is_file(prompts) and not test_prompts:
        rows = _rows("prompts", prompts, "[:]") or []
        num_distinct = len({loose_text(row.transcript) for row in rows})
        share = 1 / HELD_OUT if num_distinct >= FEW_PROMPTS * HELD_OUT else 2 / HELD_OUT
        try:
            parts = hold_out(rows, USES, share, seed=0, key="prompts")
        except ValueError as error:
            raise UserError(
                f"prompts: {prompts} has too few rows to hold any out; add prompts to it, or pass "
                "--test_prompts."
            ) from error
        lines = [
            f"  train: {_data(prompts, '[:]')}",
            f"  hold_out: {share} # of the prompts for testing{', and for validation' * is_full}",
        ]
        train = parts["train"] + ([] if is_full else parts["validation"])
        return NewData({"data": lines}, train, len(train), num_test=len(parts["test"]))
    name = "" if is_file(test_prompts) else "test"
    train = _rows("prompts", prompts, split := "[:]" if is_file(prompts) else "train")
    lines, held_out = [f"  train: {_data(prompts, split)}"], None
    splits = {"validation": f"{name}[:50%]", "test": f"{name}[50%:]"}
    for use, split in (splits if is_full else {"test": name or "[:]"}).items():
        held_out = _rows("test_prompts", test_prompts or prompts, split)
        lines.append(f"  {use}: {_data(test_prompts or prompts, split)}")
    num_test = None if held_out is None else len(held_out)
    num_rows = None if train is None else len(train)
    return NewData({"data": lines}, train, num_rows, num_test=num_test)


def _pairs(pairs: Mapping[str, str], is_full: bool) -> NewData:
    """Returns ranked pairs, and the section `pairs`.

    Raises:
        UserError: A source does not exist, or a row of it is malformed.
    """
    lines, sizes = [], []
    prompts: list[Prompt] = []
    replies: list[str] = []
    for name, source in pairs.items():
        check_data(f"pairs.{name}", source)
        split = "train"
        if is_file(source):
            try:
                own = load_pairs(PairsConfig(source=source, split=None), objective=name)
            except ValueError as error:
                raise UserError(f"pairs.{name}: {error}") from error
            prompts += [pair.prompt for pair in own]
            replies += [text for pair in own for text in pair.replies]
            sizes.append(len(own) if is_full else min(NUM_PAIRS, len(own)))
            split = _slices(len(own), sizes[-1])
        lines.append(f"  {_quote(name)}: {_data(source, split)}")
    if len(sizes) < len(pairs):
        return NewData({"pairs": lines}, None)
    num_test = min(min(sizes) // HELD_OUT, MAX_HELD_OUT)
    return NewData(
        {"pairs": lines}, prompts, min(sizes) - num_test, tuple(replies), max(2, num_test)
    )


def _slices(num_rows: int, num_kept: int) -> str:
    """Returns slices, evenly spread, of so many rows; files may be sorted by topic."""
    if num_kept == num_rows:
        return "[:]"
    starts = [part * num_rows // NUM_SLICES for part in range(NUM_SLICES)]
    return "+".join(f"[{start}:{start + num_kept // NUM_SLICES}]" for start in starts)


def _data(source: str, split: str) -> str:
    """Returns a source of prompts or pairs as a YAML mapping."""
    return f'{{ source: {_quote(source)}, split: "{split}", max_tokens: {MAX_PROMPT_TOKENS} }}'


def _quote(text: str) -> str:
    """Returns a text as a YAML scalar, quoted if necessary."""
    if re.fullmatch(r"[A-Za-z_][\w./-]*", text):
        return text
    return yaml.dump(text, default_style='"', width=math.inf).rstrip("\n")


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
    lines = [f"{config.policy.path} is aligned to {' and '.join(config.pairs or config.rewards)}"]
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
    source, noun = written.source, "pairs of an objective" if config.pairs else "prompts"
    if source.num_rows is not None:
        lines.append(f"data     {source.num_rows:,} {noun} for {config.num_clients} clients")
        if source.num_test is not None:
            few = f", too few to measure most changes: add {noun}" * (source.num_test < FEW_PROMPTS)
            lines[-1] += f", {source.num_test:,} held out for testing{few}"
    length = f"{config.rounds} rounds, replies of up to {config.rollout.max_new_tokens} tokens"
    if written.seconds is not None:
        length += f", about {duration(written.seconds)} here"
        if written.seconds > SECONDS:
            length += ": a smaller policy, or an accelerator, takes less"
    lines.append(f"run      {length}")
    return lines
