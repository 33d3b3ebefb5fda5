"""What a run left in its folder, read and changed as tests need it."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Row = dict[str, Any]


def read_rows(folder: Path, kind: str | None = None, **fields: Any) -> list[Row]:
    """Returns the rows of a run's log, or those of a kind with these values in their fields."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    wanted = fields if kind is None else {"kind": kind, **fields}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Replaces a run's log; what is no JSON number is written as Python does, NaN or Infinity."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


def write_classic_run(folder: Path, rows: Iterable[Row], **settings: Any) -> Path:
    """Writes the log and the configuration of one run of a classic study; returns its folder."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps({"seeds": [0]} | settings))
    (folder / "run.json").write_text('{"status": "finished"}')
    write_rows(folder, rows)
    return folder


def edit_rows(folder: Path, change: Callable[[Row], Row | None]) -> None:
    """Applies `change` to every row of a run's log; a row for which it gives None goes."""
    changed = map(change, read_rows(folder))
    write_rows(folder, [row for row in changed if row is not None])


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Returns the adapter that a run ended with."""
    return load_file(folder / "adapter/adapter_model.safetensors")


def distance(first: Path, second: Path) -> float:
    """Returns the largest difference between the adapters of two runs."""
    mine, theirs = read_adapter(first), read_adapter(second)
    return max((value - theirs[name]).abs().max().item() for name, value in mine.items())


def edit_adapter(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Applies `change` to the name and value of every tensor of an adapter's own folder."""
    path = folder / "adapter_model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(path).items()}, path)


def figures_in(page: Path | str) -> dict[str, Any]:
    """Returns the figures of a page, a file or its HTML, by their names."""
    html = page.read_text(encoding="utf-8") if isinstance(page, Path) else page
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', html)
    return json.loads(data)
