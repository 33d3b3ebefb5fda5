"""Lets the base and the aligned model answer side by side."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from firm.federation.outside import legible
from firm.jobs.chat import Answer, ChatConfig, Conversation
from firm.jobs.finished_runs import parse_over_run
from firm.run import exit_on_user_error

COMMANDS = "/reset begins anew, /quit leaves"


def main(cfg: ChatConfig, console: Console | None = None) -> None:
    """Answers every line of the input until it ends."""
    console = console or Console(highlight=False)
    conversation = Conversation(cfg)
    show_welcome(console, cfg, conversation.folder)
    for turn, line in enumerate(turns(console)):
        if line == "/reset":
            conversation.reset()
            say(console, "(both dialogues begin anew)")
        elif line.startswith("/"):
            say(console, f"(no command {line.split()[0]}: {COMMANDS})")
        else:
            show(console, conversation.answer(line, turn))


def turns(console: Console) -> Iterator[str]:
    """Yields what the person says, line by line, until /quit or the end of the input."""
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


def show_welcome(console: Console, cfg: ChatConfig, folder: Path) -> None:
    """Says on a terminal who talks, and how to leave."""
    if console.is_terminal:
        say(console, f"base     {cfg.policy.path}\naligned  {folder}\n{COMMANDS}\n")


def show(console: Console, answers: Mapping[str, Answer]) -> None:
    """Prints two columns on a terminal, labelled lines elsewhere."""
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
    """Prints a text as it is."""
    console.print(Text(legible(text)), soft_wrap=True)


def cli(argv: Sequence[str] | None = None, *, description: str = "") -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    with exit_on_user_error():
        main(parse_over_run(ChatConfig, argv, key="run", description=description))
