"""Standard streams that accept text outside of their encoding."""

import io
import sys
from contextlib import suppress


def accept_any_text() -> None:
    """Makes the standard streams accept any text, regardless of their encoding.

    An output stream in ASCII or in Windows' cp1252 escapes characters that it cannot encode, such
    as ``\\u03b2``, like Python's standard error: a run of several hours must not fail because its
    table contains a Greek letter or a model answered in Chinese. An input stream replaces bytes
    that it cannot decode by replacement characters.
    """
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):  # notebooks use other types, in UTF-8
            with suppress(io.UnsupportedOperation):  # raised after input has been read
                stream.reconfigure(errors=errors)
