import pytest

from firm.federation.training import LocalTraining
from tests import nursery


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """Runs a Python program in two processes of a launcher's environment."""
    folder = tmp_path_factory.mktemp("two_processes")
    with nursery.two_processes(folder, "import torch, firm.federation") as run:
        yield run


@pytest.fixture
def request_of(start):
    """What a round of local training sends: ``request_of(round_number, accepted)``."""

    def build(round_number, accepted):
        return LocalTraining(
            round=round_number,
            objectives=start.objectives,
            adapter=start.adapter,
            accepted=accepted,
            num_local_steps=2,
            weighting="firm",
        )

    return build
