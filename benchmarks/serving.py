"""Serves a conditioned run at one preference and at eight at once, beside the folded adapter.

    python benchmarks/serving.py --run runs/front [--check] [--vllm .venv-vllm/bin/python]

Prints tokens per CPU second and memory per engine; each figure comes from processes of its own, in
turn. CPU seconds do not depend on what else the machine does. `--check` compares the engines'
replies with those of the folded adapter instead, in float32. vLLM, which has one adapter per
preference, is left out unless `--vllm` names the Python of an environment with it. `--engines`
measures some of the engines.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import peak_resident
from firm.alignment.adapter_files import load_adapters, read_settings, refold_adapter_
from firm.alignment.policy import PolicyConfig
from firm.cli.main import COMMANDS
from firm.jobs.export import export
from firm.run.progress import print_table
from firm.run.shipped import with_shipped_paths
from firm.serving import ServedFront, load_served, set_scales_
from firm.serving.llama import LlamaEngine

QUESTIONS = (
    "Why is the sky blue?",
    "How do I bake bread?",
    "What should I eat for breakfast?",
    "Tell me about the moon.",
    "How does a bicycle work?",
    "What is a good book for a child?",
    "Why do cats purr?",
    "How can I sleep better?",
)
ONE = [0.7, 0.3]
"""The preference of all requests, for two objectives."""
EIGHT = [[share / 7, 1 - share / 7] for share in range(8)]
FOLDED, EIGHT_AT_ONCE = "folded adapter", "eight preferences"
SETUPS = ("base model", FOLDED, "one preference", EIGHT_AT_ONCE)
ENGINES = {"peft": "peft", "llama.cpp": "gguf"}
"""Forms of the export by engine; each sets scales of one adapter per objective."""
VLLM = "vLLM"
CONTEXT = 256


def preferences(setup: str) -> list[list[float]]:
    """Returns the preference of each request."""
    return EIGHT if setup == EIGHT_AT_ONCE else [ONE] * len(EIGHT)


def exported(run: Path, to: str, out: Path, *more: str) -> Path:
    given = ["--run", str(run), "--to", to, "--out", str(out), *more]
    return export(COMMANDS["export"].parse(given)).folder


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


# --- One timed batch, in a process of its own -----------------------------------------------------


def timed_llama(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which llama.cpp answers eight requests at once."""
    engine = LlamaEngine(folder, num_slots=8, context=CONTEXT, num_threads=num_threads)

    def reply(number: int) -> None:
        if setup == "base model":
            scales = dict.fromkeys(engine.served.adapters, 0.0)
        elif setup == FOLDED:
            scales = engine.served.scales([1.0, 0.0])
        else:
            scales = engine.served.scales(preferences(setup)[number])
        body = {"messages": messages(QUESTIONS[number]), "temperature": 0, "ignore_eos": True}
        engine.reply({**body, "max_tokens": num_tokens}, scales)

    engine.reply(
        {"messages": messages("Hello!"), "max_tokens": 2},
        dict.fromkeys(engine.served.adapters, 0.0),
    )
    start = time.process_time()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(reply, range(8)))
    return time.process_time() - start


def timed_peft(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which PEFT answers eight requests, in a batch per preference."""
    torch.set_num_threads(num_threads)
    served = ServedFront.load(folder)
    path = str(with_shipped_paths(served.base_model))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if setup == FOLDED:
        policy = PolicyConfig(path=path, dtype="bfloat16")
        model = load_adapters(policy, [folder / "folded"], check_base=False)
    elif setup != "base model":
        model, _ = load_served(folder, model)
        model.bfloat16()
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}

    @torch.no_grad()
    def generate(questions: list[str]) -> None:
        inputs = tokenizer.apply_chat_template(
            [messages(question) for question in questions],
            add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True,
        )  # fmt: skip
        model.generate(**inputs, **options, pad_token_id=tokenizer.pad_token_id)

    generate([QUESTIONS[0]])
    start = time.process_time()
    if setup == EIGHT_AT_ONCE:
        for question, preference in zip(QUESTIONS, EIGHT, strict=True):
            set_scales_(model, served.scales(preference))
            generate([question])
    else:
        generate(list(QUESTIONS))
    return time.process_time() - start


def start_vllm(path: str, num_adapters: int, rank: int, dtype: str) -> Any:
    return import_module("vllm").LLM(
        path,
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        enable_lora=num_adapters > 0,
        max_loras=max(1, num_adapters),
        max_lora_rank=max(8, 1 << (rank - 1).bit_length()),
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,  # compiling takes minutes on a CPU
    )


def vllm_adapters(folder: Path) -> list[Any]:
    request: Any = import_module("vllm.lora.request").LoRARequest
    places = sorted(folder.iterdir())
    return [request(each.name, at, str(each)) for at, each in enumerate(places, start=1)]


def timed_vllm(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which vLLM answers eight requests at once."""
    torch.set_num_threads(num_threads)
    given = [] if setup == "base model" else vllm_adapters(folder)
    settings = read_settings(folder / "0")
    llm = start_vllm(str(settings.base_model_name_or_path), len(given), settings.r, "bfloat16")

    def generate(questions: Sequence[str], count: int) -> None:
        own = [given[at % len(given)] if given else None for at in range(len(questions))]
        sampling = import_module("vllm").SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=count
        )
        chats: Any = [messages(question) for question in questions]
        llm.chat(chats, sampling, lora_request=own, use_tqdm=False)

    generate(["Hello!"] * len(given or " "), 2)  # loads the adapters
    start = time.process_time()
    generate(QUESTIONS, num_tokens)
    return time.process_time() - start


def measure(args: argparse.Namespace) -> None:
    """Prints the figures of one batch as JSON."""
    if args.engine == VLLM:
        import_module("vllm")  # its libraries do not count
    before = peak_resident()
    timed = {"peft": timed_peft, "llama.cpp": timed_llama, VLLM: timed_vllm}[args.engine]
    seconds = timed(args.run, args.setup, args.tokens, args.threads)
    print(
        json.dumps({"speed": 8 * args.tokens / seconds, "memory": (peak_resident() - before) / 1e6})
    )


# --- All batches in turn --------------------------------------------------------------------------


def in_process(args: argparse.Namespace, engine: str, folder: Path, *more: str) -> Any:
    """Returns the JSON that this script prints last when it runs one engine."""
    python = args.vllm if engine == VLLM else sys.executable
    command = [python, __file__, "--engine", engine, "--run", str(folder)]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads), *more]
    # in one process, whose CPU time and memory then count, and on any core
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    environment = {**os.environ, **own} if engine == VLLM else None
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(output.stdout.strip().splitlines()[-1])


def export_for_vllm(run: Path, scratch: Path, preferences: Sequence[list[float]]) -> Path:
    """Exports an adapter per preference, whose settings name the base model's folder."""
    path = str(with_shipped_paths(COMMANDS["export"].parse(["--run", str(run)]).policy).path)
    for at, preference in enumerate(preferences):
        given = ["--preference", json.dumps(preference)]
        file = exported(run, "vllm", scratch / str(at), *given) / "adapter_config.json"
        settings = {**json.loads(file.read_text()), "base_model_name_or_path": path}
        file.write_text(json.dumps(settings))
    return scratch


def exports(run: Path, engine: str, scratch: Path) -> dict[str, Path]:
    """Returns the folder that an engine reads in each setup."""
    if engine == VLLM:  # one adapter at one preference is the folded one
        one = export_for_vllm(run, scratch / "one", [ONE])
        eight = export_for_vllm(run, scratch / "eight", EIGHT)
        return {"base model": one, FOLDED: one, EIGHT_AT_ONCE: eight}
    whole = exported(run, ENGINES[engine], scratch / "all")
    folders: dict[str, Path] = dict.fromkeys(map(str, SETUPS), whole)
    at_one = ["--preference", json.dumps(ONE)]
    if engine == "peft":
        exported(run, "peft", folders[FOLDED] / "folded", *at_one)
        return folders
    # the folded adapter in the first one's place, at scale 1: llama.cpp skips those of scale 0
    folders[FOLDED] = Path(shutil.copytree(folders[FOLDED], scratch / "folded"))
    adapter = exported(run, "gguf", scratch / "one", *at_one, "--has_base", "false")
    first = next(iter(ServedFront.load(folders[FOLDED]).adapters.values()))
    shutil.copyfile(adapter / "adapter.gguf", folders[FOLDED] / first)
    return folders


def compare(args: argparse.Namespace, scratch: Path) -> None:
    """Prints a table of all engines and setups."""
    folders = {engine: exports(args.run, engine, scratch / engine) for engine in args.engines}
    cells = [(engine, *cell) for engine, own in folders.items() for cell in own.items()]
    figures: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for engine, setup, folder in cells:
            row = in_process(args, engine, folder, "--setup", setup)
            figures.setdefault((engine, setup), []).append(row)
            print(engine, setup, row, file=sys.stderr, flush=True)
    rows = []
    for (engine, setup), found in figures.items():
        speeds = [row["speed"] for row in found]
        folded_speeds = [row["speed"] for row in figures[engine, FOLDED]]
        ratio = median(a / b for a, b in zip(speeds, folded_speeds, strict=True))
        memory = max(row["memory"] for row in found)
        rows.append([engine, setup, f"{median(speeds):.1f}", f"{ratio:.2f}", f"{memory:.0f}"])
    print_table(
        f"8 requests at once, {args.tokens} tokens each, {args.threads} thread(s), {args.rounds} "
        "rounds in turn",
        ["engine", "setup", "tokens/CPU s", "to folded", "MB"],
        rows,
    )


# --- Replies beside those of the folded adapter ---------------------------------------------------


def check(args: argparse.Namespace, scratch: Path) -> None:
    """Prints how far log-probabilities are from the folded model's, and how many replies differ."""
    more = ["--policy.dtype", args.dtype]
    folders = {e: exported(args.run, to, scratch / e, *more) for e, to in ENGINES.items()}
    torch.set_num_threads(args.threads)
    engine = LlamaEngine(folders["llama.cpp"], num_slots=1, context=512, num_threads=args.threads)
    policy = with_shipped_paths(COMMANDS["chat"].parse(["--run", str(args.run)]).policy)
    path, served = policy.path, engine.served
    tokenizer = AutoTokenizer.from_pretrained(path)
    scaled, _ = load_served(folders["peft"])
    single = replace(policy, path=path, dtype="float32")
    folded = load_adapters(single, [args.run / "adapter"], check_base=False, preference=ONE)
    gaps: dict[str, float] = dict.fromkeys(ENGINES, 0.0)
    equal = dict.fromkeys(ENGINES, 0)
    chosen = [EIGHT[0], EIGHT[-1], ONE]
    for preference in chosen:
        refold_adapter_(folded, 0, args.run / "adapter", path, preference)
        set_scales_(scaled, served.scales(preference))
        for question in QUESTIONS[:3]:
            chat = messages(question)
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            with torch.no_grad():
                expected = folded(ids).logits[0, -1].log_softmax(-1)
                own = scaled(ids).logits[0, -1].log_softmax(-1)
                replies = [
                    model.generate(ids, max_new_tokens=args.tokens, do_sample=False)[
                        0, ids.size(1) :
                    ]
                    for model in (folded, scaled)
                ]
            likely = expected.topk(20).indices
            gaps["peft"] = max(gaps["peft"], float((own - expected)[likely].abs().max()))
            equal["peft"] += replies[0].tolist() == replies[1].tolist()
            body = {"messages": chat, "temperature": 0, "max_tokens": args.tokens}
            reply = engine.reply(
                {**body, "logprobs": True, "top_logprobs": 20}, served.scales(preference)
            )
            assert reply is not None
            [choice] = reply["choices"]
            for entry in choice["logprobs"]["content"][0]["top_logprobs"]:
                gap = abs(entry["logprob"] - float(expected[entry["id"]]))
                gaps["llama.cpp"] = max(gaps["llama.cpp"], gap)
            text = tokenizer.decode(replies[0], skip_special_tokens=True).strip()
            equal["llama.cpp"] += choice["message"]["content"].strip() == text
    total = len(chosen) * 3
    rows = [[name, f"{gaps[name]:.1e}", f"{equal[name]} of {total}"] for name in ENGINES]
    print_table(
        f"Beside the folded adapter in float32, base model in {args.dtype}",
        [
            "engine",
            "largest difference among the 20 likeliest log-probabilities",
            "equal greedy replies",
        ],
        rows,
    )


def main() -> None:
    """Measures, checks, or runs one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="a finished conditioned run")
    parser.add_argument("--check", action="store_true", help="compare replies instead of speeds")
    parser.add_argument("--dtype", default="float32", help="of the base model in --check")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, VLLM])
    parser.add_argument("--engine", choices=[*ENGINES, VLLM], help=argparse.SUPPRESS)
    parser.add_argument("--setup", choices=SETUPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        measure(args)
        return
    args.engines = args.engines or [*ENGINES, *([VLLM] if args.vllm else [])]
    if VLLM in args.engines and not args.vllm:
        parser.error("vLLM needs --vllm, the Python of an environment with it")
    with tempfile.TemporaryDirectory(prefix="firm-serving-") as scratch:
        (check if args.check else compare)(args, Path(scratch))


if __name__ == "__main__":
    main()
