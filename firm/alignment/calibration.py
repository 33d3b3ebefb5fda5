"""Calibrations from raw scores to rewards, which configurations give and checkpoints store."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval
from pydantic import Strict

from firm.base.fields import NOT_IN_PAPER, NonNegativeInt, configuration
from firm.base.sanitize import printable

if TYPE_CHECKING:
    import torch

Method = Literal["sigmoid", "minmax", "none"]
LARGEST, SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126
"""Largest number of float32, and its smallest normal one."""
TAIL = 3.0
"""Standard deviations above the mean at which the upper tail of scores begins."""
WIDTH = 3.29
"""Standard deviations between the 5 % and 95 % quantiles of a normal distribution."""
_Float32 = Annotated[float, Strict(), Interval(ge=-LARGEST, le=LARGEST)]


@configuration(source=NOT_IN_PAPER)
class Calibration:
    """A frozen map from raw scores to rewards; saved in checkpoints and reports."""

    method: Method
    """"sigmoid": sigmoid((s - mean) / scale) of the score s; "minmax": (s - low) / (high - low),
    clipped to [0, 1]; "none": s itself."""
    mean: _Float32 = 0.0
    """Mean score of the calibration replies."""
    scale: _Float32 = 1.0
    """Standard deviation of the scores of the calibration replies."""
    low: _Float32 = 0.0
    """5 % quantile of the scores of the calibration replies."""
    high: _Float32 = 1.0
    """95 % quantile of the scores of the calibration replies."""
    num_samples: Annotated[NonNegativeInt, Strict()] = 0
    """Number of calibration replies."""

    def __post_init__(self) -> None:
        if min(self.scale, self.high - self.low) < SMALLEST:
            raise ValueError(
                f"a calibration's scale must be positive, and low below high, got scale "
                f"{self.scale:g}, low {self.low:g} and high {self.high:g}."
            )

    def __call__(self, scores: "torch.Tensor") -> "torch.Tensor":
        """Returns the rewards of scores, with the same shape."""
        if self.method == "sigmoid":
            return ((scores - self.mean) / self.scale).sigmoid()
        if self.method == "minmax":
            return ((scores - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return scores

    @property
    def tail(self) -> float:
        """Score above which a reply lies in the upper tail of the base model's scores.

        It is three standard deviations above the mean. "minmax" knows only two quantiles, so mean
        and deviation are those of the normal distribution with them; "none" knows nothing of the
        base model's scores, so there is no tail: NaN.
        """
        if self.method == "none":
            return math.nan
        if self.method == "sigmoid":
            return self.mean + TAIL * self.scale
        return (self.low + self.high) / 2 + TAIL * (self.high - self.low) / WIDTH

    def to_dict(self) -> dict[str, Any]:
        """Returns the method, its parameters and the number of samples."""
        figures = {"sigmoid": ("mean", "scale"), "minmax": ("low", "high"), "none": ()}
        names = ("method", *figures[self.method], "num_samples")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> "Calibration":
        """Returns the calibration from the result of `to_dict`.

        Raises:
            ValueError: When the values, which may come from files and messages, are not a valid
                calibration.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(figures, Mapping) or not {"method"} <= set(figures) <= known:
            raise ValueError(
                f"a calibration must have a method, and only the keys {', '.join(sorted(known))}, "
                f"got {printable(repr(figures), max_length=80)}."
            )
        return cls(**figures)
