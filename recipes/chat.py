"""Base and aligned model answer side by side.

    python recipes/chat.py --run runs/mine
    python recipes/chat.py --run runs/mine --rollout.temperature 0.3 --show_rewards false
    python recipes/chat.py --adapter FOLDER --policy.path FOLDER
    echo "How do I clean my oven?" | python recipes/chat.py --run runs/mine

Each side goes on with its own dialogue: your turns are the same, the replies before them are its
own. Both sample on the same noise. /reset begins both dialogues anew, /quit or the end of the
input leaves.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from firm.alignment import (
    Calibration,
    PolicyConfig,
    RolloutConfig,
    check_vocabulary,
    load_adapters,
    load_tokenizer,
    sample_replies,
    score,
    select_adapter,
)
from firm.alignment.prompts import ASSISTANT, HUMAN
from firm.federation import RandomStream
from firm.run import exit_on_user_error
from recipes.evaluate import (
    adapter_folder,
    checked_record,
    frozen_calibrations,
    parse_over_run,
    printable,
)
from reward_models import RewardModelConfig, load_reward_model

SIDES = {"base": None, "aligned": 0}
"""What a person sees -> index of the adapter that speaks."""
COMMANDS = "/reset begins anew, /quit leaves"


@dataclass(frozen=True)
class Config:
    """One conversation. What is not given comes from `run`, and then from here."""

    run: Path | None = None
    """A finished run directory; gives adapter, policy, rewards, rollout and seed."""
    adapter: Path | None = None
    """A PEFT folder, or a run directory of which nothing else is read; by default the run's."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """The base model. The adapter brings its own `lora`."""
    check_base: bool = True
    """Refuses an adapter that names another base model than policy.path. Turn it off when it is
    the same model in another place."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """What every reply is scored by; there may be none."""
    show_rewards: bool = True
    """Loads the reward models and shows their scores."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    seed: int = 0
    """The same seed gives the same replies to the same words."""
    num_threads: int | None = None
    """CPU threads; by default as many as torch takes."""

    def __post_init__(self) -> None:
        if not (self.run or self.adapter):
            raise ValueError(
                "there is nobody to talk to: give --run runs/mine, or --adapter with --policy.path."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(
                f"num_threads must be at least 1, got {self.num_threads}; null leaves it to torch."
            )
        if not self.policy.path:
            raise ValueError(
                "policy.path is empty: name the base model, or give --run on the command line."
            )


@dataclass(frozen=True)
class Answer:
    """What one side said, and how it was scored."""

    text: str
    scores: list[str]
    """Raw scores, and rewards in [0, 1] where a run froze the map; empty without reward models."""


def main(cfg: Config, console: Console | None = None) -> None:
    """Answers every line of the input until it ends."""
    transformers.utils.logging.disable_progress_bar()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    console = console or Console(highlight=False)
    folder = adapter_folder(cfg.adapter or cfg.run or Path())
    policy = load_adapters(cfg.policy, [folder], check_base=cfg.check_base)
    tokenizer = load_tokenizer(cfg.policy)
    check_vocabulary(policy, tokenizer, cfg.policy.path)
    rewards = cfg.rewards if cfg.show_rewards else {}
    reward_fns = {name: load_reward_model(config, name) for name, config in rewards.items()}
    calibrations = frozen_calibrations(rewards, checked_record(cfg.run)) if cfg.run else {}

    def answer(side: str, dialogue: str, turn: int) -> Answer:
        stream = RandomStream(cfg.seed, "chat", turn)  # the same for both sides
        with select_adapter(policy, SIDES[side]) as reference, stream:
            replies = sample_replies(
                policy,
                [dialogue],
                tokenizer=tokenizer,
                prompt_format=cfg.policy.prompt,
                config=cfg.rollout,
                reference=reference,
            )
        scores = score(reward_fns, [dialogue], replies.completions) if reward_fns else ()
        raw = {name: row[0] for name, row in zip(reward_fns, scores, strict=True)}
        return Answer(replies.completions[0].strip(), in_words(raw, calibrations))

    show_welcome(console, cfg, folder)
    dialogues = dict.fromkeys(SIDES, "")
    for turn, line in enumerate(turns(console)):
        if line == "/reset":
            dialogues = dict.fromkeys(SIDES, "")
            say(console, "(both dialogues begin anew)")
            continue
        if line.startswith("/"):
            say(console, f"(no command {line.split()[0]}: {COMMANDS})")
            continue
        answers = {}
        for side in SIDES:
            dialogues[side] += f"{HUMAN} {line}{ASSISTANT}"
            answers[side] = answer(side, dialogues[side], turn)
            dialogues[side] += f" {answers[side].text}"
        show(console, answers)


def turns(console: Console) -> Iterator[str]:
    """What the person says, line by line, until /quit or the end of the input."""
    is_person = sys.stdin.isatty()
    while True:
        try:
            line = (console.input("[bold]you[/bold]: ") if is_person else input()).strip()
        except EOFError:
            return
        line = line.encode(errors="replace").decode()  # bytes that are no text reach no tokenizer
        if line == "/quit":
            return
        if line:
            if not is_person:
                say(console, f"you: {line}")
            yield line


def in_words(raw: Mapping[str, torch.Tensor], calibrations: Mapping[str, Calibration]) -> list[str]:
    """Scores with their names, each with its reward in [0, 1] where there is a map to it."""
    parts = []
    for name, value in raw.items():
        reward = f" (reward {calibrations[name](value).item():.2f})" if name in calibrations else ""
        parts.append(f"{name} {value.item():.3f}{reward}")
    return parts


def show_welcome(console: Console, cfg: Config, folder: Path) -> None:
    """Says on a terminal who talks, and how to leave."""
    if console.is_terminal:
        say(console, f"base     {cfg.policy.path}\naligned  {folder}\n{COMMANDS}\n")


def show(console: Console, answers: Mapping[str, Answer]) -> None:
    """Two columns on a terminal, labelled lines elsewhere."""
    if not console.is_terminal:
        for side, answer in answers.items():
            say(console, f"{side}: {answer.text}")
            if answer.scores:
                say(console, f"{side} scores: {'  '.join(answer.scores)}")
        return
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    for side in answers:
        table.add_column(side, ratio=1)
    table.add_row(*(Text(printable(answer.text)) for answer in answers.values()))
    if any(answer.scores for answer in answers.values()):
        table.add_row(*(Text("\n".join(answer.scores), style="dim") for answer in answers.values()))
    console.print(table)


def say(console: Console, text: str) -> None:
    """Prints a text as it is."""
    console.print(Text(printable(text)), soft_wrap=True)


def cli(argv: Sequence[str] | None = None) -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    with exit_on_user_error():
        main(parse_over_run(Config, argv, key="run", description=__doc__ or ""))


if __name__ == "__main__":
    cli()
