"""FLARE workflow at the server that sends a strategy's requests to its sites."""

import io
import json
import logging
import math
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.private.admin_defs import Message
from nvflare.private.defs import (
    CellChannel,
    ClientStatusKey,
    TrainingTopic,
    new_cell_message,
)

from firm.base.sanitize import printable
from firm.network.jobs import POLL
from firm.network.sites import Lost, SitesReturned
from firm.network.wire import LISTENING, TASK, THERE, from_model, to_model

logger = logging.getLogger(__name__)

REASON, RESTART = "the run ended early: ", "the run must be restarted: "
"""Prefixes of the reason in the server's log."""

SAID = "firm.said"
"""Command with which an administrator reads the output of a running job."""

FOLLOWING = 10.0
"""Seconds between two questions of an administrator who follows a job, at most; they ask every
second, but their machine may be busy."""
_LOOK, _PATIENCE = 2.0, 5.0
"""Seconds between two checks that the sites still to answer are connected, and the timeout of a
check."""
_AWAY = "it is not connected"
_BACK = "it is connected, and takes part again after a restart of the run"

_PROBLEMS = {
    ReturnCode.EXECUTION_EXCEPTION: "its process has died, or does not answer its site",
    ReturnCode.TASK_ABORTED: "the task was aborted there",
}


class Stopped(RuntimeError):
    """Raised when the job is stopped by a user; the last checkpoint is intact."""


class SitesController(ModelController):
    """Base class of programs that run over the sites of a FLARE job."""

    def __init__(self) -> None:
        super().__init__(task_check_period=POLL, ignore_result_error=True)

    @abstractmethod
    def work(self, channel: "FlareChannel") -> None:
        """Runs the program; the job ends when this method returns."""

    def run(self) -> None:
        """Runs the job; called by FLARE when the job starts."""
        channel = FlareChannel(self)
        try:
            with channel.listening():
                self.work(channel)
        except Stopped:
            logger.info("the job was stopped")
        except SitesReturned as error:
            reason = printable(error)
            logger.info("%s%s", RESTART, reason)
            self.panic(reason)
        except Exception as error:  # FLARE would end the job without reporting the error
            reason = printable(" ".join(str(error).split()), max_length=2000)
            logger.exception("the workflow failed with this traceback")
            logger.error("%s%s", REASON, reason)  # last: readers start at the log's end
            self.panic(reason)


class Transcript(io.StringIO):
    """A file that forwards text to another file and keeps a copy."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._num_heard, self._asked_at = 0, -math.inf

    @property
    def is_followed(self) -> bool:
        """Whether an administrator follows the job."""
        return time.monotonic() < self._asked_at + FOLLOWING

    @property
    def lines(self) -> list[str]:
        """The complete lines written so far."""
        return self.getvalue().split("\n")[:-1]

    def since(self, num_heard: int) -> list[str]:
        """Returns the complete lines after the first `num_heard`, for an administrator."""
        lines = self.lines
        self._num_heard, self._asked_at = len(lines), time.monotonic()
        return lines[num_heard:]

    def wait_until_heard(self) -> None:
        """Waits until an administrator who follows the job has asked for its last lines.

        FLARE answers no command of a job that has ended. Ends when nobody asks any more.
        """
        while self._num_heard < len(self.lines) and self.is_followed:
            time.sleep(POLL)

    def write(self, text: str, /) -> int:
        """Writes the text and returns its number of characters."""
        self._file.write(text)
        return super().write(text)

    def flush(self) -> None:
        """Flushes the underlying file."""
        self._file.flush()


class FlareChannel:
    """Carries messages to the sites of a FLARE job; implements ``Channel``.

    Attributes:
        transcript: Output shown to administrators who follow the job.
    """

    def __init__(self, controller: SitesController) -> None:
        self._controller = controller
        self._lost = set[str]()
        self.transcript = Transcript(sys.stdout)
        self._engine.register_app_command(SAID, self._lines_since)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answers an administrator's commands; on exit, waits until the last lines are read."""
        folder = self._engine.get_workspace().get_run_dir(self._context.get_job_id())
        marker = Path(folder) / LISTENING
        marker.touch()
        try:
            yield
        finally:
            self.transcript.wait_until_heard()
            marker.unlink(missing_ok=True)

    def ask(self, messages: Mapping[str, bytes], *, timeout: float) -> dict[str, bytes | Lost]:
        """Returns each site's answer, or the reason for a missing one; see ``Channel``.

        Raises:
            Stopped: The job was stopped in the meantime.
        """
        answers: dict[str, bytes | Lost] = {}
        changed = threading.Condition()

        def received(site: str, client_task: ClientTask, fl_ctx: FLContext) -> None:
            answer, client_task.result = _read(client_task.result), None
            with changed:
                answers.setdefault(site, answer)
                changed.notify()

        tasks = {}
        for site, message in messages.items():
            tasks[site] = Task(
                name=TASK,
                data=FLModelUtils.to_shareable(to_model(message)),
                timeout=math.ceil(timeout),
                result_received_cb=partial(received, site),
            )
            self._controller.broadcast(
                task=tasks[site], fl_ctx=self._context, targets=[site], min_responses=1
            )
        deadline = time.monotonic() + timeout
        next_look, missed = time.monotonic() + _LOOK, set[str]()
        while time.monotonic() < deadline:
            with changed:
                waiting = [site for site in messages if site not in answers]
                if not waiting:
                    break
                changed.wait(min(0.2, deadline - time.monotonic()))
            if self._controller.abort_signal.triggered:
                raise Stopped
            if time.monotonic() >= next_look:
                missed_before, missed = missed, self._missing(waiting)
                if gone := missed & missed_before:  # a single miss may be transient
                    back = self._outside_job(gone)
                    with changed:
                        for site in gone:
                            answers.setdefault(site, Lost(_BACK if site in back else _AWAY))
                next_look = time.monotonic() + _LOOK
        with changed:
            for site in messages.keys() - answers.keys():
                answers[site] = Lost(f"no answer within {timeout:g} s")
            for site, answer in answers.items():
                self._lost.discard(site)
                if isinstance(answer, Lost):
                    self._lost.add(site)
                    self._controller.cancel_task(tasks[site], fl_ctx=self._context)
            return {site: answers[site] for site in messages}

    def returned(self) -> list[str]:
        """Returns the reconnected sites: FLARE does not let them rejoin a running job.

        Returns none while others are away, without which a job does not start, or if no
        administrator follows the job, who would have to restart it.
        """
        back = self._outside_job(self._lost) if self.transcript.is_followed else []
        return back if len(back) == len(self._lost) else []

    def close(self) -> None:
        """Does nothing: FLARE notifies the sites of the job's end."""

    def _lines_since(self, topic: str, asked: dict[str, int], fl_ctx: FLContext) -> dict[str, Any]:
        return {"lines": self.transcript.since(asked["num_heard"])}

    def _missing(self, sites: list[str]) -> set[str]:
        """Returns the unreachable sites: their connection or their job has ended."""
        replies = self._engine.send_aux_request(
            targets=sites,
            topic=THERE,
            request=Shareable(),
            timeout=_PATIENCE,
            fl_ctx=self._context,
            optional=True,
        )
        gone = ReturnCode.COMMUNICATION_ERROR  # a slow site does not count as unreachable
        return {site for site, reply in replies.items() if reply.get_return_code() == gone}

    def _outside_job(self, sites: Collection[str]) -> list[str]:
        """Returns the given sites that are connected to the server, but do not run this job."""
        if not sites:
            return []
        topic = TrainingTopic.CHECK_STATUS
        requests = {
            site: TargetMessage(
                site, CellChannel.CLIENT_MAIN, topic, new_cell_message({}, Message(topic, ""))
            )
            for site in sites
        }
        cell, job = self._engine.get_cell(), self._context.get_job_id()
        replies = cell.broadcast_multi_requests(requests, _PATIENCE, optional=True)
        return sorted(
            site for site, reply in replies.items() if job not in _jobs(reply.payload, job)
        )

    @property
    def _context(self) -> Any:
        return self._controller.fl_ctx

    @property
    def _engine(self) -> Any:
        return self._controller.engine


def _jobs(status: Any, own: str) -> list[str]:
    """Returns the jobs in a site's status; only its own one if the site sent no valid status."""
    try:
        jobs = json.loads(status.body)[ClientStatusKey.RUNNING_JOBS]
        return [job[ClientStatusKey.JOB_ID] for job in jobs]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return [own]


def _read(result: Any) -> bytes | Lost:
    code = result.get_return_code()
    if code != ReturnCode.OK:
        return Lost(_PROBLEMS.get(code, f"FLARE says {printable(code)}"))
    try:
        return from_model(FLModelUtils.from_shareable(result))
    except Exception as error:  # a malicious answer may raise anything
        return Lost(f"its answer cannot be read: {printable(error)}")
