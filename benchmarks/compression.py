"""Error of the Gram matrix by compressor at one upload, on real Jacobians (FedCMOO's Table 3).

    python benchmarks/compression.py

Every client may upload d numbers, as many as its model has. The error is the nRMSE (Frobenius) of
the estimate against the Gram matrix of the clients' exact mean Jacobian, in per cent, with its
mean ± standard deviation over seeds; a seed draws data, clients, parameters, minibatches and
compressors anew. The best of a column carries a star. "+ own Grams" takes the M² products within
each client as exact, M² more numbers of upload; "two-way" is Algorithm 6, with a download of d
numbers. The baseline of own Grams is scaled by 1/n and, as if the truth were known, best.

The data need no network:

- digits: pairs of scikit-learn's bundled 8x8 digits, doubled in size and pasted into one 28x28
  image, the left one up, the right one down; a LeNet encoder of 28,392 parameters, whose Jacobian
  it is; 10 clients, Dirichlet 0.3 over the 100 pairs of labels. M = 2: the cross-entropies of the
  left and of the right digit.
- predicates: the same images and encoder, M = 40 binary cross-entropies: each digit one-vs-rest
  on either side (20), and 20 properties of a digit or of the pair (parity, order, sum, loops...).
- LoRA: the miniature policy with adapters, 6 clients, Dirichlet 0.3 over the prompts' kinds. M = 2:
  REINFORCE losses of 48 sampled replies per client under the shipped helpful and harmless reward
  models, scores standardised per client.

"start" is the initial model; the other column follows 300 SGD steps (digits, predicates: batches
of 128, learning rate 0.1) or 20 Adam steps (LoRA: 48 replies each) on the mean of the objectives
with all clients' data. At the start, LoRA's B is zero, and so is half of the Jacobian.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from benchmarks.measure import quiet
from firm.alignment import (
    LoraSettings,
    PolicyConfig,
    PromptsConfig,
    RolloutConfig,
    load_policy,
    load_prompts,
    load_tokenizer,
)
from firm.alignment.policy import adapter_parameters
from firm.alignment.prompts import PromptFormat
from firm.alignment.rollout import Sampler, encode_prompts, rollout
from firm.alignment.sequences import response_logprobs
from firm.federation import RandomStream
from firm.federation.fedcmoo.approx_gram import (
    broadcast,
    one_way_gram,
    project_to_psd,
    two_way_gram,
    two_way_reply,
)
from firm.federation.partition import dirichlet_partition
from firm.gradients import gram_matrix, jacobian
from firm.gradients.compression import (
    Compressor,
    LowRankCompressor,
    RandomMaskCompressor,
    TopKCompressor,
)
from firm.gradients.quantization import QuantizingCompressor
from firm.gradients.sketch import CountSketchCompressor, HybridCompressor
from firm.miniature import checkpoint_path
from firm.run import print_table
from reward_models import RewardModelConfig, load_reward_model

NUM_PAIRS, NUM_CLIENTS, BATCH, ALPHA = 6000, 10, 128, 0.3
NUM_STEPS, LEARNING_RATE, NUM_SEEDS = 300, 0.1, 5
LORA_CLIENTS, LORA_BATCH, LORA_STEPS, LORA_LEARNING_RATE, LORA_SEEDS = 6, 48, 20, 1.5e-3, 3


@dataclass(frozen=True)
class Estimate:
    """One method's Gram matrix and what it cost a client."""

    gram: torch.Tensor
    bytes_up: int
    bytes_down: int = 0


Method = Callable[[Sequence[torch.Tensor], int], Estimate]

REFERENCE = "low rank (SVD), one-way"
HINDSIGHT = "own Grams, scale fitted to the truth"


def main() -> None:
    quiet()
    start, start_cpu = time.perf_counter(), time.process_time()
    errors: dict[str, dict[str, list[float]]] = {}  # by column and method
    costs: dict[str, dict[str, Estimate]] = {}
    for column, seed, jacobians in all_jacobians():
        truth = gram_matrix(torch.stack(list(jacobians)).double().mean(dim=0))
        for name, method in methods().items():
            estimate = method(jacobians, seed)
            costs.setdefault(column, {})[name] = estimate
            by_method = errors.setdefault(column, {})
            by_method.setdefault(name, []).append(100 * nrmse(truth, estimate.gram))
            if name.startswith("own"):
                fitted = (estimate.gram * truth).sum() / estimate.gram.square().sum()
                error = 100 * nrmse(truth, fitted * estimate.gram)
                by_method.setdefault(HINDSIGHT, []).append(error)
                costs[column][HINDSIGHT] = estimate
    print_errors(errors)
    print_costs(costs)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    print(f"{seconds:.0f} s on one thread, of which {cpu_seconds:.0f} s at work")


def methods() -> dict[str, Method]:
    """Returns every way of estimating the Gram matrix, by the name of its row."""
    compressors: dict[str, Compressor] = {
        "low rank (SVD)": LowRankCompressor(),
        "top-k": TopKCompressor(),
        "random mask": RandomMaskCompressor(),
        "random mask / p": RandomMaskCompressor(scaling="inverse_probability"),
        "CountSketch": CountSketchCompressor(),
        "hybrid": HybridCompressor(),
        "quantiser": QuantizingCompressor(),
    }
    rows: dict[str, Method] = {"own Grams, 1/n": own_grams}
    rows |= {f"{name}, one-way": one_way(c) for name, c in compressors.items()}
    rows |= {f"{name}, one-way + own Grams": with_own_grams(c) for name, c in compressors.items()}
    rows |= {
        f"{name}, two-way": two_way(c)
        for name, c in compressors.items()
        if name not in ("CountSketch", "hybrid")
    }
    return rows


def own_grams(jacobians: Sequence[torch.Tensor], seed: int) -> Estimate:
    """Returns the mean of the clients' Gram matrices, (1/n) Σ_i A_i A_iᵀ.

    The paper's Table 3 scales this sum "with a proper scale" but does not give the scale. 1/n is
    exact for identical clients and an upper bound otherwise.
    """
    grams = [gram_matrix(client) for client in jacobians]
    return Estimate(torch.stack(grams).double().mean(dim=0), grams[0].nbytes)


def nrmse(truth: torch.Tensor, estimate: torch.Tensor) -> float:
    """Returns ‖truth - estimate‖ / ‖truth‖, the error measure of the paper's Table 3.

    The paper writes ‖·‖₂ but calls it a root mean squared error, which is taken over the entries:
    hence the Frobenius norm.
    """
    truth, estimate = truth.double(), estimate.double()
    return (torch.linalg.matrix_norm(truth - estimate) / torch.linalg.matrix_norm(truth)).item()


def one_way(compressor: Compressor) -> Method:
    """Returns Algorithm 3."""

    def estimate(jacobians: Sequence[torch.Tensor], seed: int) -> Estimate:
        messages = compressed(compressor, jacobians, seed)
        return Estimate(one_way_gram(messages), messages[0].num_bytes)

    return estimate


def with_own_grams(compressor: Compressor) -> Method:
    """Returns Algorithm 3 with the products within each client exact.

    The terms A_i A_iᵀ of Eq. (13) take the place of the messages' own.
    """

    def estimate(jacobians: Sequence[torch.Tensor], seed: int) -> Estimate:
        messages = compressed(compressor, jacobians, seed)
        grams = [gram_matrix(client) for client in jacobians]
        estimate = len(messages) ** 2 * one_way_gram(messages)
        for message, gram in zip(messages, grams, strict=True):
            estimate += gram.to(estimate) - one_way_gram([message])
        estimate = project_to_psd(estimate / len(messages) ** 2)
        return Estimate(estimate, messages[0].num_bytes + grams[0].nbytes)

    return estimate


def two_way(compressor: Compressor) -> Method:
    """Returns Algorithm 6 with its second option."""

    def estimate(jacobians: Sequence[torch.Tensor], seed: int) -> Estimate:
        messages = compressed(compressor, jacobians, seed)
        answer = broadcast(
            messages, compressor, generator=torch.Generator().manual_seed(1000 + seed)
        )
        replies = [
            two_way_reply(client, message, answer)
            for client, message in zip(jacobians, messages, strict=True)
        ]
        return Estimate(
            two_way_gram(messages, replies),
            messages[0].num_bytes + replies[0].num_bytes,
            answer.num_bytes,
        )

    return estimate


def compressed(compressor: Compressor, jacobians: Sequence[torch.Tensor], seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        compressor.compress(client, generator=generator, shared_seed=seed) for client in jacobians
    ]


def all_jacobians() -> Iterator[tuple[str, int, list[torch.Tensor]]]:
    """Yields column, seed and the clients' Jacobians [M, d]."""
    for seed in range(NUM_SEEDS):
        images, labels = digit_pairs(seed)
        for name, targets in {"digits": labels, "predicates": predicates(labels)}.items():
            for stage, jacobians in lenet_jacobians(images, labels, targets, seed):
                yield f"{name} M={jacobians[0].size(0)}, {stage}", seed, jacobians
    for seed in range(LORA_SEEDS):
        for stage, jacobians in lora_jacobians(seed):
            yield f"LoRA M=2, {stage}", seed, jacobians


def digit_pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 28, 28] in 0..1 and both labels [N, 2]."""
    pixels, digits = (torch.as_tensor(column) for column in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(len(digits), (NUM_PAIRS, 2), generator=generator)
    small = pixels.float().view(-1, 1, 8, 8) / 16
    large = functional.interpolate(small, size=(16, 16), mode="bilinear")
    images = torch.zeros(NUM_PAIRS, 1, 28, 28)
    images[:, :, :16, :16] = large[pairs[:, 0]]
    images[:, :, 12:, 12:] = torch.maximum(images[:, :, 12:, 12:], large[pairs[:, 1]])
    return images, digits[pairs]


def predicates(labels: torch.Tensor) -> torch.Tensor:
    """Returns the 40 binary targets of a pair of digits, float [N, 40]."""
    left, right = labels.unbind(dim=1)
    total, loops, primes = left + right, torch.tensor([0, 6, 8, 9]), torch.tensor([2, 3, 5, 7])
    columns = [side == digit for side in (left, right) for digit in range(10)]
    for side in (left, right):
        columns += [side % 2 == 0, side >= 5, torch.isin(side, loops), torch.isin(side, primes)]
        columns += [side % 3 == 0]
    columns += [left == right, left > right, (left - right).abs() <= 1, (left - right).abs() >= 5]
    columns += [total % 2 == 0, total % 3 == 0, total > 9, total > 13, left * right > 20]
    columns += [torch.isin(left, loops) & torch.isin(right, loops)]
    return torch.stack(columns, dim=1).float()


def lenet_jacobians(
    images: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, seed: int
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the clients' Jacobians of the encoder at the start and after training."""
    nn = torch.nn
    with RandomStream(seed, "lenet"):
        encoder = nn.Sequential(
            *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(320, 72), nn.ReLU()),
        )
        is_binary = targets.size(1) == 40
        head = nn.Linear(72, 40 if is_binary else 20)

    def losses(rows: torch.Tensor) -> torch.Tensor:
        outputs = head(encoder(images[rows]))
        if is_binary:
            each = functional.binary_cross_entropy_with_logits(
                outputs, targets[rows], reduction="none"
            )
            return each.mean(dim=0)  # [40]
        both = outputs.view(len(rows), 2, 10).transpose(1, 2)  # [B, classes, 2]
        return functional.cross_entropy(both, targets[rows], reduction="none").mean(dim=0)  # [2]

    pairs = (10 * labels[:, 0] + labels[:, 1]).tolist()
    shards = dirichlet_partition(pairs, NUM_CLIENTS, alpha=ALPHA, seed=seed, min_examples=BATCH)
    generator = torch.Generator().manual_seed(seed)
    batches = [
        torch.tensor(shard)[torch.randperm(len(shard), generator=generator)[:BATCH]]
        for shard in shards
    ]
    parameters = list(encoder.parameters())
    yield "start", [jacobian(losses(rows), parameters) for rows in batches]
    optimizer = torch.optim.SGD([*parameters, *head.parameters()], lr=LEARNING_RATE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses(torch.randint(len(images), (BATCH,), generator=generator)).mean().backward()
        optimizer.step()
    yield f"{NUM_STEPS} steps", [jacobian(losses(rows), parameters) for rows in batches]


def lora_jacobians(seed: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields the clients' Jacobians of the adapter at the start and after training."""
    config = PolicyConfig(str(checkpoint_path("policy")), lora=LoraSettings(dropout=0.0))
    sampling = RolloutConfig(max_new_tokens=40, temperature=1.0, stop_strings=[])
    tokenizer = load_tokenizer(config)
    policy = load_policy(config, stream=RandomStream(seed, "adapter"))
    prompts = load_prompts(
        PromptsConfig(str(checkpoint_path("policy").parent / "prompts_train.jsonl"))
    )
    rewards = [
        load_reward_model(
            RewardModelConfig(path=str(checkpoint_path(name)), format="plain", append_eos=True),
            name,
        )
        for name in ("helpful", "harmless")
    ]
    parameters = list(adapter_parameters(policy).values())

    def losses(rows: Sequence[int]) -> torch.Tensor:
        asked = [prompts[row] for row in rows]
        queries = encode_prompts(
            asked, tokenizer, prompt_format=PromptFormat(), max_prompt_tokens=64
        )
        sampler = Sampler(policy, tokenizer, sampling, policy.disable_adapter)
        replies = rollout(sampler, queries)
        scores = torch.tensor([r(prompts=asked, completions=replies.completions) for r in rewards])
        centred = scores - scores.mean(dim=1, keepdim=True)
        advantages = centred / (scores.std(dim=1, keepdim=True) + 1e-8)  # [M, B]
        logprobs = response_logprobs(policy, replies, sampling.temperature)  # [B, T]
        return -(advantages * (logprobs * replies.mask).sum(dim=1)).mean(dim=1)  # [M]

    kinds = [prompt.kind for prompt in prompts]
    shards = dirichlet_partition(
        kinds, LORA_CLIENTS, alpha=ALPHA, seed=seed, min_examples=LORA_BATCH
    )
    generator = torch.Generator().manual_seed(seed)
    batches = [
        [shard[i] for i in torch.randperm(len(shard), generator=generator)[:LORA_BATCH].tolist()]
        for shard in shards
    ]
    with RandomStream(seed, "rollout"):
        yield "start", [jacobian(losses(rows), parameters) for rows in batches]
        optimizer = torch.optim.Adam(parameters, lr=LORA_LEARNING_RATE)
        for _ in range(LORA_STEPS):
            optimizer.zero_grad()
            rows = torch.randint(len(prompts), (LORA_BATCH,), generator=generator)
            losses(rows.tolist()).mean().backward()
            optimizer.step()
        yield f"{LORA_STEPS} steps", [jacobian(losses(rows), parameters) for rows in batches]


def print_errors(errors: dict[str, dict[str, list[float]]]) -> None:
    """Prints the errors, and how much better the best and the sketch are than the paper's."""
    means = {
        column: {name: mean(values) for name, values in by_method.items()}
        for column, by_method in errors.items()
    }
    best = {
        column: min((name for name in by_method if name != HINDSIGHT), key=by_method.__getitem__)
        for column, by_method in means.items()
    }
    rows = [
        [name]
        + [
            f"{means[column][name]:.3g} ± {stdev(by_method[name]):.2g}"
            + ("*" if name == best[column] else " ")
            for column, by_method in errors.items()
        ]
        for name in next(iter(errors.values()))
    ]
    print_table("nRMSE of the Gram matrix in per cent", ["", *errors], rows)
    ratios = [
        [
            f"{name} / {REFERENCE}",
            *(f"{means[column][name] / means[column][REFERENCE]:.2g}" for column in errors),
        ]
        for name in dict.fromkeys(["CountSketch, one-way", "hybrid, one-way", *best.values()])
    ]
    print_table("Ratio of the mean errors", ["", *errors], ratios)


def print_costs(costs: dict[str, dict[str, Estimate]]) -> None:
    """Bytes per client: up, and down where there is a broadcast."""
    columns = {column.split(",")[0]: estimates for column, estimates in costs.items()}
    rows = [
        [name]
        + [
            f"{estimates[name].bytes_up:,}"
            + (f" + {estimates[name].bytes_down:,} down" if estimates[name].bytes_down else "")
            for estimates in columns.values()
        ]
        for name in next(iter(columns.values()))
    ]
    print_table("Bytes per client", ["", *columns], rows)


if __name__ == "__main__":
    main()
