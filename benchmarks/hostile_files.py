"""What files of strangers cost: seconds, memory and changes outside their folder, by command.

    python benchmarks/hostile_files.py

A conditioned run of configs/smoke.yaml is copied, spoilt in one way, and given to a command, as a
user would type it, in a process of its own. Links are put in the place of each file and folder of
a run that the command reads or writes, to a file, to a folder and to nothing. Each command must end
by itself.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from firm.run import print_table

ROOT = Path(__file__).parent.parent
RUN = (
    *("align", "--config", "configs/smoke.yaml", "--strategy.name", "fedavg", "--rounds", "1"),
    *("--estimator.name", "critic_free", "--estimator.num_replies", "2"),
    *("--estimator.ratio", "cispo", "--policy.conditioning.kind", "preference"),
)
PLACES = (
    *(".lock", "config.yaml", "run.json", "metrics.jsonl", "samples.jsonl", "error.txt"),
    *("checkpoints", "checkpoints/round_0001", "report.html", "plotly.min.js", "front.json"),
    *("front", "adapter", "adapter/adapter_config.json", "test_scores.safetensors", "wandb"),
)
TEMPLATES = {
    "a template that loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a template that takes 3 GB": "{{ 'a' * 3000000000 }}",
    "a template of 5,000 parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}
NUM_POINTS, NUM_SEEDS, BOMB_BYTES = 4_000, 60_000, 3_000_000_000


def firm(arguments: Sequence[str | Path]) -> tuple[int, float, float, str]:
    """Runs a command; returns its exit code, seconds, peak memory in MB and last line."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "firm", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
    )
    assert process.stdout
    lines = process.stdout.read().decode(errors="replace").strip().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds, peak = time.perf_counter() - start, usage.ru_maxrss / 1024
    return process.returncode, seconds, peak, lines[-1] if lines else ""


def with_template(run: Path, template: str) -> None:
    """Gives a run's tokenizer another chat template."""
    for file in run.rglob("chat_template.jinja"):
        file.unlink()
    for file in run.rglob("tokenizer_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


def with_pattern(run: Path) -> None:
    """Gives a run's adapter a pattern of layers that takes exponential time."""
    file = run / "adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "target_modules": r"(([a-z_.0-9])*)*\d\d!"}))


def with_points(run: Path) -> None:
    """Gives a run a front of thousands of points."""
    file = run / "front.json"
    front = json.loads(file.read_text())
    first, rows = front["points"][0], np.linspace(0, 1, NUM_POINTS)
    front["points"] = [
        first
        | {"name": str(index), "preference": [share, 1 - share], "collapse": None}
        | {"rewards": dict(zip(first["rewards"], (share, 1 - share), strict=True))}
        for index, share in enumerate(rows.tolist())
    ]
    unknown = {"validation": {}, "test_values": {}, "validation_values": {}}
    file.write_text(json.dumps({**front, **unknown}))


def links(run: Path, scratch: Path) -> list[str]:
    """Returns the row of the table on links."""
    outside = scratch / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("own")
    before = sorted((path, path.stat().st_mtime_ns) for path in outside.rglob("*"))
    codes, seconds, peaks, num_changed = [], [], [], 0
    for place in PLACES:
        for target in ("file", "folder", "nowhere"):
            theirs = Path(shutil.copytree(run, scratch / "theirs"))
            if (theirs / place).is_dir():
                shutil.rmtree(theirs / place)
            (theirs / place).unlink(missing_ok=True)
            (theirs / place).parent.mkdir(exist_ok=True)
            (theirs / place).symlink_to(outside / target)
            code, own, peak, _ = firm(["resume", theirs])
            codes.append(code)
            seconds.append(own)
            peaks.append(peak)
            num_changed += before != sorted((p, p.stat().st_mtime_ns) for p in outside.rglob("*"))
            shutil.rmtree(theirs)
    shown = ", ".join(f"{codes.count(code)} × {code}" for code in sorted(set(codes)))
    return [
        f"resume: a link, {len(codes)} cases",
        *(shown, f"{max(seconds):.1f}", f"{max(peaks):.0f}", str(num_changed)),
    ]


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run = scratch / "run"
        code, _, _, line = firm([*RUN, "--out", run])
        assert code == 0, line
        rows = [links(run, scratch)]

        def case(name: str, arguments: Sequence[str | Path]) -> None:
            code, seconds, peak, line = firm(arguments)
            rows.append([name, str(code), f"{seconds:.1f}", f"{peak:.0f}", line[:60]])

        def spoilt(change: Callable[[Path], None]) -> Path:
            shutil.rmtree(scratch / "theirs", ignore_errors=True)
            theirs = Path(shutil.copytree(run, scratch / "theirs"))
            change(theirs)
            return theirs

        for name, template in TEMPLATES.items():

            def change(theirs: Path, template: str = template) -> None:
                with_template(theirs, template)

            theirs = spoilt(change)
            case(f"chat: {name}", ["chat", theirs])
            case(f"export: {name}", ["export", theirs, "--to", "gguf", "--out", scratch / "e"])
        case("chat: a pattern of layers", ["chat", spoilt(with_pattern)])
        theirs = spoilt(with_points)
        target = ["--target", "brevity=0.3,positivity=0.7"]
        case(f"pick: {NUM_POINTS:,} points", ["pick", theirs, *target])
        with gzip.open(scratch / "bomb.jsonl.gz", "wb", compresslevel=9) as file:
            for _ in range(BOMB_BYTES // 10**7):
                file.write(b" " * 10**7)
        data = ["--data.train.source", scratch / "bomb.jsonl.gz", "--data.train.split", "null"]
        case("align: 3 GB of spaces", ["align", *RUN[1:3], *data, "--out", scratch / "a"])
        seeds = json.dumps(list(range(NUM_SEEDS)))
        (scratch / "study.yaml").write_text(
            f"base: configs/smoke.yaml\nsettings: {{a: {{}}}}\nseeds: {seeds}\n"
        )
        plan = ["study", "--config", scratch / "study.yaml", "--plan"]
        case(f"study --plan: {NUM_SEEDS:,} seeds", plan)
    print_table(
        "Files of strangers",
        ["case", "exit code", "seconds", "MB", "files changed outside, or the last line"],
        rows,
    )


if __name__ == "__main__":
    main()
