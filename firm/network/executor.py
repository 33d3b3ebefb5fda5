"""A site's end of a job in FLARE: the one class that a job builds there."""

from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.client.config import ExchangeFormat

from firm.network.link import ATTACH_ID


class SiteExecutor(ClientAPIExecutor):
    """Passes a job's tasks on to the process that the site has started itself.

    FLARE's own executor can also start a command or a script that a job names; of this one a job
    sets nothing but how often, in seconds, the two processes look after each other.
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
