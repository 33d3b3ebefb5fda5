"""Prints which folders of tests a change needs in the second tier, or `tests` for all of them.

    python -m tests.parts              # since this branch left origin's default branch
    python -m tests.parts v1.2         # since a tag or commit
    python -m tests.parts --passed     # records that the whole second tier has passed

On the default branch itself, a change is what differs from the commit at which the whole second
tier passed last. Where git cannot tell what has changed, it is all.
"""

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALL = "tests"
PASSED = ROOT / "tests/second_tier.txt"
"""Commit at which the whole second tier passed last, which `make test-slow` writes."""
PARTS: dict[str, tuple[str, ...]] = {
    "firm/alignment": (
        *("alignment", "zoo", "jobs", "network/test_federations.py", "extensions"),
        *("accelerator", "docs"),
    ),
    "firm/cli": ("cli", "docs"),
    "firm/federation": ("federation", "jobs", "network", "extensions", "accelerator"),
    "firm/fmoo": ("fmoo", "jobs", "recipes", "accelerator"),
    "firm/fronts": ("fronts", "jobs", "benchmarks"),
    "firm/gradients": ("gradients", "federation", "alignment", "zoo", "accelerator"),
    "firm/jobs": ("jobs", "cli", "network", "docs"),
    "firm/miniature": ("miniature", "recipes"),
    "firm/network": ("network",),
    "firm/report": ("report", "recipes", "docs"),
    "firm/run": ("run", "jobs", "network/test_federations.py", "cli"),
    "firm/serving": ("serving", "jobs", "docs"),
    "firm/solvers": ("solvers", "federation", "fronts", "recipes"),
    "reward_models": ("reward_models", "jobs", "extensions"),
    "recipes": ("recipes", "docs"),
    "benchmarks": ("benchmarks", "network", "accelerator"),
    "configs": ("jobs", "network/test_federations.py", "docs"),
    "docs": ("docs", "benchmarks"),
    "README.md": ("docs",),
}
"""Folders of tests that notice a fault in a package: its own, and those of whole runs."""
NONE = (
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", ".gitignore",
    PASSED.relative_to(ROOT).as_posix(),
)  # fmt: skip
"""Files that no test of the second tier reads."""


def parts_of(changed: Iterable[str]) -> list[str]:
    """Returns the folders of tests for files that have changed, or all where one is unknown."""
    found: set[str] = set()
    for file in changed:
        package = next((name for name in PARTS if _holds(name, file)), None)
        if package is not None:
            found.update(f"tests/{part}" for part in PARTS[package])
        elif file.startswith("tests/") and file.count("/") > 1:
            found.add("/".join(file.split("/")[:2]))
        elif file not in NONE:
            return [ALL]
    return sorted(part for part in found if not found & {*_parents(part)})


def _holds(package: str, file: str) -> bool:
    return file == package or file.startswith(f"{package}/")


def _parents(part: str) -> Collection[str]:
    return [parent.as_posix() for parent in Path(part).parents]


def changed_files(base: str | None = None) -> list[str] | None:
    """Returns the files that differ from a commit, or None where there is none to compare with.

    Args:
        base: A commit, branch or tag; by default where this branch left origin's default branch,
            and on that branch where the whole second tier passed last.
    """
    if base is None:
        head, left = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/HEAD")
        is_branch = left is not None and left != head
        base = left if is_branch else PASSED.read_text(encoding="utf-8").strip()
    told = _git("diff", "--name-only", "--no-renames", base)
    return None if told is None else told.splitlines()


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def note_passed() -> str:
    """Records that the whole second tier passed at this commit; returns a line for the terminal."""
    if _git("status", "--porcelain"):
        return "passed, but not recorded: there are changes without a commit"
    PASSED.write_text(f"{_git('rev-parse', 'HEAD')}\n", encoding="utf-8")
    return f"recorded in {PASSED.relative_to(ROOT)}: commit it"


if __name__ == "__main__":
    if sys.argv[1:] == ["--passed"]:
        words = note_passed()
    else:
        files = changed_files(*sys.argv[1:2])
        words = " ".join([ALL] if files is None else parts_of(files))
    sys.stdout.write(f"{words}\n")
