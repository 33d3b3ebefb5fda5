"""What W&B noted off line, read back from its files."""

import json
import os
import pty
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def records_of(run_path: Path) -> list[Record]:
    """Everything that W&B first noted of a run; its service ends the file shortly after that."""
    file = min(run_path.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 120
    while True:
        records = parse(file.read_bytes())
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, "the file does not end"
        time.sleep(0.05)


def parse(data: bytes) -> list[Record]:
    """The whole records of a .wandb file: blocks of 32 kB, a record in one or more fragments."""
    records, fragments, at = [], b"", 7  # after the file's own header
    while at + 7 <= len(data):
        if (room := 32_768 - at % 32_768) < 7:
            at += room  # no header fits: the block's end is padding
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            break  # still being written
        fragments += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            records.append(Record.FromString(fragments))
            fragments = b""
    return records


def items(records: list[Record], kind: str) -> list[dict[str, Any]]:
    """Key -> value of each history record, or of each change of configuration or summary."""
    dicts = []
    for record in records:
        if record.WhichOneof("record_type") == kind:
            part, values = getattr(record, kind), {}
            for entry in part.item if kind == "history" else part.update:
                *groups, name = entry.nested_key or [entry.key]
                place = values
                for group in groups:
                    place = place.setdefault(group, {})
                place[name] = json.loads(entry.value_json)
            dicts.append(values)
    return dicts


def merged(dicts: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for entries in dicts for key, value in entries.items()}


def table(run_path: Path, reference: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a table that a history record refers to."""
    # a resumed run has a folder more; a name with its digest stands for one content
    file, *_ = run_path.glob(f"wandb/offline-run-*/files/{reference['path']}")
    content = json.loads(file.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]


def started(run_path: Path) -> Any:
    """The run's own record: its name, group, job type and tags."""
    [run] = [record.run for record in records_of(run_path) if record.HasField("run")]
    return run


def on_a_terminal(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of a command on a terminal, where W&B would ask for a key."""
    terminal, inner = pty.openpty()
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    try:
        done = subprocess.run(command, env=environment, timeout=90, **streams)
        return done.returncode, os.read(terminal, 10_000).decode()
    finally:
        os.close(terminal)
        os.close(inner)
