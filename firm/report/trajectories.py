"""What runs did over their rounds and ended with: the numbers behind curves and claims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import stats

from firm.fronts import total_variation
from firm.report.record import Record, final_row
from firm.run.directory import Row

Figure = Callable[[Record], float]
"""One number of one run."""


def rewards(record: Record) -> np.ndarray:
    """Returns the mean reward of each round's training batches over the clients, shape [T, M]."""
    by_round: list[list[list[float]]] = [[] for _ in range(record.last_round)]
    for client in record.trainings.values():
        for row in client:
            own = row.get("by_objective") or dict.fromkeys(record.objectives, row)
            values = [
                (own.get(name, row).get("rewards") or {}).get(name) for name in record.objectives
            ]
            by_round[row["round"] - 1].append([np.nan if v is None else v for v in values])
    return np.array([np.nanmean(rows, axis=0) for rows in by_round])


def weights_by_client(record: Record) -> dict[str, np.ndarray]:
    """Returns λ of each client's rounds, the mean of a round's solves, shape [rounds, M] by client.

    Where the server weighs the objectives, its weights count as every client's.
    """
    server = {row["round"]: row["weights"] for row in record.rounds if row.get("weights")}
    curves = {}
    for client, rows in record.trainings.items():
        curves[client] = np.array(
            [
                [server[row["round"]][name] for name in record.objectives]
                if row["round"] in server
                else np.mean(row["weights"], axis=0)
                for row in rows
            ]
        )
    return curves


def weights(record: Record) -> np.ndarray:
    """Returns λ of each round, the mean over its clients, shape [T, M]."""
    curves = weights_by_client(record)
    by_round: list[list[np.ndarray]] = [[] for _ in range(record.last_round)]
    for client, rows in record.trainings.items():
        for row, value in zip(rows, curves[client], strict=True):
            by_round[row["round"] - 1].append(value)
    return np.array([np.mean(values, axis=0) for values in by_round])


def solves_by_client(record: Record) -> dict[str, np.ndarray]:
    """Returns λ of all solves of each client that makes its own, shape [solves, M] by client."""
    return {
        client: np.concatenate([np.array(row["weights"]) for row in rows])
        for client, rows in record.trainings.items()
        if rows and all("weights" in row for row in rows)
    }


def solves(record: Record) -> np.ndarray:
    """Returns λ of each solve, the mean over the clients, shape [T K passes, M].

    Of clients that make unequal numbers of solves in a round, the first ones that all make count.
    """
    server = {row["round"]: row["weights"] for row in record.rounds if row.get("weights")}
    by_round: list[list[np.ndarray]] = [[] for _ in range(record.last_round)]
    for rows in record.trainings.values():
        for row in rows:
            own = row.get("weights")
            if own is None:
                own = [[server[row["round"]][name] for name in record.objectives]]
            by_round[row["round"] - 1].append(np.array(own))
    means = []
    for clients in by_round:
        shortest = min(map(len, clients))
        means.append(np.mean([client[:shortest] for client in clients], axis=0))
    return np.concatenate(means)


def mean_variation(record: Record) -> float:
    """Returns the total variation over rounds, Σ |λ_t - λ_{t-1}|, of the first objective's mean λ.

    The mean over a round's clients and solves is what the paper's curves show. It is the calmer the
    more it averages, by √n for n independent solves, whatever the algorithm: compare algorithms
    that average unequal numbers by ``solve_variation``.

    Returns:
        From 0 to T - 1 for T rounds.
    """
    return float(total_variation(weights(record))[0])


def solve_variation(record: Record) -> float:
    """Returns the total variation over rounds of the first objective's λ in one solve a round.

    That is the mean over clients of Σ |λ_t - λ_{t-1}| with λ_t of the client's first solve in a
    round, which all clients make at the global model. Where the server weighs the objectives, its
    weights count as every client's. A client that was not drawn in every round has fewer changes;
    their mean counts T - 1 times.

    Returns:
        From 0 to T - 1 for T rounds; NaN where no client took part twice.
    """
    if any(row.get("weights") for row in record.rounds):
        return mean_variation(record)
    changes = []
    for rows in record.trainings.values():
        if len(rows) > 1:
            firsts = [row["weights"][0] for row in rows]
            changes.append(total_variation(firsts)[0] / (len(rows) - 1))
    return fmean(changes) * (record.last_round - 1) if changes else float("nan")


def weights_disagreement(record: Record) -> float:
    """Returns the standard deviation of the first objective's λ over a round's clients.

    It is that of one solve each, the mean over all solves and rounds; 0 where the server decides.
    """
    if any(row.get("weights") for row in record.rounds):
        return 0.0
    by_round: dict[int, list[np.ndarray]] = {}
    for rows in record.trainings.values():
        for row in rows:
            by_round.setdefault(row["round"], []).append(np.array(row["weights"])[:, 0])
    spreads = []
    for clients in by_round.values():
        shortest = min(map(len, clients))
        if len(clients) > 1:
            spreads.append(np.std([c[:shortest] for c in clients], axis=0, ddof=1).mean())
    return float(np.mean(spreads)) if spreads else 0.0


def cosine(record: Record) -> float:
    """Returns the mean cosine of the first pair of gradients over all solves; NaN without any."""
    values = [
        pair[0]
        for rows in record.trainings.values()
        for row in rows
        for pair in row.get("cosines") or ()
    ]
    return fmean(values) if values else float("nan")


def beta_effect(record: Record) -> float:
    """Returns how far β moved the weights towards uniform ones, the mean over all solves."""
    values = [
        value
        for rows in record.trainings.values()
        for row in rows
        for value in row.get("beta_effect") or ()
    ]
    return fmean(values) if values else float("nan")


def megabytes_up(record: Record) -> float:
    """Returns what the clients uploaded in all rounds, measured, in MB."""
    return sum(row["bytes_up"] for row in record.rounds) / 1e6


def reward_within(name: str, megabytes: float, *, num_rounds: int = 3) -> Figure:
    """Returns the function that reads an objective's training reward at a limit of the upload.

    It is the mean over the last few rounds that the limit, in MB over all clients, allows; NaN when
    it allows none.
    """

    def read(record: Record) -> float:
        spent = np.cumsum([row["bytes_up"] for row in record.rounds]) / 1e6
        allowed = rewards(record)[: np.searchsorted(spent, megabytes * (1 + 1e-9), side="right")]
        column = record.objectives.index(name)
        return float(allowed[-num_rounds:, column].mean()) if len(allowed) else float("nan")

    return read


def final_reward(name: str) -> Figure:
    """Returns the function that reads an objective's mean reward on the test prompts at the end."""
    return lambda record: _final(record)["rewards"][name]["mean"]


def final_score(name: str) -> Figure:
    """Returns the function that reads a raw or further score on the test prompts at the end."""
    return lambda record: _final(record)["scores"][name]["mean"]


def final_kl(record: Record) -> float:
    """Returns the final model's KL from the base model on the test prompts, in nats per reply."""
    return _final(record)["kl"]


def _final(record: Record) -> Row:
    row = final_row(record)
    if row is None:
        raise ValueError(f"the run {record.name} has no final evaluation; let it finish.")
    return row


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    values: tuple[float, ...]
    """One per seed."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return float(np.mean(self.values))

    @property
    def sd(self) -> float:
        """The standard deviation with n - 1; 0 for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else 0.0

    def text(self, digits: int = 3) -> str:
        """Returns mean ± standard deviation."""
        return f"{self.mean:.{digits}f} ± {self.sd:.{digits}f}"


def over_seeds(records: Sequence[Record], figure: Figure) -> Spread:
    """Returns a figure of each of a setting's runs."""
    return Spread(tuple(figure(record) for record in records))


@dataclass(frozen=True)
class Difference:
    """A mean difference of two settings over seeds, paired, and what chance leaves of it."""

    mean: float
    low: float
    """Lower end of the 95 % interval of Student's t."""
    high: float
    """Upper end."""
    num_seeds: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    def text(self, digits: int = 3) -> str:
        """Returns the difference with its interval."""
        return f"{self.mean:+.{digits}f} [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"


def difference(
    first: Sequence[Record], second: Sequence[Record], figure: Figure, *, level: float = 0.95
) -> Difference:
    """Returns how much larger a figure is in the first setting, from runs of the same seeds.

    Args:
        first: Runs of a setting.
        second: Runs of another, of the same seeds in the same order.
        figure: What is compared.
        level: Of the interval.

    Raises:
        ValueError: With fewer than two seeds, or other seeds.
    """
    seeds = [[record.settings["seed"] for record in records] for records in (first, second)]
    if seeds[0] != seeds[1] or len(seeds[0]) < 2:
        raise ValueError(f"two settings are compared on the same two seeds or more, got {seeds}.")
    values = np.array([figure(a) - figure(b) for a, b in zip(first, second, strict=True)])
    mean, error = float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
    reach = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return Difference(mean, mean - reach, mean + reach, len(values))
