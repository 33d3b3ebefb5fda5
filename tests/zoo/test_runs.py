"""Whole runs of `firm align` end replies, mask and drop out as the model's own files say.

Tests of the parts cannot see what a trainer around them changes: TRL's replaces the end tokens of
the policy's generation config, and sets all dropout to 0.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from firm.alignment import build, rollout
from firm.alignment.trainer import MultiObjectiveTrainer
from firm.cli.main import COMMANDS
from firm.jobs import alignment_loading
from tests.zoo import oracle
from tests.zoo.architectures import ARCHITECTURES, swap_outputs_
from tests.zoo.data import DATA
from tests.zoo.kinds import KINDS, SPECIAL

pytestmark = pytest.mark.filterwarnings(  # plain PEFT's own
    "ignore:.*is_gradient_checkpointing.*:FutureWarning"
)

MAX_NEW, DROPOUT = 12, 0.25
TOKENIZER = KINDS["ends"].tokenizer()
ENDS = KINDS["ends"].ends(TOKENIZER)
"""EOS and two ends that only generation_config.json has, as Llama 3's."""
COMMON = {
    "num_threads": 1,
    "rounds": 1,
    "num_clients": 2,
    "strategy.num_local_steps": 1,
    "policy.lora": f"{{r: 2, dropout: {DROPOUT}}}",
    "rollout.max_new_tokens": MAX_NEW,
    "rollout.temperature": 0.3,
    "estimator.batch_size": 8,
    "estimator.minibatch_size": 4,
    "estimator.num_epochs": 1,
    "evaluation.num_calibration_prompts": 8,
    "evaluation.num_validation_prompts": 2,
    "evaluation.num_test_prompts": 4,
    "evaluation.num_samples": 1,
    "evaluation.metrics": "{}",
}
REWARD = """
from reward_models import reward_model

@reward_model("bytes")
def bytes_of(completions, **_):
    return [float(sum(text.encode()) % 97) for text in completions]
"""
CRITIC_FREE = {"estimator.name": "critic_free", "estimator.num_replies": 2}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, network": {"estimator.critic": "network"},
    "ppo, without TRL": {},
    "critic_free": CRITIC_FREE,
    "critic_free, conditioned": {
        **CRITIC_FREE,
        "policy.conditioning.kind": "preference",
        "strategy.name": "fedavg",
    },
}
ENGINES: dict[str, dict[str, Any]] = {
    "local": {},
    "static cache": {"rollout.cache": "static"},
    "stacked": {"engine": "stacked"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often ends by a token that is not its tokenizer's EOS, and its prompts."""
    folder = tmp_path_factory.mktemp("runs")
    model = ARCHITECTURES["llama"].model({"pad_token_id": None, "eos_token_id": ENDS[0]})
    prompt = oracle.prompt_ids(DATA["text"][0], TOKENIZER)
    said, _ = oracle.greedy(model, prompt, [], 4)
    swap_outputs_(model, ENDS[-1], said[-1])
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "bytes.py").write_text(REWARD)
    prompts = [{"prompt": f"Why is number {index} blue?"} for index in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return folder


def align(folder: Path, out: Path, **settings: Any) -> None:
    """Runs `firm align` as a user would."""
    prompts = str(folder / "prompts.jsonl")
    sources = {f"data.{use}.source": prompts for use in ("train", "validation", "test")}
    rewards = f"{{first: {{name: brevity}}, second: {{name: bytes, file: {folder / 'bytes.py'}}}}}"
    sources["rewards"] = rewards
    given = {"policy.path": str(folder / "model"), **COMMON, **sources, "out": str(out), **settings}
    COMMANDS["align"].run(
        [word for key, value in given.items() for word in (f"--{key}", str(value))]
    )


@pytest.mark.parametrize(
    ("estimator", "engine"),
    [
        pytest.param(
            estimator,
            engine,
            marks=() if estimator == "ppo" or engine == "local" else pytest.mark.slow,
        )
        for estimator in ESTIMATORS
        for engine in ENGINES
        # engines sample alike for all estimators, and otherwise if the adapter is conditioned
        if engine == "local" or estimator in ("ppo", "critic_free, conditioned")
    ],
)
def test_replies_end_at_every_end_of_the_model_and_dropout_is_as_configured(
    folder, tmp_path, monkeypatch, estimator, engine
):
    seen: list[tuple[torch.Tensor, Any]] = []
    trainers: list[MultiObjectiveTrainer] = []

    def find_ends(responses, **options):
        found = rollout_find_ends(responses, **options)
        seen.append((responses, found))
        return found

    def build_trainer(*arguments, **options):
        trainers.append(build.build_trainer(*arguments, **options))
        return trainers[-1]

    rollout_find_ends = rollout.find_ends
    monkeypatch.setattr(rollout, "find_ends", find_ends)
    monkeypatch.setattr(alignment_loading, "build_trainer", build_trainer)
    if "without TRL" in estimator:
        monkeypatch.setattr(build, "has_trl_ppo", lambda: False)
    align(folder, tmp_path / "run", **ESTIMATORS[estimator], **ENGINES[engine])

    by = dict.fromkeys(ENDS, 0)
    for responses, (lengths, ended, _) in seen:
        for row, length, has_ended in zip(responses.tolist(), lengths, ended, strict=True):
            first = next((at for at, token in enumerate(row) if token in ENDS), None)
            assert bool(has_ended) == (first is not None)
            assert int(length) == (len(row) if first is None else first + 1)
            if first is None:
                assert len(row) == MAX_NEW  # no engine gave up before
            else:
                by[row[first]] += 1
    assert by[SPECIAL.index("<|eot|>")] >= 5  # an end that the tokenizer does not know as EOS
    (trainer,) = trainers
    assert (trainer.trl is None) == (estimator not in ("ppo", "ppo, network"))
    for name, module in trainer.policy_model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            assert module.p == (DROPOUT if "lora_dropout" in name else 0.2), name
