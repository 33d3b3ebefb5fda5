"""Capabilities and attacks of the clients of an alignment run."""

from typing import Literal, get_args

from firm.base.fields import NOT_IN_PAPER, FiniteFloat, PositiveFloat, configuration
from firm.federation.capabilities import Capability, UpdateAttack

CAPABILITIES: frozenset[Capability] = frozenset({"rewards", "epochs"})
"""Capabilities of `AlignmentClient`."""
RewardAttack = Literal["reward_bias", "reward_scaling", "label_flip"]


@configuration(source=NOT_IN_PAPER)
class AttackConfig:
    """Attack of a client."""

    kind: Literal[UpdateAttack, RewardAttack]
    """sign_flip multiplies the update by -scale, scaling by scale. collusion replaces it by an
    update of scale times its norm in a random direction shared by all colluders. reward_bias adds
    bias to the raw scores, reward_scaling multiplies them by scale. label_flip mirrors rewards: 1 -
    r, or -r if scores are not mapped to [0, 1]; of pairs it swaps the replies."""
    scale: PositiveFloat = 1.0
    """Factor s of the update (sign_flip, scaling, collusion) or of the raw scores
    (reward_scaling)."""
    bias: FiniteFloat = 0.0
    """Constant that reward_bias adds to the raw scores, in their unit."""
    objective: str | None = None
    """Objective with the attacked reward; null for all."""

    def __post_init__(self) -> None:
        if (self.kind == "reward_bias") != (self.bias != 0):
            raise ValueError(
                "bias must be non-zero for reward_bias and zero otherwise, got "
                f"{self.bias} with {self.kind}."
            )
        if self.kind in ("scaling", "reward_scaling") and self.scale == 1:
            raise ValueError(f"{self.kind} by 1 has no effect; choose another scale.")
        if self.kind in ("reward_bias", "label_flip") and self.scale != 1:
            raise ValueError(f"{self.kind} has no scale, got {self.scale}.")
        if self.objective is not None and not self.is_on_rewards:
            raise ValueError(
                "objective is supported for attacks on rewards only, got "
                f"{self.objective!r} with {self.kind}."
            )

    @property
    def is_on_rewards(self) -> bool:
        """True if the attack changes rewards; otherwise it changes the update."""
        return self.kind in get_args(RewardAttack)
