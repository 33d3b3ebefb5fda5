"""Pages are redrawn for a small share of the time, and always when something goes wrong."""

import pytest

from firm.run.pace import SHARE, Paced


class Round:
    """A clock, and a page whose drawing takes longer with every round."""

    def __init__(self):
        self.now, self.drawn, self.seconds = 0.0, [], 0.0
        self.number = 0

    def clock(self):
        return self.now

    def train(self, seconds):
        self.number += 1
        self.now += seconds

    def draw(self):
        self.drawn.append(self.number)
        self.now += 0.001 * self.number
        self.seconds += 0.001 * self.number


def test_drawing_takes_up_no_more_than_its_share_however_long_it_takes():
    rounds = Round()
    page = Paced(rounds.draw, clock=rounds.clock)
    for _ in range(3000):  # at the end, the page takes 30 times as long as a round
        rounds.train(0.1)
        page()
    assert rounds.seconds / rounds.now <= 1.1 * SHARE  # each takes longer than the one before
    assert rounds.seconds / rounds.now > SHARE / 2  # no more out of date than necessary


def test_a_page_is_drawn_after_every_round_that_takes_long():
    rounds = Round()
    page = Paced(rounds.draw, clock=rounds.clock)
    for _ in range(50):
        rounds.train(60.0)
        page()
    assert rounds.drawn == list(range(1, 51))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_has_the_page_drawn_even_if_it_is_not_due(error):
    rounds = Round()

    def work():
        with Paced(rounds.draw, clock=rounds.clock) as page:
            for _ in range(2):
                rounds.train(0.0)
                page()
            raise error

    with pytest.raises(error):
        work()
    assert rounds.drawn == [1, 2]


def test_nothing_is_drawn_where_nothing_has_begun():
    rounds = Round()
    with pytest.raises(ValueError), Paced(rounds.draw, clock=rounds.clock):
        raise ValueError
    assert rounds.drawn == []
