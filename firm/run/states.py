"""States of clients on the disk."""

import re
from itertools import pairwise
from pathlib import Path

from firm.base.inside import give, remove_folder
from firm.base.sanitize import check_name
from firm.base.state import State
from firm.federation.engines.local import ClientStates, StateMissing
from firm.run.checkpoint import load_state, save_state
from firm.run.errors import UserError
from firm.run.files import file_errors, make_private_folder


class _Folders:
    """Folders such as client_0/round_0003 below a folder."""

    def __init__(self, folder: Path, num_digits: int) -> None:
        self.path, self._num_digits = folder, num_digits

    def of(self, client: str, round: int) -> Path:
        """Returns the folder of a client and a round."""
        name = check_name(client, "a client's name")
        return self.path / name / f"round_{round:0{self._num_digits}d}"

    def rounds(self, client: str) -> list[int]:
        """Returns the rounds of a client's folders, in ascending order."""
        return rounds_in(self.of(client, 0).parent)

    def keep_only(self, client: str, rounds: list[int]) -> None:
        """Removes the client's folders of other rounds."""
        for round in set(self.rounds(client)) - set(rounds):
            remove_folder(self.of(client, round))


def rounds_in(folder: Path) -> list[int]:
    """Returns the rounds of the folders such as round_0003 in a folder, in ascending order."""
    names = (re.fullmatch(r"round_(\d+)", path.name) for path in folder.glob("*"))
    return sorted(int(match[1]) for match in names if match)


class DiskStates(ClientStates):
    """Stores the client states of the last rounds in a folder of a site.

    A site that is killed and restarted continues with the same states; each state is written
    atomically. The last ``num_kept`` accepted states of each client are kept, so that a server can
    fall back to an older checkpoint.
    """

    def __init__(self, folder: Path, *, num_kept: int = 3) -> None:
        self._folders, self._num_kept = _Folders(folder, 6), num_kept
        give(folder)

    def has(self, client: str, round: int) -> bool:
        """Returns whether there is a client's state after a round."""
        return round in self._folders.rounds(client)

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round."""
        if not self.has(client, round):
            raise StateMissing(client, round, self._folders.rounds(client))
        return load_state(self._folders.of(client, round))

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a client's state after a round."""
        save_state(self._folders.of(client, round), state)

    def forget(self, client: str, accepted: int) -> None:
        """Deletes states after the accepted round, and states before the last ``num_kept``."""
        rounds = [each for each in self._folders.rounds(client) if each <= accepted]
        self._folders.keep_only(client, rounds[-self._num_kept :])


class RunStates(ClientStates):
    """Stores new states in memory until a checkpoint is saved, which refers to them on the disk.

    States of the checkpoint's own round stay in memory, too, for clients that train in each round.
    The folder ``clients/NAME/round_0003`` of a run contains a client's state in the checkpoint of
    round 3 and in all later ones, until a newer folder. It is written before the checkpoint, and
    removed with the client's next state once no checkpoint refers to it any more.

    Args:
        run: The run's directory.
        writes: Whether this process writes; otherwise another one writes the same states to the
            same directory.
    """

    def __init__(self, run: Path, *, writes: bool = True) -> None:
        self._run, self._writes = run, writes
        self._folders = _Folders(run / "clients", 4)
        self._new: dict[str, dict[int, State]] = {}
        self._recent: dict[str, State] = {}
        """The states in `_saved` that were taken in the last checkpoint's round."""
        self._saved: dict[str, tuple[int, int]] = {}
        """The round after which a client's state was taken, and that of its folder."""

    def has(self, client: str, round: int) -> bool:
        """Returns whether there is a client's state after a round."""
        saved_round, _ = self._saved.get(client, (None, None))
        return round == saved_round or round in self._new.get(client, ())

    def read(self, client: str, round: int) -> State:
        """Returns a client's state after a round.

        Raises:
            UserError: Its folder is missing or damaged.
        """
        if round in self._new.get(client, ()):
            return self._new[client][round]
        if not self.has(client, round):
            raise StateMissing(client, round, sorted(self._new.get(client, ())))
        if client in self._recent:
            return self._recent[client]
        number = self._saved[client][1]
        try:
            return load_state(self._folders.of(client, number))
        except ValueError as error:
            raise UserError(
                f"the state of {client} is damaged: {error} {self._remedy(number)}"
            ) from error

    def write(self, client: str, round: int, state: State) -> None:
        """Stores a state in memory."""
        self._new.setdefault(client, {})[round] = state

    def forget(self, client: str, accepted: int) -> None:
        """Drops the states in memory, except the accepted one."""
        own = self._new.pop(client, {})
        if accepted in own:
            self._new[client] = {accepted: own[accepted]}

    def save(self, client: str, round: int, now: int) -> State:
        """Returns a reference to a client's state, after writing it if it is new."""
        own = self._new.pop(client, {})
        if round < now:
            self._recent.pop(client, None)
        if round in own:
            last = self._saved.get(client, (0, -1))[1]
            newest = max(now, last + 1)
            if self._writes:
                folder = self._folders.path
                what = f"the state of {client} in {folder}"
                with file_errors(what, "the checkpoints are intact: "):
                    make_private_folder(folder)
                    save_state(self._folders.of(client, newest), own[round])
                    self._prune(client, last, newest)
            self._saved[client] = (round, newest)
            if round == now:
                self._recent[client] = own[round]
        return {"saved": self._saved[client][1]}

    def restore(self, client: str, round: int, saved: State) -> None:
        """Restores what ``save`` returned, or the state in a checkpoint of an older version.

        Raises:
            UserError: The state's folder is missing.
        """
        self._new.pop(client, None)
        self._recent.pop(client, None)
        if "state" in saved:
            self._new[client] = {round: saved["state"]}
            return
        number = saved["saved"]
        if not (path := self._folders.of(client, number)).is_dir():
            raise UserError(f"the state of {client} is missing at {path}. {self._remedy(number)}")
        self._saved[client] = (round, number)

    def _remedy(self, number: int) -> str:
        return (
            f"Restore it from a backup, or remove the folders of round {number} and later in "
            f"{self._run / 'checkpoints'}, to resume from an earlier one, or start a new run."
        )

    def _prune(self, client: str, last: int, newest: int) -> None:
        """Removes folders that no checkpoint refers to, some of which a killed run has left."""
        checkpoints = rounds_in(self._run / "checkpoints")
        own = [each for each in self._folders.rounds(client) if each <= last or each == newest]
        kept = [
            number
            for number, following in pairwise(own)
            if any(number <= each < following for each in checkpoints)
        ]
        self._folders.keep_only(client, [*kept, newest])
