"""Bad input: one line that says what, what was received and what to do; nothing is half-written."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers.integrations.integration_utils  # noqa: F401  # prints where W&B is offline
from safetensors.torch import save_file
from transformers import AutoTokenizer

from firm.cli.main import COMMANDS
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.sources import check_sources
from firm.run import Run, UserError, parse, run_cli, to_dict
from reward_models import REWARD_MODELS
from tests.smoke import POLICY, SMOKE, config

REWARDS = """
from reward_models import reward_model

@reward_model("nan_at_the_end")
def nan_at_the_end(completions, **kwargs):
    return [float(len(text)) for text in completions[:-1]] + [float("nan")]

@reward_model("one_too_few")
def one_too_few(completions, **kwargs):
    return [float(len(text)) for text in completions[1:]]

@reward_model("raises")
def raises(completions, **kwargs):
    raise LookupError("no such\\nword")

@reward_model("always_the_same")
def always_the_same(completions, **kwargs):
    return [1.0 for text in completions]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Iterator[Path]:
    """A folder of bad files, which arguments and messages call FILES."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty.jsonl").write_text("")
    (folder / "torn.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Hel')
    (folder / "other.jsonl").write_text('{"prompt": "Hi"}\n\n{"question": "Hi"}\n')
    (folder / "twice.yaml").write_text("rounds: 1\nrounds: 2\n")
    (folder / "half.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "Hi \\ud83d"}\n')
    bomb = ", ".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefgh"))
    options = "{name: brevity, options: {x: {a: &a [1], " + bomb + "}}}"
    (folder / "bomb.yaml").write_text(f"rewards: {{brevity: {options}}}")
    shutil.copytree(POLICY, folder / "large_tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "large_tokenizer")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "broken.py").write_text("import os\n\nimport no_such_package\n")
    shutil.copytree(POLICY, folder / "no_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "no_tokenizer" / name).unlink()
    shutil.copytree(POLICY, folder / "torn_policy")
    tensors = folder / "torn_policy/model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:9_999])
    (folder / "adapter").mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    settings["base_model_name_or_path"] = str(POLICY)
    (folder / "adapter/adapter_config.json").write_text(json.dumps(settings))
    save_file({"lora_A.weight": torch.zeros(4, 8)}, folder / "adapter/adapter_model.safetensors")
    yield folder
    for name in re.findall(r'reward_model\("(\w+)"\)', REWARDS):
        REWARD_MODELS.pop(name, None)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def recipe(*arguments: object) -> None:
    run_cli(main, AlignmentConfig, ["--config", str(SMOKE), *map(str, arguments)])


HELLO = r'{prompt: "\n\nHuman: Hi\n\nAssistant:", completion: "a b", score: 7}'

CASES = {
    # the config
    "an unknown key": (
        ["--strategy.betta", "1"],
        ["unknown key strategy.betta", "did you mean strategy.beta?"],
    ),
    "a key of another section": (
        ["--batch_size", "8"],
        ["unknown key batch_size", "did you mean estimator.batch_size?"],
    ),
    "a key without a value": (
        ["--seed"],
        ["--seed has no value; write --seed VALUE"],
    ),
    "a wrong type": (
        ["--strategy.beta", "much"],
        ["strategy.beta must be float, got 'much'"],
    ),
    "a calibration of no objective": (
        ["--evaluation.calibrations", "{kindness: {method: sigmoid}}"],
        ["evaluation.calibrations has the unknown objective 'kindness'; choose from brevity"],
    ),
    "a calibration of another kind": (
        ["--evaluation.calibrations", "{brevity: {method: minmax}}"],
        ["calibrations.brevity.method must be the reward's normalization", "got 'minmax'"],
    ),
    "a calibration without a width": (
        ["--evaluation.calibrations", "{brevity: {method: sigmoid, scale: 0}}"],
        ["scale must be positive, and low below high, got scale 0"],
    ),
    "a strategy that does not exist": (
        ["--strategy.name", "fedprox"],
        ["strategy.name must be one of afl, constrained, famo, fedavg", "got 'fedprox'"],
    ),
    "a comparison with the paper without a plan": (
        ["--paper"],
        ["paper needs plan, got paper without it; run `firm plan --paper`"],
    ),
    "constraints of a conditioned policy": (
        [
            *["--strategy.name", "constrained", "--strategy.min_rewards", "{brevity: 0.5}"],
            *["--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"],
        ],
        ["cannot train a policy with policy.conditioning.kind preference", "firm pick --require"],
    ),
    "a conditioned policy under fixed weights": (
        [
            *["--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"],
            *["--strategy.name", "fedavg", "--strategy.weights", "[0.7, 0.3]"],
        ],
        ["strategy.weights must be null with policy.conditioning.kind preference"],
    ),
    "a conditioned policy under a server's weights": (
        [
            *["--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"],
            *["--strategy.name", "fedcmoo"],
        ],
        ["strategy fedcmoo cannot train a policy with policy.conditioning.kind preference"],
    ),
    "a conditioned policy under a solver without preferences": (
        [
            *["--policy.conditioning.kind", "preference", "--estimator.name", "critic_free"],
            *["--strategy.solver", "torchjd/pcgrad"],
        ],
        ["strategy.solver torchjd/pcgrad takes no preference", "such as exact or torchjd/upgrad"],
    ),
    "a sum of rewards before weights are solved": (
        ["--estimator.name", "critic_free", "--estimator.aggregation", "sum_then_normalize"],
        ["must not be sum_then_normalize with strategy firm", "use strategy fedavg with"],
    ),
    "a sum of rewards in steps by weights of a batch": (
        [
            *["--estimator.name", "critic_free", "--estimator.aggregation", "normalize_then_sum"],
            *["--strategy.solve_per", "batch"],
        ],
        ["must not be normalize_then_sum with strategy firm solve_per batch", "by_objective"],
    ),
    "a sum of rewards in steps by weights of the server": (
        [
            *["--estimator.name", "critic_free", "--estimator.aggregation", "normalize_then_sum"],
            *["--strategy.name", "fedcmoo"],
        ],
        ["must not be normalize_then_sum with strategy fedcmoo whose server solves the weights"],
    ),
    "a sum of rewards for replies with weights of their own": (
        [
            *["--estimator.name", "critic_free", "--estimator.aggregation", "normalize_then_sum"],
            *["--policy.conditioning.kind", "preference"],
        ],
        ["aggregation must be by_objective with policy.conditioning.kind", "scale group_std"],
    ),
    "a Gram matrix of a sum of rewards": (
        [
            *["--estimator.name", "critic_free", "--estimator.aggregation", "normalize_then_sum"],
            *["--strategy.name", "fedavg", "--strategy.share_gram", "true"],
        ],
        ["strategy.share_gram must be false with estimator.aggregation normalize_then_sum"],
    ),
    "a constraint on no objective": (
        ["--strategy.name", "constrained", "--strategy.min_rewards", "{brevty: 0.5}"],
        ["min_rewards has the unknown objective 'brevty'", "did you mean 'brevity'?"],
    ),
    "a strategy that reads losses on a shard of prompts": (
        ["--strategy.name", "qfedavg"],
        ["strategy.name qfedavg needs losses on a client's whole shard", "AlignmentClient"],
    ),
    "no config file": (
        ["--config", "no/such.yaml"],
        ["no/such.yaml: no such file; the nearest that ship are", "firm configs --all"],
    ),
    "a malformed config file": (
        ["--config", "FILES/twice.yaml"],
        ["twice.yaml: malformed YAML, line 2: key 'rounds' twice; correct it"],
    ),
    "no time for a client": (
        ["--client_timeout", "0"],
        ["client_timeout must be positive, got 0.0; null sets no limit"],
    ),
    "a negative beta": (
        ["--strategy.beta", "-0.1"],
        ["strategy.beta must be non-negative, got -0.1"],
    ),
    "a preference of the wrong length": (
        ["--strategy.preference", "[1, 0, 0]"],
        ["preference", "2 objectives", "got (1.0, 0.0, 0.0)"],
    ),
    "a negative preference": (
        ["--strategy.preference", "[-1, 2]"],
        ["preference must", "non-negative", "got (-1.0, 2.0)"],
    ),
    "a preference of zeros": (
        ["--strategy.preference", "[0, 0]"],
        ["not all zero", "got (0.0, 0.0)"],
    ),
    "a batch that minibatches do not divide": (
        ["--estimator.minibatch_size", "3"],
        ["estimator.batch_size must be a multiple of minibatch_size, got 8 and 3"],
    ),
    "a config file that stands for more than it says": (
        ["--config", "FILES/bomb.yaml"],
        ["bomb.yaml: malformed YAML, line 1: more than 100000 values with aliases expanded"],
    ),
    # names
    "a name that leads elsewhere": (
        ["--name", "../run"],
        ["name must be at most 64 letters", "got '../run'"],
    ),
    "an objective that is a path": (
        ["--rewards", "{a/b: {name: brevity}}"],
        ["rewards: the name of an objective must be at most 64 letters", "got 'a/b'"],
    ),
    "an objective with the name of a figure": (
        ["--rewards", "{length: {name: length}}"],
        ["rewards: the name of an objective must not be one of kl, length", "got 'length'"],
    ),
    "an objective with the name of a figure of a score": (
        ["--rewards", "{mean: {name: brevity}}"],
        ["the name of an objective must not be one of", "mean, se, which", "got 'mean'"],
    ),
    "an objective that YAML takes for a bool": (
        ["--rewards", "{true: {name: brevity}}"],
        ["rewards must have strings as keys, got True, which YAML reads as bool; quote it"],
    ),
    "a further score that is a path": (
        ["--evaluation.metrics", "{../a: {name: brevity}}"],
        ["evaluation.metrics: the name of a score must be at most 64 letters", "got '../a'"],
    ),
    "a further score with the name of an objective": (
        ["--evaluation.metrics", "{brevity: {name: brevity}}"],
        ["evaluation.metrics and rewards both have 'brevity'; rename one"],
    ),
    "a group that a terminal would obey": (
        ["--groups", '{"a\\e[2J": {clients: [0]}}'],
        ["groups: the name of a group must be at most 64 letters", r"got 'a\x1b[2J'"],
    ),
    # counts
    "a quorum that nobody can meet": (
        ["--strategy.quorum", "99"],
        ["strategy.quorum must be at most num_clients (2), got 99; decrease it, or add clients"],
    ),
    "more clients a round than there are": (
        ["--strategy.clients_per_round", "99"],
        ["strategy.clients_per_round must be at most num_clients (2), got 99; decrease it"],
    ),
    "more clients for the Gram matrix than there are": (
        [
            *("--strategy.name", "fedcmoo", "--strategy.communication", "two_sample"),
            *("--strategy.compressor", "none", "--strategy.normalize_gram", "false"),
            *("--strategy.gram_clients", "99"),
        ],
        ["strategy.gram_clients must be at most num_clients (2), got 99; decrease it"],
    ),
    "a client that is none": (
        ["--strategy.always", "[client_9]"],
        ["strategy.always must name clients, client_0 to client_1, got 'client_9'"],
    ),
    "a preference of a client that does not exist": (
        ["--strategy.preferences", "{client_99: [1, 0]}"],
        ["strategy.preferences must name clients, client_0 to client_1, got 'client_99'"],
    ),
    "an objective that no client serves": (
        ["--groups", "{all: {clients: [0, 1], objectives: [brevity]}}"],
        ["groups: no client trains the objective 'positivity'; add it to"],
    ),
    "a rank of a client that is none": (
        ["--strategy.ranks", "{client_9: 2}"],
        ["strategy.ranks must name clients, client_0 to client_1, got 'client_9'"],
    ),
    "more ranks than the adapter has": (
        ["--strategy.ranks", "{client_1: 9}"],
        ["strategy.ranks must be at most policy.lora.r (4), got client_1: 9"],
    ),
    "ranks of what has none": (
        ["--strategy.ranks", "{client_1: 2}", "--policy.adapter", "lora_xs"],
        ["strategy.ranks requires policy.adapter lora, got lora_xs"],
    ),
    "an adapter that does not exist": (
        ["--policy.adapter", "loraxs"],
        ["policy.adapter must be one of lora, lora_xs, got 'loraxs'"],
    ),
    "a mean of products of what has none": (
        ["--strategy.lora_mean", "products", "--policy.adapter", "lora_xs"],
        ["strategy.lora_mean must be factors with policy.adapter lora_xs", "got products"],
    ),
    "a frozen A of what has none": (
        ["--policy.lora.freeze_a", "true", "--policy.adapter", "lora_xs"],
        ["policy.lora.freeze_a must be false with policy.adapter lora_xs, which trains neither"],
    ),
    "masks and a robust rule": (
        ["--strategy.secure", "masks", "--strategy.robust.rule", "median"],
        ["a robust rule compares single updates, which are hidden; with secure,"],
    ),
    "no threads": (
        ["--num_threads", "0"],
        ["num_threads must be at least 1, got 0; null leaves it to torch"],
    ),
    "time without end for a client": (
        ["--client_timeout", ".inf"],
        ["client_timeout must be a finite number, got inf; null sets no limit"],
    ),
    "a share that is no number": (
        ["--start", "{a: .nan}"],
        ["start.a must be a finite number, got nan"],
    ),
    "a concentration of zero": (
        ["--partition.alpha", "0"],
        ["partition.alpha must be positive, got 0.0"],
    ),
    "one prompt, of which there is no error": (
        ["--evaluation.num_validation_prompts", "1"],
        ["evaluation.num_validation_prompts must be 0 or at least 2, got 1"],
    ),
    **{
        f"too few in evaluation.{name}": (
            [f"--evaluation.{name}", str(least - 1)],
            [f"evaluation.{name} must be {words}, got {least - 1}"],
        )
        for name, least, words in (
            ("num_calibration_prompts", 1, "at least 1"),
            ("num_validation_prompts", 0, "non-negative"),
            ("num_test_prompts", 2, "at least 2"),
            ("num_samples", 1, "at least 1"),
            ("num_shown_samples", 0, "non-negative"),
        )
    },
    # the data
    "half a character in a test prompt": (
        ["--data.test.source", "FILES/half.jsonl"],
        ["FILES/half.jsonl, line 2: the prompt has a lone surrogate at character 4"],
    ),
    "more clients than prompts": (
        ["--num_clients", "5000"],
        ["5000", "fewer clients"],
    ),
    "no data file": (
        ["--data.train.source", "no/such.jsonl"],
        ["data.train.source: there is no file no/such.jsonl; correct it"],
    ),
    "an empty data file": (
        ["--data.train.source", "FILES/empty.jsonl"],
        ["there is no prompt in FILES/empty.jsonl", "choose another source"],
    ),
    "a torn data file": (
        ["--data.train.source", "FILES/torn.jsonl"],
        ["FILES/torn.jsonl, line 2: not valid JSON", "repair it"],
    ),
    "a data file with other fields": (
        ["--data.validation.source", "FILES/other.jsonl"],
        ["FILES/other.jsonl, line 3: no prompt in fields question", "use an object with"],
    ),
    "prompts and replies beyond the context": (
        ["--rollout.max_prompt_tokens", "500", "--rollout.max_new_tokens", "13"],
        ["the 512 positions of", "got 500 + 13", "lower one"],
    ),
    # the policy
    "a policy that does not exist": (
        ["--policy.path", "no/such/policy"],
        ["policy.path: there is no folder no/such/policy; correct it"],
    ),
    "a policy on the hub without network": (
        ["--policy.path", "some/policy"],
        ["policy.path: there is no folder some/policy", "choose the folder of a local checkpoint"],
    ),
    "a policy without a tokenizer": (
        ["--policy.path", "FILES/no_tokenizer"],
        ["no tokenizer could be loaded from the folder FILES/no_tokenizer", "complete checkpoint"],
    ),
    "a torn policy": (
        ["--policy.path", "FILES/torn_policy"],
        [
            "no language model could be loaded from the folder FILES/torn_policy",
            "complete checkpoint",
        ],
    ),
    "a tokenizer with more tokens than the embedding": (
        ["--policy.path", "FILES/large_tokenizer"],
        [
            "policy.path: the tokenizer of FILES/large_tokenizer has ids up to",
            "use the model's own",
        ],
    ),
    "target modules that match nothing": (
        ["--policy.lora.target_modules", "[wq]"],
        ["policy.lora.target_modules: ['wq'] match no layer", "choose among", "'q_proj'"],
    ),
    # the reward models
    "a reward model that does not exist": (
        ["--rewards", "{helpful: {path: no/such/reward}}"],
        ["rewards.helpful: there is no folder no/such/reward; correct it"],
    ),
    "a reward model on the hub without network": (
        ["--rewards", "{helpful: {path: some/reward}}"],
        ["'helpful': there is no folder some/reward", "choose the folder of a local checkpoint"],
    ),
    "a language model as a reward": (
        ["--rewards", f"{{helpful: {{path: {POLICY}}}}}"],
        ["'helpful'", "is no trained classifier", "use a reward model"],
    ),
    "a reward that nobody registered": (
        ["--rewards.brevity.name", "brevitty"],
        ["rewards.brevity: there is no reward model 'brevitty': did you mean 'brevity'?"],
    ),
    "a reward file that does not exist": (
        ["--rewards.brevity.file", "no/such.py"],
        ["rewards.brevity: there is no file no/such.py; correct it"],
    ),
    "a reward file that does not import": (
        ["--rewards.brevity.file", "FILES/broken.py"],
        ["ModuleNotFoundError: No module named 'no_such_package' (FILES/broken.py:3)", "repair it"],
    ),
    "a reward that fails its golden score": (
        ["--rewards.brevity.golden", f"[{HELLO}]"],
        ["'brevity': golden.0 must score 7 ± 0.01, got", "correct the score"],
    ),
    "a reward that is not a number": (
        ["--rewards.brevity.name", "nan_at_the_end", "--rewards.brevity.file", "FILES/rewards.py"],
        ["reward 'brevity' returned nan at index 31", "return one finite number for each"],
    ),
    "a reward that raises": (
        ["--rewards.brevity.name", "raises", "--rewards.brevity.file", "FILES/rewards.py"],
        ["reward 'brevity' raised LookupError: no such word (FILES/rewards.py:14); repair"],
    ),
    "a reward of the wrong length": (
        ["--rewards.brevity.name", "one_too_few", "--rewards.brevity.file", "FILES/rewards.py"],
        ["reward 'brevity' returned 31 values", "return one finite number for each of the 32"],
    ),
    "a reward that never varies": (
        ["--rewards.brevity.name", "always_the_same", "--rewards.brevity.file", "FILES/rewards.py"],
        ["the scores of 'brevity' do not vary on 32", "choose normalization 'none'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_line_and_nothing_is_written(case, files, tmp_path, refusal):
    arguments, messages = CASES[case]
    arguments = [argument.replace("FILES", str(files)) for argument in arguments]
    line = refusal(recipe, "--out", tmp_path / "runs/a", *arguments)
    for message in messages:
        assert message.replace("FILES", str(files)) in line
    assert contents(tmp_path) == {}


def test_a_file_of_validation_prompts_must_exist_only_where_they_are_used():
    missing = ("--data.validation.source", "no/such.jsonl")
    check_sources(config(*missing, "--evaluation.num_validation_prompts", 0))
    with pytest.raises(UserError, match=r"data\.validation\.source: there is no file no/such"):
        check_sources(config(*missing))


def test_an_incompatible_adapter_ends_in_one_line_and_nothing_is_written(files, tmp_path, refusal):
    arguments = ["--adapters", f"[{files}/adapter]", "--policy.path", POLICY]
    arguments += ["--out", str(tmp_path / "out")]
    line = refusal(COMMANDS["evaluate"].run, arguments)
    assert f"the adapter in {files}/adapter does not fit {POLICY}" in line
    assert "use the base model that it was made for" in line
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("parent", ["a regular file", "/proc"])
def test_a_place_without_write_permission_ends_in_one_line(parent, tmp_path, refusal):
    (tmp_path / "a regular file").write_text("mine")
    before = contents(tmp_path)
    out = tmp_path / parent / "runs/a"  # an absolute parent outranks tmp_path
    line = refusal(recipe, "--out", out)
    assert f"the run directory {out} cannot be written" in line
    assert "choose another path" in line
    assert contents(tmp_path) == before


def nothing(run: Run) -> None: ...


def another_process(run: Run) -> Run:
    """Opens it again: the kernel refuses this process then as it would any other."""
    return Run.resume(run.path, run_config(run.path), ignore=["resume", "out"])


def torn(run: Run) -> None:
    for path in run.path.glob("checkpoints/*/tensors.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def another_version(run: Run) -> None:
    path = run.path / "checkpoints/round_0000/state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


def shorter_log(run: Run) -> None:
    (run.path / "metrics.jsonl").write_text("")


def no_run(run: Run) -> None:
    (run.path / "config.yaml").unlink()


RUN_CASES: dict[str, tuple[Callable[[Run], Run | None], list[str], list[str]]] = {
    "it is there already": (
        nothing,
        [],
        ["the run directory RUN exists and is not empty; continue it with `firm resume RUN` or"],
    ),
    "it is no run": (
        no_run,
        ["--resume", "true"],
        ["there is no run to resume at RUN; pass the folder of a run"],
    ),
    "another process writes to it": (
        another_process,
        ["--resume", "true"],
        [f"the directory RUN is in use by process {os.getpid()} on ", "wait until it has end"],
    ),
    "another process writes to it, and nobody said resume": (
        another_process,
        [],
        [f"the directory RUN is in use by process {os.getpid()} on ", "choose another path"],
    ),
    "it has another configuration": (
        nothing,
        ["--resume", "true", "--seed", "5"],
        ["the run at RUN has another configuration: seed was 0, is 5; resume with its config"],
    ),
    "its checkpoints are torn": (
        torn,
        ["--resume", "true"],
        [
            "the run at RUN cannot be resumed, because none of its 2 checkpoints is intact",
            "restore",
        ],
    ),
    "its checkpoints are of another version": (
        another_version,
        ["--resume", "true"],
        ["has format 0, but this version reads format 1; resume with the version of firm-align"],
    ),
    "its log is shorter than its checkpoint says": (
        shorter_log,
        ["--resume", "true"],
        ["RUN/metrics.jsonl must have at least 16 bytes, as at its checkpoint, got 0"],
    ),
}


def run_config(path: Path) -> dict:
    return to_dict(parse(AlignmentConfig, ["--config", str(SMOKE), "--out", str(path)]))


@pytest.mark.parametrize("case", RUN_CASES)
def test_a_run_directory_that_cannot_be_used_ends_in_one_line_and_stays(case, tmp_path, refusal):
    damage, arguments, messages = RUN_CASES[case]
    path = tmp_path / "run"
    run = Run.create(path, run_config(path))
    run.log({"kind": "run"})
    for number in (0, 1) if damage is torn else (0,):
        run.save_checkpoint(number, {"tensor": torch.ones(2)})
    run.close()
    writer = damage(run)
    before = contents(tmp_path)
    line = refusal(recipe, "--out", path, *arguments)
    if writer:
        writer.close()
    for message in messages:
        assert message.replace("RUN", str(path)) in line
    assert contents(tmp_path) == before
