"""Attacks of clients on an alignment run, through reward scores or updates.

Reward attacks change the scores of the client's own judges: everything downstream, from the
client's metrics to its update, is computed from wrong rewards. Attacks on updates are in
`firm.federation.attackers`, attacks on losses in `firm.fmoo.attacks`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from transformers import TrainerState

from firm.alignment.calibration import Calibration
from firm.alignment.client_config import AttackConfig
from firm.alignment.pairs import Pair
from firm.alignment.prompts import Prompt
from firm.alignment.rewards import Judges, RewardFn, score, values_or_none
from firm.federation.attackers import Attacker
from firm.federation.client import Client


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
    maps = judges.calibrations or {}  # a flipped label mirrors rewards, not scores
    fns = dict(judges.reward_fns)
    for name in fns if attack.objective is None else fns.keys() & {attack.objective}:
        factor, shift = attack.scale, attack.bias
        if attack.kind == "label_flip":
            factor, shift = -1.0, _mirror(maps.get(name))
        fns[name] = _AttackedReward(name, fns[name], factor, shift)
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


def _mirror(calibration: Calibration | None) -> float:
    """Returns the c for which c - x maps to 1 - r if x maps to r; 0 without calibration."""
    if calibration is None or calibration.method == "none":
        return 0.0
    if calibration.method == "sigmoid":
        return 2 * calibration.mean  # sigmoid(-z) = 1 - sigmoid(z)
    return calibration.low + calibration.high  # (c - x - low) / width = 1 - r
