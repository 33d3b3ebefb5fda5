"""A policy divided between two processes: its bytes, its passes, and an end in good order."""

import signal

import pytest

from tests.nursery import two_processes

POLICY = """
import os
import sys
import torch
from firm.alignment import LoraSettings, PolicyConfig, load_policy, load_tokenizer
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.policy import adapter_parameters
from firm.alignment.rollout import Sampler, encode_prompts, sample, with_logprobs
from firm.alignment.prompts import Prompt
from firm.alignment.self_check import check_passes
from firm.alignment.sharding import gathered_bytes, part_bytes, shard_
from firm.federation import Processes, RandomStream
from tests.smoke import POLICY

def local_bytes(policy):  # of the frozen parameters that this process keeps between passes
    frozen = (p for name, p in policy.named_parameters() if "lora_" not in name)
    return sum(getattr(p, "_local_tensor", p).nbytes for p in frozen)

config = PolicyConfig(str(POLICY), lora=LoraSettings(r=4))
policy = load_policy(config, stream=RandomStream(0, "adapter"))
torch.manual_seed(0)
torch.nn.init.normal_(list(adapter_parameters(policy).values())[1], std=0.1)
token_ids = torch.arange(2, 26).view(2, 12)
whole = {"bytes": local_bytes(policy), "logits": policy(input_ids=token_ids).logits.detach()}
planned = part_bytes(policy, 2), gathered_bytes(policy)
processes = Processes.join(per_client=2)
alone = processes.team()
team = shard_(policy, processes, alone, torch.device("cpu"))
"""

EQUAL = """
kept = local_bytes(policy)
assert kept == planned[0] <= 0.501 * whole["bytes"], (kept, planned, whole["bytes"])
assert 0.99 * whole["bytes"] < team.sum(torch.tensor(kept)) < 1.01 * whole["bytes"]
assert {type(p.data) for p in adapter_parameters(policy).values()} == {torch.Tensor}
logits = policy(input_ids=token_ids).logits
assert torch.equal(logits, whole["logits"])
gradient = torch.autograd.grad(logits.square().mean(), list(adapter_parameters(policy).values()))
assert all(part.abs().max() > 0 for part in gradient[:1])
check_passes(policy, "it")
assert local_bytes(policy) == kept  # nothing stays gathered after a pass

sizes = []
def remember(*_):
    sizes.append(local_bytes(policy))
for module in policy.modules():
    if type(module).__name__ == "Linear":
        module.register_forward_hook(remember)
policy(input_ids=token_ids)
assert kept < max(sizes) <= kept + planned[1], (kept, max(sizes), planned)
print("equal")
"""

UNEQUAL = """
with team.unanimous():
    for _ in range(3 * team.rank):
        logits = policy(input_ids=token_ids).logits
if team.rank:
    assert torch.equal(logits, whole["logits"])

tokenizer = load_tokenizer(config)
length = RolloutConfig(max_new_tokens=32, temperature=1.0)
prompts = [Prompt("Tell me of a cat."), Prompt("Hello."), Prompt("Who are you, then?")]
def sampled(policy, team):
    sampler = Sampler(policy, tokenizer, length, policy.disable_adapter, team=team)
    queries = encode_prompts(
        prompts, tokenizer, prompt_format=config.prompt, max_prompt_tokens=40
    )
    torch.manual_seed(3)
    result = with_logprobs(sampler, sample(sampler, queries), measures_mismatch=True)
    return result, torch.rand(1)
replies, draw = sampled(policy, team)
again = load_policy(config, stream=RandomStream(0, "adapter"))
for name, own in adapter_parameters(again).items():
    own.data = adapter_parameters(policy)[name].data
expected, expected_draw = sampled(again, alone)
first, *others = replies.num_tokens.tolist()  # of the first process, and of the second
assert first != max(others), (first, others)
assert torch.equal(replies.query_responses, expected.query_responses)
assert torch.equal(replies.reference_logprobs, expected.reference_logprobs)
assert torch.equal(draw, expected_draw)

prompts = prompts[:1]  # the second process has no row
assert torch.equal(
    sampled(policy, team)[0].query_responses, sampled(again, alone)[0].query_responses
)
if team.rank == 0:  # the server measures alone; the other waits for its messages
    for _ in range(2):
        with team.alone():
            assert torch.equal(policy(input_ids=token_ids).logits, whole["logits"])
    processes.send("goodbye", 1)
else:
    assert processes.receive(0) == "goodbye"

try:
    with team.unanimous():
        if team.rank:
            raise ValueError("no batch")
        policy(input_ids=token_ids)
except (ValueError, RuntimeError) as error:
    print(type(error).__name__, error)
with team.unanimous():
    logits = policy(input_ids=token_ids).logits
assert torch.equal(logits, whole["logits"])
"""

LOST = """
def fail(*_):
    if team.rank and sys.argv[1] == "dies":
        os.kill(os.getpid(), 9)
    if team.rank:
        raise FloatingPointError("no number.")
policy.get_input_embeddings().register_forward_hook(fail)  # the other waits for the layer
if sys.argv[2] == "both":
    with team.unanimous():
        policy(input_ids=token_ids)
elif team.rank:
    processes.receive(0)
else:
    with team.alone():
        policy(input_ids=token_ids)
"""


@pytest.fixture(scope="module")
def run_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    imports = "import tests.smoke, firm.alignment.sharding, torch.distributed.fsdp"
    with two_processes(folder, imports) as run_program:
        yield run_program


@pytest.mark.slow
def test_two_processes_keep_a_half_each_and_compute_as_one_with_the_whole(run_two):
    for process in run_two(POLICY + EQUAL):
        assert (process.returncode, process.stdout) == (0, "equal\n"), process.stderr


@pytest.mark.slow
def test_processes_with_passes_of_different_number_wait_for_each_other(run_two):
    first, second = run_two(POLICY + UNEQUAL)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    reason = "process 1 of the client's 2 failed: ValueError: no batch"
    assert first.stdout == f"RuntimeError {reason}\n"
    assert second.stdout == "ValueError no batch\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dies", "raises"])
@pytest.mark.parametrize("who", ["both", "alone"])
def test_a_process_that_fails_in_a_pass_ends_the_other(run_two, way, who):
    left, failed = run_two(POLICY + LOST, way, who)
    assert left.returncode == 1
    assert "TeamLost: a process of the client's 2 is gone; unless it was killed" in left.stderr
    assert "peer" in left.stderr
    if way == "dies":
        assert failed.returncode == -signal.SIGKILL
    else:
        line = failed.stderr.splitlines()[-1]
        assert "could not finish a pass of the sharded policy (FloatingPointError: no" in line
