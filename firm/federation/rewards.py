"""Mean rewards of a round, for strategies whose server weights the objectives by them."""

from collections.abc import Sequence
from statistics import fmean

from firm.federation.messages import Update


def mean_rewards(updates: Sequence[Update], objectives: Sequence[str]) -> dict[str, float]:
    """Returns the mean reward of each objective over the clients that have one.

    Raises:
        ValueError: No client sent its rewards.
    """
    rows = [update.metrics["rewards"] for update in updates if "rewards" in update.metrics]
    if not rows:
        raise ValueError(
            "the strategy needs the clients' mean rewards, but none of "
            f"{len(updates)} clients sent them; let the sites' list of metrics contain rewards."
        )
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in objectives}
    return {name: fmean(values) for name, values in found.items() if values}
