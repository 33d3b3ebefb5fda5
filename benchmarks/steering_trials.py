"""Tries changes of family K's conditioned run, one at a time, on two seeds of their own.

    python benchmarks/steering_trials.py                          # every trial, seeds 198 and 199
    python benchmarks/steering_trials.py core --seeds 198

Prints, by seed, the expected utility of the run's folds at five preferences, chosen and valued on
the same 200 validation prompts, and the largest KL of a fold. These are trials (docs/log.md): two
seeds tell changes of about 0.02 from noise, and a change that gains is tested on other seeds.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.findings import expected_utility
from benchmarks.measure import quiet
from benchmarks.protocol_runs import FIRST, GUARDED, Lab
from firm.alignment.adapters.conditioned import (
    Conditioned,
    ConditioningConfig,
    _AtPreferences,
    gates,
    is_conditioned,
)
from firm.alignment.adapters.lora import adapted_modules
from firm.alignment.batches import ShuffledPasses
from firm.alignment.decoding import Draws

NUM_REPLIES, BATCH = 4, 16
"""Replies to a prompt and of a batch, as in configs/miniature_front.yaml."""


@contextmanager
def pairs(*, shares_numbers: bool) -> Iterator[None]:
    """Samples replies to each prompt at two preferences, with the same random numbers or others."""
    draw_prompts, draw_numbers = ShuffledPasses.draw, Draws.draw

    def twice(self: Any, count: int) -> list[Any]:
        return [prompt for prompt in draw_prompts(self, count // 2) for _ in range(2)]

    def common(self: Any, vocabulary: int) -> torch.Tensor:
        numbers = draw_numbers(self, vocabulary)
        if len(numbers) != BATCH:  # an evaluation
            return numbers
        first = numbers.unflatten(0, (-1, 2, NUM_REPLIES))[:, :1]
        return first.expand(-1, 2, *first.shape[2:]).flatten(0, 2)

    with patch.object(ShuffledPasses, "draw", twice), ExitStack() as stack:
        if shares_numbers:
            stack.enter_context(patch.object(Draws, "draw", common))
        yield


class Core(Conditioned):
    """Conditions a core between A and B: B_j = B C_j, with C_j [r, r], as PARM (ICML 2025) does."""

    def width(self, r: int) -> int:
        """Returns the number of columns of a C_j."""
        return r

    def prepare_(self, policy: Any) -> None:
        self.kind.prepare_(policy)
        for layer in adapted_modules(policy).values():
            weight = layer.lora_B["default"].weight
            r = weight.size(1)
            for name in self.names:
                core = nn.Linear(self.width(r), r, bias=False, device="meta")
                core.weight = nn.Parameter(weight.new_zeros(r, self.width(r)))
                layer.add_module(name, nn.ModuleDict({"default": core}))

    def output(self, layer: Any, rows: Any, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return self.kind.output(layer, self.at(rows), x, result)

    def at(self, rows: Any) -> "_AtCores":
        """Returns the rows with the cores at their preferences."""
        return _AtCores(rows, self.names)

    def as_lora(self, policy: Any, adapter: Any) -> Any:
        whole = {}
        for name, values in adapter.items():
            if is_conditioned(name):
                values = self.times(adapter[re.sub(r"lora_B\d+", "lora_B", name)], values)
            whole[name] = values
        return self.kind.as_lora(policy, whole)

    def times(self, matrix: torch.Tensor, core: torch.Tensor) -> torch.Tensor:
        """Returns B C_j."""
        return matrix @ core


class SingularValues(Core):
    """Conditions the scale of each rank: diagonal C_j, as Panacea (arXiv:2402.02030) does."""

    def width(self, r: int) -> int:
        return 1

    def at(self, rows: Any) -> "_AtCores":
        return _AtScales(rows, self.names)

    def times(self, matrix: torch.Tensor, core: torch.Tensor) -> torch.Tensor:
        return matrix * core.mT


class _AtCores(_AtPreferences):
    def product(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "lora_B" and self.preferences is not None:
            total = x
            for gate, further in zip(gates(self.preferences).T, self._names, strict=True):
                gate = gate.to(x).view(-1, *[1] * (x.ndim - 1))
                total = total + gate * self.cored(layer, further, x)
            x = total
        return self._rows.product(layer, name, x)

    def cored(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        """Returns C_j x."""
        return self._rows.product(layer, name, x)


class _AtScales(_AtCores):
    def cored(self, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * self._rows.product(layer, name, torch.ones_like(x[..., :1]))


@contextmanager
def conditioned_by(kind: type[Conditioned]) -> Iterator[None]:
    """Conditions adapters by another kind."""
    with patch.object(ConditioningConfig, "condition", lambda self, own, m: kind(own, m)):
        yield


@dataclass(frozen=True)
class Trial:
    """A change of the conditioned run."""

    change: Callable[[], Any] | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


TRIALS = {
    "defaults": Trial(),
    "half_kl": Trial(overrides={"estimator.kl.coefficient": 0.03}),
    "two_preferences": Trial(lambda: pairs(shares_numbers=False)),
    "common_numbers": Trial(lambda: pairs(shares_numbers=True)),
    "core": Trial(lambda: conditioned_by(Core)),
    "singular_values": Trial(lambda: conditioned_by(SingularValues)),
}
"""Trials by name: as configured; half the KL coefficient; replies to each prompt at two
preferences, with random numbers of their own or in common; and two kinds of conditioned adapters.
"""


def tried(trial: Trial, name: str, seed: int, runs: Path) -> tuple[float, float]:
    """Returns the expected utility and the largest KL of a trial's run."""
    lab = Lab(seed, runs, GUARDED)
    with trial.change() if trial.change else ExitStack():
        folds = lab.conditioned(FIRST, name, **trial.overrides)
    figures = lab.measured(folds, splits=["validation"], has_base=False).values()
    models = [{**own, "test": own["validation"]} for own in figures]
    return expected_utility(models), max(own["validation"]["KL"] for own in models)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, "all"], default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[198, 199])
    parser.add_argument("--runs", type=Path, default=Path("runs/steering"))
    options = parser.parse_args(arguments)
    quiet()
    for name in TRIALS if "all" in options.trials else options.trials:
        figures = [tried(TRIALS[name], name, seed, options.runs) for seed in options.seeds]
        utilities, kls = zip(*figures, strict=True)
        print(
            f"{name:16}  utility {', '.join(f'{u:.3f}' for u in utilities)}"
            f"  largest KL {', '.join(f'{kl:.1f}' for kl in kls)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
