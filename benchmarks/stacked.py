"""CPU seconds of a round of C clients: all at once, one after the other, and one client alone.

    python benchmarks/stacked.py   # a quarter of an hour
    python benchmarks/stacked.py --hidden 512 --repeats 2   # eight clients alone, half an hour

Engine stacked beside engine local, and beside a single client with as many replies in as many
minibatches. All have the miniature's prompts, reward models and sizes, and take a round of FIRM
from the same adapter. Rounds are interleaved on one thread; every figure is a median, and the first
round of each is left out. Memory is what a process of its own has resident at most.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import in_own_process, interleaved, one_round, peak_resident, quiet
from firm.alignment import load_tokenizer
from firm.alignment.policy_config import PolicyConfig
from firm.federation import Processes
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import load
from firm.miniature import checkpoint_path
from firm.run import compose, print_table

ROOT = Path(__file__).parent.parent
CONFIGS = {"PPO": "miniature.yaml", "critic-free": "miniature_critic_free.yaml"}
REPEATS = 5  # rounds of each variant, after one that warms up
SHARES = (4, 16)  # replies of each of eight clients
CLIENTS = (1, 4, 16, 64)
TOTAL, EACH = 128, 8  # replies of all clients together, and of every one of them
MAX_ROWS = 64
SPECIAL = ("bos", "eos", "pad")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, help="width of a random policy; the miniature's own")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args(arguments)
    quiet()
    with policy_of(options.hidden) as policy:
        rows = [
            [f"{name}, 8 x {replies}", *compared(config, policy, 8, replies, options.repeats)]
            for name, config in CONFIGS.items()
            for replies in SHARES
        ]
        heads = ["", "stacked, s", "local, s", "one client, s", "stacked / local", "stacked / one"]
        print_table("A round of eight clients, clients x replies", heads, rows)
        if options.hidden:
            return
        for title, sizes in (
            (f"{TOTAL} replies in all", [(count, TOTAL // count) for count in CLIENTS]),
            (f"{EACH} replies each", [(count, EACH) for count in CLIENTS]),
        ):
            rows = [
                [str(size[0]), *compared(CONFIGS["critic-free"], policy, *size, options.repeats)]
                for size in sizes
            ]
            print_table(f"Critic-free, {title}, by clients", ["clients", *heads[1:]], rows)
        peaks = {count: in_own_process(peak_memory, policy, count) for count in CLIENTS}
        own = (peaks[CLIENTS[-1]] - peaks[CLIENTS[-2]]) / (CLIENTS[-1] - CLIENTS[-2])
        print_table(
            f"Critic-free, {EACH} replies each, at most {MAX_ROWS} rows in a pass: memory in MB",
            ["clients", *map(str, CLIENTS), "each further one", "its adapter and moments"],
            [["", *(f"{peaks[c]:.0f}" for c in CLIENTS), f"{own:.2f}", f"{lasting(policy):.2f}"]],
        )


@contextmanager
def policy_of(hidden: int | None) -> Iterator[str]:
    """Gives the folder of the miniature's policy, or of a random one of six layers."""
    miniature = str(checkpoint_path("policy"))
    if hidden is None:
        yield miniature
        return
    tokenizer = load_tokenizer(PolicyConfig(miniature))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=256,
        **{f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in SPECIAL},
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield folder


def compared(config: str, policy: str, count: int, replies: int, repeats: int) -> list[str]:
    """Returns the cells of a row: the seconds of the three, and the stacked engine's ratios."""
    groups = {"estimator.num_replies": min(4, replies)} if "critic_free" in config else {}
    shapes = {
        "stacked": ("stacked", count, replies),
        "local": ("local", count, replies),
        "one": ("local", 1, count * replies),
    }
    rounds = {
        name: round_of(configuration(config, policy, *shape, **groups))
        for name, shape in shapes.items()
    }
    taken = interleaved(rounds, repeats=repeats + 1)
    seconds = {name: median(each[1:]) for name, each in taken.items()}
    ratios = [seconds["stacked"] / seconds[other] for other in ("local", "one")]
    return [f"{value:.2f}" for value in (*seconds.values(), *ratios)]


def configuration(
    config: str, policy: str, engine: str, count: int, replies: int, **changes: Any
) -> AlignmentConfig:
    """Returns the run, with two minibatches of each batch."""
    settings = {
        "engine": engine,
        "num_clients": count,
        "policy.path": policy,
        "estimator.batch_size": replies,
        "estimator.minibatch_size": max(1, replies // 2),
        "evaluation.num_calibration_prompts": 16,
        **changes,
    }
    return compose(AlignmentConfig, [ROOT / "configs" / config], list(settings.items()))


def round_of(cfg: AlignmentConfig) -> Callable[[], object]:
    """Returns a round, always from the same adapter."""
    return one_round(load(cfg, Processes(), measures=False), cfg)


def lasting(policy: str) -> float:
    """Returns the megabytes of a client's adapter and of Adam's two moments of it."""
    cfg = configuration(CONFIGS["critic-free"], policy, "local", 1, EACH)
    adapter = load(cfg, Processes(), measures=False).start
    return 3 * sum(value.numel() * value.element_size() for value in adapter.values()) / 1e6


def peak_memory(policy: str, count: int) -> float:
    """Returns the megabytes that this process has resident at most with a round alone."""
    quiet()
    options = policy, "stacked", count, EACH
    round_of(configuration(CONFIGS["critic-free"], *options, max_rows=MAX_ROWS))()
    return peak_resident() / 1e6


if __name__ == "__main__":
    main()
