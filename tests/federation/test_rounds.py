from collections import Counter

import pytest

from firm.federation.rounds import sample_clients

CLIENTS = [f"client_{index}" for index in range(8)]


def test_equal_seed_and_round_draw_alike_and_others_differ():
    draws = {
        (seed, number): tuple(sample_clients(CLIENTS, seed=seed, round_number=number, count=4))
        for seed in range(3)
        for number in range(1, 11)
    }
    for (seed, number), draw in draws.items():
        assert tuple(sample_clients(CLIENTS, seed=seed, round_number=number, count=4)) == draw
    assert len(set(draws.values())) > 20  # 30 draws out of 70 subsets


def test_clients_are_distinct_and_in_their_given_order():
    for number in range(1, 20):
        drawn = sample_clients(CLIENTS, seed=0, round_number=number, count=5)
        assert len(drawn) == 5
        assert drawn == sorted(set(drawn), key=CLIENTS.index)


def test_every_client_is_drawn_about_equally_often():
    draws = (sample_clients(CLIENTS, seed=1, round_number=r, count=2) for r in range(1, 401))
    counts = Counter(name for drawn in draws for name in drawn)
    assert all(60 < counts[name] < 140 for name in CLIENTS)  # mean 100, standard deviation 8.7


def test_all_take_part_by_default():
    assert sample_clients(CLIENTS, seed=0, round_number=1) == CLIENTS
    assert sample_clients(CLIENTS, seed=0, round_number=1, count=8) == CLIENTS


def test_named_clients_take_part_in_every_round_and_the_others_in_turn():
    always, seen = ["client_7", "client_2"], set()
    for number in range(1, 40):
        drawn = sample_clients(CLIENTS, seed=3, round_number=number, count=4, always=always)
        assert len(drawn) == 4
        assert {"client_2", "client_7"} < set(drawn)
        assert drawn == sorted(drawn)
        seen |= set(drawn)
    assert seen == set(CLIENTS)
    everybody = sample_clients(CLIENTS, seed=3, round_number=1, always=always)
    assert everybody == CLIENTS


def test_the_draws_of_a_seed_stay_what_they_are():
    drawn = [sample_clients(CLIENTS, seed=0, round_number=r, count=3) for r in (1, 2)]
    assert drawn == [["client_1", "client_3", "client_4"], ["client_3", "client_4", "client_7"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 9}, "from 1 to the number of clients, 8, got 9"),
        ({"count": 0}, "from 1 to the number of clients, 8"),
        (
            {"always": ["phd"]},
            r"always has the unknown client 'phd'; choose from client_0, .*\.\.\.",
        ),
        ({"always": ["client_0"], "count": 1}, "exceed the number of clients in always, 1, got 1"),
    ],
)
def test_sizes_and_names_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sample_clients(CLIENTS, seed=0, round_number=1, **options)
