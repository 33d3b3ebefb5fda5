"""A command whose disk is full says so in one line, and leaves no draft behind."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from firm.cli.main import main


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Files cannot be larger than `room` bytes; Python ignores the signal that comes with it."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize(
    ("engine", "room"),
    [
        *((engine, room) for engine in ("peft", "vllm", "openvino", "gguf") for room in (0, 500)),
        *(("vllm", 5_000), ("gguf", 100_000)),
    ],
)
def test_an_export_to_a_full_disk_is_one_line(trained, tmp_path, refusal, engine, room):
    out = tmp_path / "exports/own"
    with full_disk(room):
        line = refusal(main, ["export", trained, "--to", engine, "--out", out])
    assert f"the export {out} cannot be written (" in line
    assert line.endswith("; free space on the disk, then export again.")
    assert os.listdir(out.parent) == []


def test_a_merge_to_a_full_disk_is_one_line(trained, tmp_path, refusal):
    out = tmp_path / "exports/own"
    arguments = ["--target", "brevity=0.3,positivity=0.7", "--merge", "--out", out]
    with full_disk(500):
        line = refusal(main, ["pick", trained, *arguments])
    assert line.endswith("(File too large); free space on the disk, then merge again.")
    assert os.listdir(out.parent) == []


def test_a_tokenizer_that_does_not_fit_is_a_full_disk(tmp_path):
    from transformers import AutoTokenizer

    from firm.run.files import as_os_errors
    from tests.smoke import POLICY

    tokenizer = AutoTokenizer.from_pretrained(Path(POLICY))
    with full_disk(1_000), pytest.raises(OSError, match="File too large"), as_os_errors():
        tokenizer.save_pretrained(tmp_path)
