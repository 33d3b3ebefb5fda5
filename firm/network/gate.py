"""Gates at which a site and a server check a job before accepting it and before running it.

FLARE builds these components from the resources of a kit, which its owner writes; a job cannot
change them. `AppGate` checks a job's folder as soon as it is unpacked. `SiteGate` and `ServerGate`
start the process of a job, and check in this process each component that its configuration builds.
They also disable FLARE's commands and requests that no run needs.
"""

import logging
import shlex
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessJobLauncher
from nvflare.app_common.job_launcher.server_process_launcher import ServerProcessJobLauncher
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.proto import MetaStatusValue, make_meta
from nvflare.fuel.hci.server.constants import ConnProps
from nvflare.fuel.hci.server.reg import CommandFilter
from nvflare.private.defs import TrainingTopic
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from firm.base.sanitize import printable
from firm.network.jobs import (
    App,
    problem_of_app,
    problem_of_component,
    problem_of_meta,
    server_app,
    site_app,
)
from firm.network.wire import LISTENING

logger = logging.getLogger(__name__)

COMMANDS = frozenset(
    {
        *("_cert_login", "_check_session", "_commands", "_logout"),  # used by every session
        *("submit_job", "abort_job", "app_command"),
        *("check_status", "list_jobs", "get_job_meta", "get_job_log"),
    }
)
"""FLARE commands that a server executes for an administrator."""

REQUESTS = frozenset(
    {
        TrainingTopic.DEPLOY,
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.START_JOB,
        TrainingTopic.NOTIFY_JOB_STATUS,
        TrainingTopic.CHECK_STATUS,
        TrainingTopic.ABORT,
    }
)
"""FLARE topics of the requests that a site accepts from its server. The other topics read files of
the site, change its log level, stop it, or describe its machine."""

Arguments = Sequence[tuple[str, Any]]
"""Arguments of a workflow as pairs, since FLARE mistakes some mappings for components to build."""


class AppGate(AppValidator):
    """Refuses jobs whose folder contains anything that this party does not allow.

    The server allows one workflow, with a fixed set of arguments.
    """

    def __init__(self, controller: str = "", arguments: Arguments = ()) -> None:
        self._allowed = server_app(controller, dict(arguments)) if controller else site_app()

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Returns the problem of a folder, empty if there is none, and an empty dictionary."""
        problem = problem_of_app(Path(app_folder), self._allowed)
        if problem:
            logger.error("%s", problem)
        return problem or "", {}


class _Gate(ProcessJobLauncher):
    """Starts the process of an allowed job, and checks each component built in the process."""

    def __init__(self, allowed: App) -> None:
        super().__init__()
        self._allowed = allowed

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Starts the process of a job; raises ``RuntimeError`` if the job is not allowed."""
        workspace: Any = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        folder = Path(workspace.get_app_dir(job_meta["job_id"]))
        problem = problem_of_meta(job_meta) or problem_of_app(folder, self._allowed)
        if problem:
            logger.error("%s", problem)
            raise RuntimeError(problem)
        return super().launch_job(job_meta, fl_ctx)

    def get_command(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> str:
        """Returns the command of a job's process as a string in shell syntax.

        FLARE adds paths to it without quoting, and later splits it at white space, quotes and "#".
        """
        arguments = {
            name: (flag, value if name == JobProcessArgs.OPTIONS else shlex.quote(str(value)))
            for name, (flag, value) in fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS, {}).items()
        }
        quoted = FLContext()
        quoted.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments, private=True, sticky=False)
        command = super().get_command(job_meta, quoted)
        return shlex.quote(sys.executable) + command.removeprefix(sys.executable)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Refuses classes and arguments that are not allowed in the process of a job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            try:
                self._bootstrap(fl_ctx)
            except Exception as error:  # FLARE would continue on any other exception
                raise UnsafeComponentError(f"this FLARE cannot be restricted: {error}") from error
        if event_type == EventType.BEFORE_BUILD_COMPONENT:
            component = fl_ctx.get_prop(FLContextKey.COMPONENT_CONFIG)
            if problem := problem_of_component(component, self._allowed):
                logger.error("%s", problem)
                raise UnsafeComponentError(problem)

    @abstractmethod
    def _bootstrap(self, fl_ctx: FLContext) -> None:
        """Disables FLARE features that no run needs, before FLARE serves any request."""


class SiteGate(_Gate, ClientProcessJobLauncher):
    """Gate of a site, which also restricts the server's requests to ``REQUESTS``.

    Requests from other sites, which an honest server forwards, are rejected.
    """

    def __init__(self) -> None:
        super().__init__(site_app())

    def _bootstrap(self, fl_ctx: FLContext) -> None:
        processors = ClientRequestProcessors.request_processors
        processors[:] = [each for each in processors if set(each.get_topics()) <= REQUESTS]
        connection: Any = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
        _hear_only(("server", str(fl_ctx.get_identity_name())), connection.cell)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Makes a job's process reject requests from other sites."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.ABOUT_TO_START_RUN:
            engine: Any = fl_ctx.get_engine()
            _hear_only(("server", str(fl_ctx.get_identity_name())), engine.get_cell())


class ServerGate(_Gate, ServerProcessJobLauncher):
    """Gate of a server, which also restricts an administrator's commands to ``COMMANDS``."""

    def __init__(self, controller: str, arguments: Arguments) -> None:
        super().__init__(server_app(controller, dict(arguments)))

    def _bootstrap(self, fl_ctx: FLContext) -> None:
        server: Any = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
        set_admin_server = server.set_admin_server

        def set_with_filter(admin_server: Any) -> None:
            admin_server.cmd_reg.add_filter(CommandGate())
            set_admin_server(admin_server)

        server.set_admin_server = set_with_filter  # the admin server is created after this event


class CommandGate(CommandFilter):
    """Refuses an administrator's commands unless they are listed in ``COMMANDS``.

    A command for a job that does not listen is answered here, since FLARE would log an error.
    """

    def pre_command(self, conn: Connection, args: list[str]) -> bool:
        """Returns whether a command is allowed."""
        entry = conn.get_prop(ConnProps.CMD_ENTRY)  # `args` may contain the name with its module
        if entry and entry.name == "app_command" and not _listens(conn, args):
            meta = make_meta(MetaStatusValue.JOB_NOT_RUNNING, "it does not listen")
            conn.append_error("the job does not listen", meta=meta)
            return False
        if entry and entry.name in COMMANDS:
            return True
        command = printable(args[0], max_length=100)
        logger.error("refused the command %s, which no run needs", command)
        conn.append_error(
            f"{command} is not allowed here",
            meta=make_meta(MetaStatusValue.NOT_AUTHORIZED, "no run needs this command"),
        )
        return False


def _listens(conn: Connection, args: Sequence[str]) -> bool:
    engine: Any = conn.app_ctx
    try:
        folder = Workspace(engine.args.workspace).get_run_dir(args[1])
    except (LookupError, ValueError):  # not the name of a job
        return False
    return (Path(folder) / LISTENING).exists()


def _hear_only(parties: Sequence[str], cell: Any) -> None:
    """Rejects requests unless they come from `parties`; the server authenticates their origin."""
    cell.core_cell.add_incoming_request_filter("*", "*", _refuse_strangers, parties)


def _refuse_strangers(message: Message, parties: Sequence[str]) -> Message | None:
    origin = str(message.get_header(MessageHeaderKey.ORIGIN))
    if origin.split(".")[0] in parties:
        return None
    logger.error("refused a request from %s", printable(origin, max_length=100))
    return make_reply(
        ReturnCode.UNAUTHENTICATED, error="a site accepts requests of its server only"
    )
