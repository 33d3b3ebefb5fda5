"""Time of all M gradients: a loop of backward passes, and one pass with products per sequence.

    python benchmarks/per_sequence.py

Random token sequences on a LoRA Llama of random parameters and on the miniature's policy. Methods
are interleaved; times are medians of CPU milliseconds, forward pass included, with the ratio to one
forward and backward pass beside them. The last columns are the largest relative differences of a
row from the loop's and from the loop's in float64.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import copy
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import interleaved, quiet
from firm.alignment import LoraSettings, PolicyConfig, load_policy, load_tokenizer
from firm.alignment.policy import without_needless_warnings
from firm.federation import RandomStream
from firm.gradients import combine, gram_matrix, jacobian
from firm.gradients.per_sequence import PerSequenceGradients
from firm.miniature import checkpoint_path
from firm.run import print_table

REPEATS = 7
NUM_SEQUENCES = 8
UNIT = "one forward and backward"
VOCABULARY_SIZE = 1024
NUM_OBJECTIVES = (2, 4, 8)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    quiet()
    measure(
        "Llama, hidden 256, 6 layers, r = 16 on 7 projections",
        llama(),
        vocabulary_size=VOCABULARY_SIZE,
        num_tokens=128,
    )
    config = PolicyConfig(str(checkpoint_path("policy")), lora=LoraSettings(dropout=0.0))
    measure(
        "miniature policy, r = 16 on 4 projections",
        load_policy(config, stream=RandomStream(0, "adapter")),
        vocabulary_size=len(load_tokenizer(config)),
        num_tokens=64,
    )


def llama() -> torch.nn.Module:
    """Returns a Llama of random parameters under an adapter on every projection, B not zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS, init_lora_weights=False)
    with without_needless_warnings():
        return get_peft_model(LlamaForCausalLM(config), lora)


def measure(title: str, model: torch.nn.Module, *, vocabulary_size: int, num_tokens: int) -> None:
    """Times every method on one model, interleaved, and prints the table."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary_size, (NUM_SEQUENCES, num_tokens), generator=generator)
    coefficients = torch.randn(max(NUM_OBJECTIVES), NUM_SEQUENCES, generator=generator)

    def forward(model: torch.nn.Module = model) -> torch.Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]  # [B, T - 1, V]
        nll = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return nll.sum(dim=1)  # [B]

    def loop(num_objectives: int) -> torch.Tensor:
        return jacobian(coefficients[:num_objectives] @ forward(), parameters)

    gradients = PerSequenceGradients(model, parameters, checks_once=True)  # as a trainer does

    def per_sequence(num_objectives: int) -> torch.Tensor:
        with gradients:
            return gradients.jacobian(forward(), coefficients[:num_objectives])

    double = copy.deepcopy(model).double()
    exact = jacobian(
        coefficients.double() @ forward(double), [p for p in double.parameters() if p.requires_grad]
    )
    methods: dict[str, Callable[[], object]] = {
        "forward only": forward,
        UNIT: lambda: torch.autograd.grad(coefficients[0] @ forward(), parameters),
    }
    differences: dict[str, list[str]] = {}
    for name, rows_fn in {"loop": loop, "per sequence": per_sequence}.items():
        for m in NUM_OBJECTIVES:
            methods[f"{name}, M = {m}"] = partial(rows_fn, m)
            rows = rows_fn(m)
            differences[f"{name}, M = {m}"] = [
                f"{relative_difference(rows, expected):.1e}" for expected in (loop(m), exact[:m])
            ]
        m = max(NUM_OBJECTIVES)
        methods[f"{name}, Gram and direction, M = {m}"] = partial(full_step, rows_fn, m)
    seconds = {name: median(s) for name, s in interleaved(methods, repeats=REPEATS).items()}
    num_parameters = sum(parameter.numel() for parameter in parameters)
    print_table(
        f"{title}; d = {num_parameters:,}, B = {NUM_SEQUENCES}, T = {num_tokens}",
        ["", "ms", "ratio", "from loop", "from float64"],
        [
            [name, f"{1e3 * s:.1f}", f"{s / seconds[UNIT]:.2f}", *differences.get(name, ["", ""])]
            for name, s in seconds.items()
        ],
    )


def full_step(rows_fn: Callable[[int], torch.Tensor], num_objectives: int) -> None:
    rows = rows_fn(num_objectives)
    combine(rows, gram_matrix(rows).diagonal().softmax(dim=0))  # any weights will do


def relative_difference(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest ‖row − expected‖ / ‖expected‖ of two Jacobians [M, d]."""
    return ((rows - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


if __name__ == "__main__":
    main()
