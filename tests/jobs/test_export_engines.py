"""vLLM and OpenVINO GenAI compute with exports of a front as the folded model does.

The model is SmolLM2-135M-Instruct as fetched by `firm fetch smollm2`, or that of FIRM_MODEL. vLLM
is tested by `make test-vllm`, OpenVINO GenAI where it is installed and FIRM_OPENVINO names the
folder of the model as converted by the command that the export prints.
"""

import os
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from firm.alignment.adapter_files import load_adapters, save_adapter
from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.policy import adapter_parameters, load_policy
from firm.alignment.policy_config import PolicyConfig
from firm.federation import RandomStream
from firm.fronts import Front, Point
from firm.jobs.configs import ExportConfig
from firm.jobs.export import main
from firm.serving.openvino import OpenVINOEngine
from tests.real_model import real_model

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own, and of what it imports

OBJECTIVES = ("helpful", "harmless")
PREFERENCES = ([1.0, 0.0], [0.0, 1.0], [0.3, 0.7])
QUESTIONS = ("Why is the sky blue?", "Write a short poem about rain.")
NUM_TOKENS = 8
ROUNDING = 2e-3
"""Differences of log-probabilities in float32, whose sums run in another order in the engines."""
EFFECT = 0.02
"""Differences that other adapters and the base model must exceed, ten times those of rounding."""


@pytest.fixture(scope="module")
def path() -> str:
    if not any(map(find_spec, ("vllm", "openvino_genai"))):
        pytest.skip("neither vLLM nor OpenVINO GenAI is installed here: run `make test-vllm`")
    return real_model()


@pytest.fixture(scope="module")
def run(path, tmp_path_factory) -> Path:
    """The files of a conditioned run that an export reads, with a random adapter."""
    folder = tmp_path_factory.mktemp("run")
    config = PolicyConfig(path, conditioning=ConditioningConfig("preference"), device="cpu")
    policy = load_policy(config, stream=RandomStream(0, "adapter"), num_objectives=2)
    generator = torch.Generator().manual_seed(0)
    for name, values in adapter_parameters(policy).items():
        if "lora_A" not in name:
            values.data.copy_(0.06 * torch.randn(values.shape, generator=generator))
    save_adapter(policy, folder / "adapter")
    zero = dict.fromkeys(OBJECTIVES, 0.0)
    points = tuple(
        Point(
            str(row),
            tuple(row),
            seed=0,
            rewards=zero,
            errors=zero,
            scores={},
            kl=0.0,
            adapter="unused",
        )
        for row in PREFERENCES
    )
    calibrations = {name: {} for name in OBJECTIVES}
    Front(OBJECTIVES, points, (0.0, 0.0), calibrations, zero, "FIRM", 1, True).save(
        folder / "front.json"
    )
    (folder / "run.json").write_text("{}")
    return folder


@dataclass(frozen=True)
class Reference:
    """The folded model at a preference: greedy replies to the prompts."""

    replies: list[list[int]]
    """Tokens of each reply."""
    texts: list[str]
    logprobs: list[torch.Tensor]
    """Of every token at each place of the reply, [T, V]."""


@pytest.fixture(scope="module")
def prompts(path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"add_generation_prompt": True, "return_dict": True}
    return tokenizer.apply_chat_template(chats, **options)["input_ids"]


@pytest.fixture(scope="module")
def references(path, run, prompts) -> list[Reference]:
    """The folded models, one per preference."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    config, references = PolicyConfig(path, device="cpu"), []
    for preference in PREFERENCES:
        model = load_adapters(config, [run / "adapter"], preference=preference)
        found = [_greedy(model, ids) for ids in prompts]
        replies = [reply for reply, _ in found]
        texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
        references.append(Reference(replies, texts, [logprobs for _, logprobs in found]))
    return references


@torch.no_grad()
def _greedy(model: Any, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    tokens = model.generate(torch.tensor([ids]), **options)
    logits = model(tokens).logits[0, len(ids) - 1 : -1]
    return tokens[0, len(ids) :].tolist(), logits.log_softmax(-1)


@pytest.fixture(scope="module")
def generate(path, run, tmp_path_factory):
    """Returns vLLM's outputs for rows of tokens, each with the adapter at a preference's index.

    None is the base model. vLLM has the arguments of the printed command, in float32.
    """
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: run `make test-vllm`")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    out = tmp_path_factory.mktemp("export") / "vllm"
    with redirect_stdout(StringIO()) as printed:
        main(ExportConfig(run=run, to="vllm", policy=PolicyConfig(path), out=out))
    command = shlex.split(printed.getvalue().splitlines()[-1].removeprefix("serve"))
    modules = command[command.index("--lora-modules") + 1 :]
    requests = [
        LoRARequest(name, number, folder)
        for number, (name, _, folder) in enumerate((m.partition("=") for m in modules), start=1)
    ]
    llm = LLM(
        command[command.index("serve") + 1],
        dtype="float32",
        max_model_len=128,
        enable_lora="--enable-lora" in command,
        max_lora_rank=int(command[command.index("--max-lora-rank") + 1]),
        max_loras=int(command[command.index("--max-loras") + 1]),
        kv_cache_memory_bytes=2**29,
        enforce_eager=True,
    )

    def replies(rows: list[list[int]], adapters: list[int | None], **sampling: Any) -> list[Any]:
        return llm.generate(
            [{"prompt_token_ids": ids} for ids in rows],
            SamplingParams(temperature=0, **sampling),
            lora_request=[None if each is None else requests[each] for each in adapters],
            use_tqdm=False,
        )

    yield replies
    llm.llm_engine.engine_core.shutdown()
    patch.undo()


def test_replies_in_one_batch_of_vllm_are_those_of_the_folded_models(references, prompts, generate):
    adapters = [at for at in range(len(references)) for _ in prompts]
    # those of the reply: in 0.32, those of the prompt end the worker if there are adapters
    outputs = generate(prompts * len(references), adapters, max_tokens=NUM_TOKENS, logprobs=5)
    texts = [text for own in references for text in own.texts]
    replies = [reply for own in references for reply in own.replies]
    logprobs = [rows for own in references for rows in own.logprobs]
    gaps = []
    for output, text, reply, rows in zip(outputs, texts, replies, logprobs, strict=True):
        assert output.outputs[0].text == text
        assert list(output.outputs[0].token_ids) == reply
        for place, own in zip(output.outputs[0].logprobs, rows, strict=True):
            gaps += [abs(found.logprob - float(own[token])) for token, found in place.items()]
    print(f"largest difference {max(gaps):.1e}")  # noqa: T201
    assert max(gaps) < ROUNDING
    assert references[0].texts != references[1].texts


def test_other_adapters_and_the_base_model_differ_in_vllm(references, prompts, generate):
    least = float("inf")
    # not in one batch: on CPUs, rows without an adapter get the last one of those with adapters
    for adapter in (None, *range(len(references))):
        outputs = generate(prompts, [adapter] * len(prompts), max_tokens=1, logprobs=5)
        for question, output in enumerate(outputs):
            found = output.outputs[0].logprobs[0]
            for at, own in enumerate(references):
                first = own.logprobs[question][0]
                gap = max(abs(each.logprob - float(first[token])) for token, each in found.items())
                if adapter == at:
                    assert gap < ROUNDING
                else:
                    least = min(least, gap)
    print(f"least difference of others {least:.3f}")  # noqa: T201
    assert least > EFFECT


@pytest.fixture(scope="module")
def openvino(path, run, tmp_path_factory) -> OpenVINOEngine:
    if find_spec("openvino_genai") is None or "FIRM_OPENVINO" not in os.environ:
        pytest.skip("OpenVINO GenAI is not installed, or FIRM_OPENVINO names no converted model")
    out = tmp_path_factory.mktemp("export") / "openvino"
    main(ExportConfig(run=run, to="openvino", policy=PolicyConfig(path), out=out))
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return OpenVINOEngine(out, os.environ["FIRM_OPENVINO"], **precision)


def test_replies_of_openvino_are_those_of_the_folded_models(references, prompts, openvino):
    import openvino as ov

    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "logprobs": 1}
    gaps = []
    # prompts within preferences, then preferences within prompts: a cache of prompts would show
    order = [(at, question) for at in range(3) for question in range(2)]
    for at, question in [*order, *sorted(order, key=lambda pair: pair[1])]:
        own, scales = references[at], openvino.served.scales(PREFERENCES[at])
        output = openvino.generate(ov.Tensor(np.array([prompts[question]])), scales, **options)
        reply = own.replies[question]
        assert list(output.tokens[0]) == reply
        expected = own.logprobs[question].gather(1, torch.tensor(reply)[:, None]).sum()
        gaps.append(abs(output.scores[0] - float(expected)))
    print(f"largest difference of a reply {max(gaps):.1e}")  # noqa: T201
    assert max(gaps) < NUM_TOKENS * ROUNDING
    assert references[0].texts != references[1].texts


def test_every_scale_of_openvino_is_used_even_if_the_last_one_stays(prompts, openvino):
    import openvino as ov

    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "logprobs": 1}
    prompt = ov.Tensor(np.array([prompts[0]]))

    def score(*scales: float) -> float:
        named = dict(zip(OBJECTIVES, scales, strict=True))
        return openvino.generate(prompt, named, **options).scores[0]

    for one in ((1.0, 0.0), (0.0, 1.0)):
        first, base = score(*one), score(0.0, 0.0)
        assert abs(base - first) > NUM_TOKENS * EFFECT
        assert abs(score(*one) - first) < NUM_TOKENS * ROUNDING
