import pytest


@pytest.fixture
def two_clients(new_plain_client):
    """Clients whose first updates from the origin are (2, 0, 0) and (0, 1, 0), of losses 8 and 2.

    Called with the options of the second one, who may attack.
    """

    def build(**attack):
        return [
            new_plain_client("a", [[4.0, 0.0, 0.0]] * 2),
            new_plain_client("b", [[0.0, 2.0, 0.0]] * 2, **attack),
        ]

    return build


@pytest.fixture
def rewarded(new_plain_client):
    """Builds a client that sends rewards, by default of all: ``rewarded(name, targets)``."""

    def build(name: str, targets: list[list[float]], *, known=("left", "right"), **options):
        return new_plain_client(name, targets, rewarded=known, **options)

    return build
