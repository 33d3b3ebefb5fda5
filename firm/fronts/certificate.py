"""Certificates: whether a model meets requirements, by bounds on prompts that did not choose it.

As the safety test of high-confidence RLHF (arXiv:2506.08266): a model is chosen on some prompts,
and tested on others. A certificate that passes is wrong with a probability of at most
1 - confidence. If there are no other prompts, the bounds hold for all measured models at once
(Bonferroni), so that the choice among them does not matter.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from firm.fronts.json_record import read_record, write_record

CERTIFICATE_NAME = "certificate.json"
"""File of a certificate in an adapter's folder."""
_FORMAT = 1


@dataclass(frozen=True)
class Bound:
    """A requirement with the bound that must meet it."""

    requirement: str
    bound: float
    """One-sided bound on the mean; NaN if the prompts give none."""
    mean: float
    num_prompts: int
    passes: bool

    @property
    def is_known(self) -> bool:
        """Whether the prompts give a bound."""
        return math.isfinite(self.bound)


@dataclass(frozen=True)
class Certificate:
    """Requirements on a model, and whether their bounds meet them."""

    preference: dict[str, float]
    """The model's preference, as shares by objective."""
    bounds: tuple[Bound, ...]
    confidence: float
    """Probability of at least this that a model that misses a requirement does not pass."""
    split: str
    """Prompts of the bounds: "test"."""
    num_models: int
    """Models for which the bounds hold at once; 1 if other prompts have chosen the model."""
    is_interpolated: bool
    """True if the model was not measured itself: its values are interpolated linearly between those
    of its neighbours."""
    passes: bool
    """Whether all bounds meet their requirements."""

    def __post_init__(self) -> None:
        if not self.bounds or self.passes != all(own.passes for own in self.bounds):
            raise ValueError(
                f"a certificate must have bounds, and pass if all of them do, got passes "
                f"{self.passes} with {len(self.bounds)} bounds."
            )

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """The result in a word."""
        return "pass" if self.passes else "fail"

    def describe(self) -> str:
        """Returns the certificate in one line."""
        parts = ", ".join(
            f"{own.requirement} "
            f"({f'bound {own.bound:.3f}' if own.is_known else 'no bound: too few values differ'})"
            for own in self.bounds
        )
        num = min(own.num_prompts for own in self.bounds)
        chosen = (
            "that chose nothing"
            if self.num_models == 1
            else f"and bounds for all {self.num_models} models at once"
        )
        between = ", interpolated between measured models" if self.is_interpolated else ""
        return (
            f"{self.verdict}: {parts}, by {num} {self.split} prompts {chosen}, "
            f"{self.confidence:.0%} confidence{between}"
        )

    def save(self, folder: Path) -> None:
        """Writes the certificate into an adapter's folder."""
        write_record(folder / CERTIFICATE_NAME, self, version=_FORMAT)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Returns the certificate in an adapter's folder; None without one.

        Raises:
            ValueError: The file is malformed.
        """
        file = folder / CERTIFICATE_NAME
        return read_record(file, cls, version=_FORMAT) if file.is_file() else None
