"""Measures the house: lines by package, longest files and functions, and what one round passes.

    python benchmarks/house.py
    python benchmarks/house.py --round    # also runs the smoke job and traces its second round

Files, functions and the depth of frames are those of `firm` that run in the second round, and in
its second local training, of the smoke job.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
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
    imports = import_graph()
    circles = [group for group in networkx.strongly_connected_components(imports) if len(group) > 1]
    # a circle, closed by imports within functions, counts as one module
    merged = networkx.condensation(imports)
    members = (
        sorted(merged.nodes[group]["members"]) for group in networkx.dag_longest_path(merged)
    )
    chain = [" = ".join(modules) for modules in members]
    print(f"import circles: {len(circles)}")
    print(f"longest import chain, {len(chain)} modules: {' > '.join(chain)}")
    names = Counter(name for file in files_of(ROOT / "firm") for name in classes_of(file))
    taken = sorted(name for name, count in names.items() if count > 1)
    print(f"class names defined more than once, {len(taken)}: {', '.join(taken)}\n")
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


def classes_of(file: Path) -> list[str]:
    """Returns the public names of the classes that a file defines at its top."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


def import_graph() -> networkx.DiGraph:
    """Returns which of the product's modules imports which when it runs."""
    names = "firm", "reward_models", "recipes"
    graph = grimp.build_graph(*names, exclude_type_checking_imports=True)
    return networkx.DiGraph(
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    )


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
TRACER = """
import sys
from firm.federation import strategies
from firm.federation.tasks import TASKS, ClientTask
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse

root, out, estimator = sys.argv[1:]

def traced(function, name):
    # the second call is traced: the first one loads what is loaded once
    calls = []

    def call(*arguments, **options):
        calls.append(name)
        if len(calls) != 2:
            return function(*arguments, **options)
        files, functions, depths, own = set(), set(), [0], sys._getframe()

        def profile(frame, event, argument):
            code = frame.f_code
            if event != "call" or not code.co_filename.startswith(root):
                return
            files.add(code.co_filename)
            functions.add((code.co_filename, code.co_name, code.co_firstlineno))
            depth = 0
            while frame is not None and frame is not own:
                depth += frame.f_code.co_filename.startswith(root)
                frame = frame.f_back
            depths.append(depth)

        outer = sys.getprofile()
        sys.setprofile(profile)
        try:
            return function(*arguments, **options)
        finally:
            sys.setprofile(outer)
            print("TRACE", name.replace(" ", "_"), len(files), len(functions), max(depths))

    return call

step = TASKS["local_training"]
if estimator.endswith("round"):
    strategies.STRATEGIES["firm"] = traced(strategies.STRATEGIES["firm"], "round")
else:
    TASKS["local_training"] = ClientTask(traced(step.function, "local step"), step.request)
main(parse(AlignmentConfig, [
    "--config", "smoke", "--out", out, "--estimator.name", estimator.split()[0],
    "--strategy.num_local_steps", "1", "--estimator.num_epochs", "1",
    "--evaluation.num_test_prompts", "2", "--evaluation.num_validation_prompts", "0",
]))
"""


def print_round() -> None:
    """Prints the files, functions and frames that a local step and a round pass, options off."""
    rows = []
    for estimator in ("ppo", "critic_free", "ppo round", "critic_free round"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", TRACER, str(ROOT / "firm"), f"{folder}/run", estimator]
            ended = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=folder, env=ENVIRONMENT
            )
        found = [line for line in ended.stdout.splitlines() if line.startswith("TRACE ")]
        _, what, *figures = found[-1].split()
        rows.append([f"{what.replace('_', ' ')}, {estimator.split()[0]}", *figures])
    header = ["second of the smoke job", "files", "functions", "depth"]
    print_table("What is passed with every option off", header, rows)


if __name__ == "__main__":
    main()
