"""FLARE executor at a site, the only class that a job may instantiate there."""

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.client.config import ExchangeFormat

from firm.network.link import ATTACH_ID
from firm.network.wire import THERE


class SiteExecutor(ClientAPIExecutor):
    """Forwards a job's tasks to the process that the site has started itself.

    FLARE's own executor can also start a command or a script named by a job. Here, a job sets only
    the heartbeat interval and timeout between the two processes, in seconds.
    """

    def __init__(self, heartbeat_interval: float, heartbeat_timeout: float) -> None:
        super().__init__(
            execution_mode="attach",
            attach_id=ATTACH_ID,
            allow_reconnect=True,
            heartbeat_interval=heartbeat_interval,
            heartbeat_timeout=heartbeat_timeout,
            params_exchange_format=ExchangeFormat.RAW,
            server_expected_format=ExchangeFormat.RAW,
        )

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Answers the server's question whether the job runs, from its start."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            engine: Any = fl_ctx.get_engine()
            engine.register_aux_message_handler(THERE, _confirm)


def _confirm(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
    return make_reply(ReturnCode.OK)
