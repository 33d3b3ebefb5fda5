"""Rewards and weights of a run over its rounds: the numbers behind the paper's figures."""

from itertools import groupby
from statistics import fmean

import numpy as np

from firm.fronts import total_variation
from firm.report.record import Record
from firm.report.tables import Setting
from firm.run.rows import Row
from recipes.paper.over_seeds import Figure


def rewards(record: Record) -> np.ndarray:
    """Returns the mean reward of each round's training batches over the clients, shape [T, M]."""
    return _curves(record, "rewards")


def weights(record: Record) -> np.ndarray:
    """Returns λ of each round, the mean over its clients, shape [T, M].

    If the server solves for the weights, they count as every client's.
    """
    return _curves(record, "weights")


def _curves(record: Record, quantity: str) -> np.ndarray:
    run = Setting.of(record.name, 0, [record])
    return np.stack([run.curves(quantity, name)[0] for name in record.objectives], axis=1)


def solves_by_client(record: Record) -> dict[str, np.ndarray]:
    """Returns λ of all solves, shape [solves, M], by client that solves itself."""
    return {
        client: np.concatenate([np.array(row["weights"]) for row in rows])
        for client, rows in record.trainings.items()
        if rows and all("weights" in row for row in rows)
    }


def solves(record: Record) -> np.ndarray:
    """Returns λ of each solve, the mean over the clients, shape [T K passes, M].

    If clients make different numbers of solves in a round, uses the first ones that all make.
    """
    server = _server_weights(record)
    means = []
    for at, rows in _by_round(record):
        clients = [np.array(row.get("weights") or [server[at]]) for row in rows]
        shortest = min(map(len, clients))
        means.append(np.mean([client[:shortest] for client in clients], axis=0))
    return np.concatenate(means)


def _server_weights(record: Record) -> dict[int, list[float]]:
    """Returns the server's weights by round, if it solves for them."""
    rows = (row for row in record.rounds if row.get("weights"))
    return {row["round"]: [row["weights"][name] for name in record.objectives] for row in rows}


def _by_round(record: Record) -> list[tuple[int, list[Row]]]:
    """Returns the clients' rows by round."""
    rows = [row for own in record.trainings.values() for row in own]
    ordered = sorted(rows, key=lambda row: row["round"])
    return [(at, list(own)) for at, own in groupby(ordered, lambda row: row["round"])]


def mean_variation(record: Record) -> float:
    """Returns the total variation over rounds, Σ |λ_t - λ_{t-1}|, of the first objective's mean λ.

    The paper's curves show this mean over a round's clients and solves. For any algorithm, the mean
    of n independent solves varies less by √n: use ``solve_variation`` to compare algorithms that
    average different numbers of solves. Ranges from 0 to T - 1 for T rounds.
    """
    return float(total_variation(weights(record))[0])


def solve_variation(record: Record) -> float:
    """Returns the total variation over rounds of the first objective's λ in one solve a round.

    This is the mean over clients of Σ |λ_t - λ_{t-1}|, with λ_t of the client's first solve in a
    round, which all clients make at the global model. If the server solves for the weights, they
    count as every client's. For clients that were not drawn in every round, the mean change is
    multiplied by T - 1. NaN if no client participated twice.
    """
    if _server_weights(record):
        return mean_variation(record)
    changes = []
    for rows in record.trainings.values():
        if len(rows) > 1:
            firsts = [row["weights"][0] for row in rows]
            changes.append(total_variation(firsts)[0] / (len(rows) - 1))
    return fmean(changes) * (record.last_round - 1) if changes else float("nan")


def weights_disagreement(record: Record) -> float:
    """Returns the standard deviation of the first objective's λ over a round's clients.

    It is computed from one solve per client and averaged over all solves and rounds; 0 if the
    server solves for the weights.
    """
    if _server_weights(record):
        return 0.0
    spreads = []
    for _, rows in _by_round(record):
        clients = [np.array(row["weights"])[:, 0] for row in rows]
        shortest = min(map(len, clients))
        if len(clients) > 1:
            spreads.append(np.std([c[:shortest] for c in clients], axis=0, ddof=1).mean())
    return float(np.mean(spreads)) if spreads else 0.0


def cosine(record: Record) -> float:
    """Returns the mean cosine of the first pair of gradients over all solves; NaN without any."""
    return _mean_over_solves(record, "cosines")


def beta_effect(record: Record) -> float:
    """Returns the mean effect of β over all solves: the relative shift towards uniform weights."""
    return _mean_over_solves(record, "beta_effect")


def _mean_over_solves(record: Record, key: str) -> float:
    entries = [e for _, rows in _by_round(record) for row in rows for e in row.get(key) or ()]
    return fmean(e[0] if isinstance(e, list) else e for e in entries) if entries else float("nan")


def megabytes_up(record: Record) -> float:
    """Returns the measured uploads of all clients and rounds, in MB."""
    return sum(row["bytes_up"] for row in record.rounds) / 1e6


def reward_within(name: str, megabytes: float, *, num_rounds: int = 3) -> Figure:
    """Returns a function that reads an objective's training reward at an upload limit.

    The function returns the mean over the last rounds within the limit, in MB over all clients; NaN
    if no round is within it.
    """

    def read(record: Record) -> float:
        spent = np.cumsum([row["bytes_up"] for row in record.rounds]) / 1e6
        allowed = rewards(record)[: np.searchsorted(spent, megabytes * (1 + 1e-9), side="right")]
        column = record.objectives.index(name)
        return float(allowed[-num_rounds:, column].mean()) if len(allowed) else float("nan")

    return read
