"""The table from packages to the tests of the second tier that a change of them needs."""

import subprocess

import pytest

from tests import parts
from tests.parts import ALL, PARTS, ROOT, changed_files, parts_of


def folders_of(top):
    return {path.name for path in (ROOT / top).iterdir() if any(path.glob("**/*.py"))}


def test_every_package_and_every_folder_of_tests_is_in_the_table():
    packages = {f"firm/{name}" for name in folders_of("firm") if (ROOT / "firm" / name).is_dir()}
    packages.remove("firm/base")  # which all others use
    assert packages | {"reward_models", "recipes", "benchmarks", "configs", "docs"} <= {*PARTS}
    named = {part.partition("/")[0] for parts in PARTS.values() for part in parts}
    assert named | {"base"} == {
        name for name in folders_of("tests") if any((ROOT / "tests" / name).glob("**/test_*.py"))
    }
    assert all((ROOT / "tests" / part).exists() for parts in PARTS.values() for part in parts)


def test_a_package_with_tests_of_its_own_names_them():
    for package, folders in PARTS.items():
        own = package.rpartition("/")[2]
        assert own in folders or not (ROOT / "tests" / own).is_dir()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        (["firm/cli/main.py"], ["tests/cli", "tests/docs"]),
        (["tests/solvers/test_kkt.py", "README.md"], ["tests/docs", "tests/solvers"]),
        (
            ["firm/network/site.py", "firm/run/rows.py"],
            ["tests/cli", "tests/jobs", "tests/network", "tests/run"],
        ),
        (["CHANGELOG.md"], []),
        (["firm/base/schema.py"], [ALL]),
        (["tests/runs.py"], [ALL]),
        (["pyproject.toml", "firm/cli/main.py"], [ALL]),
        (["a/new/place.py"], [ALL]),
    ],
)
def test_a_change_needs_the_tests_of_what_it_touches(changed, needed):
    assert parts_of(changed) == needed


def test_what_git_cannot_tell_is_not_known():
    assert changed_files("no-such-commit") is None
    assert changed_files("HEAD") is not None


def test_on_the_default_branch_a_change_is_what_differs_from_the_last_pass(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "PASSED", tmp_path / "tests/second_tier.txt")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/second_tier.txt").write_text("a commit of another clone\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert changed_files() is None
    assert parts.note_passed() == "recorded in tests/second_tier.txt: commit it"
    assert parts.note_passed().startswith("passed, but not recorded")
    (tmp_path / "firm.py").write_text("")
    git("add", ".")
    git("commit", "-m", "two")
    assert changed_files() == ["firm.py", "tests/second_tier.txt"]
