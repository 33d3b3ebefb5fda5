"""Runs of configs/smoke.yaml, the smallest that are whole, with one layer of its policy."""

import atexit
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firm.federation.strategies import STRATEGIES
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse

ROOT = Path(__file__).parents[1]


def _one_layer(policy: Path, folder: Path) -> Path:
    """Copies a policy without the layers above its first; what it says is still varied."""
    shutil.copytree(policy, folder)
    config = json.loads((folder / "config.json").read_text())
    above = tuple(f"model.layers.{layer}." for layer in range(1, config["num_hidden_layers"]))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.startswith(above)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


_FOLDER = Path(tempfile.mkdtemp(prefix="firm-smoke-"))


@atexit.register
def _remove(owner: int = os.getpid()) -> None:
    """Removes the folder; a forked process, which has the same one, leaves it alone."""
    if os.getpid() == owner:
        shutil.rmtree(_FOLDER, ignore_errors=True)


WHOLE = "firm/miniature/checkpoints/policy"
"""The policy that configs/smoke.yaml names."""
POLICY = _one_layer(ROOT / WHOLE, _FOLDER / WHOLE)
"""Its first layer alone, which makes a run twice as fast; by its name, it ships."""
SMOKE = _FOLDER / "smoke.yaml"
"""The smoke configuration with that policy."""
SMOKE.write_text((ROOT / "configs/smoke.yaml").read_text().replace(WHOLE, str(POLICY)))
FRONT = (
    *("--estimator.name", "critic_free", "--estimator.num_replies", 2),
    *("--estimator.ratio", "cispo"),  # tests of exports depend on what this run's policy says
    *("--policy.conditioning.kind", "preference", "--strategy.name", "fedavg"),
)
"""Options of a run whose policy is conditioned on the preference."""


def config(*arguments: object) -> AlignmentConfig:
    """Returns the smoke configuration with the command line's changes."""
    return parse(AlignmentConfig, ["--config", str(SMOKE), *map(str, arguments)])


def run_stopped_in_round_2(*arguments: object, strategy: str = "firm") -> None:
    """Runs it until its second round begins, where it is interrupted as by Ctrl-C."""

    def stops_in_round_2(state, *others):
        if state.round == 1:
            raise KeyboardInterrupt
        return whole(state, *others)

    whole = STRATEGIES[strategy]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, strategy, stops_in_round_2)
        with pytest.raises(KeyboardInterrupt):
            run(*arguments)


def run(*arguments: object) -> Path:
    """Runs it in the project, from where it finds the shipped checkpoints; returns the folder."""
    with contextlib.chdir(ROOT):
        folder = main(config(*arguments))
    assert folder is not None
    return folder
