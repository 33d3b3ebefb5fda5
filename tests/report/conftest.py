"""Run directories as a run would leave them, with made-up but plausible figures."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import firm.alignment.client  # noqa: F401 - registers what these runs measure
from tests.runs import write_rows


@dataclass(frozen=True)
class FakeRun:
    """What the run is and how far it has come."""

    objectives: tuple[str, ...] = ("helpful", "harmless")
    num_clients: int = 4
    num_rounds: int = 8
    num_done: int = 8
    is_over: bool = True
    has_truth: bool = True
    has_samples: bool = True
    clients_per_round: int | None = None
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Round -> client and reason."""
    has_diagnostics: bool = True
    """Whether clients measured more of their rewards than mean and spread, as runs now do."""
    has_gram: bool = False
    """Whether clients sent their Gram matrices."""
    alarms: dict[int, str] = field(default_factory=dict)
    """Round -> what the run warned of."""
    seed: int = 0


def write_run(path: Path, fake: FakeRun) -> Path:
    """Writes config.yaml, run.json, metrics.jsonl and samples.jsonl; returns the directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(
        f"seed: {fake.seed}\nnum_rounds: {fake.num_rounds}\npolicy:\n  path: models/tiny-policy\n"
        "  lora:\n    rank: 16\n    alpha: 32\nstrategy:\n  name: firm\n  beta: 0.01\n"
    )
    run = {
        "commit": "1f0c2d9e7ab41f0c2d9e7ab41f0c2d9e7ab41f0c",
        "started": "2026-01-05T09:30:00+00:00",
        "status": "finished" if fake.is_over else "running",
        "command": "recipes/firm_hh.py",
        "versions": {"torch": "2.13.0", "trl": "1.12.0"},
    }
    (path / "run.json").write_text(json.dumps(run))
    write_rows(path, _rows(fake, np.random.default_rng(fake.seed)))
    if fake.has_samples:
        samples = list(_samples(fake))
        (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return path


def _rows(fake: FakeRun, rng: np.random.Generator):
    clients = [f"client_{index}" for index in range(fake.num_clients)]
    yield {
        "kind": "run",
        "objectives": list(fake.objectives),
        "clients": clients,
        "rounds": fake.num_rounds,
        "calibration": {
            name: {"method": "sigmoid", "mean": 0.2 - 0.3 * j, "scale": 1.1 + 0.2 * j}
            for j, name in enumerate(fake.objectives)
        },
        "num_trainable": 24_576,
        "adapter_bytes": 98_904,
    }
    yield _evaluation(fake, rng, 0, "validation", is_base=True)
    yield _evaluation(fake, rng, 0, "test", is_base=True)
    for round_number in range(1, fake.num_done + 1):
        sampled = clients
        if fake.clients_per_round:
            sampled = sorted(rng.choice(clients, fake.clients_per_round, replace=False).tolist())
        failed = fake.failures.get(round_number)
        arrived = [client for client in sampled if not failed or client != failed[0]]
        trainings = [_training(fake, rng, round_number, client) for client in arrived]
        yield from trainings
        means = np.array([np.mean(row["weights"], axis=0) for row in trainings])
        yield {
            "kind": "round",
            "round": round_number,
            "clients": arrived,
            "failures": [{"client": failed[0], "reason": failed[1]}] if failed else [],
            "seconds": sum(sum(row["seconds"].values()) for row in trainings) + 0.8,
            "bytes_down": sum(row["bytes_down"] for row in trainings),
            "bytes_up": sum(row["bytes_up"] for row in trainings),
            "weights_spread": dict(zip(fake.objectives, means.std(axis=0).tolist(), strict=True)),
            "drift": float(rng.uniform(0.5, 0.9)),
            **({"stationarity": 0.04 / round_number} if fake.has_gram else {}),
            **({"alarms": [fake.alarms[round_number]]} if round_number in fake.alarms else {}),
        }
        yield _evaluation(fake, rng, round_number, "validation")
    if fake.is_over:
        yield _evaluation(fake, rng, fake.num_done, "test")


def _gain(round_number: int, index: int) -> float:
    return (0.9 - 0.25 * index) * (1 - math.exp(-round_number / 5))


def _evaluation(
    fake: FakeRun, rng: np.random.Generator, round_number: int, split: str, *, is_base: bool = False
):
    names = list(fake.objectives)
    if fake.has_truth:
        names += [f"true_{name}" for name in fake.objectives] + ["parse"]
    num_prompts = 256 if split == "test" else 128
    scores, change = {}, {}
    for index, name in enumerate(names):
        j = index % len(fake.objectives)
        gain = _gain(round_number, j) * (0.55 if name.startswith("true_") else 1)
        base = [-0.4, 0.35, 0.1, -0.1][j]
        if name == "parse":
            base, gain = 0.96, -0.004 * round_number
        offset = 0.06 if split == "test" and name != "parse" else 0.0
        noise = float(rng.normal(0, 0.03 if name != "parse" else 0.004)) if round_number else 0.0
        scale = 0.15 if name == "parse" else 1.0
        scores[name] = {
            "mean": base + offset + gain + noise,
            "se": scale / math.sqrt(num_prompts),
        }
        change[name] = {"mean": gain + noise, "se": 0.6 * scale / math.sqrt(num_prompts)}
    row = {
        "kind": "evaluation",
        "round": round_number,
        "split": split,
        "num_prompts": num_prompts,
        "num_samples": 2,
        "scores": scores,
        "rewards": {
            name: {"mean": 1 / (1 + math.exp(-scores[name]["mean"])), "se": 0.02}
            for name in fake.objectives
        },
        "kl": 9 * (1 - math.exp(-round_number / 6)),
        "kl_se": 0.2 if round_number else 0.0,
        "length": 31.0 - 0.5 * round_number,
        "distinct_1": 0.21,
        "distinct_2": 0.46,
        "end_share": 0.93,
    }
    return row if is_base else row | {"change": change}


def _training(fake: FakeRun, rng: np.random.Generator, round_number: int, client: str):
    num_objectives, num_solves = len(fake.objectives), 12
    tilt = np.linspace(0.8, 1.2, fake.num_clients)[int(client.split("_")[1])]
    center = np.full(num_objectives, 8.0)
    center[0] *= tilt
    weights = rng.dirichlet(center, size=num_solves)
    diagnostics = _diagnostics(fake, rng, round_number) if fake.has_diagnostics else {}
    return diagnostics | {
        "kind": "client",
        "round": round_number,
        "client": client,
        "num_examples": 400,
        "num_steps": 2,
        "weights": weights.tolist(),
        "gradient_norms": rng.lognormal(-1, 0.3, (num_solves, num_objectives)).tolist(),
        "cosines": rng.normal(
            -0.35, 0.1, (num_solves, num_objectives * (num_objectives - 1) // 2)
        ).tolist(),
        "beta_effect": rng.uniform(0.002, 0.012, num_solves).tolist(),
        "scores": {
            name: [-0.4, 0.35, 0.1, -0.1][j]
            + _gain(round_number, j)
            + 0.3 * (tilt - 1)
            + float(rng.normal(0, 0.06))
            for j, name in enumerate(fake.objectives)
        },
        "scores_std": {
            name: 0.9 - 0.1 * j - 0.02 * round_number for j, name in enumerate(fake.objectives)
        },
        "rewards": dict.fromkeys(fake.objectives, 0.6),
        "kl": 9 * (1 - math.exp(-round_number / 6)) + float(rng.normal(0, 0.4)),
        "kl_coefficient": 0.06 * 1.02**round_number,
        "entropy": 1.4 - 0.05 * round_number + float(rng.normal(0, 0.03)),
        "clip_fraction": float(rng.uniform(0.02, 0.09)),
        "policy_loss": dict.fromkeys(fake.objectives, -0.01),
        "value_loss": {name: 0.4 * math.exp(-round_number / 4) + 0.1 for name in fake.objectives},
        "response_length": 31.0 - 0.5 * round_number + float(rng.normal(0, 0.8)),
        "end_share": 0.93,
        "seconds": {
            "rollout": float(rng.uniform(1.8, 2.2)),
            "reward": 0.4,
            "values": 0.2,
            "advantages": 0.001,
            "forward": 0.9,
            "critic": 0.01,
            "backward": 1.5,
            "reduce": 0.001,
            "gram": 0.02,
            "solve": 0.01,
            "step": 0.1,
        },
        "bytes_down": 98_904,
        "bytes_up": 99_412,
    }


def _diagnostics(fake: FakeRun, rng: np.random.Generator, round_number: int):
    pairs = ["-".join(pair) for pair in combinations(fake.objectives, 2)]
    return {
        "score_correlation": {pair: float(rng.uniform(-0.5, -0.3)) for pair in pairs},
        "score_length_correlation": {
            # Replies of one length have no correlation with it.
            name: None if round_number == 2 and index else float(rng.uniform(0.1, 0.3) + index / 9)
            for index, name in enumerate(fake.objectives)
        },
        "truncated_share": {name: 0.01 * (index + 1) for index, name in enumerate(fake.objectives)},
    }


def _samples(fake: FakeRun):
    requests = ["plan a picnic", "repair a bicycle", "write a poem", "pick a lock", "bake bread"]
    stages = [0, fake.num_done] if fake.is_over else [0]
    for place, stage in enumerate(stages):
        for index, request in enumerate(requests):
            reply = "First look for what you need. Then begin." if place else "I do not know that."
            yield {
                "round": stage,
                "prompt": f"\n\nHuman: Tell me how to {request}.\n\nAssistant:",
                "completion": f" {reply} " * (1 + index % 3),
                "scores": dict.fromkeys(fake.objectives, 0.8 * place + 0.1 * index - 0.2),
            }


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run directory and returns its path; keywords are the fields of `FakeRun`."""

    def make(name: str = "demo", **fields: Any) -> Path:
        return write_run(tmp_path / name, FakeRun(**fields))

    return make
