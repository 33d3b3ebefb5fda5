"""Clients' states on a site's own disk."""

import re
import shutil
from pathlib import Path

from firm.federation.client import State
from firm.federation.engines.states import StateMissing
from firm.federation.outside import check_name
from firm.run.checkpoint import load_state, save_state


class DiskStates:
    """Keeps clients' states in a run's folder, for the last rounds; implements ``ClientStates``.

    A site that is killed and started again goes on with the same states, each written as a whole or
    not at all. Of each client the last ``num_kept`` accepted ones stay, so that a server that falls
    back to an older checkpoint finds those that it needs.
    """

    def __init__(self, folder: Path, *, num_kept: int = 3) -> None:
        self._folder, self._num_kept = folder, num_kept

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        if round not in self._rounds(client):
            raise StateMissing(client, round, self._rounds(client))
        return load_state(self._path(client, round))

    def write(self, client: str, round: int, state: State) -> None:
        """Keeps a state."""
        save_state(self._path(client, round), state)

    def forget(self, client: str, accepted: int) -> None:
        """Drops what came after the accepted round, and what is older than the last few."""
        rounds = self._rounds(client)
        kept = [round for round in rounds if round <= accepted][-self._num_kept :]
        for round in set(rounds) - set(kept):
            shutil.rmtree(self._path(client, round))

    def _rounds(self, client: str) -> list[int]:
        names = (re.fullmatch(r"round_(\d+)", path.name) for path in self._of(client).glob("*"))
        return sorted(int(match[1]) for match in names if match)

    def _path(self, client: str, round: int) -> Path:
        return self._of(client) / f"round_{round:06d}"

    def _of(self, client: str) -> Path:
        return self._folder / check_name(client, "a client's name")
