"""Calibrations from raw scores to rewards, which configurations give and checkpoints store."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from firm.base.fields import NOT_IN_PAPER, configuration
from firm.base.sanitize import printable

if TYPE_CHECKING:
    import torch

Method = Literal["sigmoid", "minmax", "none"]
LARGEST, SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126
"""Largest number of float32, and its smallest normal one."""


@configuration(source=NOT_IN_PAPER)
class Calibration:
    """A frozen map from raw scores to rewards; saved in checkpoints and reports."""

    method: Method
    """"sigmoid": sigmoid((s - mean) / scale) of the score s; "minmax": (s - low) / (high - low),
    clipped to [0, 1]; "none": s itself."""
    mean: float = 0.0
    """Mean score of the calibration replies."""
    scale: float = 1.0
    """Standard deviation of the scores of the calibration replies."""
    low: float = 0.0
    """5 % quantile of the scores of the calibration replies."""
    high: float = 1.0
    """95 % quantile of the scores of the calibration replies."""
    num_samples: int = 0
    """Number of calibration replies."""

    def __post_init__(self) -> None:
        for name in ("mean", "scale", "low", "high"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) <= LARGEST:
                raise ValueError(
                    f"a calibration's {name} must be finite in float32, got {_short(value)}."
                )
        if min(self.scale, self.high - self.low) < SMALLEST:
            raise ValueError(
                f"a calibration's scale must be positive, and low below high, got scale "
                f"{self.scale:g}, low {self.low:g} and high {self.high:g}."
            )
        count = self.num_samples
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(
                f"a calibration's num_samples must be a non-negative integer, got {_short(count)}."
            )

    def __call__(self, scores: "torch.Tensor") -> "torch.Tensor":
        """Returns the rewards of scores, with the same shape."""
        if self.method == "sigmoid":
            return ((scores - self.mean) / self.scale).sigmoid()
        if self.method == "minmax":
            return ((scores - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return scores

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
                f"got {_short(figures)}."
            )
        return cls(**figures)


def _short(value: object) -> str:
    return printable(repr(value), max_length=80)
