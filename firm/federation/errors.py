"""Errors that end a round or the work of a client; they need no library to be caught."""


class RoundFailed(RuntimeError):
    """Raised when too few clients finish a round; the last checkpoint is still valid."""


class ProcessLost(RuntimeError):
    """Raised when another process of the run is gone; the last checkpoint is still valid.

    It does not count as a failure of a client.
    """


class TimeLimitError(TimeoutError):
    """Raised when a client's time limit has passed, to interrupt the work in progress."""


class TeamLost(ProcessLost):
    """Raised when the lost process worked on the same client as this process."""
