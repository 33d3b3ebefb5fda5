"""Writes what holds for which models and tokenizers into the guide.

    python -m tests.zoo.table

The tables are those of the zoo, whose tests check each line of them.
"""

from collections.abc import Iterable
from pathlib import Path

from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.kinds import KINDS

PAGE = Path(__file__).parents[2] / "docs/guide/models.md"
USES = {"everywhere": "trains", "stacked": "stacked clients"}
"""Columns of the table, by the key of `Architecture.refused`."""
BEGIN, END = "<!-- begin: {} -->\n", "<!-- end: {} -->"


def page() -> str:
    """Returns the page with its tables as they are to be."""
    text = PAGE.read_text()
    for name, table in {"models": models(), "tokenizers": tokenizers()}.items():
        before, _, rest = text.partition(BEGIN.format(name))
        _, _, after = rest.partition(END.format(name))
        text = f"{before}{BEGIN.format(name)}\n{table}\n{END.format(name)}{after}"
    return text


def models() -> str:
    """Returns the table of architectures, and why some are refused."""
    reasons: dict[str, int] = {}
    rows = []
    for name, own in ARCHITECTURES.items():
        marks = []
        for use in USES:
            reason = own.refused.get("everywhere") or own.refused.get(use)
            number = reasons.setdefault(reason, len(reasons) + 1) if reason else None
            marks.append(f"no ({number})" if number else "yes")
        rows.append((own.models, f"`{name}`", ", ".join(own.features), *marks))
    head = ("models", "type", "particular", *USES.values())
    refusals = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    return f"{_table(head, rows)}\nRefused, in one line that says:\n\n{refusals}"


def tokenizers() -> str:
    """Returns the table of tokenizers."""
    rows = [(own.what, own.like) for own in KINDS.values()]
    return _table(("a tokenizer with", "as in"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(tuple(head)), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
