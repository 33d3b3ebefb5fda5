"""The main job on the pretend accelerator."""

import json

import pytest
import torch

from tests.runs import read_adapter
from tests.smoke import run

TINY = (
    *("--rounds", 1, "--estimator.batch_size", 4, "--estimator.minibatch_size", 4),
    *("--estimator.num_epochs", 1, "--strategy.num_local_steps", 1),
    *("--rollout.max_new_tokens", 6, "--rollout.max_prompt_tokens", 32),
    *("--evaluation.num_calibration_prompts", 4, "--evaluation.num_validation_prompts", 0),
    *("--evaluation.num_test_prompts", 2, "--evaluation.num_shown_samples", 1),
)
CRITIC_FREE = ("--estimator.name", "critic_free", "--estimator.num_replies", 4)


def classifiers(*devices: str) -> tuple[str, str]:
    """Returns the option of two reward models on these devices."""
    names = zip(("helpful", "harmless"), devices, strict=True)
    rewards = {
        name: {"path": f"firm/miniature/checkpoints/{name}", "format": "plain", "device": device}
        for name, device in names
    }
    return "--rewards", json.dumps(rewards)


@pytest.mark.parametrize("engine", ["local", "stacked"])
@pytest.mark.parametrize(
    "method",
    [(), CRITIC_FREE],
    ids=["ppo", "critic_free"],
)
def test_a_run_ends_as_on_the_cpu(tmp_path, engine, method):
    options = (*TINY, *method, "--engine", engine, "--policy.lora.dropout", 0)
    options += ("--estimator.actor_optimizer", "sgd", "--estimator.actor_learning_rate", 0.1)
    adapters = []
    for device in ("cpu", "auto"):
        torch.pretend.reset_peak_memory_stats()
        rewards = classifiers(device, "cpu" if device == "cpu" else "pretend:1")
        run(*options, *rewards, "--policy.device", device, "--out", tmp_path / device)
        adapters.append(read_adapter(tmp_path / device))
    assert torch.pretend.max_memory_allocated() > 1e6
    assert adapters[0].keys() == adapters[1].keys()
    assert max(v.abs().max() for n, v in adapters[0].items() if "lora_B" in n) > 1e-3  # from 0
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], atol=2e-5, rtol=0)
