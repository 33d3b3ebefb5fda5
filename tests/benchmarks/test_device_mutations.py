"""Mutations that leave a tensor on the host fit the code, and turn a test red."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import device_mutations
from benchmarks.device_mutations import MUTATIONS, Mutation
from tests.accelerator.device import missing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: f"{each.file}: {each.before}")
def test_every_mutation_fits_the_code(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    compile(device_mutations.mutated(mutation, text), mutation.file, "exec")


def test_every_package_that_moves_tensors_has_a_mutation():
    packages = {Path(each.file).parent.as_posix() for each in MUTATIONS}
    moving = set()
    for top in ("firm", "reward_models"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if ".device)" in text or ".to(device)" in text:
                moving.add(path.relative_to(ROOT).parent.as_posix())
    assert moving - packages == {"firm/base", "firm/jobs/plan"}  # which only name devices


def test_code_that_is_not_there_is_named():
    mutation = Mutation("firm/base/fields.py", "no such code", "", "")
    with pytest.raises(ValueError, match=r"'no such code' must occur once in firm/base/fields\.py"):
        device_mutations.mutated(mutation, "")


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason="no pretend accelerator")
def test_no_mutation_survives():
    command = [sys.executable, str(ROOT / "benchmarks/device_mutations.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
