"""The algorithm in one file gives the adapter of `firm align`."""

import json

import pytest
import torch

import firm
from recipes import minimal
from recipes.minimal import MINIATURE, Settings
from tests.runs import read_adapter

REWARDS = {"brief": minimal.brief, "varied": minimal.varied}
OWN = Settings(rounds=2, learning_rate=6e-5)
SETTINGS = {
    "num_threads": 1,
    "rounds": OWN.rounds,
    "num_clients": OWN.num_clients,
    "seed": OWN.seed,
    "strategy.num_local_steps": OWN.num_local_steps,
    "strategy.beta": OWN.beta,
    "policy.lora": {"r": OWN.rank, "dropout": 0.0},
    "estimator.name": "critic_free",
    "estimator.batch_size": OWN.batch_size,
    "estimator.minibatch_size": OWN.minibatch_size,
    "estimator.num_replies": OWN.num_replies,
    "estimator.actor_learning_rate": OWN.learning_rate,
    "estimator.kl": {"controller": "fixed", "coefficient": OWN.kl_coefficient},
    "rollout.max_new_tokens": OWN.max_new_tokens,
    "rollout.max_prompt_tokens": OWN.max_prompt_tokens,
    "rollout.temperature": 1.0,
    **{f"rewards.{name}.normalization": "none" for name in REWARDS},
    "evaluation.num_calibration_prompts": 2,
    "evaluation.num_validation_prompts": 0,
    "evaluation.num_test_prompts": 2,
    "evaluation.num_samples": 1,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT's
def test_one_file_gives_the_adapter_of_firm_align(tmp_path, capsys):
    texts = (MINIATURE / "prompts_train.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in texts]
    policy = str(MINIATURE / "policy")
    own = minimal.align(policy, prompts, REWARDS, OWN)
    assert capsys.readouterr().out.count("round ") == OWN.rounds
    result = firm.align(
        policy,
        REWARDS,
        prompts,
        validation_prompts=str(MINIATURE / "prompts_validation.jsonl"),
        test_prompts=str(MINIATURE / "prompts_test.jsonl"),
        settings=SETTINGS,
        out=tmp_path / "run",
    )
    assert result is not None
    saved = read_adapter(tmp_path / "run")
    assert len(saved) == len(own)
    trained = [name for name in own if "lora_B" in name]  # these start at 0
    for name in own:
        theirs = saved[name.replace(".default", "")]
        torch.testing.assert_close(own[name], theirs, atol=1e-6, rtol=0)
    change = sum(own[name].norm().item() for name in trained)
    error = sum((own[name] - saved[name.replace(".default", "")]).norm().item() for name in trained)
    assert error < 1e-3 * change
