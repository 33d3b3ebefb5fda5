"""Attacks of clients on an alignment run, through reward scores or updates.

Reward attacks change the scores of the client's own judges: everything downstream, from the
client's metrics to its update, is computed from wrong rewards. Attacks on updates are in
`firm.federation.attackers`, attacks on losses in `firm.fmoo.attacks`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from transformers import TrainerState

from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt
from firm.alignment.rewards import Calibration, Judges, RewardFn, score, values_or_none
from firm.base.fields import NOT_IN_PAPER, FiniteFloat, PositiveFloat, configuration
from firm.federation.attackers import Attacker, UpdateAttack
from firm.federation.client import Client

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


def as_attacker(client: Client, attack: AttackConfig | None, *, seed: int) -> Client:
    """Wraps a client as an attacker if it attacks updates.

    Clients that attack rewards use `attacked_judges` instead. Colluders share the run's seed.
    """
    if attack is None or attack.is_on_rewards:
        return client
    kind: Any = attack.kind
    return cast(Client, Attacker(client, kind, scale=attack.scale, seed=seed))


def attacked_judges(judges: Judges, attack: AttackConfig | None) -> Judges:
    """Returns the judges of a client that attacks rewards; unchanged for other clients.

    The calibrations are unchanged, since they are determined by the server.
    """
    if attack is None or not attack.is_on_rewards:
        return judges
    maps = judges.calibrations or {}
    fns = {
        name: _attacked(name, fn, attack, maps.get(name))
        if attack.objective in (None, name)
        else fn
        for name, fn in judges.reward_fns.items()
    }
    return replace(judges, reward_fns=fns)


def attacked_pairs(pairs: Sequence[Pair], attack: AttackConfig | None) -> list[Pair]:
    """Returns the pairs of a client that flips their labels; unchanged for other clients."""
    if attack is None or attack.kind != "label_flip":
        return list(pairs)
    return [
        pair.swapped() if attack.objective in (None, pair.objective) else pair for pair in pairs
    ]


class _AttackedReward:
    """Wraps a reward function to return a x + b for true scores x; forwards other attributes."""

    reads_prompts = True
    output = source = None
    """Not forwarded: the wrapper returns a single list, and shares no call with other
    objectives."""

    def __init__(self, name: str, reward_fn: RewardFn, factor: float, shift: float) -> None:
        self.name = name
        self._reward_fn, self._factor, self._shift = reward_fn, factor, shift

    def __call__(
        self,
        /,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        *,
        trainer_state: TrainerState | None = None,
        **columns: Any,
    ) -> list[float | None]:
        own = {self.name: self._reward_fn}
        scores = score(own, prompts, completions, completion_ids, trainer_state=trainer_state)[0]
        return values_or_none(self._factor * scores.double() + self._shift)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._reward_fn, name)


def _attacked(
    name: str, reward_fn: RewardFn, attack: AttackConfig, calibration: Calibration | None
) -> RewardFn:
    if attack.kind == "label_flip":
        return _AttackedReward(name, reward_fn, -1.0, _mirror(calibration))
    return _AttackedReward(name, reward_fn, attack.scale, attack.bias)


def _mirror(calibration: Calibration | None) -> float:
    """Returns the c for which c - x maps to 1 - r if x maps to r; 0 without calibration."""
    if calibration is None or calibration.method == "none":
        return 0.0
    if calibration.method == "sigmoid":
        return 2 * calibration.mean
    return calibration.low + calibration.high
