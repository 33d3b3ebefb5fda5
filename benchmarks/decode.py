"""Operations and waits of a sampled token, and its milliseconds, beside transformers' `generate`.

    python benchmarks/decode.py                                # TinyLlama's layers, narrow: counts
    python benchmarks/decode.py --updates                      # those of passes in a local step
    python benchmarks/decode.py --shape tinyllama --rows 16    # its true widths, random weights
    python benchmarks/decode.py --model FOLDER --dtype float32

A dispatch is an operation that Python starts on the device, without views; a compiled step is one,
as the replay of its graph is on a GPU. A wait is a value that Python reads back. Both are what a
token costs beside arithmetic, and equal on every machine; milliseconds are those of this one. All
are differences of two lengths, so prompts and the ends of a rollout do not count.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.random_models import TINYLLAMA
from firm.alignment import compiled
from firm.alignment.adapters import Conditioned, Lora, LoraSettings, adapt_, forward_of
from firm.alignment.compiled import BLOCK, CompiledDecoder
from firm.alignment.head import head_of
from firm.alignment.policy import without_needless_warnings
from firm.alignment.prompts import Prompt
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.rollout_engines import RolloutEngine, SampleRequest, TransformersEngine
from firm.alignment.sequences import Queries, Sequences
from firm.alignment.stacked.model import StackedModel, Weighted
from firm.alignment.stacked.passes import ClientPart
from firm.base.devices import named_device, synchronize

NUM_OBJECTIVES = 3
VIEWS = frozenset(
    {
        *("view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "slice", "select"),
        *("squeeze", "permute", "detach", "alias", "split", "split_with_sizes", "unbind"),
        *("_reshape_alias", "as_strided", "lift_fresh", "is_nonzero", "unflatten"),
    }
)
"""Operations without a kernel."""
READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal"})
"""Operations whose result Python must know before the next one."""


class Work:
    """Counts dispatches and waits of what runs inside `counted`."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.waits = 0

    @property
    def dispatches(self) -> int:
        """Operations that are no views."""
        return self.names.total()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Opens a context whose operations count."""
        with _Operations(self), _Reads(self):
            yield


class _Operations(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self._work.names[name] += 1
        result = func(*args, **(kwargs or {}))
        is_copy = name in ("_to_copy", "_copy_from") and isinstance(result, torch.Tensor)
        to_host = is_copy and result.device.type == "cpu" != args[0].device.type
        self._work.waits += name in READS or to_host
        return result


class _Reads(TorchFunctionMode):
    """Counts what Python reads from a CPU's tensors, which are no operations there."""

    _FUNCTIONS = frozenset({torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy})

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._work.waits += func in self._FUNCTIONS and args[0].device.type == "cpu"
        with torch._C.DisableTorchFunction():  # `tolist` of a device's tensor copies it, too
            return func(*args, **(kwargs or {}))


@contextmanager
def steps_as_one_call() -> Iterator[None]:
    """Counts a compiled step as one operation inside the context, without compiling it."""

    def one_call(decoder: CompiledDecoder, step: Any) -> None:
        torch.zeros(())
        with _disable_current_modes():
            step.step()

    with (
        mock.patch.object(CompiledDecoder, "_replay", one_call),
        mock.patch.object(compiled, "CompiledDecoder", partial(CompiledDecoder, backend=None)),
    ):
        yield


class _Tokenizer:
    pad_token_id = 0


Sample = Callable[[int, int], Any]
"""Samples so many tokens of each of so many replies."""


def samplers(
    policy: Any,
    base: Any,
    *,
    prompt_tokens: int,
    clients: int,
    compiles: bool = False,
    engine: RolloutEngine | None = None,
) -> dict[str, Sample]:
    """Returns what is compared, by name; each without end tokens, so that all replies are long.

    Args:
        policy: The base model with an adapter.
        base: A base model without one.
        prompt_tokens: Length of the prompts, all different and without padding.
        clients: Stacked clients, which share the rows.
        compiles: Value of `rollout.compile`.
        engine: Samples in place of the policy itself.
    """
    vocabulary, device = base.config.vocab_size, base.device
    generator = torch.Generator().manual_seed(0)

    def queries(count: int, *, conditioned: bool = False) -> Queries:
        ids = torch.randint(5, vocabulary, (count, prompt_tokens), generator=generator)
        shares = torch.rand(count, NUM_OBJECTIVES, generator=generator)
        return Queries(
            [Prompt(f"p{index}") for index in range(count)],
            ids,
            torch.full((count,), prompt_tokens),
            preferences=shares / shares.sum(1, keepdim=True) if conditioned else None,
        ).to(device)

    def request(count: int, length: int, *, conditioned: bool = False, **own: Any) -> SampleRequest:
        asked = queries(count, conditioned=conditioned)
        config = RolloutConfig(max_new_tokens=length, compile=compiles)
        return SampleRequest(asked, config, end_ids=[], **own)

    def generate(cache: str | None, rows: int, length: int) -> None:
        """Samples with the adapter in the slot, by PEFT's layers."""
        ids = queries(rows).token_ids
        base.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            cache_implementation=cache,
        )

    own_engine = engine or TransformersEngine(policy, _Tokenizer())  # type: ignore[arg-type]

    def slot(rows: int, length: int, *, conditioned: bool = False) -> None:
        own_engine.sample([request(rows, length, conditioned=conditioned)])

    def stacked(rows: int, length: int, *, conditioned: bool = False) -> None:
        stack = StackedModel(policy)
        joint = []
        for client in range(clients):
            own = {
                "adapter": stack.new_adapter(),
                "generator": torch.Generator(device).manual_seed(client),
            }
            joint.append(request(rows // clients, length, conditioned=conditioned, **own))
        (engine or stack).sample(joint)

    found: dict[str, Sample] = {
        "generate": partial(generate, None),
        "generate, static cache": partial(generate, "static"),
        "one slot": slot,
        f"{clients} stacked clients": stacked,
    }
    if not isinstance(forward_of(policy).kind, Conditioned):
        return found
    return {
        "one slot, conditioned": partial(slot, conditioned=True),
        f"{clients} stacked clients, conditioned": partial(stacked, conditioned=True),
    }


def per_token(sample: Sample, rows: int, lengths: tuple[int, int] = (3, 7)) -> tuple[float, float]:
    """Returns the dispatches and the waits of a token of all rows."""
    works = []
    sample(rows, 2)  # what is found once, such as the formula of a model's head
    for length in lengths:
        works.append(Work())
        with works[-1].counted():
            sample(rows, length)
    tokens = lengths[1] - lengths[0]
    short, long = works
    return (long.dispatches - short.dispatches) / tokens, (long.waits - short.waits) / tokens


def update_work(
    policy: Any, *, clients: int, rows: int, prompts_once: bool, num_replies: int = 4
) -> dict[str, Work]:
    """Returns the work of the passes over a minibatch of stacked critic-free clients.

    Args:
        policy: The base model with an adapter.
        clients: Stacked clients.
        rows: Replies of each client.
        prompts_once: Whether replies share the passes over their prompt.
        num_replies: Replies to a prompt.
    """
    vocabulary, length, width = policy.config.vocab_size, 8, 4
    head_of(policy)  # found once
    stack = StackedModel(policy, prompts_once=prompts_once)
    parts = []
    for client in range(clients):
        ids = torch.randint(5, vocabulary, (rows // num_replies, length))
        ids = ids.repeat_interleave(num_replies, 0)
        asked = [Prompt(f"{client} {row // num_replies}") for row in range(rows)]
        queries = Queries(asked, ids, torch.full((rows,), length))
        replies = torch.randint(5, vocabulary, (rows, width))
        replied = Sequences(queries, torch.cat([ids, replies], 1), torch.full((rows,), width))
        parts.append(ClientPart(replied.to(policy.device), stack.new_adapter()))
    work = {name: Work() for name in ("log-probabilities", "forward", "backward")}
    with work["log-probabilities"].counted():
        stack.logprobs(parts)
    parts = [replace(part, has_gradient=True, is_tapped=True) for part in parts]
    with work["forward"].counted():
        outputs = stack.forward(parts)
        losses = [-output.token_scores(1.0).logprobs.sum(1) for output in outputs]
    coefficients = torch.rand(NUM_OBJECTIVES - 1, rows, device=policy.device)
    with work["backward"].counted():
        stack.per_sequence_jacobian(
            [
                Weighted(output.place, own, coefficients, retain_graph=False)
                for output, own in zip(outputs, losses, strict=True)
            ]
        )
    return work


def milliseconds(sample: Sample, rows: int, device: torch.device, *, tokens: int) -> float:
    """Returns the milliseconds of a token of all rows; on the CPU those of the process."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for length in (2, 2 + tokens, 2, 2 + tokens):
        synchronize(device)
        start = clock()
        sample(rows, length)
        synchronize(device)
        taken.append(clock() - start)
    return 1e3 * (min(taken[1::2]) - min(taken[::2])) / tokens


def adapted(base: Any, *, conditioned: bool) -> Any:
    """Returns a base model with a random LoRA adapter on all linear layers."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=16, lora_alpha=32, target_modules=targets, lora_dropout=0.0)
    with without_needless_warnings():
        policy = get_peft_model(base, config)
    if conditioned:
        adapt_(policy, Conditioned(Lora(LoraSettings()), NUM_OBJECTIVES))
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=1e-2)
    return policy.eval()


def new_base(options: argparse.Namespace, device: torch.device) -> Any:
    """Returns the base model: a stored one, or random weights in a shape."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    if options.model:
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        return model.to(device).eval()
    sizes = TINYLLAMA.to_dict() | {"num_hidden_layers": options.layers}
    if options.shape == "narrow":
        sizes |= {
            "vocab_size": 9000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
    with device:
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="folder of a stored model")
    parser.add_argument("--shape", choices=["narrow", "tinyllama"], default="narrow")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8, help="timed tokens; 0: counts only")
    parser.add_argument("--compile", action="store_true", help="time compiled steps: minutes")
    parser.add_argument("--updates", action="store_true", help="count passes of a local step")
    options = parser.parse_args(arguments)
    device = named_device(options.device)
    if options.updates:
        _print_updates(options, device)
        return
    print("| sampler | rows | dispatches | waits | ms |\n|---|---:|---:|---:|---:|")
    for conditioned in (False, True):
        base = new_base(options, device)
        policy = adapted(base, conditioned=conditioned)
        sizes = {"prompt_tokens": options.prompt_tokens, "clients": options.clients}
        for compiles in (False, True):
            chosen = samplers(policy, policy.get_base_model(), **sizes, compiles=compiles)
            for name, sample in chosen.items():
                if compiles and "generate" in name:
                    continue
                for rows in options.rows:
                    with steps_as_one_call():
                        lengths = (BLOCK, 3 * BLOCK) if compiles else (3, 7)
                        counts = per_token(sample, rows, lengths)
                    vars(policy).pop("compiled_decoder", None)  # its steps are not compiled
                    cells = [name + ", compiled" * compiles, str(rows)]
                    cells += [f"{counts[0]:.0f}", f"{counts[1]:.2f}", ""]
                    if options.tokens and (options.compile or not compiles):
                        taken = milliseconds(sample, rows, device, tokens=options.tokens)
                        cells[-1] = f"{taken:.1f}"
                    print(f"| {' | '.join(cells)} |", flush=True)


def _print_updates(options: argparse.Namespace, device: torch.device) -> None:
    """Prints the dispatches of a minibatch of eight replies a client, to two objectives."""
    policy = adapted(new_base(options, device), conditioned=False)
    print("| prompts | clients | log-probabilities | forward | backward |")
    print("|---|---:|---:|---:|---:|")
    for prompts_once in (False, True):
        for clients in (1, options.clients):
            work = update_work(policy, clients=clients, rows=8, prompts_once=prompts_once)
            cells = ["once" if prompts_once else "whole", str(clients)]
            cells += [f"{own.dispatches:,}" for own in work.values()]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
