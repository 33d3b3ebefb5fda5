"""Tokens per second of the rollout engines, for several clients with an adapter each.

    .venv-vllm/bin/python benchmarks/rollout_engines.py --model FOLDER   # after `make test-vllm`
    python benchmarks/rollout_engines.py --model FOLDER --urls http://127.0.0.1:8001 http://127.0.0.1:8002

All clients' replies are sampled in one batch: by the policy's joint passes (transformers), and by
vLLM; with `--urls`, by one and by all of these servers, whose start `firm rollout-server` prints.
Replies have no end token, so that both sample equally many tokens. Batches alternate; figures
are medians of wall-clock time, without the first batch of each. The adapters are new in each batch,
as after a local step.
"""

import argparse
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from firm.alignment import PolicyConfig, Prompt, PromptFormat, RolloutConfig
from firm.alignment.policy import load_policy, load_tokenizer
from firm.alignment.rollout import encode_prompts
from firm.alignment.rollout_config import TransformersConfig, VLLMConfig, VLLMServerConfig
from firm.alignment.rollout_engines import SampledTokens, SampleRequest
from firm.alignment.stacked.model import StackedModel
from firm.federation import RandomStream

Sample = Callable[[list[SampleRequest]], Sequence[SampledTokens]]


def main(options: Namespace) -> None:
    """Prints a row for each engine."""
    own = PolicyConfig(options.model, dtype=options.dtype)
    policy, tokenizer = load_policy(own, stream=RandomStream(0, "adapter")), load_tokenizer(own)
    stack = StackedModel(policy)
    config = RolloutConfig(
        max_new_tokens=options.new_tokens, max_prompt_tokens=options.prompt_tokens, temperature=1.0
    )
    engines: dict[str, Any] = {
        "transformers": TransformersConfig(),
    }
    if find_spec("vllm"):
        engines["vllm"] = VLLMConfig(max_loras=options.clients, cache_gb=options.cache_gb)
    shared = tempfile.TemporaryDirectory()  # removed at the end of this process
    for number in sorted({min(1, len(options.urls)), len(options.urls)} - {0}):
        engines[f"servers: {number}"] = VLLMServerConfig(
            urls=options.urls[:number], shared_folder=shared.name, max_loras=options.clients
        )
    samplers: dict[str, Sample] = {}
    for name, settings in engines.items():
        engine = settings.engine(policy, tokenizer, config)
        samplers[name] = settings.stacked(engine, stack.sample).sample
    ids = torch.randint(1000, len(tokenizer), (options.replies, 2 * options.prompt_tokens))
    queries = encode_prompts(
        [Prompt(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)],
        tokenizer,
        prompt_format=PromptFormat("plain"),
        max_prompt_tokens=options.prompt_tokens,
    ).to(policy.device)
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for batch in range(options.batches + 1):
        requests = []
        for client in range(options.clients):
            adapter = stack.new_adapter()
            for matrix in adapter.values():
                matrix.data += 1e-3 * torch.randn_like(matrix)
            generator = torch.Generator(policy.device).manual_seed(client)
            requests.append(
                SampleRequest(queries, config, [], adapter=adapter, generator=generator)
            )
        for name, sample in samplers.items():
            start = time.perf_counter()
            sample(requests)
            seconds[name].append(time.perf_counter() - start)
        print(f"batch {batch}: " + ", ".join(f"{n} {s[-1]:.1f} s" for n, s in seconds.items()))
    tokens = options.clients * options.replies * options.new_tokens
    print(f"{options.clients} clients x {options.replies} replies x {options.new_tokens} tokens")
    print("| engine | tokens/s |\n|---|---|")
    for name, measured in seconds.items():
        print(f"| {name} | {tokens / median(measured[1:]):.0f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--urls", nargs="*", default=[], help="addresses of vLLM's servers")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--replies", type=int, default=16)
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--cache_gb", type=float, default=1.0)
    main(parser.parse_args())
