"""Averaging LoRA's factors, their products, or B alone with A frozen: errors, rewards, seconds.

    python benchmarks/lora_mean.py

First the miniature world, by `recipes/firm_hh.py`: in every round of the plain runs, how far
mean(B) mean(A) is from mean(BA), and what rank r loses of mean(BA); then every way's held-out
rewards. Last the seconds of one aggregation at TinyLlama's shape, on clients made up of a common
part and a spread. All on one thread. `--seeds 1 --rounds 2` is a quick look.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from benchmarks.lora_errors import averaging_error, truncation_error
from benchmarks.measure import interleaved
from firm.federation import Adapter, Engine, ServerState
from firm.federation.aggregation import weighted_mean
from firm.federation.options.lora_mean import product_mean
from firm.federation.strategies import STRATEGIES
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from firm.fmoo.progress import Recorder
from firm.jobs.alignment import main
from firm.jobs.alignment_config import AlignmentConfig
from firm.run import parse, print_table

ROOT = Path(__file__).parent.parent
WAYS = {
    "factors": {},
    "products": {"strategy.lora_mean": "products"},
    "frozen A": {"policy.lora.freeze_a": "true"},
}
SIZES = {
    "estimator.batch_size": 32,
    "estimator.minibatch_size": 16,
    "evaluation.num_calibration_prompts": 128,
    "evaluation.num_validation_prompts": 0,
    "evaluation.num_test_prompts": 200,
    "evaluation.num_shown_samples": 0,
}
SCORES = ("helpful", "harmless", "true_helpful", "true_harmless")
SHAPES = [(2048, 2048), (2048, 256), (2048, 256), (2048, 2048)] * 22
"""[in, out] of q, k, v and o in TinyLlama's layers."""
NUM_CLIENTS = 8
RANK = 16
SPREADS = (0.1, 1.0)
REPEATS = 3


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[float, float]]]:
    """Gives a list that grows by the averaging and the truncation error of each round of FIRM."""
    errors: list[tuple[float, float]] = []

    def round_of_firm(
        state: ServerState, clients: Sequence[str], engine: Engine, cfg: FirmConfig
    ) -> tuple[ServerState, dict[str, Any]]:
        recorder: Any = Recorder(engine)
        result = firm_round(state, clients, recorder, cfg)
        adapters = [reply.content.adapter for reply in recorder.replies]
        weights = [1.0] * len(adapters)
        if not any("lora_A" in name for name in state.adapter):
            errors.append((0.0, 0.0))  # with one A for all the mean of B is exact
        else:
            errors.append((averaging_error(adapters, weights), truncation_error(adapters, weights)))
        return result

    STRATEGIES["firm"] = round_of_firm
    try:
        yield errors
    finally:
        STRATEGIES["firm"] = firm_round


@dataclass(frozen=True)
class Result:
    errors: list[tuple[float, float]]
    """By round: of averaging factors, and of rank r."""
    changes: dict[str, float]
    """Of the scores' means on held-out prompts."""
    adapter_bytes: int
    seconds: float
    """Of CPU time."""


def run(settings: dict[str, Any], seed: int) -> Result:
    arguments = ["--config", str(ROOT / "configs/miniature.yaml"), "--seed", str(seed)]
    for key, value in {**SIZES, **settings}.items():
        arguments += [f"--{key}", str(value)]
    with tempfile.TemporaryDirectory() as folder, watched() as errors:
        out = Path(folder) / "run"
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            main(parse(AlignmentConfig, [*arguments, "--out", str(out)]))
        seconds = time.process_time() - start
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    changes = [row for row in rows if row["kind"] == "evaluation"][-1]["change"]
    num_bytes = next(row["adapter_bytes"] for row in rows if row["kind"] == "run")
    return Result(errors, {n: changes[n]["mean"] for n in SCORES}, num_bytes, seconds)


def measure_runs(seeds: Sequence[int], rounds: int, local_steps: Sequence[int]) -> None:
    """Prints the errors by round and the rewards of every way."""
    for num_local_steps in local_steps:
        sizes = {"rounds": rounds, "strategy.num_local_steps": num_local_steps}
        results_by_way: dict[str, list[Result]] = {way: [] for way in WAYS}
        for seed in seeds:
            for way, settings in WAYS.items():
                result = run({**settings, **sizes}, seed)
                results_by_way[way].append(result)
                print(f"seed {seed}, {way}: {result}", file=sys.stderr, flush=True)
        errors_by_round = zip(*(r.errors for r in results_by_way["factors"]), strict=True)
        rows = [
            [
                way,
                *(spread([result.changes[name] for result in results]) for name in SCORES),
                f"{results[0].adapter_bytes:,}",
                f"{fmean(result.seconds for result in results):.0f}",
            ]
            for way, results in results_by_way.items()
        ]
        about = f"{num_local_steps} local step{'s' * (num_local_steps > 1)}, {len(seeds)} seeds"
        print_table(
            f"averaging factors, {about}: relative errors of the mean product, per cent",
            ["round", "mean(B) mean(A)", "rank r"],
            [
                [str(index), *(spread([100 * e[k] for e in errors]) for k in range(2))]
                for index, errors in enumerate(errors_by_round, 1)
            ],
        )
        print_table(
            f"{rounds} rounds, {about}: change of the held-out scores, mean ± standard error",
            ["", *(name.replace("_", " ") for name in SCORES), "adapter bytes", "CPU seconds"],
            rows,
        )


def spread(values: Sequence[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{fmean(values):.3f} ± {error:.3f}"


def measure_seconds() -> None:
    """Prints seconds and errors of one aggregation at TinyLlama's shape."""
    rows = []
    for share in SPREADS:
        adapters, weights = made_up(share), [1.0] * NUM_CLIENTS
        ways = {
            "factors": partial(weighted_mean, adapters, weights),
            "products": partial(product_mean, adapters, weights),
        }
        rows.append(
            [
                f"{share:g}",
                *(f"{median(s):.2f}" for s in interleaved(ways, repeats=REPEATS).values()),
                f"{100 * averaging_error(adapters, weights):.2f}",
                f"{100 * truncation_error(adapters, weights):.2f}",
            ]
        )
    print_table(
        f"one aggregation, TinyLlama's shape: {len(SHAPES)} layers, r = {RANK}, "
        f"{NUM_CLIENTS} clients",
        ["spread / common part", "s, factors", "s, products", "% off, factors", "% off, products"],
        rows,
    )


def made_up(share: float) -> list[Adapter]:
    """Clients' adapters: a common one, and each one's own part `share` as long as its change."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    adapters: list[Adapter] = [{} for _ in range(NUM_CLIENTS)]
    for index, (num_in, num_out) in enumerate(SHAPES):
        first = normal(RANK, num_in) / (3 * num_in) ** 0.5  # as peft draws A
        for letter, origin, shape in (
            ("A", first, (RANK, num_in)),
            ("B", torch.zeros(num_out, RANK), (num_out, RANK)),
        ):
            common = origin + 1e-3 * normal(*shape)
            for adapter in adapters:
                name = f"layers.{index}.lora_{letter}.weight"
                adapter[name] = common + share * 1e-3 * normal(*shape)
    return adapters


def cli() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--local-steps", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure_runs(arguments.seeds, arguments.rounds, arguments.local_steps)
    measure_seconds()


if __name__ == "__main__":
    cli()
