import os
import socket
import subprocess
import sys

import pytest

from firm.federation.training import LocalTraining


@pytest.fixture(scope="session")
def two_processes():
    """Starts a Python program as a launcher would start two processes of it.

    Called with Python's arguments; returns the finished processes with what each one printed.
    """

    def run(*arguments: str) -> list[tuple[subprocess.Popen[str], str, str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        members = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "localhost",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        return [(member, *member.communicate(timeout=120)) for member in members]

    return run


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
