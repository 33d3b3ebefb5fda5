"""The main job on accelerators."""

import gc
import json
import shlex
import weakref
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from benchmarks.decode import per_token, steps_as_one_call
from firm.alignment import decoding
from firm.alignment import head as heads
from firm.alignment.compiled import BLOCK
from firm.alignment.placement import place_
from firm.alignment.policy import load_policy
from firm.base.randomness import RandomStream
from firm.federation import Processes, RoundFailed
from firm.federation.strategies import STRATEGIES
from firm.jobs.chat import Conversation
from firm.jobs.compare import main as compare
from firm.jobs.configs import ChatConfig, CompareConfig
from firm.jobs.finished_runs import parse_over_run
from firm.jobs.plan import make_plan
from tests.accelerator.device import IS_PRETEND, NAME, accelerator, limited_memory, second
from tests.alignment.test_decoding import own_samplers
from tests.alignment.test_gpu import python
from tests.nursery import two_processes
from tests.runs import read_adapter, read_rows
from tests.smoke import FRONT, SMOKE, WHOLE, config, run

TINY = (
    *("--rounds", 1, "--estimator.batch_size", 4, "--estimator.minibatch_size", 4),
    *("--estimator.num_epochs", 1, "--strategy.num_local_steps", 1),
    *("--rollout.max_new_tokens", 6, "--rollout.max_prompt_tokens", 32),
    *("--evaluation.num_calibration_prompts", 16, "--evaluation.num_validation_prompts", 0),
    *("--evaluation.num_test_prompts", 2, "--evaluation.num_shown_samples", 1),
)
STEADY = (
    *("--policy.lora.dropout", 0, "--estimator.actor_optimizer", "sgd"),
    *("--estimator.actor_learning_rate", 0.1),
)
"""Options of runs whose adapters are equal up to rounding: Adam would make steps of it."""
CRITIC_FREE = ("--estimator.name", "critic_free", "--estimator.num_replies", 4)


two_devices = pytest.mark.skipif(
    not IS_PRETEND and torch.accelerator.device_count() < 2, reason="fewer than two accelerators"
)


@pytest.fixture(autouse=True)
def _policy_is_there() -> Iterator[None]:
    """Fails a test whose policy was not on the first device."""
    gc.collect()
    accelerator().reset_peak_memory_stats()
    before = accelerator().memory_allocated()
    yield
    assert accelerator().max_memory_allocated() > before + 1e6


def classifiers(*devices: str) -> tuple[str, str]:
    """Returns the option of two reward models on these devices."""
    names = zip(("helpful", "harmless"), devices, strict=True)
    rewards = {
        name: {"path": f"firm/miniature/checkpoints/{name}", "format": "plain", "device": device}
        for name, device in names
    }
    return "--rewards", json.dumps(rewards)


def _draw_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next run sample the same tokens on any device."""
    seeds = count()

    def numbers(num_rows, vocabulary, *, device, generator=None):
        seeded = torch.Generator().manual_seed(next(seeds))
        return torch.empty(num_rows, vocabulary).exponential_(generator=seeded).to(device)

    monkeypatch.setattr(decoding, "random_numbers", numbers)


@pytest.mark.parametrize("engine", ["local", "stacked"])
@pytest.mark.parametrize(
    "method",
    [(), CRITIC_FREE],
    ids=["ppo", "critic_free"],
)
def test_a_run_ends_as_on_the_cpu(tmp_path, monkeypatch, engine, method):
    options = (*TINY, *STEADY, *method, "--engine", engine)
    adapters = []
    before = accelerator().memory_allocated(second())
    accelerator().reset_peak_memory_stats(second())
    for device in ("cpu", "auto"):
        rewards = classifiers(*["cpu" if device == "cpu" else second()] * 2)
        if not IS_PRETEND:  # its generators give other numbers
            _draw_on_the_cpu(monkeypatch)
        run(*options, *rewards, "--policy.device", device, "--out", tmp_path / device)
        adapters.append(read_adapter(tmp_path / device))
    assert accelerator().max_memory_allocated(second()) > before + 1e5  # the reward models
    assert adapters[0].keys() == adapters[1].keys()
    assert max(v.abs().max() for n, v in adapters[0].items() if "lora_B" in n) > 1e-3  # from 0
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "name",
    sorted(STRATEGIES.keys() - {"afl", "fedcmoo_pref", "qfedavg"}),  # these need losses
)
def test_every_strategy_runs(tmp_path, name):
    bound = ["--strategy.min_rewards", "{brevity: 0.5}"] if name == "constrained" else []
    run(*TINY, *CRITIC_FREE, "--strategy.name", name, *bound, "--out", tmp_path / "run")
    assert read_rows(tmp_path / "run", "round")[0]["failures"] == []


VARIANTS = {
    "LoRA-XS, checkpointing": "--policy.adapter lora_xs --policy.gradient_checkpointing true",
    "bfloat16, static cache": "--policy.dtype bfloat16 --rollout.cache static",
    "critic network": "--estimator.critic network",
    "private": "--strategy.privacy.clip_norm 1 --strategy.privacy.noise_multiplier 1",
    "robust": "--strategy.robust.rule median",
    "secure": "--strategy.secure masks --strategy.masks.num_colluders 0 --num_clients 3",
    "ranks": "--strategy.ranks '{client_0: 2}'",
    "uploads of few bits": "--strategy.upload.bits 4",
    "proximal": "--strategy.name fedavg --strategy.proximal 0.1",
    "epochs in parts": "--estimator.num_epochs 2 --estimator.micro_batch_size 1",
}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # which inductor records
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_runs(tmp_path, name):
    run(*TINY, *shlex.split(VARIANTS[name]), "--out", tmp_path / "run")
    assert read_rows(tmp_path / "run", "round")[0]["failures"] == []


@pytest.mark.parametrize("conditioned", [False, True])
def test_a_token_waits_once_for_the_device(conditioned):
    for name, sample in own_samplers(2, conditioned=conditioned, device=NAME).items():
        assert per_token(sample, 8)[1] == 1, name
    steps = own_samplers(2, conditioned=conditioned, device=NAME, compiles=True)
    for name, sample in steps.items():
        if "generate" not in name:
            with steps_as_one_call():
                operations, waits = per_token(sample, 8, (BLOCK, 3 * BLOCK))
            assert 0 < waits <= 0.1, name
            assert operations <= 60, name


@pytest.mark.parametrize("engine", ["local", "stacked"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, engine):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = (*TINY, "--engine", engine)  # PPO, dropout and Adam
    run(*options, "--rounds", 2, "--out", whole)
    run(*options, "--out", stopped)
    torch.manual_seed(5)
    run(*options, "--rounds", 2, "--out", stopped, "--resume", "true")
    adapter = read_adapter(stopped)
    assert all(torch.equal(adapter[name], value) for name, value in read_adapter(whole).items())


@pytest.mark.parametrize("can_save", [True, False])
def test_a_run_says_once_that_generators_cannot_be_saved(tmp_path, monkeypatch, capsys, can_save):
    if not can_save:
        monkeypatch.delattr(accelerator(), "get_rng_state")
    run(*TINY, "--out", tmp_path / "run")
    line = f"note: torch cannot save the random generators of {NAME} devices"
    before, _, _ = capsys.readouterr().out.partition("round 1/1")
    assert before.count(line) == (not can_save)


def test_a_front_is_trained_measured_and_picked_from_and_its_adapters_speak(tmp_path):
    out = tmp_path / "run"
    run(*TINY, *FRONT, "--evaluation.num_validation_prompts", 2, "--out", out)
    assert (out / "front.json").exists()
    words = ["--runs", f"[{out}]", "--out", str(tmp_path / "compare")]
    compare(parse_over_run(CompareConfig, words, key="runs", description=""))
    assert (tmp_path / "compare/evaluation.html").exists()
    cfg = parse_over_run(ChatConfig, ["--run", str(out)], key="run", description="")
    before = accelerator().memory_allocated()
    conversation = Conversation(cfg)
    assert accelerator().memory_allocated() > before + 1e5  # the model is there
    assert conversation.answer("Hello.", 0)["aligned"]


TEAM = """
import torch
import torch.distributed as dist
from firm.federation import Processes

processes = Processes.join(per_client=2)
team = processes.team()
device = torch.device(torch.accelerator.current_accelerator().type, processes.rank)
assert torch.accelerator.current_device_index() == processes.rank
total = team.sum(torch.full((3,), processes.rank + 1.0, device=device))
assert total.device == device and total.tolist() == [3.0, 3.0, 3.0], total
rows = torch.arange(5.0, device=device)[team.share(5)]
assert torch.cat(team.gather(rows)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
dist.destroy_process_group()
"""
PROGRAM = """
import sys
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import run_cli
run_cli(main, AlignmentConfig, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("method", "rounding"), [((), 2e-5), (CRITIC_FREE, 1e-4)], ids=["ppo", "critic_free"]
)
def test_stacked_clients_end_as_sequential_ones(tmp_path, method, rounding):
    adapters = []
    for engine in ("local", "stacked"):
        run(*TINY, *STEADY, *method, "--engine", engine, "--out", tmp_path / engine)
        adapters.append(read_adapter(tmp_path / engine))
    for name, value in adapters[0].items():
        torch.testing.assert_close(value, adapters[1][name], atol=rounding, rtol=0)


@two_devices
@pytest.mark.skipif(IS_PRETEND, reason="its processes have no means to exchange tensors")
def test_two_processes_sum_on_their_devices(tmp_path):
    (tmp_path / "team.py").write_text(TEAM)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    python(*launcher, tmp_path / "team.py")
    own = ("recipes/firm_hh.py", "--config", "configs/smoke.yaml", "--rounds", 1)
    python(*launcher, *own, "--processes_per_client", 2, "--out", tmp_path / "run")
    assert read_rows(tmp_path / "run")[0]["processes"] == [["client_0", "client_1"]] * 2


@two_devices
def test_two_processes_have_a_device_each_and_share_clients_or_batches(tmp_path):
    options = (*TINY, *STEADY, "--config", SMOKE)
    imports = "import firm.alignment.trl_ppo"
    if IS_PRETEND:
        imports = f"from tests.accelerator.device import register; register(); {imports}"
    with two_processes(tmp_path, imports) as run_program:
        for name, number in (("clients", 1), ("batches", 2)):
            words = (*options, "--processes_per_client", number, "--out", tmp_path / name)
            ends = run_program(PROGRAM, *map(str, words))
            assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]
    run(*TINY, *STEADY, "--out", tmp_path / "one")
    one, clients = read_adapter(tmp_path / "one"), read_adapter(tmp_path / "clients")
    assert all(torch.equal(clients[name], value) for name, value in one.items())
    batches = read_adapter(tmp_path / "batches")
    assert batches.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(batches[name], value, atol=2e-5, rtol=0)


def failure_before_resuming(tmp_path, monkeypatch, options, limited) -> str:
    """Runs with a round that fails, then resumes it; returns the failure's only line.

    The run must end as `tmp_path / "whole"` did.
    """
    with monkeypatch.context() as patch:
        patch.setitem(STRATEGIES, "firm", limited)
        with pytest.raises(RoundFailed) as failed:
            run(*options, "--out", tmp_path / "run")
    run(*options, "--out", tmp_path / "run", "--resume", "true")
    adapter = read_adapter(tmp_path / "run")
    for name, value in read_adapter(tmp_path / "whole").items():
        assert torch.equal(adapter[name], value)
    (line,) = str(failed.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("engine", "share", "key"),
    [
        ("local", 0.6, "estimator.micro_batch_size, now 4, the whole minibatch"),
        ("stacked", 0.6, "estimator.micro_batch_size, now 4, the whole minibatch"),
        ("local", 0.02, "rollout.forward_batch_size, now"),
    ],
)
def test_out_of_memory_names_a_key_and_no_client_is_lost(tmp_path, monkeypatch, engine, share, key):
    strategy, options = STRATEGIES["firm"], (*TINY, "--engine", engine)
    start, peak = 0, 0

    def measured(*arguments):
        nonlocal start, peak
        start = accelerator().memory_allocated()
        accelerator().reset_peak_memory_stats()
        result = strategy(*arguments)
        peak = accelerator().max_memory_allocated()
        return result

    def limited(*arguments):
        with limited_memory(int(share * (peak - start))):
            return strategy(*arguments)

    with monkeypatch.context() as patch:
        patch.setitem(STRATEGIES, "firm", measured)
        run(*options, "--out", tmp_path / "whole")
    line = failure_before_resuming(tmp_path, monkeypatch, options, limited)
    device = "pretend accelerator" if IS_PRETEND else NAME.upper()
    assert f"OutOfMemoryError: {device} out of memory. Tried to allocate" in line
    assert key in line or not IS_PRETEND  # a real one gives memory in segments
    assert "; lower " in line


@two_devices
def test_a_reward_model_that_fills_its_device_names_its_key_and_no_batch_is_lost(
    tmp_path, monkeypatch
):
    strategy, options = STRATEGIES["firm"], (*TINY, *classifiers(second(), second()))

    def limited(*arguments):
        with limited_memory(1000, second()):
            return strategy(*arguments)

    run(*options, "--out", tmp_path / "whole")
    line = failure_before_resuming(tmp_path, monkeypatch, options, limited)
    assert "on device 1" in line or not IS_PRETEND  # the pretend one's words
    assert "lower rewards.NAME.batch_size" in line


@two_devices
@pytest.mark.parametrize(
    ("placed", "method", "shares_prompts"),
    [
        pytest.param("auto", (), False, id="auto-ppo"),
        pytest.param("by module", CRITIC_FREE, False, id="by module-critic_free"),
        pytest.param("auto", CRITIC_FREE, True, id="auto-critic_free, prompts once"),
    ],
)
def test_a_policy_on_two_devices_ends_as_on_one(
    tmp_path, monkeypatch, method, shares_prompts, placed
):
    if shares_prompts:
        monkeypatch.setattr(heads, "LARGE_VOCABULARY", 0)
        monkeypatch.setattr(heads, "_formulas", weakref.WeakKeyDictionary())
    options = (*TINY, *method, "--policy.path", WHOLE, "--policy.lora.dropout", 0)
    options += ("--estimator.actor_optimizer", "sgd", "--estimator.actor_learning_rate", 0.1)
    options += ("--rollout.max_new_tokens", 24)  # shorter ones have equal rewards
    device_map = placed
    if placed == "by module":  # the last layer on the first device: rows go there and back
        names = (
            ["embed_tokens", "layers.0", "layers.3"],
            ["layers.1", "layers.2", "rotary_emb", "norm"],
        )
        places = [{f"model.{n}": f"{NAME}:{i}" for n in own} for i, own in enumerate(names)]
        device_map = json.dumps({**places[0], **places[1], "lm_head": f"{NAME}:0"})
    run(*options, "--out", tmp_path / "one")
    plan = make_plan(config(*options, "--policy.device_map", device_map), ["c"], Processes())
    (place,) = plan.places
    assert list(place.policy_bytes) == [f"{NAME}:0", second()]
    assert sum(place.policy_bytes.values()) == plan.policy.part_bytes
    assert min(place.policy_bytes.values()) > 0.4 * plan.policy.part_bytes
    gc.collect()
    before = accelerator().memory_allocated(1)
    accelerator().reset_peak_memory_stats(1)
    run(*options, "--policy.device_map", device_map, "--out", tmp_path / "two")
    assert accelerator().max_memory_allocated(1) > before + 5e5  # a layer is there
    words = ["--run", str(tmp_path / "two")]
    cfg = parse_over_run(ChatConfig, words, key="run", description="")
    assert Conversation(cfg).answer("Hello.", 0)["aligned"]
    one, two = read_adapter(tmp_path / "one"), read_adapter(tmp_path / "two")
    assert max(value.abs().max() for name, value in one.items() if "lora_B" in name) > 5e-4
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-5, rtol=0)


@two_devices
def test_a_module_is_on_one_device():
    policy = load_policy(config("--policy.path", WHOLE).policy, stream=RandomStream(0, "adapter"))
    twice = json.dumps({"model": f"{NAME}:0", "model.norm": second(), "lm_head": f"{NAME}:0"})
    with pytest.raises(ValueError, match="model contains or shares a parameter of another device"):
        place_(policy, config("--policy.device_map", twice).policy, torch.device("cpu"))
