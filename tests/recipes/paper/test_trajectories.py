"""The numbers behind curves and claims, against runs whose weights are written out."""

import numpy as np
import pytest

from firm.report.record import Record
from recipes.paper.over_seeds import final_figure, final_reward, final_score
from recipes.paper.trajectories import (
    beta_effect,
    cosine,
    mean_variation,
    megabytes_up,
    reward_within,
    rewards,
    solve_variation,
    solves,
    solves_by_client,
    weights,
    weights_disagreement,
)

# two clients, two rounds, two solves each; of the second objective λ is the rest
LAMBDA = {"client_0": [[0.2, 0.4], [0.6, 0.8]], "client_1": [[0.6, 0.8], [0.6, 0.4]]}
REWARDS = {"client_0": [0.1, 0.3], "client_1": [0.3, None]}


def record(tmp_path, *, seed=0, final=0.5, server=()) -> Record:
    trainings = {}
    for client, rounds in LAMBDA.items():
        trainings[client] = []
        for index, values in enumerate(rounds):
            own = {
                "rewards": {"a": REWARDS[client][index], "b": 0.5},
                "cosines": [[0.5], [1.0]],
                "beta_effect": [0.1, 0.3],
            }
            row = {"round": index + 1, "client": client, **own}
            if not server:
                row["weights"] = [[value, 1 - value] for value in values]
            trainings[client].append(row)
    rows = [{"round": index + 1, "bytes_up": 1_500_000} for index in range(2)]
    for row, value in zip(rows, server, strict=False):
        row["weights"] = {"a": value, "b": 1 - value}
    test = {
        "round": 2,
        "split": "test",
        "rewards": {"a": {"mean": final}},
        "scores": {"t": {"mean": 7.0}},
    }
    return Record(
        name="run",
        path=tmp_path,
        config="",
        settings={"seed": seed},
        run={},
        objectives=("a", "b"),
        clients=tuple(LAMBDA),
        num_rounds=2,
        header={},
        evaluations={"test": [{**test, "kl": 0.25}]},
        trainings=trainings,
        rounds=rows,
        samples=[],
    )


def test_curves_are_the_means_over_the_clients_of_each_round(tmp_path):
    run = record(tmp_path)
    assert weights(run)[:, 0] == pytest.approx([(0.3 + 0.7) / 2, (0.7 + 0.5) / 2])
    assert weights(run).sum(axis=1) == pytest.approx([1, 1])
    assert solves(run)[:, 0] == pytest.approx([0.4, 0.6, 0.6, 0.6])
    assert solves_by_client(run)["client_1"][:, 0] == pytest.approx([0.6, 0.8, 0.6, 0.4])
    # a client that lacks a reward is left out of its mean
    assert rewards(run) == pytest.approx(np.array([[0.2, 0.5], [0.3, 0.5]]))


def test_a_reward_within_an_upload_is_that_of_the_last_rounds_that_it_allows(tmp_path):
    run = record(tmp_path)  # 1.5 MB a round
    assert reward_within("a", 1.5)(run) == pytest.approx(0.2)
    assert reward_within("a", 2.9)(run) == pytest.approx(0.2)
    assert reward_within("a", 3.0)(run) == pytest.approx(0.25)
    assert reward_within("a", 3.0, num_rounds=1)(run) == pytest.approx(0.3)
    assert np.isnan(reward_within("a", 1.4)(run))


def test_the_servers_weights_count_as_every_clients(tmp_path):
    run = record(tmp_path, server=[0.25, 0.75])
    assert weights(run)[:, 0] == pytest.approx([0.25, 0.75])
    assert solves(run)[:, 0] == pytest.approx([0.25, 0.75])
    assert mean_variation(run) == pytest.approx(0.5)
    assert solve_variation(run) == pytest.approx(0.5)
    assert weights_disagreement(run) == 0
    assert solves_by_client(run) == {}


def test_variation_and_disagreement_are_those_of_the_first_objective(tmp_path):
    run = record(tmp_path)
    assert mean_variation(run) == pytest.approx(0.1)  # 0.5 to 0.6
    assert solve_variation(run) == pytest.approx((0.4 + 0.0) / 2)  # 0.2 to 0.6, 0.6 to 0.6
    # spreads of the four solves between the clients: 0.4, 0.4, 0, 0.4 apart
    assert weights_disagreement(run) == pytest.approx(np.mean([0.4, 0.4, 0.0, 0.4]) / 2**0.5)


def test_a_client_that_was_drawn_in_fewer_rounds_counts_with_its_mean_change(tmp_path):
    run = record(tmp_path)
    run.rounds.append({"round": 3, "bytes_up": 1})
    run.trainings["client_1"].append({"round": 3, "weights": [[0.3, 0.7], [0.0, 1.0]]})
    # changes 0.4 at the one, 0 and 0.3 at the other, as if each had seen three rounds
    assert solve_variation(run) == pytest.approx(2 * (0.4 + 0.15) / 2)
    for rows in run.trainings.values():
        del rows[1:]
    assert np.isnan(solve_variation(run))


def test_figures_of_the_solves_and_of_the_end_are_read_off(tmp_path):
    run = record(tmp_path)
    assert cosine(run) == pytest.approx(0.75)
    assert beta_effect(run) == pytest.approx(0.2)
    assert megabytes_up(run) == pytest.approx(3.0)
    assert (final_reward("a")(run), final_score("t")(run)) == (0.5, 7.0)
    assert final_figure("kl")(run) == 0.25
