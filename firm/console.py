"""The standard streams, where their encoding lacks characters that a program has to say."""

import io
import sys
from contextlib import suppress


def accept_any_text() -> None:
    """Lets the standard streams carry any text, whatever their encoding.

    An output in ASCII or in Windows' cp1252 shows a character that it lacks as an escape, such as
    ``\\u03b2``, as Python's standard error does: a run of hours must not end because its table
    holds a Greek letter or a model answered in Chinese. An input shows bytes that are not in its
    encoding as replacement characters.
    """
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's streams are UTF-8 and other types
            with suppress(io.UnsupportedOperation):  # of an input that has been read from already
                stream.reconfigure(errors=errors)
