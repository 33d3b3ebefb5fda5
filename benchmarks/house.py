"""Measures the house: lines by package, longest files and functions, and what one round passes.

    python benchmarks/house.py
    python benchmarks/house.py --round    # also runs the smoke job and traces its second round

A round's hops are the files of the project in which something ran between the start of the last
round and its aggregation, or its page.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

import grimp
import networkx

from firm.run import print_table

ROOT = Path(__file__).parents[1]
PACKAGES = ("firm", "recipes", "reward_models", "benchmarks", "tests")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--round", action="store_true", help="trace a round of the smoke job")
    options = parser.parse_args(argv)
    print_table("Packages", HEADER, [row(name, files_of(ROOT / name)) for name in PACKAGES])
    print(f"import circles: {num_circles()}\n")
    parts = sorted(path for path in (ROOT / "firm").iterdir() if any(path.glob("*.py")))
    print_table("firm", HEADER, [row(path.name, files_of(path)) for path in parts])
    product = [file for name in ("firm", "recipes") for file in files_of(ROOT / name)]
    longest = sorted(product, key=num_lines, reverse=True)[:8]
    rows = [[str(file.relative_to(ROOT)), str(num_lines(file))] for file in longest]
    print_table("Longest files", ["file", "lines"], rows)
    functions = sorted((entry for file in product for entry in functions_of(file)), reverse=True)
    rows = [
        [f"{file.relative_to(ROOT)}: {name}", str(lines)] for lines, name, file in functions[:8]
    ]
    print_table("Longest functions", ["function", "lines"], rows)
    if options.round:
        print_round()


HEADER = ["", "files", "lines", "median, p90, longest file", "median, longest function", "broad"]


def row(name: str, files: Sequence[Path]) -> list[str]:
    """Returns the figures of some files: lines of files and functions, and broad excepts."""
    lengths = [num_lines(file) for file in files]
    functions = [lines for file in files for lines, _, _ in functions_of(file)]
    ninth = quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    return [
        name,
        str(len(files)),
        f"{sum(lengths):,}",
        f"{median(lengths):.0f}, {ninth:.0f}, {max(lengths)}",
        f"{median(functions):.0f}, {max(functions)}" if functions else "",
        str(sum(num_broad(file) for file in files)),
    ]


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)


def num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def functions_of(file: Path) -> Iterator[tuple[int, str, Path]]:
    """Yields the length in lines, the name and the file of every function."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield node.end_lineno - node.lineno + 1, node.name, file


def num_broad(file: Path) -> int:
    """Returns how many handlers of a file catch every exception."""
    handlers = [
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler)
    ]
    broad = {"Exception", "BaseException"}
    return sum(
        handler.type is None
        or bool(broad & {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)})
        for handler in handlers
    )


def num_circles() -> int:
    """Returns how many groups of the product's modules import each other, directly or not."""
    graph = grimp.build_graph("firm", "reward_models", "recipes")
    imports = networkx.DiGraph(
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    )
    return sum(len(group) > 1 for group in networkx.strongly_connected_components(imports))


TRACER = """
import sys, threading
from pathlib import Path
from firm.jobs.alignment import main
from firm.federation.server import ServerState
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse
import firm.jobs.alignment as job

root, out, seen, marks = sys.argv[1], sys.argv[2], set(), []

def trace(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(root):
        seen.add(name)

wing, advance = job._LanguageWing, ServerState.advance
measure, show = wing.measure, wing.show

def measured(self, before, after, metrics):
    marks.append(("aggregation", set(seen)))
    return measure(self, before, after, metrics)

def shown(self, state, rows):
    result = show(self, state, rows)
    marks.append(("page", set(seen)))
    seen.clear()
    return result

wing.measure, wing.show = measured, shown
sys.setprofile(trace)
threading.setprofile(trace)
main(parse(AlignmentConfig, ["--config", "smoke", "--out", out]))
sys.setprofile(None)
for name, files in marks[-2:]:
    lines = sum(len(Path(f).read_text().splitlines()) for f in files)
    print(f"HOPS {name} {len(files)} {lines}")
"""


def print_round() -> None:
    """Prints how many files and lines the last round of the smoke job passes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRACER, str(ROOT / "firm"), f"{folder}/run"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    found = [line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("HOPS ")]
    print_table("One round of the smoke job", ["up to the", "files", "lines"], found)


if __name__ == "__main__":
    main()
