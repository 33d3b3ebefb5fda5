"""Chats with the base model and the aligned model side by side."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from firm.alignment.calibration import Calibration
from firm.alignment.prompts import ChatMessage, Prompt, hh_text, is_hh
from firm.alignment.rewards import score
from firm.base.preferences import in_order
from firm.base.randomness import RandomStream
from firm.base.sanitize import legible
from firm.jobs.configs import ChatConfig
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import adapter_folder, check_code, checked_record, frozen_calibrations
from firm.jobs.pick import conditioned_front
from firm.jobs.speakers import Speakers
from firm.report import formats
from firm.run.directory import Run
from firm.run.errors import UserError
from firm.run.shipped import with_shipped_paths
from firm.serving.front import stated_preference

SIDES = {"base": None, "aligned": 0}
"""Index of each model's adapter, by the model's displayed name; None for the base model."""


@dataclass(frozen=True)
class ChatReply:
    """One model's reply, with its scores."""

    text: str
    scores: list[str]
    """Raw scores, with rewards in [0, 1] if calibrated by a run; empty without reward models."""


class Conversation:
    """Two dialogues with the same user turns: one with the base model, one with the aligned model.

    Args:
        cfg: The models, and the sampling and scoring of replies.

    Raises:
        UserError: Model, adapter or reward models cannot be loaded.
    """

    def __init__(self, cfg: ChatConfig) -> None:
        record = checked_record(cfg.run) if cfg.run else None
        if record and cfg.show_rewards:
            check_code(cfg.rewards, record, allow_code=cfg.allow_code)
        fetch_policy(cfg.policy.path)
        cfg = with_shipped_paths(cfg)
        self.folder = adapter_folder(cfg.adapter or cfg.run or Path())
        """Folder of the aligned model's adapter."""
        rewards = cfg.rewards if cfg.show_rewards else {}
        self._seed = cfg.seed
        self.preference = _preference(cfg, record.objectives if record else tuple(cfg.rewards))
        """Shares of the objectives at which a conditioned adapter replies; None: equal shares."""
        self._speakers = Speakers(cfg, [self.folder], rewards, preference=self.preference)
        self._form = _form_of(cfg.run) if cfg.run else "hh"
        self._calibrations = frozen_calibrations(rewards, record) if record else {}
        self.reset()

    def reset(self) -> None:
        """Clears both dialogues."""
        self._dialogues: dict[str, list[ChatMessage]] = {}

    def answer(self, line: str, turn: int) -> dict[str, ChatReply]:
        """Returns each model's reply to a line, and appends both to the dialogues.

        Args:
            line: The user's message.
            turn: Number of the turn; with the seed it determines the sampling noise of both models.
        """
        answers, self._dialogues = self.extend(self._dialogues, line, turn)
        return answers

    def extend(
        self, dialogues: Mapping[str, list[ChatMessage]], line: str, turn: int
    ) -> tuple[dict[str, ChatReply], dict[str, list[ChatMessage]]]:
        """Returns each model's reply to a line, and the extended dialogues.

        Args:
            dialogues: Messages so far, by model; {} for a new conversation.
            line: The user's message.
            turn: Number of the turn; with the seed it determines the sampling noise of both models.
        """
        answers, longer = {}, {}
        for side in SIDES:
            asked = [*dialogues.get(side, ()), {"role": "user", "content": line}]
            answers[side] = self._reply(side, asked, turn)
            longer[side] = [*asked, {"role": "assistant", "content": answers[side].text}]
        return answers, longer

    def turn_to(self, preference: Sequence[float]) -> None:
        """Sets the preference of the aligned model; its adapter must be conditioned."""
        self._speakers.refold(preference)

    def _reply(self, side: str, messages: Sequence[ChatMessage], turn: int) -> ChatReply:
        # reward functions receive the same form as in training
        text = None if self._form == "chat" else hh_text(messages)
        if self._form == "text" and len(messages) == 1:
            text = messages[0]["content"]
        prompts = [Prompt(text, messages=tuple(messages))]
        stream = RandomStream(self._seed, "chat", turn)  # both models sample with the same noise
        with self._speakers.speaking(SIDES[side]) as sample, stream:
            replies = sample(prompts)
        judges = self._speakers.reward_fns.items()
        reward_fns = {name: fn for name, fn in judges if not getattr(fn, "needs", ())}
        batch = prompts, replies.completions, replies.completion_ids
        rows = score(reward_fns, *batch) if reward_fns else ()
        scores = {name: row[0] for name, row in zip(reward_fns, rows, strict=True)}
        return ChatReply(replies.completions[0].strip(), in_words(scores, self._calibrations))


def _preference(cfg: ChatConfig, objectives: Sequence[str]) -> Sequence[float] | None:
    """Returns the preference that is given, leads to the target or meets the requirements."""
    try:
        if not (cfg.target or cfg.require):
            return in_order(cfg.preference, objectives, "preference")
        front = conditioned_front(cfg.run or Path(), "chat")
        request = {"target": cfg.target or None, "require": cfg.require or None}
        return stated_preference(front, **request, confidence=cfg.confidence)
    except ValueError as error:
        raise UserError(str(error)) from error


def _form_of(run: Path) -> Literal["chat", "hh", "text"]:
    """Returns the form of a run's prompts, judging by its samples; texts of HH-RLHF without any."""
    rows = [row for row in Run(run).samples() if {"prompt", "messages"} <= row.keys()]
    chats = [Prompt(messages=tuple(row["messages"])).transcript == row["prompt"] for row in rows]
    if any(chats):
        return "chat"
    return "hh" if all(is_hh(row["prompt"]) for row in rows) else "text"


def in_words(raw: Mapping[str, torch.Tensor], calibrations: Mapping[str, Calibration]) -> list[str]:
    """Formats named scores, each with its reward in [0, 1] if there is a calibration."""
    parts = []
    for name, value in raw.items():
        if value.isnan():
            parts.append(f"{name} not applicable")
            continue
        reward = f" (reward {calibrations[name](value).item():.2f})" if name in calibrations else ""
        parts.append(f"{name} {value.item():.3f}{reward}")
    return parts


COMMANDS = "/reset starts over, /quit exits"


def main(cfg: ChatConfig, console: Console | None = None) -> None:
    """Replies to every line of the input until its end."""
    console = console or Console(highlight=False)
    conversation = Conversation(cfg)
    show_welcome(console, cfg, conversation)
    for turn, line in enumerate(turns(console)):
        if line == "/reset":
            conversation.reset()
            say(console, "(both dialogues start over)")
        elif line.startswith("/"):
            say(console, f"(unknown command {line.split()[0]}: {COMMANDS})")
        else:
            show(console, conversation.answer(line, turn))


def turns(console: Console) -> Iterator[str]:
    """Yields the user's messages, line by line, until /quit or the end of the input."""
    is_person = sys.stdin.isatty()  # otherwise a pipe, whose lines are echoed
    while True:
        try:
            line = (console.input("[bold]you[/bold]: ") if is_person else input()).strip()
        except EOFError:
            return
        line = line.encode(errors="replace").decode()  # keeps invalid bytes from the tokenizer
        if line == "/quit":
            return
        if line:
            if not is_person:
                say(console, f"you: {line}")
            yield line


def show_welcome(console: Console, cfg: ChatConfig, conversation: Conversation) -> None:
    """On a terminal, prints which models reply and how to quit."""
    if console.is_terminal:
        at = conversation.preference and f", at {formats.shares(conversation.preference)}"
        aligned = f"{conversation.folder}{at or ''}"
        say(console, f"base     {cfg.policy.path}\naligned  {aligned}\n{COMMANDS}\n")


def show(console: Console, answers: Mapping[str, ChatReply]) -> None:
    """Prints the replies: in two columns on a terminal, as labelled lines elsewhere."""
    if not console.is_terminal:
        for side, answer in answers.items():
            say(console, f"{side}: {answer.text}")
            if answer.scores:
                say(console, f"{side} scores: {'  '.join(answer.scores)}")
        return
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
    for side in answers:
        table.add_column(side, ratio=1)
    table.add_row(*(Text(legible(answer.text)) for answer in answers.values()))
    if any(answer.scores for answer in answers.values()):
        table.add_row(*(Text("\n".join(answer.scores), style="dim") for answer in answers.values()))
    console.print(table)


def say(console: Console, text: str) -> None:
    """Prints a text verbatim."""
    console.print(Text(legible(text)), soft_wrap=True)
