"""The page of `firm explore`, as a person uses it in a browser."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser import Page

SLIDE = """((index, share) => {
    const input = document.querySelector(`#share-${index} input[type=range]`);
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(input, share);
    for (const name of ["input", "pointerup"]) {
        input.dispatchEvent(new Event(name, { bubbles: true }));
    }
})"""


def _heed_interrupts() -> None:
    """Undoes what a process in the background inherits from its shell: to ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def served(run: Path, *options: str) -> Iterator[str]:
    """Yields where the page of a run is served, by a process of its own as for a person."""
    with subprocess.Popen(
        [sys.executable, "-m", "firm", "explore", "--run", str(run), *options],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    ) as command:
        assert command.stdout is not None
        lines = iter(command.stdout.readline, "")
        try:
            yield next(line.split()[0] for line in lines if "Ctrl-C" in line)
            command.send_signal(signal.SIGINT)
            command.communicate(timeout=60)
        finally:
            command.kill()  # what fails in the page must not leave the command waiting for Ctrl-C


def visit(page: Page, address: str, *, width: int = 1280) -> None:
    """Opens the page and waits for its front."""
    page.visit(address, width=width)
    page.wait_until("document.querySelectorAll('.js-plotly-plot .point').length > 0")


def slide(page: Page, index: int, share: float) -> None:
    """Moves a slider."""
    page(f"{SLIDE}({index}, {share})")


def ask(page: Page, line: str, count: int) -> None:
    """Says a line to both models, and waits until the dialogues have so many messages."""
    page("document.querySelector('#line textarea').focus()")
    page.write(line)
    page("document.querySelector('#ask').click()")
    page.wait_until(f"document.querySelectorAll('#aligned .message').length >= {count}")
