"""FLARE executor at a site, the only class that a job may instantiate there."""

from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.client.config import ExchangeFormat

from firm.network.link import ATTACH_ID


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
