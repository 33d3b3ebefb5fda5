"""Writes a page with the costs of a round at TinyLlama's shape on this machine's accelerator.

    make gpu                                                       # docs/gpu.md, within ten minutes
    python benchmarks/gpu.py --budget 60                           # the first rows of it
    python benchmarks/gpu.py --shape tiny --device cpu             # every part, in a minute
    python benchmarks/gpu.py --shape tinyllama-short --device cpu  # the true models, two clients

A sampled token of 16 and of 128 replies, by compiled steps and without them, beside transformers'
`generate` and the rollout engine vLLM. Rounds of FIRM with random bfloat16 weights: PPO with value
heads and the critic-free estimator, sequential clients (engine local), also with a static cache,
and stacked ones, also with compiled steps on CUDA devices and with a prompt passed for each of its
replies, beside TRL's GRPOTrainer with one adapter and as many replies, epochs and minibatches, also
with vLLM. Rows of vLLM say so where it is not installed. The cases that say most come first; the
page is written after each. Cases run in processes of their own: one that fails is a row with its
error, and the next starts a new process.

On any accelerator that torch finds, a round of the same passes warms up, and the next one is
measured, so small differences say nothing. Stages wait for the device before and
after. Memory on an accelerator is what torch allocated; on the CPU it is the most that the case's
process had resident in the round, libraries included, which the plan leaves out. If the page is
kept, the tests of tests/accelerator run once the rounds of the critic-free estimator have rows.
"""

import argparse
import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the package is not installed

import datasets
import torch
import transformers
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
)
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from benchmarks.decode import adapted, milliseconds, samplers
from benchmarks.gpu_page import (
    COMPILED,
    DECODING,
    STAGES,
    STATIC,
    WHOLE,
    Case,
    Row,
    Setting,
    page_of,
)
from benchmarks.measure import one_round, peak_resident, reset_peak_resident
from benchmarks.random_models import SHAPES, prompts, save_models
from firm.alignment import MultiObjectiveTrainer
from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.rollout_config import VLLMConfig
from firm.base.devices import (
    accelerate_on,
    named_device,
    peak_bytes,
    prepare_attention,
    release_memory,
    reset_peak_bytes,
    synchronize,
    total_bytes,
)
from firm.base.inside import replace_text
from firm.base.sanitize import first_line, printable
from firm.federation import Processes, lockstep
from firm.jobs.alignment_config import AlignmentConfig, client_names
from firm.jobs.alignment_loading import LoadedRun, load
from firm.jobs.plan import make_plan
from firm.jobs.plan.record import RunPlan
from firm.run import compose
from reward_models import RewardModelConfig, load_reward_model

ROOT = Path(__file__).parent.parent
ESTIMATORS = ("ppo", "critic_free")
ENGINES = ("local", "stacked")
NUM_REPLIES = 4  # to a prompt, critic-free
TEST_SECONDS = 150
"""Most seconds of the budget that the tests may take."""
PATIENCE = 300
"""Most seconds that a case which began within the budget may take beyond it; at most the budget."""
SAMPLERS = (
    ("one slot, compiled", 16),
    ("8 stacked clients, compiled", 128),
    ("generate", 16),
    ("one slot", 16),
    ("8 stacked clients", 128),
    ("one slot, vLLM", 16),
    ("8 stacked clients, vLLM", 128),
)
"""Samplers whose tokens are timed, as `benchmarks.decode` names them, and their replies."""
VLLM = "trl, vLLM"
"""TRL's trainer with vLLM for its replies, as a row names it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--device", default="auto", help="auto, cpu, or a device as torch has it")
    parser.add_argument("--clients", type=int, nargs="+", default=None)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--budget", type=float, default=540, help="seconds, then no case begins")
    parser.add_argument("--out", type=Path, help="the page; without one it is printed")
    options = parser.parse_args(arguments)
    try:
        device = named_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cpu" or device.type != "cpu":
        write_page(options, device)
    else:
        parser.error("there is no accelerator here; give --device cpu --shape tiny.")


def write_page(options: argparse.Namespace, device: torch.device) -> None:
    """Measures the cases until the budget is spent, and writes the page after each."""
    _quiet()
    end = time.monotonic() + options.budget
    clients = options.clients or ([2] if options.shape == "tinyllama-short" else [1, 2, 4, 8])
    late = f"not run: {options.budget:g} seconds were over"
    chosen = cases(clients, compiles=device.type == "cuda")
    rows = {case: Row(case, _missing(case) or late) for case in chosen}
    patience = min(PATIENCE, options.budget)
    tests = "not run yet" if options.out else "not run: the page is not kept"
    tests = "not run: no accelerator" if device.type == "cpu" else tests
    with tempfile.TemporaryDirectory() as folder, closing(Worker()) as worker:
        setting = Setting(options.shape, str(device), folder, options.gradient_checkpointing)
        save_models(setting.shape, Path(folder), device)
        peak_flops = _product_flops(setting)

        def write() -> str:
            page = page_of(setting, list(rows.values()), tests=tests, peak_flops=peak_flops)
            if options.out is not None:
                replace_text(options.out, page)
            return page

        page = write()
        for case in rows:
            left = end - time.monotonic()
            if left > 0 and not _missing(case):
                rows[case] = worker.row(setting, case, patience=left + patience)
                page = write()
                if case == Case("critic_free", "local", clients[-1]) and tests == "not run yet":
                    tests = _tests(device, max(1.0, min(TEST_SECONDS, end - time.monotonic())))
                    page = write()
    if options.out is None:
        sys.stdout.write(page)


def cases(clients: Sequence[int], *, compiles: bool = False) -> list[Case]:
    """Returns the cases by value: tokens, stacked clients, TRL, sequential ones, fewer clients."""
    few, many = clients[0], clients[-1]
    peers = ["trl", VLLM]
    stacked = ("stacked", *([COMPILED] if compiles else []))
    chosen = [Case(DECODING, name, rows) for name, rows in SAMPLERS]
    chosen += [Case("critic_free", engine, many) for engine in (*stacked, *peers, "local")]
    chosen += [Case("ppo", engine, many) for engine in ("stacked", "local")]
    chosen += [Case("critic_free", engine, many) for engine in (WHOLE, STATIC)]
    chosen += [Case(e, engine, c) for c in clients for e in ESTIMATORS for engine in ENGINES]
    chosen += [Case("critic_free", peer, few) for peer in peers]
    return list(dict.fromkeys(chosen))


def _missing(case: Case) -> str:
    """Returns a note if a case needs a package that is not installed."""
    return "not installed" if case.needs_vllm and not find_spec("vllm") else ""


def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _tests(device: torch.device, budget: float) -> str:
    """Runs the tests of accelerators on this one; returns pytest's last line."""
    options = ("-q", "-p", "no:cacheprovider", "-n", "8", "--dist", "load")
    command = [sys.executable, "-m", "pytest", *options, "tests/accelerator"]
    environment = {**os.environ, "FIRM_ACCELERATOR": device.type}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=budget
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {budget:.0f} seconds"
    sys.stderr.write(done.stdout if done.returncode else "")
    return (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1]


class Worker:
    """The process that measures cases; a new one after a case that failed, or for each on a CPU.

    A failed kernel may leave a process's device unusable, and on the CPU the memory measured is
    that of the process.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def row(self, setting: Setting, case: Case, *, patience: float) -> Row:
        """Returns a case's row, with a note if its process died or exceeded so many seconds."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            row = self._pool.submit(_row, setting, case).result(patience)
        except BrokenProcessPool:
            row = Row(case, "failed: its process was killed")
        except TimeoutError:
            row = Row(case, "failed: it did not end")
            for process in multiprocessing.active_children():
                process.kill()
        if row.note or case.needs_vllm or setting.device == "cpu":  # vLLM keeps its memory
            self.close()
        return row

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def _row(setting: Setting, case: Case) -> Row:
    """Returns a case's row; a case that fails gets a note, so that the others are measured."""
    _quiet()
    try:
        prepare_attention(torch.device(setting.device))  # the kernels that runs use
        gc.collect()  # of the case before
        release_memory(torch.device(setting.device))
        if case.is_decoding:
            return _token_row(setting, case)
        with mock.patch.object(CriticFreeConfig, "shares_prompts", case.engine != WHOLE):
            return (_peer_row if case.is_peer else _own_row)(setting, case)
    except torch.OutOfMemoryError:
        return Row(case, "out of memory")
    except Exception as error:
        traceback.print_exc()
        reason = printable(first_line(error), max_length=160)
        return Row(case, f"failed: {type(error).__name__}: {reason}")


# --- Tokens --------------------------------------------------------------------------------------


def _token_row(setting: Setting, case: Case) -> Row:
    """Returns what a token of all replies takes."""
    device, shape = torch.device(setting.device), setting.shape
    name, _, way = case.engine.partition(", ")
    compiles = way == "compiled"
    if compiles and device.type != "cuda":
        return Row(case, "not run: compiled steps are replayed on CUDA devices only")
    _loaded.cache_clear()
    gc.collect()
    policy = adapted(_random_policy(setting), conditioned=False)
    tokens, clients = min(64, shape.rollout.max_new_tokens - 2), 8
    with ExitStack() as stack:
        engine = None
        if case.needs_vllm:
            policy.peft_config["default"].base_model_name_or_path = f"{setting.folder}/policy"
            settings = VLLMConfig(max_loras=clients, cache_gb=2.0)
            tokenizer: Any = None  # prompts and replies are tokens
            engine = settings.engine(policy, tokenizer, shape.rollout)
            stack.callback(engine.close)
        sample = samplers(
            policy,
            policy.get_base_model(),
            prompt_tokens=shape.rollout.max_prompt_tokens,
            clients=clients,
            compiles=compiles,
            engine=engine,
        )[name]
        seconds = milliseconds(sample, case.num_clients, device, tokens=tokens) / 1e3
    return Row(case, _not_compiled(policy) if compiles else "", seconds=seconds)


def _not_compiled(policy: Any) -> str:
    """Returns a note if a policy that should sample by compiled steps did not."""
    decoder = vars(policy).get("compiled_decoder")
    if decoder is None or decoder.failure is not None:
        return f"failed: not compiled ({decoder.failure if decoder else 'see the warnings'})"
    return ""


def _random_policy(setting: Setting) -> Any:
    torch.manual_seed(0)
    with torch.device(setting.device):
        return LlamaForCausalLM(setting.shape.policy).to(getattr(torch, setting.dtype)).eval()


# --- Rounds of FIRM -------------------------------------------------------------------------------


def _own_row(setting: Setting, case: Case) -> Row:
    loaded = _loaded_for(setting, case)
    cfg, plan = _fitting(setting, case)
    # passes of sequential clients do not grow with their number
    own = case if cfg.engine == "stacked" else replace(case, num_clients=1)
    _warm_up(setting, own, cfg.max_rows)
    with _synchronized(setting.device):
        run = one_round(loaded, cfg)
        _reset_peak(setting.device)
        start = lockstep.time.perf_counter()
        metrics = run()
        seconds = lockstep.time.perf_counter() - start
    clients = metrics["clients"]
    stages = {
        column: float(sum(client["seconds"].get(name, 0) for client in clients for name in names))
        for column, names in STAGES.items()
    }
    assert plan.policy is not None
    size = cfg.estimator.batch_size
    tokens = size * sum(client["response_length"] for client in clients)
    layers = plan.policy.num_parameters - 2 * setting.shape.policy.vocab_size * (
        setting.shape.policy.hidden_size or 0
    )
    prompts, num_objectives = len(clients) * size * cfg.rollout.max_prompt_tokens, len(cfg.rewards)
    if loaded.trainer.prompts_once:  # with a backward pass through the prompts per objective
        prompts //= cfg.estimator.replies_per_prompt
        positions = 2 * tokens + (1 + num_objectives) * prompts
    else:  # frozen weights have no gradient
        num_backward = num_objectives if case.estimator == "ppo" else 1
        positions = (1 + num_backward) * (tokens + prompts)
    taken = stages["forward"] + stages["backward"]
    return Row(
        case,
        _not_compiled(loaded.trainer.policy_model) if case.engine == COMPILED else "",
        seconds=seconds,
        stages=stages,
        tokens_per_second=tokens / stages["rollout"],
        flops=2 * layers * cfg.estimator.num_epochs * positions / taken,
        rows=plan.work.updates.rows,
        peak=_peak(setting.device),
        planned=sum(plan.memory_by_device().values()),
        bytes_up=clients[0]["bytes_up"],
        planned_up=plan.policy.bytes_up,
    )


def _fitting(setting: Setting, case: Case) -> tuple[AlignmentConfig, RunPlan]:
    """Returns the run and its plan; on an accelerator its joint passes have only rows that fit."""
    cfg = configuration(setting, case)
    plan = make_plan(cfg, client_names(cfg), Processes())
    size = total_bytes(torch.device(setting.device))
    if size is not None and cfg.engine == "stacked":
        room = 0.85 * size
        for max_rows in (64, 32, 16, 8):
            if sum(plan.memory_by_device().values()) < room:
                break
            cfg = replace(cfg, max_rows=max_rows)
            plan = make_plan(cfg, client_names(cfg), Processes())
    return cfg, plan


def configuration(setting: Setting, case: Case) -> AlignmentConfig:
    """Returns the run: LoRA of rank 16, two reward models, each client a local step."""
    shape, folder = setting.shape, Path(setting.folder)
    source = folder / "prompts.jsonl"
    if not source.exists():
        texts = prompts(shape, 16 * 8)
        datasets.Dataset.from_list([{"prompt": text} for text in texts]).to_json(source)
    reward = {
        "path": str(folder / "reward"), "format": "plain", "dtype": setting.dtype,
        "device": setting.device, "normalization": "none",
    }  # fmt: skip
    replies = {"num_replies": NUM_REPLIES} if case.estimator == "critic_free" else {}
    settings = {
        "policy": {
            "path": str(folder / "policy"),
            "dtype": setting.dtype,
            "device": setting.device,
            "gradient_checkpointing": setting.checkpointing,
            "lora": {"dropout": 0.0},
        },
        "rewards": {"first": reward, "second": {**reward, "path": str(folder / "other")}},
        "data": {split: {"source": str(source)} for split in ("train", "validation", "test")},
        "num_clients": case.num_clients,
        "engine": case.engine.partition(", ")[0],
        "rollout": asdict(shape.rollout),
        "rollout.compile": case.engine == COMPILED,
        "rollout.cache": "static" if case.engine == STATIC else "dynamic",
        "estimator": {"name": case.estimator, **shape.batch, **replies},
        "evaluation": {"num_calibration_prompts": 2},
    }
    return compose(AlignmentConfig, [], list(settings.items()))


def _loaded_for(setting: Setting, case: Case) -> LoadedRun:
    own = case.engine if case.engine in (STATIC, COMPILED, WHOLE) else "local"
    return _loaded(setting, case.estimator, own)


@functools.lru_cache(maxsize=1)
def _loaded(setting: Setting, estimator: str, engine: str) -> LoadedRun:
    """Loads what the rounds of an estimator share."""
    return load(configuration(setting, Case(estimator, engine, 1)), Processes(), measures=False)


@functools.cache
def _warm_up(setting: Setting, case: Case, max_rows: int | None) -> None:
    """Runs a round on an accelerator, which loads kernels and takes memory at the first use."""
    if setting.device != "cpu":
        one_round(
            _loaded_for(setting, case), replace(configuration(setting, case), max_rows=max_rows)
        )()


# --- TRL's --------------------------------------------------------------------------------------


def _peer_row(setting: Setting, case: Case) -> Row:
    """Returns what TRL's GRPOTrainer takes for one adapter and as many replies."""
    # whose import fails beside some releases of vLLM; that is a note of these rows
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    _loaded.cache_clear()
    gc.collect()
    shape, folder = setting.shape, Path(setting.folder)
    num_replies = case.num_clients * shape.batch["batch_size"]
    minibatch = case.num_clients * shape.batch["minibatch_size"]
    steps = shape.batch["num_epochs"] * num_replies // minibatch
    reward = RewardModelConfig(
        path=str(folder / "reward"), format="plain", dtype=setting.dtype, device=setting.device
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    with tempfile.TemporaryDirectory() as out:
        options: Any = {
            "output_dir": out,
            "per_device_train_batch_size": minibatch,
            "steps_per_generation": num_replies // minibatch,
            "num_iterations": shape.batch["num_epochs"],
            "num_generations": NUM_REPLIES,
            "max_completion_length": shape.rollout.max_new_tokens,
            "max_steps": 2 * steps,  # the first generation warms up
            "gradient_checkpointing": setting.checkpointing,
            "bf16": setting.device != "cpu" and is_torch_bf16_gpu_available(),
            "use_cpu": setting.device == "cpu",
            **({"use_vllm": True, "vllm_mode": "colocate"} if case.engine == VLLM else {}),
            "beta": 0.05,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
        rewards: Any = [_reward(reward, name) for name in ("first", "second")]
        with accelerate_on(torch.device(setting.device)):
            arguments = GRPOConfig(**options)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=setting.dtype),
            args=arguments,
            reward_funcs=rewards,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts(shape, 2 * num_replies)}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
            ),
        )
        clock = _StepClock(steps, setting.device)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return Row(case, seconds=clock.seconds, peak=_peak(setting.device))


def _reward(config: RewardModelConfig, name: str) -> Callable[..., list[float]]:
    model = load_reward_model(config, name)

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return list(model(prompts=prompts, completions=completions))

    reward.__name__ = name
    return reward


class _StepClock(TrainerCallback):
    """Notes the seconds from the end of a step to the end of training."""

    def __init__(self, first: int, device: str) -> None:
        self._first, self._device = first, torch.device(device)
        self._start = 0.0
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts after the steps that warm up; ends with the last one."""
        synchronize(self._device)
        if state.global_step == self._first:
            _reset_peak(str(self._device))
            self._start = time.perf_counter()
        self.seconds = time.perf_counter() - self._start


# --- What is measured -----------------------------------------------------------------------------


@contextmanager
def _synchronized(device: str) -> Iterator[None]:
    """Has the clock of the stages wait for the device."""

    def perf_counter() -> float:
        synchronize(torch.device(device))
        return time.perf_counter()

    with (
        mock.patch.object(lockstep, "time", SimpleNamespace(perf_counter=perf_counter)),
        mock.patch.object(MultiObjectiveTrainer, "_clock", staticmethod(perf_counter)),
    ):
        yield


def _reset_peak(device: str) -> None:
    reset_peak_bytes(torch.device(device))
    if device == "cpu":
        reset_peak_resident()  # a plan before it times copies of 128 MB


def _peak(device: str) -> int:
    peak = peak_bytes(torch.device(device))
    return peak_resident() if peak is None else peak


def _product_flops(setting: Setting) -> float:
    """Returns the floating-point operations a second of a large bfloat16 product."""
    device = torch.device(setting.device)
    size, repeats = (8192, 20) if device.type != "cpu" else (1024, 5)
    size = size if setting.shape_name != "tiny" else 512
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


if __name__ == "__main__":
    main()
