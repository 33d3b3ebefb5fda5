"""What privacy costs, before any training: ε of a client by noise, sampling and rounds.

    python benchmarks/privacy_budget.py
    python benchmarks/privacy_budget.py --noise 4 8 --num_clients 1000 --drawn 10 --rounds 16
    python benchmarks/privacy_budget.py --num_parameters 65536 4096 1024 256 --epsilon 8 2

Four tables, all at one δ. Noise at the server, without and with sampling that stays secret; noise
at each client, against the server and against all others. And where the other federation is one in
which the client sends nothing, not one in which another stands in its place. The last table turns
the question round: for how many clients, all of whom take part, is the noise of a round's mean no
longer than the longest delta S? With d trained parameters it is zS√d / n long.
"""

import argparse
import math
from collections.abc import Sequence

from firm.federation.options.accounting import gaussian_epsilon
from firm.run import print_table


def tables(
    noise: Sequence[float],
    rounds: Sequence[int],
    drawn: Sequence[int],
    num_clients: int,
    delta: float,
) -> None:
    """Prints the tables for all noise multipliers z, rounds T and draws of n of C clients."""
    header = ["z", *(f"q = {n / num_clients:g}, T = {t}" for n in drawn for t in rounds)]
    rows = [
        [
            f"{z:g}",
            *(
                gaussian_epsilon({z / 2: t}, delta, sample=(n, num_clients))
                for n in drawn
                for t in rounds
            ),
        ]
        for z in noise
    ]
    print_table(f"at: server, who took part stays secret; ε at δ = {delta:g}", header, rows)

    header = ["z", *(f"{whom}, T = {t}" for whom in ("server", "others") for t in rounds)]
    rows = [
        [
            f"{z:g}",
            *(gaussian_epsilon({z / 2: t}, delta) for t in rounds),
            *(gaussian_epsilon({z / 2 * num_clients**0.5: t}, delta) for t in rounds),
        ]
        for z in noise
    ]
    print_table(f"at: client, all {num_clients} take part; ε at δ = {delta:g}", header, rows)

    header = ["z", *(f"q = 1, T = {t}" for t in rounds)]
    rows = [[f"{z:g}", *(gaussian_epsilon({z: t}, delta) for t in rounds)] for z in noise]
    print_table(f"at: server, a client or none; ε at δ = {delta:g}", header, rows)


def needed_clients(
    sizes: Sequence[int], rounds: Sequence[int], epsilons: Sequence[float], delta: float
) -> None:
    """Prints for each adapter's size d how many clients make the noise as short as one delta."""
    noise = {(e, t): noise_for(e, t, delta) for e in epsilons for t in rounds}
    rows = [
        ["z", *(f"{z:.2f}" for z in noise.values())],
        *(
            [f"d = {size:,}", *(f"{math.ceil(z * size**0.5):,}" for z in noise.values())]
            for size in sizes
        ),
    ]
    header = ["", *(f"ε = {e:g}, T = {t}" for e, t in noise)]
    print_table(f"at: server; clients for noise of length S, δ = {delta:g}", header, rows)


def noise_for(epsilon: float, rounds: int, delta: float) -> float:
    """Returns the smallest noise multiplier z whose ε is not above this one, to 0.1 %."""
    low, high = 0.0, 1.0
    while gaussian_epsilon({high / 2: rounds}, delta) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if gaussian_epsilon({middle / 2: rounds}, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[16, 100])
    parser.add_argument("--num_clients", type=int, default=8)
    parser.add_argument("--drawn", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--num_parameters", type=int, nargs="+", default=[65_536, 4_096, 1_024])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0, 2.0])
    given = parser.parse_args()
    tables(given.noise, given.rounds, given.drawn, given.num_clients, given.delta)
    needed_clients(given.num_parameters, given.rounds, given.epsilon, given.delta)
