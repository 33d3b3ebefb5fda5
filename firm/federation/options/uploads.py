"""Quantised uploads: updates with a few bits per parameter.

A client sends Q(θ_c - θ_t), and the server reconstructs θ_t + Q(θ_c - θ_t). With rounding to the
nearest level, the client keeps the rounding error and adds it to its next update. With this error
feedback, the sums of sent and of true updates differ by a single rounding error after any number
of rounds (Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). With stochastic rounding,
every update is unbiased by itself (QSGD, Alistarh et al. 2017, arXiv:1610.02132).
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from firm.base.fields import NOT_IN_PAPER, configuration
from firm.base.sizes import BUCKET, FLOAT_BYTES, MAX_BITS
from firm.federation.option import DECIDED_BY_SERVER, Option, Requests, Train, option
from firm.federation.round_config import RoundConfig

if TYPE_CHECKING:
    from firm.federation.messages import Update


BITS_OF_LENGTH = 4
"""Fewest bits that hardly change the length of an update; with fewer, error feedback adds to it."""


@option
@configuration(source=NOT_IN_PAPER)
class UploadConfig(Option):
    """Quantised uploads of the clients' updates."""

    key: ClassVar[str] = "upload"
    travels: ClassVar[bool] = True

    bits: Annotated[int, Interval(ge=2, le=MAX_BITS)] = 8
    """Bits per value of an update; each 128 values also take a scale of 4 bytes."""
    rounding: Literal["nearest", "random"] = "nearest"
    """nearest has the smallest error, which the client adds to its next update (error feedback);
    random is unbiased, without error feedback."""

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` if rounding could make updates too long for the norm limit."""
        super().check(cfg)
        if cfg.max_update_norm is not None and self.bits < BITS_OF_LENGTH:
            raise ValueError(
                f"upload.bits {self.bits} makes updates longer than they are, so that "
                f"max_update_norm would refuse honest clients: use upload.bits {BITS_OF_LENGTH} or "
                "more, or max_update_norm null."
            )

    def num_bytes(self, num_parameters: int) -> int:
        """Returns the size in bytes of the quantised parameters and their scales."""
        num_scales = -(-num_parameters // BUCKET)
        return -(-num_parameters * self.bits // 8) + FLOAT_BYTES * num_scales

    def wrap(self, train: Train) -> Train:
        """Returns the training with its update quantised; the client keeps the rounding error."""
        from firm.federation.options.quantized import quantized_training

        return quantized_training(self, train)

    def requests(self, requests: Requests, cfg: RoundConfig) -> Requests:
        """Returns the requests, with a seed in those of a training whose update is drawn."""
        from firm.federation.training import LocalTraining

        if self.rounding == "nearest":
            return requests
        seeded = {**requests[LocalTraining], "seed": DECIDED_BY_SERVER}
        return {**requests, LocalTraining: seeded}

    def received(self, update: "Update", request: Any) -> "Update":
        """Returns the update with θ_t + Q(θ_c - θ_t); untrained parameters equal θ_t's.

        Raises:
            Invalid: The update is not quantised, has the wrong size, or leads to huge entries.
        """
        from firm.federation.options.quantized import whole_update

        return whole_update(update, request)
