"""What a job says is kept for whoever follows it."""

import io

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from rich.console import Console

from firm.network.controller import Transcript
from firm.run import Progress


def test_a_transcript_passes_on_everything_and_keeps_whole_lines():
    file = io.StringIO()
    transcript = Transcript(file)
    for text in ("round", " 1\nround 2\n", "", "rou"):
        assert transcript.write(text) == len(text)
    assert file.getvalue() == "round 1\nround 2\nrou"
    assert transcript.lines == ["round 1", "round 2"]


def test_a_run_shows_a_line_per_round_in_it():
    transcript = Transcript(io.StringIO())
    with Progress(9, ["a"], ["x"], console=Console(file=transcript)) as progress:
        for number in (1, 2):
            progress.event("round_finished", row={"round": number, "seconds": 3.0})
    assert [line.split("  ")[0] for line in transcript.lines] == ["round 1/9", "round 2/9"]
