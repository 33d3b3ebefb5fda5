"""Serves a conditioned run at one preference and at eight at once, beside the folded adapter.

    python benchmarks/serving.py --run runs/front [--check] [--openvino FOLDER] [--vllm PYTHON]

Prints tokens per CPU second and memory per engine; each figure comes from processes of its own, in
turn. CPU seconds do not depend on what else the machine does. `--check` compares the engines'
replies at the measured preferences with those of the folded adapters instead, in float32.

OpenVINO GenAI needs `--openvino`, the base model as converted by the command that `firm export --to
openvino` prints. vLLM, which has one adapter per preference, needs `--vllm`, the Python of an
environment with it. Engines that are missing are left out; `--engines` selects some.
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
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import peak_resident
from firm.alignment.adapter_files import load_adapters, read_settings, refold_adapter_
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.rollout_config import max_lora_rank
from firm.base.extras import install_command
from firm.base.preferences import FRONT_NAME, preference_folder
from firm.cli.main import COMMANDS
from firm.fronts.front import Front
from firm.jobs.export import export
from firm.run.progress import print_table
from firm.run.shipped import with_shipped_paths
from firm.serving import OpenVINOEngine, ServedFront, load_served, set_scales_
from firm.serving.llama import LlamaEngine
from firm.serving.openvino import BASE_FOLDER

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
BASE, FOLDED, EIGHT_AT_ONCE = "base model", "folded adapter", "eight preferences"
SETUPS = (BASE, FOLDED, "one preference", EIGHT_AT_ONCE)
PEFT, LLAMA, OPENVINO, VLLM = "PEFT", "llama.cpp", "OpenVINO", "vLLM"
FORMS = {PEFT: "peft", LLAMA: "gguf", OPENVINO: "openvino", VLLM: "vllm"}
"""Forms of the export by engine; all but vLLM set scales of one adapter per objective."""
PACKAGES = {PEFT: "peft", LLAMA: "xllamacpp", OPENVINO: "openvino_genai", VLLM: "vllm"}
CONTEXT = 256
LIKELY = 20
"""Number of log-probabilities that are compared at the first token."""


class Reply(NamedTuple):
    """A greedy reply."""

    text: str
    score: float
    """Log-probability of the whole reply."""
    first: dict[str, float]
    """Log-probabilities of likely first tokens; empty if the engine does not report them."""


def scales_of(served: ServedFront, setup: str) -> list[dict[str, float]]:
    """Returns the adapters' scales for each request; the first one's place holds the folded one."""
    if setup == BASE:
        return [dict.fromkeys(served.adapters, 0.0)] * 8
    rows = {FOLDED: [[1.0, 0.0]] * 8, EIGHT_AT_ONCE: EIGHT}.get(setup, [ONE] * 8)
    return [served.scales(row) for row in rows]


def exported(run: Path, to: str, out: Path, *more: str) -> Path:
    given = ["--run", str(run), "--to", to, "--out", str(out), *more]
    return export(COMMANDS["export"].parse(given)).folder


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


# --- One timed batch, in a process of its own -----------------------------------------------------


def timed_llama(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which llama.cpp answers eight requests at once."""
    engine = LlamaEngine(folder, num_slots=8, context=CONTEXT, num_threads=num_threads)

    def reply(question: str, scales: dict[str, float]) -> None:
        body = {"messages": messages(question), "temperature": 0, "ignore_eos": True}
        engine.reply({**body, "max_tokens": num_tokens}, scales)

    engine.reply(
        {"messages": messages("Hello!"), "max_tokens": 2},
        dict.fromkeys(engine.served.adapters, 0.0),
    )
    start = time.process_time()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(reply, QUESTIONS, scales_of(engine.served, setup)))
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
    elif setup != BASE:
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


def timed_openvino(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which OpenVINO answers eight requests, a batch per preference."""
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": num_threads}
    engine = OpenVINOEngine(folder, **properties)
    scales = scales_of(engine.served, setup)

    def generate(questions: Sequence[str], own: dict[str, float], count: int) -> None:
        options = {"max_new_tokens": count, "ignore_eos": True, "do_sample": False}
        engine.generate(list(questions), own, **options)

    generate(["Hello!"], scales[0], 2)
    start = time.process_time()
    if setup == EIGHT_AT_ONCE:
        for question, own in zip(QUESTIONS, scales, strict=True):
            generate([question], own, num_tokens)
    else:
        generate(QUESTIONS, scales[0], num_tokens)
    return time.process_time() - start


def start_vllm(folder: Path, dtype: str, *, has_adapters: bool = True) -> tuple[Any, dict]:
    """Returns vLLM, and its requests for the adapters in a folder by their names."""
    places = sorted(place for place in folder.iterdir() if place.is_dir())
    settings = read_settings(places[0])
    llm = import_module("vllm").LLM(
        str(with_shipped_paths(settings.base_model_name_or_path)),
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_seqs=8,
        enable_lora=has_adapters,
        max_loras=len(places),
        max_lora_rank=max_lora_rank(settings.r),
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,  # compiling takes minutes on a CPU
    )
    request: Any = import_module("vllm.lora.request").LoRARequest
    named = enumerate(places if has_adapters else (), start=1)
    return llm, {place.name: request(place.name, number, str(place)) for number, place in named}


def timed_vllm(folder: Path, setup: str, num_tokens: int, num_threads: int) -> float:
    """Returns the CPU seconds in which vLLM answers eight requests at once."""
    torch.set_num_threads(num_threads)
    llm, requests = start_vllm(folder, "bfloat16", has_adapters=setup != BASE)
    given = list(requests.values())

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
    import_module(PACKAGES[args.engine])
    libraries = peak_resident() / 1e6
    timed = {PEFT: timed_peft, LLAMA: timed_llama, OPENVINO: timed_openvino, VLLM: timed_vllm}
    seconds = timed[args.engine](args.folder, args.setup, args.tokens, args.threads)
    memory = peak_resident() / 1e6
    row = {"speed": 8 * args.tokens / seconds, "memory": memory, "beyond": memory - libraries}
    print(json.dumps(row))


# --- All batches in turn --------------------------------------------------------------------------


def in_process(args: argparse.Namespace, engine: str, folder: Path, *more: str) -> Any:
    """Returns the JSON that this script prints last when it runs one engine."""
    python = args.vllm if engine == VLLM else sys.executable
    command = [python, __file__, "--engine", engine, "--folder", str(folder)]
    command += ["--tokens", str(args.tokens), "--threads", str(args.threads), *more]
    # in one process, whose CPU time and memory then count, and on any core
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    environment = {**os.environ, **own} if engine == VLLM else None
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(output.stdout.strip().splitlines()[-1])


def whole_export(args: argparse.Namespace, engine: str, out: Path, *more: str) -> Path:
    """Returns the folder of the whole front's export, complete with OpenVINO's base model."""
    folder = exported(args.run, FORMS[engine], out, *more)
    if engine == OPENVINO:
        (folder / BASE_FOLDER).symlink_to(args.openvino.resolve())
    return folder


def exports(args: argparse.Namespace, engine: str, scratch: Path) -> dict[str, Path]:
    """Returns the folder that an engine reads in each setup."""
    run, form = args.run, FORMS[engine]
    at_one = ["--preference", json.dumps(ONE), "--has_base", "false"]
    if engine == VLLM:  # one adapter at one preference is the folded one
        one, eight = scratch / "one", scratch / "eight"
        exported(run, form, one / "0", *at_one)
        for at, preference in enumerate(EIGHT):
            exported(run, form, eight / str(at), "--preference", json.dumps(preference))
        return {BASE: one, FOLDED: one, EIGHT_AT_ONCE: eight}
    whole = whole_export(args, engine, scratch / "all")
    folders: dict[str, Path] = dict.fromkeys(map(str, SETUPS), whole)
    if engine == PEFT:
        exported(run, form, whole / "folded", *at_one)
        return folders
    # the folded adapter in the first one's place, at scale 1: those of scale 0 take no time
    folders[FOLDED] = Path(shutil.copytree(whole, scratch / "folded", symlinks=True))
    [adapter] = exported(run, form, scratch / "one", *at_one).iterdir()
    first = next(iter(ServedFront.load(whole).adapters.values()))
    shutil.copyfile(adapter, folders[FOLDED] / first)
    return folders


def compare(args: argparse.Namespace, scratch: Path) -> None:
    """Prints a table of all engines and setups."""
    folders = {engine: exports(args, engine, scratch / engine) for engine in args.engines}
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
        memory = [f"{max(row[key] for row in found):.0f}" for key in ("memory", "beyond")]
        rows.append([engine, setup, f"{median(speeds):.1f}", f"{ratio:.2f}", *memory])
    print_table(
        f"8 requests at once, {args.tokens} tokens each, {args.threads} thread(s), {args.rounds} "
        "rounds in turn",
        ["engine", "setup", "tokens/CPU s", "to folded", "peak MB", "beyond libraries"],
        rows,
    )


# --- Replies beside those of the folded adapter ---------------------------------------------------


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, question: str, num_tokens: int) -> Reply:
    """Returns a model's reply, with the log-probability of every first token."""
    prompt = tokenizer.apply_chat_template(
        messages(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=num_tokens, do_sample=False)
    length = prompt["input_ids"].size(1)
    logprobs = model(tokens).logits[0, length - 1 : -1].log_softmax(-1)  # [T, V]
    reply = tokens[0, length:]
    score = float(logprobs.gather(1, reply[:, None]).sum())
    first = {str(token): value for token, value in enumerate(logprobs[0].tolist())}
    return Reply(tokenizer.decode(reply, skip_special_tokens=True), score, first)


def most_likely(reply: Reply) -> Reply:
    """Returns a reply with the likeliest first tokens only, as engines report it."""
    likely = sorted(reply.first, key=lambda token: -reply.first[token])[:LIKELY]
    return reply._replace(first={token: reply.first[token] for token in likely})


Asked = list[tuple[list[float], str]]
"""Questions, each with a preference."""


def replies_of_peft(folder: Path, asked: Asked, num_tokens: int, num_threads: int) -> list[Reply]:
    torch.set_num_threads(num_threads)
    model, served = load_served(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(with_shipped_paths(served.base_model)))
    replies = []
    for preference, question in asked:
        set_scales_(model, served.scales(preference))
        replies.append(most_likely(greedy(model, tokenizer, question, num_tokens)))
    return replies


def replies_of_llama(folder: Path, asked: Asked, num_tokens: int, num_threads: int) -> list[Reply]:
    engine = LlamaEngine(folder, num_slots=1, context=CONTEXT, num_threads=num_threads)
    options = {"temperature": 0, "max_tokens": num_tokens, "logprobs": True, "top_logprobs": LIKELY}
    replies = []
    for preference, question in asked:
        body = {**options, "messages": messages(question)}
        reply: Any = engine.reply(body, engine.served.scales(preference))
        [choice] = reply["choices"]
        places = choice["logprobs"]["content"]
        first = {str(token["id"]): token["logprob"] for token in places[0]["top_logprobs"]}
        score = sum(place["logprob"] for place in places)
        replies.append(Reply(choice["message"]["content"], score, first))
    return replies


def replies_of_openvino(
    folder: Path, asked: Asked, num_tokens: int, num_threads: int
) -> list[Reply]:
    properties = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), "f32")
    engine = OpenVINOEngine(folder, INFERENCE_NUM_THREADS=num_threads, **properties)
    options = {"max_new_tokens": num_tokens, "do_sample": False, "logprobs": 1}
    replies = []
    for preference, question in asked:
        result = engine.generate([question], engine.served.scales(preference), **options)
        replies.append(Reply(result.texts[0], result.scores[0], {}))
    return replies


def replies_of_vllm(folder: Path, asked: Asked, num_tokens: int, num_threads: int) -> list[Reply]:
    torch.set_num_threads(num_threads)
    llm, adapters = start_vllm(folder, "float32")
    outputs = llm.chat(
        [messages(question) for _, question in asked],
        import_module("vllm").SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=LIKELY),
        lora_request=[adapters[preference_folder(preference)] for preference, _ in asked],
        use_tqdm=False,
    )
    replies = []
    for output in outputs:
        [own] = output.outputs
        first = {str(token): found.logprob for token, found in own.logprobs[0].items()}
        replies.append(Reply(own.text, own.cumulative_logprob, first))
    return replies


def reply(args: argparse.Namespace) -> None:
    """Prints the replies of an engine as JSON."""
    replies = {
        PEFT: replies_of_peft,
        LLAMA: replies_of_llama,
        OPENVINO: replies_of_openvino,
        VLLM: replies_of_vllm,
    }[args.engine]
    asked = json.loads(args.asked.read_text())
    print(json.dumps(replies(args.folder, asked, args.tokens, args.threads)))


def check(args: argparse.Namespace, scratch: Path) -> None:
    """Prints how far log-probabilities are from the folded model's, and counts equal replies."""
    torch.set_num_threads(args.threads)
    policy = with_shipped_paths(COMMANDS["chat"].parse(["--run", str(args.run)]).policy)
    adapter, single = args.run / "adapter", replace(policy, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(policy.path)
    rows = Front.load(args.run / FRONT_NAME).preferences().tolist()
    folded = load_adapters(single, [adapter], check_base=False, preference=rows[0])
    asked: Asked = [(row, question) for row in rows for question in QUESTIONS[:3]]
    expected = []
    for preference, question in asked:
        refold_adapter_(folded, 0, adapter, policy.path, preference)
        expected.append(greedy(folded, tokenizer, question, args.tokens))
    with folded.disable_adapter():  # the size of an adapter's effect
        base = [most_likely(greedy(folded, tokenizer, each, args.tokens)) for _, each in asked]
    table = [["no adapter", *differences(base, expected)]]
    (scratch / "asked.json").write_text(json.dumps(asked))
    for engine in args.engines:
        folder = whole_export(args, engine, scratch / engine, "--policy.dtype", "float32")
        found = in_process(args, engine, folder, "--asked", str(scratch / "asked.json"))
        table.append([engine, *differences([Reply(*each) for each in found], expected)])
    print_table(
        f"Beside the folded adapters in float32: {len(rows)} preferences, {args.tokens} tokens; "
        "largest differences of log-probabilities",
        ["engine", f"{LIKELY} likeliest first tokens", "whole replies", "equal greedy replies"],
        table,
    )


def differences(replies: Sequence[Reply], expected: Sequence[Reply]) -> list[str]:
    """Returns the largest differences of first tokens and replies, and the number of equal ones."""
    pairs = list(zip(replies, expected, strict=True))
    gaps = [abs(p - other.first[token]) for own, other in pairs for token, p in own.first.items()]
    whole = max(abs(own.score - other.score) for own, other in pairs)
    equal = sum(own.text.strip() == other.text.strip() for own, other in pairs)
    first = f"{max(gaps):.1e}" if gaps else "not reported"
    return [first, f"{whole:.1e}", f"{equal} of {len(pairs)}"]


def available(args: argparse.Namespace) -> list[str]:
    """Returns the engines that can run here, and prints the reason for each of the others."""
    missing = {}
    if find_spec(PACKAGES[LLAMA]) is None:
        missing[LLAMA] = install_command("serve")
    if find_spec(PACKAGES[OPENVINO]) is None:
        missing[OPENVINO] = "pip install openvino-genai"
    elif args.openvino is None:
        missing[OPENVINO] = "pass the converted base model as --openvino"
    if args.vllm is None:
        missing[VLLM] = "pass the Python of an environment with it as --vllm"
    for engine in missing.keys() & args.engines:
        print(f"{engine} is left out: {missing[engine]}.", file=sys.stderr)
    return [engine for engine in args.engines if engine not in missing]


def main() -> None:
    """Measures, checks, or runs one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished conditioned run")
    parser.add_argument("--check", action="store_true", help="compare replies instead of speeds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--openvino", type=Path, help="folder of the base model for OpenVINO")
    parser.add_argument("--vllm", help="Python of an environment with vLLM")
    parser.add_argument("--engines", nargs="+", choices=FORMS, default=list(FORMS))
    for key, kind in {"engine": str, "folder": Path, "setup": str, "asked": Path}.items():
        parser.add_argument(f"--{key}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        (reply if args.asked else measure)(args)
        return
    if args.run is None:
        parser.error("--run must name a finished conditioned run")
    args.engines = available(args)
    with tempfile.TemporaryDirectory(prefix="firm-serving-") as scratch:
        (check if args.check else compare)(args, Path(scratch))


if __name__ == "__main__":
    main()
