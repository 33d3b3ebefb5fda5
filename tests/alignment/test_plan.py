"""The plan against the real thing: sizes, messages and memory are those of an actual run."""

import inspect
import io
import json
import shutil
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaForSequenceClassification,
    MambaConfig,
    Qwen2Config,
)

from firm.alignment import (
    AlignmentClient,
    LoraSettings,
    PolicyConfig,
    evaluate,
    load_policy,
    load_prompts,
    load_tokenizer,
)
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.hyperparameters import departures, hyperparameters
from firm.alignment.live_bytes import LiveBytes
from firm.alignment.policy import adapter_parameters, without_needless_warnings
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.prompts import prompt_of
from firm.alignment.roofline import Speeds
from firm.alignment.stacked.trainer import stacked_trainers
from firm.base.fields import NOT_IN_PAPER, Paper, configuration
from firm.federation import Processes, RandomStream
from firm.federation.lockstep import lockstep
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig, DataConfig
from firm.jobs.alignment_data import data_of
from firm.jobs.plan import costs, make_plan, paper_tables, plan_tables, planning
from firm.jobs.plan.costs import EVALUATION_BATCH, evaluated_rows
from firm.jobs.plan.passes import preferences_of_minibatch
from firm.jobs.plan.record import RewardFigures
from firm.report import formats
from firm.run import parse, print_table
from tests.runs import read_rows
from tests.smoke import POLICY, ROOT, SMOKE
from tests.stages import experience_of, rollouts_of
from tests.tokens import queries


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    """Configs name the shipped checkpoints relative to the clone."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def shallow(make_model, tmp_path_factory) -> Path:
    """A folder with the settings of a tiny Llama of one layer, all that a plan needs."""
    folder = tmp_path_factory.mktemp("shallow")
    make_model(num_hidden_layers=1).config.save_pretrained(folder)
    return folder


def config(*arguments: object, file: str = "") -> AlignmentConfig:
    path = f"configs/{file}.yaml" if file else str(SMOKE)
    return parse(AlignmentConfig, ["--config", path, *map(str, arguments)])


def plan_of(cfg: AlignmentConfig, num_processes: int = 1):
    names = [f"client_{index}" for index in range(cfg.num_clients)]
    return make_plan(cfg, names, Processes(0, num_processes, cfg.processes_per_client))


def plan_without_memory(cfg: AlignmentConfig, num_processes: int = 1):
    """A plan but for its memory, whose estimate takes a second and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firm.jobs.plan.planning.estimate_costs", lambda *_: (None, None))
        return plan_of(cfg, num_processes)


def rows_of(plan, title: str) -> list[tuple[str, ...]]:
    return next(table.rows for table in plan_tables(plan) if table.title == title)


def shards_of(cfg: AlignmentConfig) -> list[list]:
    """The clients' prompts as a run divides them."""
    prompts = load_prompts(cfg.data.train, load_tokenizer(cfg.policy))
    return list(data_of(cfg).shards(prompts, cfg).values())


LARGE = ("--policy.lora.r", 16)
"""An adapter beside which names and figures of a message are small."""
FEW_REPLIES = ("--evaluation.num_validation_prompts", 0, "--evaluation.num_test_prompts", 2)


def test_sizes_and_messages_are_those_of_the_run(tmp_path):
    cfg = config("--out", tmp_path / "run", "--strategy.share_gram", "true", *LARGE, *FEW_REPLIES)
    plan = plan_without_memory(cfg)
    main(cfg)
    (about,) = read_rows(cfg.out, "run")
    assert plan.policy.num_trainable == about["num_trainable"]
    sizes = [len(shard) for shard in shards_of(cfg)]
    assert plan.work.prompts_per_client == (min(sizes), max(sizes))
    assert plan.policy.adapter_bytes == about["adapter_bytes"]
    assert [place.clients for place in plan.places] == about["processes"]
    clients = read_rows(cfg.out, "client")
    assert len(clients) == plan.work.rounds * plan.work.clients_per_round
    for row in clients:
        assert plan.policy.bytes_down == pytest.approx(row["bytes_down"], rel=0.02)
        assert plan.policy.bytes_up == pytest.approx(row["bytes_up"], rel=0.02)
        assert plan.work.optimizer_steps == plan.work.solves == len(row["weights"])


@pytest.mark.parametrize("upload", [("--strategy.upload.bits", 4), ("--strategy.secure", "masks")])
def test_uploads_are_those_of_the_run_quantised_or_masked(upload, tmp_path):
    cfg = config("--out", tmp_path / "run", "--rounds", 1, *upload, *LARGE, *FEW_REPLIES)
    plan = plan_without_memory(cfg)
    main(cfg)
    rows = read_rows(cfg.out, "client")
    for row in rows:
        assert plan.policy.bytes_up == pytest.approx(row["bytes_up"], rel=0.1)  # mostly figures


FEDCMOO_A = (
    "--strategy.name", "fedcmoo", "--strategy.communication", "one_way",
    "--strategy.compressor", "none", "--strategy.solver", "exact",
)  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    [FEDCMOO_A, ("--strategy.name", "fedcmoo"), ("--strategy.name", "fsmgda")],
    ids=["fedcmoo_a", "fedcmoo", "fsmgda"],
)
def test_messages_of_strategies_with_more_of_them_are_those_of_the_run(strategy, tmp_path):
    cfg = config("--out", tmp_path / "run", "--rounds", 1, *strategy, *LARGE, *FEW_REPLIES)
    plan = plan_without_memory(cfg)
    main(cfg)
    for row in read_rows(cfg.out, "client"):
        assert plan.policy.bytes_down == pytest.approx(row["bytes_down"], rel=0.02)
        assert plan.policy.bytes_up == pytest.approx(row["bytes_up"], rel=0.02)
        passes = row.get("by_objective", {"the sum": row}).values()
        assert plan.work.optimizer_steps == sum(len(each["weights"]) for each in passes)
        assert plan.work.solves == 0
    assert plan.work.server_solves == 1


def test_fedcmoo_a_sends_m_jacobian_rows_and_fsmgda_m_adapters_more_than_firm():
    firm = plan_without_memory(config(*LARGE)).policy
    rows = 2 * 4 * firm.num_trainable
    fedcmoo = plan_without_memory(config(*LARGE, *FEDCMOO_A))
    assert fedcmoo.policy.bytes_up == pytest.approx(firm.bytes_up + rows, rel=0.01)
    assert fedcmoo.policy.bytes_down == pytest.approx(2 * firm.bytes_down, rel=0.01)
    assert fedcmoo.policy.uploads == pytest.approx(2 * rows, rel=0.01)  # of both clients
    fsmgda = plan_without_memory(config(*LARGE, "--strategy.name", "fsmgda"))
    sent = fsmgda.policy.bytes_up - 2 * firm.adapter_bytes
    assert 0 < sent < 0.3 * firm.adapter_bytes  # names and figures
    assert fsmgda.work.training_replies == 2 * 2 * (2 * 2 - 1) * 8  # the first batch is shared


@pytest.mark.slow
def test_fedcmoo_a_takes_the_memory_of_a_jacobian_of_the_whole_batch(shallow):
    sizes = ("--policy.path", shallow, "--estimator.batch_size", 8)
    fedcmoo = plan_of(config(*sizes, "--estimator.minibatch_size", 4, *FEDCMOO_A)).memory
    whole = plan_of(config(*sizes, "--estimator.minibatch_size", 8)).memory
    assert fedcmoo.update == whole.update


@pytest.mark.parametrize("compressor", ["low_rank", "top_k", "quantizing"])
def test_compressed_jacobians_are_counted_from_some_of_their_columns(compressor, monkeypatch):
    cfg = config("--strategy.name", "fedcmoo", "--strategy.compressor", compressor)
    whole = plan_without_memory(cfg).policy
    monkeypatch.setattr("firm.federation.traffic.SAMPLED_PARAMETERS", whole.num_trainable // 3)
    part = plan_without_memory(cfg).policy
    assert part.bytes_up == pytest.approx(whole.bytes_up, rel=0.02)
    assert part.bytes_down == pytest.approx(whole.bytes_down, rel=0.02)


@pytest.mark.slow
def test_reward_models_of_a_group_are_placed_calibrated_and_take_memory(shallow):
    other = "{path: firm/miniature/checkpoints/helpful_other, format: plain}"
    groups = f"{{other: {{clients: [1], rewards: {{helpful: {other}}}}}}}"
    path = ("--policy.path", shallow)
    before, after = (
        plan_of(config(*path, file="miniature")),
        plan_of(config(*path, "--groups", groups, file="miniature")),
    )
    figures = after.rewards["other/helpful"]
    assert figures.num_bytes > 0
    assert after.places[0].rewards["other/helpful"] == after.places[0].policy
    device = after.places[0].policy
    taken = after.memory_by_device()[device] - before.memory_by_device()[device]
    assert taken == figures.num_bytes
    assert after.work.scored_replies - before.work.scored_replies == 256
    titles = [name for name, _ in plan_tables(after)[0].rows]
    assert "reward other/helpful" in titles


@pytest.mark.slow
def test_a_folder_with_nothing_but_its_config_is_enough(shallow, tmp_path):
    shutil.copy(shallow / "config.json", tmp_path)
    found, whole = (plan_of(config("--policy.path", path)) for path in (tmp_path, shallow))
    assert (found.policy, found.memory) == (whole.policy, whole.memory)
    assert found.memory is not None


@pytest.mark.parametrize("freeze_a", ["false", "true"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_is_the_one_that_is_loaded(dtype, freeze_a):
    cfg = config("--policy.dtype", dtype, "--policy.lora.freeze_a", freeze_a, file="miniature")
    policy = load_policy(cfg.policy, stream=RandomStream(0, "adapter"))
    figures = plan_without_memory(cfg).policy
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    assert figures.num_parameters == sum(p.numel() for p in frozen)
    by_dtype = {size for size in figures.bytes_by_dtype.items() if size[0] != "buffers"}
    assert by_dtype == {
        (kind, sum(p.nbytes for p in frozen if p.dtype == getattr(torch, kind)))
        for kind in ({dtype, "float32"} if freeze_a == "true" else {dtype})
    }
    assert figures.bytes_by_dtype["buffers"] == sum(b.nbytes for b in policy.buffers())
    assert figures.num_trainable == sum(p.numel() for p in adapter_parameters(policy).values())


TRAINER = (
    "--policy.lora.target_modules", "[q_proj, v_proj]",
    "--rollout.max_prompt_tokens", 40, "--rollout.max_new_tokens", 10,
    "--estimator.batch_size", 16, "--estimator.minibatch_size", 8,
)  # fmt: skip
"""Settings of the trainers that `new_trainer` builds, and of the prompts that come with them."""


@pytest.fixture
def new_trainer(make_trainer, checkpoint, letter_count):
    """Builds a trainer and prompts of 40 tokens: ``new_trainer(estimator, **policy)``."""
    lora = LoraSettings(r=4, target_modules=["q_proj", "v_proj"])

    def build(estimator: str, **policy):
        cfg = PolicyConfig(str(checkpoint), lora=lora, **policy)
        trainer = make_trainer(
            rewards={letter: letter_count(letter) for letter in "ab"},
            policy=load_policy(cfg, stream=RandomStream(0, "adapter"), num_objectives=2),
            estimator=estimator,
        )
        torch.manual_seed(5)
        query_ids = torch.randint(4, 10, (trainer.config.num_prompts, 40))
        return trainer, queries(query_ids, trainer.tokenizer.batch_decode(query_ids))

    return build


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_the_memory_of_an_update_is_what_the_trainer_takes(
    new_trainer, checkpoint, checkpointing, estimator
):
    trainer, asked = new_trainer(estimator, gradient_checkpointing=checkpointing)
    minibatch = experience_of(trainer, rollouts_of(trainer, asked)).rows(np.arange(8))
    with LiveBytes(trainer.policy_model) as live:
        gradients = trainer.gradients(trainer.learner, minibatch)
    taken = live.peak - gradients.jacobian.nbytes
    cfg = config(
        "--policy.path", checkpoint, *TRAINER, "--estimator.name", estimator,
        "--policy.gradient_checkpointing", str(checkpointing).lower(),
    )  # fmt: skip
    memory = plan_of(cfg).memory
    assert memory.update == pytest.approx(taken, rel=0.1)
    assert memory.jacobian == gradients.jacobian.nbytes
    assert memory.saved < memory.update


def test_the_memory_of_gradients_by_preference_is_what_the_trainer_takes(new_trainer, checkpoint):
    conditioning = ConditioningConfig(kind="preference")
    trainer, asked = new_trainer("critic_free", conditioning=conditioning)
    preferences = torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.6, 0.4], [1.0, 0.0]])
    rollouts = rollouts_of(trainer, replace(asked, preferences=preferences))
    # two replies to each prompt
    minibatch = experience_of(trainer, rollouts).rows(np.array([0, 1, 4, 5, 8, 9, 12, 13]))
    with LiveBytes(trainer.policy_model) as live:
        gradients = trainer.gradients(trainer.learner, minibatch, by_preference=True)
    cfg = config(
        "--policy.path", checkpoint, *TRAINER, "--estimator.name", "critic_free",
        "--policy.conditioning.kind", "preference",
    )  # fmt: skip
    memory = plan_of(cfg).memory
    assert len(gradients.jacobian) == 4 * 2
    assert memory.jacobian == gradients.jacobian.nbytes
    assert memory.update == pytest.approx(live.peak - memory.jacobian, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["ppo", "critic_free"])
def test_the_memory_of_stacked_updates_is_what_their_trainers_take(
    new_trainer, checkpoint, estimator
):
    trainer, asked = new_trainer(estimator)
    new_stacked = stacked_trainers(trainer)
    trainers = [new_stacked() for _ in range(3)]
    for each in trainers:
        each.learner = each.new_learner()
    minibatches = [experience_of(t, rollouts_of(t, asked)).rows(np.arange(8)) for t in trainers]
    with LiveBytes(trainer.policy_model) as live:
        pairs = zip(trainers, minibatches, strict=True)
        found = lockstep([partial(t.gradients, t.learner, minibatch) for t, minibatch in pairs])
    cfg = config(
        "--policy.path", checkpoint, *TRAINER, "--estimator.name", estimator,
        "--engine", "stacked", "--num_clients", 3,
    )  # fmt: skip
    memory = plan_of(cfg).memory
    assert memory.jacobian == sum(gradients.jacobian.nbytes for gradients in found)
    assert memory.update + memory.jacobian == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize(
    ("estimator", "engine"),
    [
        ("ppo", ("local",)),
        ("critic_free", ("stacked",)),
        ("ppo", ("stacked", "--max_rows", 9)),
        ("critic_free", ("stacked", "--max_rows", 1)),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(map(str, each)),
)
def test_passes_are_those_of_a_run(engine, estimator, tmp_path, monkeypatch):
    cfg = config(
        *("--engine", *engine, "--estimator.name", estimator, "--num_clients", 3, "--rounds", 1),
        *("--estimator.num_epochs", 1, "--estimator.micro_batch_size", 3),
        *(*FEW_REPLIES, "--out", tmp_path / "run"),
    )
    rows = []

    def watched(*arguments, **options):
        policy = load_policy(*arguments, **options)
        policy.register_forward_pre_hook(note, with_kwargs=True)
        return policy

    def note(module, arguments, named):
        if torch.is_grad_enabled():
            rows.append(len(named["input_ids"]))

    monkeypatch.setattr("firm.jobs.alignment_loading.load_policy", watched)
    monkeypatch.setattr(
        "firm.jobs.alignment_loading.check_rows", lambda *_: (None, None)
    )  # a pass before
    main(cfg)
    planned = plan_without_memory(cfg).work.updates
    assert (len(rows), max(rows)) == (planned.count, planned.rows)


@pytest.mark.slow
def test_a_frozen_a_halves_the_adapter_and_all_that_grows_with_it(shallow):
    layers = ("--policy.path", shallow, "--policy.lora.target_modules", "[q_proj, o_proj]")
    whole, half = (
        plan_of(config(*layers, "--policy.lora.freeze_a", value)) for value in ("false", "true")
    )
    assert 2 * half.policy.adapter_bytes == whole.policy.adapter_bytes  # layers are square
    assert 2 * half.memory.jacobian == whole.memory.jacobian
    assert half.memory.training < whole.memory.training
    assert half.memory.saved < whole.memory.saved


@pytest.mark.slow
def test_a_minibatch_in_parts_and_a_team_take_less(shallow):
    sizes = ["--policy.path", shallow, "--rollout.max_prompt_tokens", 40]
    whole = plan_of(config(*sizes)).memory
    parts = plan_of(config(*sizes, "--estimator.micro_batch_size", 1)).memory
    team = plan_of(config(*sizes, "--processes_per_client", 4), num_processes=4).memory
    assert parts.update == pytest.approx(team.update, rel=0.1)
    assert max(parts.update, team.update) < whole.update / 2
    assert parts.jacobian == 2 * whole.jacobian  # a part's and the sum
    assert team.jacobian == whole.jacobian


@pytest.mark.slow
def test_a_sharded_policy_takes_its_part_and_the_layers_of_a_pass():
    options = ("--processes_per_client", 4, "--estimator.minibatch_size", 4)
    whole, sharded = (
        plan_without_memory(config(*options, "--policy.shard", value, file="miniature"), 4).policy
        for value in ("false", "true")
    )
    assert whole.part_bytes == whole.bytes_by_dtype["float32"]
    assert whole.gathered_bytes == 0
    assert sharded.part_bytes == pytest.approx(whole.part_bytes / 4, rel=0.01)
    assert 0 < sharded.gathered_bytes < whole.part_bytes
    plan = plan_of(config(*options, "--policy.shard", "true"), 4)
    assert {name: size for name, size in rows_of(plan, "Memory of a process") if "part" in name}
    unsharded = plan_of(config(*options), 4)
    saved = sum(plan.policy.bytes_by_dtype.values()) - plan.policy.part_bytes
    saved -= plan.policy.gathered_bytes + plan.policy.bytes_by_dtype["buffers"]
    difference = unsharded.memory_by_device()["cpu"] - plan.memory_by_device()["cpu"]
    assert difference == 4 * saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "critic", "optimizer"),
    [
        ("firm", "heads", "sgd"),
        ("firm", "network", "adam"),
        ("firm", None, "adam"),
        ("fsmgda", "heads", "adam"),
    ],
)
def test_a_clients_learners_are_as_large_as_its_state(
    make_trainer, letter_count, checkpoint, strategy, critic, optimizer
):
    adapter = LoraSettings(r=4, target_modules=["q_proj", "v_proj"])
    policy = PolicyConfig(str(checkpoint), lora=adapter)
    trainer = make_trainer(
        rewards={letter: letter_count(letter) for letter in "abc"},
        **({"critic": critic} if critic else {"estimator": "critic_free"}),
        actor_optimizer=optimizer,
        policy=load_policy(policy, stream=RandomStream(0, "adapter")),
    )
    prompts = [prompt_of(f"\n\nHuman: {letter}\n\nAssistant:") for letter in "abcdefgh" * 2]
    client = AlignmentClient("client_0", prompts, trainer, seed=0)
    start = client.state()
    for objective in "abc" if strategy == "fsmgda" else ["all"]:
        if objective != "all":
            client.alone(objective, start)
        client.load(client.adapter())
        for batch in client.batches(1):
            gradients = client.gradients(next(batch.minibatches()))
            client.step(gradients, torch.ones(3) / 3)
    state = client.state()
    tensors = tensors_of([state["learner"], state["alone"]])
    cfg = config(
        "--policy.path", checkpoint, "--policy.lora.target_modules", "[q_proj, v_proj]",
        "--rewards.third.name", "brevity",
        *(("--estimator.critic", critic) if critic else ("--estimator.name", "critic_free")),
        "--estimator.actor_optimizer", optimizer, "--strategy", f"{{name: {strategy}}}",
    )  # fmt: skip
    size = sum(t.nbytes for t in tensors if t.dim())
    memory = plan_of(cfg).memory
    assert memory.training == pytest.approx(2 * size, rel=1e-3)
    first = sum(p.nbytes for p in trainer.critic.parameters()) if trainer.critic else 0
    assert memory.waiting == pytest.approx(2 * size + first, rel=1e-3)


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    entries = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tensor for entry in entries for tensor in tensors_of(entry)]


@pytest.mark.slow
def test_the_cache_of_a_rollout_is_what_the_model_keeps(make_model, checkpoint):
    cfg = config(
        "--policy.path", checkpoint, "--policy.lora.target_modules", "[q_proj]",
        "--rollout.max_prompt_tokens", 30, "--rollout.max_new_tokens", 20,
        "--rollout.forward_batch_size", 5, "--estimator.batch_size", 8,
    )  # fmt: skip
    read = torch.ones(5, 49, dtype=torch.long)  # the last sampled token is not read
    layers = make_model()(read, use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers.layers)
    memory = plan_of(cfg).memory
    assert memory.cache == kept
    assert memory.rollout == memory.evaluation > kept


def test_an_evaluation_has_the_rows_of_its_replies():
    def rows(calibration, validation, test, samples, limit=200):
        words = "--evaluation.num_{}_prompts"
        cfg = config(
            *(words.format("calibration"), calibration, words.format("validation"), validation),
            *(words.format("test"), test, "--evaluation.num_samples", samples),
            *("--rollout.forward_batch_size", limit),
        )
        return evaluated_rows(cfg)

    assert inspect.signature(evaluate).parameters["batch_size"].default == EVALUATION_BATCH
    assert rows(8, 0, 6, 2) == 12
    assert rows(8, 20, 6, 2) == 40
    assert rows(8, 0, 50, 2) == EVALUATION_BATCH
    assert rows(256, 0, 50, 2) == 200
    assert rows(256, 0, 50, 2, limit=30) == 30


def test_work_is_counted_by_hand():
    work = plan_without_memory(
        config(
            "--rounds", 3, "--num_clients", 5, "--strategy.clients_per_round", 2,
            "--strategy.num_local_steps", 2, "--strategy.solve_per", "batch",
            "--evaluation.metrics", "{parse: {name: parse}}",
        )
    ).work  # fmt: skip
    assert work.optimizer_steps == 2 * 2 * 2  # local steps, epochs, minibatches
    assert work.solves == 2
    assert work.training_replies == 3 * 2 * 2 * 8
    assert work.evaluation_replies == 2 * 8 + (1 + 3) * 8
    assert work.scored_replies == 2 * (96 + 32) + 3 * 48


def test_only_evaluation_prompts_that_exist_are_counted(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"prompt": "Name {n} lakes."}}\n' for n in range(20)))
    asked = ("--rounds", 3, "--evaluation.num_test_prompts", 800)
    here = plan_without_memory(config(*asked, "--data.test.source", few)).work
    assert here.evaluation_replies == 2 * 20 + (1 + 3) * 8
    elsewhere = plan_without_memory(config(*asked, "--data.test.source", "some/dataset")).work
    assert elsewhere.evaluation_replies == 2 * 800 + (1 + 3) * 8
    drawn = DataConfig(train=PromptsConfig(source=str(few)), hold_out=0.2)
    work = plan_without_memory(replace(config(*asked, "--num_clients", 1), data=drawn)).work
    assert work.prompts_per_client == (12, 12)
    assert work.evaluation_replies == 2 * 4 + (1 + 3) * 4


def test_the_front_of_a_conditioned_run_is_counted_with_its_uploads():
    options = (
        "--rounds", 6, "--policy.conditioning.kind", "preference", "--strategy.name", "fedavg",
        "--estimator.name", "critic_free", "--estimator.num_replies", 2,
    )  # fmt: skip
    plain = plan_without_memory(config(*options, "--policy.conditioning.kind", "none"))
    plan = plan_without_memory(config(*options))
    # five preferences: 8 test prompts each, and 8 validation prompts after rounds 4 and 6
    assert plan.work.evaluation_replies == plain.work.evaluation_replies + 5 * (8 + 2 * 8)
    solved = (*options, "--strategy.name", "firm")
    # a minibatch of four replies may have one to each of the batch's four prompts
    assert preferences_of_minibatch(config(*solved)) == 4
    assert preferences_of_minibatch(config(*solved, "--policy.conditioning.draw_per", "step")) == 1
    assert preferences_of_minibatch(config(*options)) == 1
    refined = plan_without_memory(config(*options, "--evaluation.num_refined", 3))
    assert refined.work.evaluation_replies == plan.work.evaluation_replies + 3 * (8 + 8)
    assert plan.policy.num_trainable == plain.policy.num_trainable * 3 / 2  # A, B and B_1, square


@pytest.mark.slow
def test_every_process_has_its_clients_and_a_reward_its_own_device(shallow):
    path = ("--policy.path", shallow)
    plan = plan_of(config(*path, "--rewards.harmless.device", "cuda:1", file="miniature"), 2)
    hosted = [place.clients for place in plan.places]
    assert hosted == [["client_0", "client_2"], ["client_1", "client_3"]]
    own = plan.places[0].policy
    assert plan.places[0].rewards == {"helpful": own, "harmless": "cuda:1"}
    alone = plan_of(config(*path, file="miniature"), 2).memory_by_device()
    num_bytes = plan.rewards["harmless"].num_bytes
    assert num_bytes == pytest.approx(4 * plan.rewards["harmless"].num_parameters, rel=1e-3)
    apart = plan.memory_by_device()
    assert apart["cuda:1"] == alone.get("cuda:1", 0) + 2 * num_bytes
    assert apart[own] == alone[own] - 2 * num_bytes


@pytest.mark.parametrize(
    ("policy", "rewards", "expected"),
    [
        ("auto", ("auto", "cuda", "cpu"), ("cuda:0", "cuda:0", "cuda:0", "cpu")),
        ("cuda:1", ("auto", "cuda", "cuda:0"), ("cuda:1", "cuda:1", "cuda:1", "cuda:0")),
        ("cpu", ("auto", "cuda", "cpu"), ("cpu", "cuda:0", "cuda:0", "cpu")),
    ],
)
def test_models_are_planned_where_they_are_loaded(policy, rewards, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    figures = {str(i): RewardFigures("", None, 0, device) for i, device in enumerate(rewards)}
    place = planning._place(0, ["client_0"], Processes(), figures, policy, {})
    assert (place.policy, *place.rewards.values()) == expected


@pytest.mark.slow
def test_an_accelerator_named_by_its_type_is_one_device_with_its_index(shallow):
    options = ("--policy.path", shallow, "--policy.device", "cuda")
    rewards = ("--rewards.helpful.device", "cuda", "--rewards.harmless.device", "cuda:0")
    (place,) = plan_of(config(*options, *rewards, file="miniature")).places
    assert place.policy == place.rewards["helpful"] == place.rewards["harmless"] == "cuda:0"


def test_trained_reward_adapters_share_their_base(tmp_path, make_model):
    (tmp_path / "base").mkdir()
    base = LlamaForSequenceClassification(make_model(num_hidden_layers=1, num_labels=1).config)
    base.save_pretrained(tmp_path / "base")
    options: list[object] = [*FEW_REPLIES, *LARGE]
    for name in ("helpful", "harmless"):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        settings = LoraConfig("SEQ_CLS", r=4, target_modules=["q_proj"])
        with without_needless_warnings():
            get_peft_model(model, settings).save_pretrained(tmp_path / name)
        options += [
            f"--rewards.{name}.path",
            str(tmp_path / name),
            f"--rewards.{name}.format",
            "plain",
        ]
    plan = plan_without_memory(config(*options))
    assert plan.notes == plan_without_memory(config(*FEW_REPLIES, *LARGE)).notes

    loaded = sum(t.nbytes for t in (*base.parameters(), *base.buffers()))
    file = load_file(tmp_path / "helpful" / "adapter_model.safetensors")
    own = sum(values.nbytes for values in file.values())
    for name in ("helpful", "harmless"):
        reward = plan.rewards[name]
        assert (reward.base_bytes, reward.num_bytes) == (loaded, own)
        assert f"an adapter of {tmp_path / 'base'}" in reward.source
    policy_only = replace(plan, places=[replace(p, rewards={}) for p in plan.places])
    total = plan.memory_by_device()["cpu"] - policy_only.memory_by_device().get("cpu", 0)
    assert total == loaded + 2 * own


def test_outputs_of_one_classifier_share_its_weights(tmp_path, make_model):
    model = LlamaForSequenceClassification(make_model(num_hidden_layers=1, num_labels=2).config)
    model.save_pretrained(tmp_path / "both")
    options: list[object] = [*FEW_REPLIES, *LARGE]
    outputs = {"rewards.helpful": 0, "rewards.harmless": 1, "evaluation.metrics.both": 1}
    for key, output in outputs.items():
        settings = {"path": tmp_path / "both", "output": output, "format": "plain"}
        for name, value in settings.items():
            options += [f"--{key}.{name}", str(value)]
    plan = plan_without_memory(config(*options))
    loaded = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    names = ("helpful", "harmless", "both")
    sizes = {name: plan.rewards[name].num_bytes for name in names}
    assert sizes == {"helpful": loaded, "harmless": 0, "both": loaded}  # a metric has its own
    assert plan.rewards["harmless"].source.endswith("shared with helpful")


def test_a_model_that_cannot_be_had_leaves_the_other_figures_and_a_remedy():
    plan = plan_of(config("--rewards.helpful.path", "no/such", file="hh_tinyllama"))
    assert plan.policy is None
    assert plan.memory_by_device() == {}
    assert plan.work.optimizer_steps == 4 * 3 * 2
    told = {note.partition(":")[0]: note for note in plan.notes}
    assert "--policy.path FOLDER" in told["TinyLlama/TinyLlama-1.1B-Chat-v1.0"]
    assert "--rewards.helpful.path FOLDER" in told["no/such"]
    assert all("\n" not in note for note in plan.notes)
    titles = [table.title for table in plan_tables(plan)]
    assert "Work" in titles
    assert "Memory of a process" not in titles


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fast path.*")
def test_an_architecture_without_keys_and_values_has_no_estimate_and_says_so(tmp_path):
    MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4).save_pretrained(
        tmp_path
    )
    cfg = config("--policy.path", tmp_path, "--policy.lora.target_modules", "[in_proj]")
    plan = plan_of(cfg)
    assert plan.policy.num_trainable == 4 * (16 + 64)
    assert plan.memory is None
    assert any("no estimate of its memory" in note for note in plan.notes)


@pytest.mark.slow
def test_absolute_positions_and_conv1d_layers_are_planned_too(tmp_path):
    GPT2Config(
        vocab_size=32,
        bos_token_id=1,
        eos_token_id=1,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=128,
    ).save_pretrained(tmp_path)
    cfg = config("--policy.path", tmp_path, "--policy.lora.target_modules", "[c_attn]")
    plan = plan_of(cfg)
    assert plan.policy.num_trainable == 2 * 4 * (16 + 48)
    assert plan.policy.layers_by_module == {"c_attn": 2}
    assert dict(rows_of(plan, "Models"))["adapted layers"] == "c_attn in 2 layers"
    saving = replace(cfg, policy=replace(cfg.policy, gradient_checkpointing=True))
    checkpointed = plan_of(saving).memory
    assert checkpointed.update < plan.memory.update
    assert checkpointed.saved < plan.memory.saved


@pytest.fixture
def depths(monkeypatch) -> list[int]:
    """Numbers of layers of the rehearsed policies, whose time is the number of operations."""
    seen: list[int] = []
    rehearse = costs._rehearse

    def noted(model, *rest):
        seen.append(model.config.num_hidden_layers)
        return rehearse(model, *rest)

    monkeypatch.setattr(costs, "_rehearse", noted)
    monkeypatch.setattr(Speeds, "seconds", lambda _, own: sum(each.flops for each in own))
    return seen


@pytest.mark.parametrize(
    "options",
    [(), ("--estimator.name", "critic_free", "--engine", "stacked")],
    ids=["ppo", "critic_free, stacked"],
)
def test_a_deep_policy_is_rehearsed_shallow_and_takes_as_much(
    options, make_model, tmp_path, monkeypatch, depths
):
    make_model(num_hidden_layers=7).config.save_pretrained(tmp_path)
    path = ("--policy.path", tmp_path, "--policy.lora.target_modules", "[q_proj]")
    shallow = plan_of(config(*path, *options))
    assert depths == [2, 3]
    monkeypatch.setattr(costs, "DEPTH", 100)
    whole = plan_of(config(*path, *options))
    assert depths == [2, 3, 7]
    assert shallow.memory == whole.memory
    assert shallow.seconds.total == pytest.approx(whole.seconds.total)


def test_a_policy_whose_layers_differ_is_rehearsed_whole(tmp_path, depths):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    Qwen2Config(
        vocab_size=32, num_hidden_layers=6, num_key_value_heads=2, **sizes, **windows
    ).save_pretrained(tmp_path)
    cfg = config("--policy.path", tmp_path, "--policy.lora.target_modules", "[q_proj]")
    assert plan_of(cfg).memory is not None
    assert depths == [6]


def test_layers_are_counted_by_target_module(make_model, tmp_path):
    make_model(num_hidden_layers=3).config.save_pretrained(tmp_path)
    modules = ("--policy.lora.target_modules", "[q_proj, down_proj, lm_head]")
    plan = plan_without_memory(config("--policy.path", tmp_path, *modules))
    assert plan.policy.layers_by_module == {"q_proj": 3, "down_proj": 3, "lm_head": 1}
    rows = dict(rows_of(plan, "Models"))
    assert rows["adapted layers"] == "q_proj, down_proj in 3 layers; lm_head in 1 layer"
    one_matrix = plan_without_memory(
        config("--policy.path", tmp_path, *modules, "--policy.lora.freeze_a", "true")
    )
    assert one_matrix.policy.layers_by_module == plan.policy.layers_by_module


def data(folder: Path, num_rows: int) -> Path:
    """A file of prompts of two kinds, a third of them of more words."""
    file = folder / "prompts.jsonl"
    rows = [
        {"prompt": "one two" + " three four five" * (not n % 3), "kind": "ab"[n % 2]}
        for n in range(num_rows)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "20 to 21"),
        (("--num_clients", 2), "31"),
        (("--partition.kind", "dirichlet", "--partition.alpha", 0.1), None),
        (("--data.train.split", "train[:50%]"), "10 to 11"),
        (("--data.train.max_tokens", 18), None),
    ],
)
def test_a_plan_tells_the_smallest_and_the_largest_share_of_prompts(options, text, tmp_path):
    cfg = config("--num_clients", 3, "--data.train.source", data(tmp_path, 62), *options)
    plan = plan_without_memory(cfg)
    sizes = [len(shard) for shard in shards_of(cfg)]
    assert plan.work.prompts_per_client == (min(sizes), max(sizes))
    shown = dict(rows_of(plan, "Work"))["prompts per client"]
    assert shown == (text or f"{min(sizes)} to {max(sizes)}")
    if "--data.train.max_tokens" in options:
        assert 10 < sum(sizes) < 62


def test_prompts_that_are_not_here_are_not_counted_and_that_is_said(tmp_path):
    for source in ("somebody/prompts", f"[{data(tmp_path, 40)}, 'somebody/prompts:part']"):
        plan = plan_without_memory(config("--data.train.source", source))
        assert plan.work.prompts_per_client is None
        assert "prompts per client" not in dict(rows_of(plan, "Work"))
        assert any("prompts per client are unknown" in note for note in plan.notes)


def test_a_plan_says_why_it_does_not_show_how_prompts_reach_the_policy(tmp_path):
    shutil.copy(POLICY / "config.json", tmp_path)
    plan = plan_without_memory(config("--policy.path", tmp_path))
    (note,) = [note for note in plan.notes if note.startswith("the format of prompts")]
    assert f"policy.path: no tokenizer could be loaded from the folder {tmp_path} (" in note
    assert "replies end at" not in dict(rows_of(plan, "Models"))


@pytest.mark.parametrize(
    ("options", "shown"), [((), r"'\n\nHuman:'"), (("--rollout.stop_strings", "[]"), None)]
)
def test_a_plan_tells_where_replies_end(options, shown):
    rows = dict(rows_of(plan_without_memory(config(*options)), "Models"))
    assert rows["replies end at"] == "<eos>"
    assert rows.get("replies end before") == shown


def test_a_plan_refuses_fewer_prompts_than_the_clients_need(tmp_path):
    few = config("--num_clients", 3, "--data.train.source", data(tmp_path, 2))
    with pytest.raises(ValueError, match="2 examples cannot give 3 clients"):
        plan_without_memory(few)


def test_target_modules_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match=r"\['wq'\] match no layer"):
        plan_of(config("--policy.lora.target_modules", "[wq]"))


@configuration(source=Paper("section 5"))
class Inner:
    """An adapter."""

    rank: int = 16
    """Rank."""
    scale: Annotated[float, NOT_IN_PAPER] = 1.0
    """Scale."""


@configuration
class Outer:
    """Settings."""

    batch: Annotated[int, Paper("A.1", (16, 32))] = 4
    """Size."""
    rate: Annotated[float, Paper("A.1"), NOT_IN_PAPER] = 0.5
    """Rate, which the paper gives; that it decays is not in it."""
    plain: int = 0
    """Neither."""
    inner: Inner = field(default_factory=Inner)
    """More."""
    by_name: dict[str, Inner] = field(default_factory=dict)
    """Even more."""


@configuration(source=NOT_IN_PAPER)
class Heir(Outer):
    """Measures."""

    own: int = 1
    """Own."""


def test_fields_say_what_the_paper_gives_and_what_it_does_not():
    found = list(hyperparameters(Outer(rate=0.25, by_name={"a": Inner(rank=8)})))
    given = {h.path: (h.value, h.paper, h.is_papers) for h in found if h.paper}
    assert given == {
        "batch": (4, Paper("A.1", (16, 32)), False),
        "rate": (0.25, Paper("A.1", (0.5,)), False),
        "inner.rank": (16, Paper("section 5", (16,)), True),
        "by_name.a.rank": (8, Paper("section 5", (16,)), False),
    }
    left_open = [h.path for h in found if not h.paper]
    assert left_open == ["rate", "inner.scale", "by_name.a.scale"]
    assert all(next(hyperparameters(Outer(batch=size))).is_papers for size in (16, 32))


def test_a_class_may_speak_for_all_its_fields_inherited_ones_too():
    assert not any(h.paper for h in hyperparameters(Heir()))
    left_open = {h.path for h in hyperparameters(Heir())}
    assert left_open == {"batch", "rate", "plain", "own", "inner.scale"}


def test_the_values_of_appendix_a1_are_the_papers():
    given = {h.path: h.paper for h in hyperparameters(config(file="hh_tinyllama")) if h.paper}
    assert {path: paper.values_in_words for path, paper in given.items()} == {
        "policy.path": "TinyLlama/TinyLlama-1.1B-Chat-v1.0 or meta-llama/Llama-3.2-1B-Instruct",
        "policy.lora.r": "16",
        "policy.lora.alpha": "32.0",
        "policy.lora.dropout": "0.05",
        "policy.lora.target_modules": "['q_proj', 'k_proj', 'v_proj', 'o_proj']",
        **dict.fromkeys(
            ("rewards.helpful.path", "rewards.harmless.path"),
            "Ray2333/gpt2-large-helpful-reward_model or Ray2333/gpt2-large-harmless-reward_model "
            "or OpenAssistant/reward-model-deberta-v3-large-v2",
        ),
        "rounds": "16",
        "num_clients": "8",
        **{f"data.{part}.source": "Anthropic/hh-rlhf" for part in ("train", "validation", "test")},
        "partition.kind": "iid",
        "partition.alpha": "0.3",  # of A.2.2
        "estimator.batch_size": "16",
        "estimator.minibatch_size": "8",
        "estimator.num_epochs": "3",
        "estimator.actor_learning_rate": "6e-05",
        "estimator.critic_learning_rate": "0.0001",
        "estimator.kl.controller": "adaptive",
        "estimator.kl.target": "0.03",
        "strategy.beta": "0.01",
        "strategy.normalize": "True",
    }


def test_one_of_several_values_is_the_papers_and_nothing_of_an_open_class_is_compared():
    for file in ("hh_tinyllama", "hh_llama32"):
        assert not departures({file: config(file=file)})
    (departure,) = departures({"mine": config("--policy.path", "gpt2", file="hh_tinyllama")})
    assert (departure.path, departure.values) == ("policy.path", {"mine": "gpt2"})
    paths = {h.path for h in hyperparameters(config(file="miniature")) if h.paper}
    assert "rewards.helpful.path" in paths
    assert "evaluation.metrics.parse.path" not in paths


def test_the_papers_run_equals_the_paper_wherever_it_gives_a_value():
    for name in ("hh_tinyllama", "hh_llama32"):
        given = [h for h in hyperparameters(config(file=name)) if h.paper]
        assert {"rounds", "num_clients", "estimator.kl.target"} <= {h.path for h in given}
        assert [h.path for h in given if not h.is_papers] == []
    changed = hyperparameters(config("--estimator.num_epochs", 4, file="hh_tinyllama"))
    assert [h.path for h in changed if h.paper and not h.is_papers] == ["estimator.num_epochs"]


@pytest.mark.slow
def test_the_tables_are_printed_whole_in_a_pipe():
    plan = plan_of(config(file="miniature"))
    text = io.StringIO()
    for table in [*plan_tables(plan), *paper_tables(plan)]:
        print_table(table.title, table.header, table.rows, console=Console(file=text))
    visits = plan.work.rounds * plan.work.clients_per_round
    total = formats.size(visits * (plan.policy.bytes_down + plan.policy.bytes_up))
    sizes = (f"{plan.policy.num_trainable:,}", f"{plan.policy.adapter_bytes:,} bytes", total)
    for figure in (*sizes, "estimator.clip_range", "reward helpful", "4,608"):
        assert figure in text.getvalue()
    assert "None" not in text.getvalue()  # values as YAML has them
    assert "…" not in text.getvalue()


@pytest.mark.slow
def test_a_plan_fits_on_a_screen():
    text = io.StringIO()
    for table in plan_tables(plan_of(config(file="miniature"))):
        print_table(table.title, table.header, table.rows, console=Console(file=text, width=120))
    assert 20 < len(text.getvalue().splitlines()) < 50


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("num_clients", 10**9, "at most 100,000"),
        ("rounds", 10**7, "at most 1,000,000"),
        ("rounds", 10**23, "at most 1,000,000"),
    ],
)
def test_numbers_that_all_work_follows_are_bounded(key, value, bound):
    with pytest.raises(ValueError, match=f"{key} must be at least . and {bound}, got {value}"):
        config(f"--{key}", value)


@pytest.mark.slow
def test_vllms_copy_of_the_policy_counts(shallow):
    path = ("--policy.path", shallow, "--estimator.name", "critic_free")
    engine = {"name": "vllm", "cache_gb": 0.5, "max_loras": 3}
    own, separate = (
        plan_of(config(*path, "--rollout.engine", json.dumps(each)))
        for each in ({"name": "transformers"}, engine)
    )
    expected = own.policy.part_bytes + 2**29 + 3 * own.policy.adapter_bytes
    assert separate.memory.engine == expected
    by_device = [plan.memory_by_device()["cpu"] for plan in (own, separate)]
    assert by_device[1] - by_device[0] == expected
    assert "rollout engine's copy and cache" in dict(rows_of(separate, "Memory of a process"))

    elsewhere = plan_of(
        config(*path, "--rollout.engine", json.dumps({**engine, "devices": [1, 2]}))
    )
    by_device = elsewhere.memory_by_device()
    assert (by_device["cuda:1"], by_device["cuda:2"]) == (expected // 2, expected // 2)
    assert by_device["cpu"] == own.memory_by_device()["cpu"]
