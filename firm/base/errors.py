"""Errors that end a round or the work of a client; they need no library to be caught."""

from collections.abc import Mapping, Sequence


class RoundFailed(RuntimeError):
    """Raised when too few clients finish a round; the last checkpoint is still valid.

    Args:
        reason: Why.
        number: The round's number.
        asked: Names of the clients that received a request.
        failed: Reasons of those that did not answer, or whose answers were refused, by name.
        is_of_machine: Whether the machine or rollout engine that the clients share failed, so that
            another try would fail, too.
    """

    def __init__(
        self,
        reason: str,
        *,
        number: int,
        asked: Sequence[str] = (),
        failed: Mapping[str, str] | None = None,
        is_of_machine: bool = False,
    ) -> None:
        super().__init__(f"{reason}; repair the cause, then resume from round {number - 1}.")
        self.reason = reason
        self.asked, self.failed = tuple(asked), dict(failed or {})
        self.is_of_machine = is_of_machine
        self.spent: tuple[int, int, float] = (0, 0, 0.0)
        """Bytes to and from the clients, and seconds."""


class RolloutError(RuntimeError):
    """Raised when a rollout engine cannot sample; the last checkpoint is still valid.

    It does not count as a failure of a client.
    """


class DivergedError(RolloutError):
    """Raised when figures of the sampling policy, such as its logits, are not finite.

    It counts as a failure of a client, whose own training may be the cause.

    Args:
        what: The figures.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"sampling the replies: {what} are not finite; lower the learning rate, or use "
            "policy.dtype float32 or bfloat16."
        )


class WithheldError(RuntimeError):
    """Raised in the place of an error whose text may quote data; the error is its cause."""


class Terminated(KeyboardInterrupt):
    """Raised when this process receives SIGTERM; like Ctrl-C, this is not a defect."""


class ProcessLost(RuntimeError):
    """Raised when another process of the run is gone; the last checkpoint is still valid.

    It does not count as a failure of a client.
    """


class TimeLimitError(TimeoutError):
    """Raised when a client's time limit has passed, to interrupt the work in progress."""


class TeamLost(ProcessLost):
    """Raised when the lost process worked on the same client as this process."""
