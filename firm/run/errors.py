"""Errors that are the user's to cure: one line, exit code 2, no traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from firm.federation import ProcessLost, RoundFailed
from firm.federation.outside import printable

_MAX_LINE = 4_000
"""Longest line that an error ends the program with, in characters."""


class UserError(ValueError):
    """What was wrong, what was received and what to do, in one line for the person who typed it."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the program with one line on stderr and exit code 2 when the input is at fault.

    Bad values, files and rewards raise ValueError or OSError, or make every client fail. A defect
    may do so too, so whatever is not a plain `UserError` says how to see its traceback. All other
    exceptions are defects and keep theirs. What messages quote from files and other machines is
    shown without anything that a terminal would obey.
    """
    try:
        yield
    except (ValueError, OSError, RoundFailed, ProcessLost) as error:
        if os.environ.get("FIRM_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")  # of a launcher's processes; the first needs no name
        words = " ".join(str(error).split()) or type(error).__name__
        line = printable(words, max_length=_MAX_LINE)
        hint = "" if isinstance(error, UserError) else " (FIRM_TRACEBACK=1 shows where)"
        sys.stderr.write(f"{'' if rank == '0' else f'[process {rank}] '}error: {line}{hint}\n")
        raise SystemExit(1 if isinstance(error, ProcessLost) else 2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None  # 128 + SIGINT, as shells count
