"""Client-level differential privacy: clips updates and adds Gaussian noise.

DP-FedAvg of McMahan et al. (2018), arXiv:1710.06963, on adapters. A client's entire contribution to
a round is one vector, its delta θ_c - θ_t over all parameters. The delta is clipped to a maximum
norm before it leaves the client. Gaussian noise is added on the client, or by a trusted server.
``firm.federation.options.accounting`` computes the resulting ε.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Interval

from firm.base.fields import (
    NOT_IN_PAPER,
    Hint,
    NonNegativeFloat,
    PositiveFloat,
    Seed,
    configuration,
)
from firm.base.quantities import Quantity, register
from firm.base.schema import NonNegative
from firm.federation.option import Need, Option, Train, option
from firm.federation.options.accounting import gaussian_epsilon, require_accountant
from firm.federation.round_config import RoundConfig

if TYPE_CHECKING:
    from firm.federation.aggregation import Transform
    from firm.federation.messages import Update

register(Quantity("clipped"), Quantity("update_norm", type=NonNegative))


@option
@configuration(source=NOT_IN_PAPER)
class PrivacyConfig(Option):
    """Client-level differential privacy of each round."""

    key: ClassVar[str] = "privacy"
    travels: ClassVar[bool] = True
    row_entry: ClassVar[str | None] = "privacy"
    scope: ClassVar[str] = "adapters"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("aggregation", "uniform", "privacy bounds each client's influence on a uniform mean"),
        Need("max_update_norm", None, "privacy.clip_norm limits updates; a rejection would leak"),
        Need("normalize_updates", False, "privacy limits the updates' norms itself"),
        Need("lora_mean", "factors", "privacy clips A and B, which does not bound their products"),
        Need("robust.rule", "none", "privacy is accounted for the unmodified mean"),
    )

    clip_norm: PositiveFloat
    """Maximum norm S of a client's delta θ_c - θ_t; longer deltas are scaled down to it."""
    noise_multiplier: Annotated[NonNegativeFloat, Hint("0 adds no noise")]
    """Standard deviation of the noise z, in multiples of S, per coordinate of the summed deltas, or
    of each delta with at client. 0 only clips, which gives no privacy."""
    at: Literal["server", "client", "sum"] = "server"
    """Place where noise is added. server: by a trusted server, to the sum. client: by each client
    to its delta, which also protects it from the server but costs far more accuracy. sum: by each
    client, a share under the masks of secure aggregation, such that the shares of the clients that
    do not collude add up to the noise of the sum."""
    delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5
    """Probability δ with which the ε guarantee may fail; should be well below one over the number
    of clients."""
    statistics: Literal["none", "noisy", "exact"] = "none"
    """Statistics on λ and the gradients that a client sends with its adapter. none: nothing; noisy:
    round means of λ and the cosines, and whether the delta was clipped, with noise that ε accounts
    for; exact: all statistics, as without privacy, which ε does not cover."""
    noise_seed: Seed | None = None
    """Seed of the noise; null draws it from the operating system's entropy. A seed makes runs
    reproducible bit for bit, for tests and replays, but anyone who knows it can subtract the
    noise."""

    def check(self, cfg: RoundConfig) -> None:
        """Raises ``ValueError`` if ε would not cover the messages of clients."""
        super().check(cfg)
        if cfg.share_gram and self.statistics != "exact":
            raise ValueError(
                "share_gram sends exact Gram matrices; with privacy, set it to false or set "
                f"privacy.statistics to exact, got {self.statistics}."
            )
        if cfg.num_local_epochs is not None and self.statistics != "exact":
            raise ValueError(
                "the number of local steps in an epoch reveals the shard's size; with privacy, "
                "num_local_epochs must be null, or privacy.statistics exact, got "
                f"{cfg.num_local_epochs} and {self.statistics}."
            )
        if self.at == "sum" and getattr(cfg, "secure", None) is None:
            raise ValueError(
                "a client's share of the noise protects a sum alone; with privacy.at sum, secure "
                "must be masks, got null."
            )
        if getattr(cfg, "upload", None) is not None and self.at == "server":
            raise ValueError(
                "quantising can make a clipped update longer than privacy.clip_norm, so that the "
                "server rejects it; with upload, set privacy.at to client, got server."
            )
        require_accountant()

    def wrap(self, train: Train) -> Train:
        """Returns the training with a private update, and with error messages withheld."""
        from firm.federation.options.noise import private_training

        return private_training(self, train)

    def to_network(self) -> Self:
        """Returns the settings without the noise seed, which each site sets itself."""
        return replace(self, noise_seed=None)

    def received(self, update: "Update", request: Any) -> "Update":
        """Returns the update; raises ``Invalid`` if it should be clipped but is not."""
        from firm.federation.options.noise import check_clipped

        check_clipped(update, request.adapter, self)
        return update

    def steps(self, steps: "Sequence[Transform]", cfg: RoundConfig) -> "Sequence[Transform]":
        """Returns the steps, followed by the server's noise and the accounting of ε."""
        from firm.federation.options.noise import ServerNoise

        return [*steps, ServerNoise(self, has_regulars=bool(cfg.always))]

    def message_noise(self) -> Sequence[float]:
        """Returns the noise of a delta, and of the statistics that a client sends with it.

        If the client adds the noise, ε applies to every reader of the messages, or of their sum
        where it adds a share; if an honest server adds it, to everyone except the server.
        """
        delta = self.noise_multiplier / 2
        parts = {"none": (delta,), "noisy": (delta, delta), "exact": (delta, 0.0)}
        return parts[self.statistics]

    def spent_epsilon(self, noise: Mapping[float, int]) -> float:
        """Returns the ε at ``delta`` of numbers of deltas and statistics, by their noise."""
        return gaussian_epsilon(noise, self.delta)

    def notes(self) -> list[str]:
        """Returns warnings about these settings that ε does not express; none by default."""
        notes = []
        if self.noise_multiplier == 0:
            notes.append(
                "privacy.noise_multiplier is 0: deltas are clipped, but there is no privacy."
            )
        if self.noise_seed is not None:
            notes.append(
                "privacy.noise_seed is set: ε holds only against observers who do not know it; it "
                "is written to config.yaml."
            )
        if self.statistics == "exact":
            notes.append(
                "privacy.statistics is exact: ε covers the adapters only; keep the log as secret "
                "as the data."
            )
        return notes
