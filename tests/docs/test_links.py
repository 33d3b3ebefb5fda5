"""Links between the pages of the documentation lead somewhere, and files that they name exist."""

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.smoke import ROOT

FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]* *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?:(?!`).)+?\1(?!`)", re.DOTALL)
INLINE = re.compile(r"\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+[\"'][^)]*)?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s+[\"'(].*)?$", re.MULTILINE)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$", re.MULTILINE)
TAG = re.compile(r"<[a-z]+\s[^>]*?(?:id|name)=[\"']([^\"']+)[\"']", re.IGNORECASE)
ATTRIBUTE = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=[\"']([^\"']+)[\"']", re.IGNORECASE)
NAMED = re.compile(r"`((?:benchmarks|configs|docs|firm|recipes|tests)/[\w./-]+\.[a-z]+)`")
"""A file of the repository, as a page names it."""


def pages(root: Path) -> list[Path]:
    """Returns the pages whose links are checked: Markdown, and notebooks."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md")), *notebooks(root)]


def notebooks(root: Path) -> list[Path]:
    return sorted((root / "docs").rglob("*.ipynb"))


def markdown(page: Path) -> str:
    """Returns a page's Markdown."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub gives a page's headings, and those that it sets itself."""
    text = FENCE.sub("", text)
    found, seen = set(TAG.findall(text)), Counter[str]()
    for heading in HEADING.findall(text):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        shown = re.sub(r"[*~]", "", shown).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def links(text: str) -> list[str]:
    """Returns the targets of a page's links and images."""
    text = CODE.sub("", FENCE.sub("", text))
    return INLINE.findall(text) + REFERENCE.findall(text) + ATTRIBUTE.findall(text)


def broken_links(root: Path) -> list[str]:
    """Returns the relative links that lead nowhere, and missing files, as `page: target`."""
    broken = []
    for page in pages(root):
        named = NAMED.findall(markdown(page))
        broken += [f"{page.relative_to(root)}: {n}" for n in named if not (root / n).exists()]
        for target in links(markdown(page)):
            if re.match(r"[a-z][a-z+.-]*:|//", target):
                continue
            path, _, anchor = unquote(target).partition("#")
            file = page.parent / path if path else page
            exists = file.exists() and file.resolve().is_relative_to(root.resolve())
            has_anchors = exists and file.suffix in (".md", ".ipynb") and anchor
            if not exists or (has_anchors and anchor not in anchors(markdown(file))):
                broken.append(f"{page.relative_to(root)}: {target}")
    return broken


def test_every_relative_link_leads_to_a_file_and_a_heading():
    assert not broken_links(ROOT)


@pytest.mark.parametrize(
    "target",
    ["gone.md", "#gone", "page.md#gone", "../../outside.md", "page.md#a-heading-2", "/x.md"],
)
def test_a_broken_link_is_found(tmp_path, target):
    root = tmp_path / "repository"
    (root / "docs").mkdir(parents=True)
    (tmp_path / "outside.md").write_text("")
    (root / "docs/page.md").write_text("# A heading\n\n## A `heading`\n\n```\n# Gone\n```\n")
    good = (
        "[a](docs/page.md#a-heading-1), [b](#β-at-05-and-2), `[c](gone.md)`\n\n# β at 0.5, and 2\n"
    )
    (root / "README.md").write_text(good)
    assert not broken_links(root)
    (root / "docs/other.md").write_text(f"[text over\nlines]({target}) `tests/gone.py`\n")
    assert broken_links(root) == ["docs/other.md: tests/gone.py", f"docs/other.md: {target}"]


def test_a_broken_link_of_a_notebook_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[notebook](docs/a.ipynb#a-title)")
    cells = [{"cell_type": "markdown", "source": ["# A title\n", "[a](../README.md), [b](b.md)"]}]
    cells += [{"cell_type": "code", "source": ["f[0](gone)"]}]
    (tmp_path / "docs/a.ipynb").write_text(json.dumps({"cells": cells}))
    assert broken_links(tmp_path) == ["docs/a.ipynb: b.md"]


def test_the_api_pages_document_modules_that_exist():
    pages = sorted((ROOT / "docs/api").glob("*.rst"))
    named = [m for page in pages for m in re.findall(r"automodule:: (\S+)", page.read_text())]
    assert len(named) > 10
    missing = []
    for module in named:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            missing.append(module)
    assert not missing
