r"""Whether the tests notice: small faults drawn over the code, and the tests that must turn red.

    pip install cosmic-ray pytest-cov          # what makes faults, and which test runs a line
    python -m pytest -m "" -n 2 --cov=firm --cov=reward_models --cov-context=test --cov-report= \
        --junitxml=tests.xml -o junit_family=xunit1
    python benchmarks/mutants.py draw --seed 0            # writes the list, once
    python benchmarks/mutants.py run --column first       # half an hour of a core; it is resumed
    python benchmarks/mutants.py                          # the table
    python benchmarks/mutants.py renew --seed 1           # after the code has changed much

A mutant is one line of `firm` or `reward_models` that differs. It is killed where one of the tests
that run the line fails, or hangs; tests of the same folder come first, the fastest first, up to
`--seconds` of them by their recorded times. Runs happen in `--tree`, a clone that nobody edits.
`renew` follows lines to the files that have them now, and draws others for lines that are gone.
"""

import argparse
import ast
import csv
import fcntl
import importlib
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
LIST = ROOT / "docs/results/data/mutants.csv"
AREAS: dict[str, tuple[int, tuple[str, ...]]] = {
    "solvers": (25, ("firm/solvers",)),
    "gradients": (25, ("firm/gradients",)),
    "estimators": (25, ("firm/alignment/estimators",)),
    "adapters": (20, ("firm/alignment/adapters",)),
    "alignment": (35, ("firm/alignment",)),
    "options": (20, ("firm/federation/options",)),
    "federation": (30, ("firm/federation",)),
    "classic": (15, ("firm/fmoo",)),
    "fronts": (20, ("firm/fronts",)),
    "jobs": (30, ("firm/jobs",)),
    "run": (20, ("firm/run", "firm/cli")),
    "report": (15, ("firm/report",)),
    "serving": (12, ("firm/serving",)),
    "network": (12, ("firm/network",)),
    "rewards": (10, ("reward_models",)),
    "root": (6, ("firm",)),
}
"""Mutants of each area and its folders; a file belongs to the longest folder that holds it."""
LEFT_OUT = ("NoOp", "RemoveDecorator", "Variable", "_Is")
"""Operators whose mutants are none, or fail on import whatever the tests are."""


@dataclass
class Mutant:
    """A line of code, what stands in its place, and what noticed."""

    area: str
    file: str
    line: int
    operator: str
    original: str
    changed: str
    note: str = ""
    """Why it may survive."""
    tests: dict[str, str] = field(default_factory=dict[str, str])
    """By suite, the test that killed it, or "survived"."""


def area_of(file: str) -> str:
    """Returns the area whose folder holds a file most closely."""
    holds = [
        (len(folder), area)
        for area, (_, folders) in AREAS.items()
        for folder in folders
        if file.startswith(f"{folder}/")
    ]
    return max(holds)[1]


def candidates(text: str) -> list[tuple[str, int, int]]:
    """Returns what could be done to a module: operator, its occurrence, and the line.

    Left out are decorators, and the places of `|`.
    """
    from cosmic_ray import plugins  # pyright: ignore[reportMissingImports]
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]

    nodes = list(ast_nodes(get_ast(text)))
    bars = _bars(text)
    found: list[tuple[str, int, int]] = []
    for name in plugins.operator_names():
        if any(part in name for part in LEFT_OUT):
            continue
        operator = plugins.get_operator(name)()
        positions = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, ((row, column), _) in enumerate(positions):
            if "BitOr" in name and (row, column) in bars:
                continue
            found.append((name, occurrence, row))
    return found


def _bars(text: str) -> set[tuple[int, int]]:
    """Returns the places of `|`, nearly all of which are in types."""
    places: set[tuple[int, int]] = set()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                places.update((row, at) for at, sign in enumerate(lines[row - 1]) if sign == "|")
    return places


def draw(seed: int, counts: Mapping[str, int]) -> list[Mutant]:
    """Returns mutants of some areas, as many as their counts."""
    from cosmic_ray import plugins  # pyright: ignore[reportMissingImports]
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]

    generator = random.Random(seed)
    texts = product()
    by_area: dict[str, list[str]] = defaultdict(list)
    for file in texts:
        by_area[area_of(file)].append(file)
    drawn: list[Mutant] = []
    for area, count in counts.items():
        places: dict[tuple[str, int, str], list[tuple[str, int]]] = defaultdict(list)
        for file in by_area[area]:
            for name, occurrence, row in candidates(texts[file]):
                family = name.split("/")[-1].split("_")[0]  # + to -, + to *: one family
                places[file, row, family].append((name, occurrence))
        order = sorted(places)
        generator.shuffle(order)
        left = count
        for file, row, family in order:
            name, occurrence = generator.choice(places[file, row, family])
            changed = mutate_code(texts[file], plugins.get_operator(name)(), occurrence)
            lines, others = texts[file].splitlines(), (changed or "").splitlines()
            if len(lines) != len(others):
                continue
            differing = [
                at for at, pair in enumerate(zip(lines, others, strict=True)) if len({*pair}) > 1
            ]
            if len(differing) != 1 or not compiles(changed or ""):
                continue
            at = differing[0]
            drawn.append(Mutant(area, file, at + 1, family, lines[at].strip(), others[at].strip()))
            left -= 1
            if not left:
                break
    return drawn


def product() -> dict[str, str]:
    """Returns the text of each module that has mutants, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for top in ("firm", "reward_models")
        for path in sorted((ROOT / top).rglob("*.py"))
    }


def renewed(mutants: Iterable[Mutant], seed: int) -> list[Mutant]:
    """Returns as many mutants of today's code, the old ones where their line is in one file."""
    texts, kept, lost = product(), list[Mutant](), Counter[str]()
    for mutant in mutants:
        if mutated(mutant, texts.get(mutant.file, "")) is None:
            holders = [
                (file, at)
                for file, text in texts.items()
                for at, line in enumerate(text.splitlines(), start=1)
                if line.strip() == mutant.original
            ]
            if len(holders) != 1:
                lost[mutant.area] += 1
                continue
            ((file, line),) = holders
            mutant = replace(mutant, file=file, line=line)
        kept.append(mutant)
    return kept + draw(seed, lost)


def compiles(text: str) -> bool:
    """Whether a text is Python."""
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def mutated(mutant: Mutant, text: str) -> str | None:
    """Returns a module with a mutant's line in it, or None where the line is gone."""
    lines = text.splitlines(keepends=True)
    places = [at for at, line in enumerate(lines) if line.strip() == mutant.original]
    if not places:
        return None
    at = min(places, key=lambda place: abs(place + 1 - mutant.line))
    lines[at] = lines[at].replace(mutant.original, mutant.changed, 1)
    return "".join(lines)


def load(path: Path) -> list[Mutant]:
    """Reads the list."""
    own = [each.name for each in fields(Mutant) if each.name != "tests"]
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Mutant(
                **{**{name: row.get(name, "") for name in own}, "line": int(row["line"])},  # pyright: ignore[reportArgumentType]
                tests={name: row[name] for name in row if name not in own and row[name]},
            )
            for row in csv.DictReader(file)
        ]


def save(path: Path, mutants: Sequence[Mutant]) -> None:
    """Writes the list."""
    columns = sorted({name for mutant in mutants for name in mutant.tests})
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8", newline="") as file:
        names = [each.name for each in fields(Mutant) if each.name != "tests"]
        writer = csv.DictWriter(file, [*names, *columns], lineterminator="\n")
        writer.writeheader()
        for mutant in mutants:
            row = asdict(mutant)
            writer.writerow({**{name: row[name] for name in names}, **mutant.tests})
    draft.replace(path)


class Suite:
    """Which tests run which line, and how long each takes."""

    def __init__(self, coverage_file: Path, times_file: Path) -> None:
        from coverage import CoverageData  # pyright: ignore[reportMissingImports]

        self.data = CoverageData(str(coverage_file))
        self.data.read()
        self.seconds = dict(_times(times_file))
        self.files = {_within(file): file for file in self.data.measured_files()}

    def tests_of(self, mutant: Mutant, text: str) -> list[str]:
        """Returns the tests that run a mutant's line, those of its folder first, then by time."""
        rows = text.splitlines()
        at = min(
            (place for place, line in enumerate(rows, 1) if line.strip() == mutant.original),
            key=lambda place: abs(place - mutant.line),
        )
        if mutant.file not in self.files:
            return []
        contexts = self.data.contexts_by_lineno(self.files[mutant.file])
        first, last = (row + mutant.line - at for row in _statement(text, at))  # as it was drawn
        ran = {name for row in range(first, last + 1) for name in contexts.get(row, ())}
        tests = {name.rsplit("|", 1)[0] for name in ran if name}
        if not tests:  # it runs on import: whatever runs something of the module
            tests = {
                name.rsplit("|", 1)[0] for names in contexts.values() for name in names if name
            }
        folder = (
            f"tests/{Path(mutant.file).parent.relative_to('firm').as_posix()}/"
            if mutant.file.startswith("firm/")
            else "tests/reward_models/"
        )
        own = f"{folder}test_{Path(mutant.file).stem}.py"

        def rank(test: str) -> tuple[int, float]:
            near = 0 if test.startswith(own) else 1 if test.startswith(folder) else 2
            return near, self.seconds.get(test, 1.0)

        return sorted((test for test in tests if test in self.seconds), key=rank)


def _within(file: str) -> str:
    """Returns a measured file's path in a tree, wherever the tree lay."""
    parts = Path(file).parts
    top = max(at for at, part in enumerate(parts) if part in ("firm", "reward_models"))
    return "/".join(parts[top:])


def _statement(text: str, row: int) -> tuple[int, int]:
    """Returns the first and last line of the smallest statement around a line."""
    around = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= row <= (node.end_lineno or node.lineno)
    ]
    first, last = min(around, key=lambda lines: lines[1] - lines[0], default=(row, row))
    return (first, last) if last - first < 12 else (row, row)


def _times(path: Path) -> Iterator[tuple[str, float]]:
    """Yields the names of tests as pytest takes them, and their seconds."""
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file")
        if file and case.find("skipped") is None:
            inner = (case.get("classname") or "")[len(file[:-3].replace("/", ".")) :].strip(".")
            name = "::".join([file, *filter(None, inner.split(".")), case.get("name") or ""])
            yield name, float(case.get("time") or 0.0)


@contextmanager
def in_place(path: Path, text: str) -> Iterator[None]:
    """Has other text in a file for a while, and leaves its time as it was."""
    before, stat = path.read_text(encoding="utf-8"), path.stat()
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(before, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class InOrder:
    """A plugin of pytest: tests in the order in which they were named."""

    def __init__(self, names: Sequence[str], report: int) -> None:
        self.place = {name: at for at, name in enumerate(names)}
        self.report = report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts the tests."""
        items.sort(key=lambda item: self.place.get(item.nodeid, len(self.place)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tells the parent which test failed."""
        self._tell(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tells the parent which file could not be imported."""
        self._tell(report)

    def _tell(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            os.write(self.report, f"{report.nodeid}\n".encode())


def killer(tests: Sequence[str], tree: Path, timeout: float, log: Path) -> str | None:
    """Returns which of the tests fails in a forked process, or None."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.setsid()
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(tree)
            sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
            sys.dont_write_bytecode = True
            flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov"]
            flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported
            code = int(pytest.main([*flags, *tests], plugins=[InOrder(tests, writing)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    end = time.monotonic() + timeout
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > end:
                return "timeout"
            time.sleep(0.05)
        failed = os.read(reading, 4096).decode().splitlines() if status else []
        if status:
            return failed[0] if failed else f"exit code {os.waitstatus_to_exitcode(status)}"
        return None
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def import_libraries(tree: Path) -> None:
    """Imports what tests import, but nothing of the tree, so that forks start with it."""
    code = (
        "import sys, firm.jobs.alignment, firm.jobs.fmoo, hypothesis, datasets, trl, pytest\n"
        "print(*[name for name in sys.modules if name.split('.')[0] not in "
        "('firm', 'recipes', 'reward_models', '__main__')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
    )
    for name in done.stdout.split():
        with suppress(Exception):
            importlib.import_module(name)


def shortened(tests: Sequence[str], seconds: Mapping[str, float], budget: float) -> list[str]:
    """Returns the first tests up to a sum of seconds, and at least one."""
    chosen: list[str] = []
    spent = 0.0
    for test in tests:
        spent += seconds.get(test, 1.0)
        if chosen and spent > budget:
            continue
        chosen.append(test)
    return chosen


def run(arguments: argparse.Namespace) -> None:
    """Runs the mutants that a column does not have yet."""
    tree = arguments.tree.resolve()
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", PYTHONPATH=str(tree))
    import_libraries(tree)
    suite = Suite(arguments.coverage, arguments.times)
    mutants = load(arguments.list)
    for at, mutant in enumerate(mutants):
        if arguments.column in mutant.tests or at % arguments.parts != arguments.part:
            continue
        path = tree / mutant.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = mutated(mutant, text)
        if changed is None:
            outcome, tests = "gone", []
        else:
            tests = suite.tests_of(mutant, text)
            known = [name for name in mutant.tests.values() if name in suite.seconds]
            tests = [*dict.fromkeys([*known, *tests])]  # what killed it before comes first
            chosen = shortened(tests, suite.seconds, arguments.seconds)
            if not chosen:
                outcome = "no test"
            else:
                spent = sum(suite.seconds[name] for name in chosen)
                log = Path(arguments.logs) / f"{at}.log"
                with in_place(path, changed):
                    outcome = killer(chosen, tree, 120 + 4 * spent, log) or "survived"
        print(f"{at:4} {mutant.file}:{mutant.line} {len(tests)} tests: {outcome}", flush=True)
        with arguments.list.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            written = load(arguments.list)  # another part may have written
            written[at].tests[arguments.column] = outcome
            save(arguments.list, written)


def table(mutants: Iterable[Mutant]) -> None:
    """Prints the killed by area, and the survivors."""
    mutants = list(mutants)
    columns = sorted({name for mutant in mutants for name in mutant.tests})
    print(f"{'area':12}{'mutants':>9}" + "".join(f"{name:>12}" for name in columns))
    for area in [*AREAS, "all"]:
        own = [mutant for mutant in mutants if area in ("all", mutant.area)]
        killed = [
            Counter(_is_killed(each.tests.get(name)) for each in own)[True] for name in columns
        ]
        print(f"{area:12}{len(own):>9}" + "".join(f"{count:>12}" for count in killed))


def _is_killed(outcome: str | None) -> bool:
    return outcome not in (None, "", "survived", "no test", "gone")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", choices=("draw", "renew", "run", "table"), default="table"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--column", default="before")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, default=ROOT / "tests.xml")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--logs", default="/tmp")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.what == "draw":
        save(given.list, draw(given.seed, {area: count for area, (count, _) in AREAS.items()}))
    elif given.what == "renew":
        save(given.list, renewed(load(given.list), given.seed))
    elif given.what == "run":
        run(given)
    table(load(given.list))


if __name__ == "__main__":
    main()
