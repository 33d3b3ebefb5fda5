"""Storage of client states on a site's disk."""

import re
from pathlib import Path

from firm.base.inside import give, remove_folder
from firm.base.sanitize import check_name
from firm.base.state import State
from firm.federation.engines.local import StateMissing
from firm.run.checkpoint import load_state, save_state


class DiskStates:
    """Stores the client states of the last rounds in a run's folder; implements ``ClientStates``.

    A site that is killed and restarted continues with the same states; each state is written
    atomically. The last ``num_kept`` accepted states of each client are kept, so that a server can
    fall back to an older checkpoint.
    """

    def __init__(self, folder: Path, *, num_kept: int = 3) -> None:
        self._folder, self._num_kept = folder, num_kept
        give(folder)

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        if round not in self._rounds(client):
            raise StateMissing(client, round, self._rounds(client))
        return load_state(self._path(client, round))

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a client's state after a round."""
        save_state(self._path(client, round), state)

    def forget(self, client: str, accepted: int) -> None:
        """Deletes states after the accepted round, and states before the last ``num_kept``."""
        rounds = self._rounds(client)
        kept = [round for round in rounds if round <= accepted][-self._num_kept :]
        for round in set(rounds) - set(kept):
            remove_folder(self._path(client, round))

    def _rounds(self, client: str) -> list[int]:
        names = (re.fullmatch(r"round_(\d+)", path.name) for path in self._of(client).glob("*"))
        return sorted(int(match[1]) for match in names if match)

    def _path(self, client: str, round: int) -> Path:
        return self._of(client) / f"round_{round:06d}"

    def _of(self, client: str) -> Path:
        return self._folder / check_name(client, "a client's name")
