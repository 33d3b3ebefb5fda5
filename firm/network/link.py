"""Connection of a site's own process to its job, by FLARE's Client API in attach mode."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.client.api_context import APIContext

from firm.base.json_text import json_text
from firm.network.wire import from_model, to_model

logger = logging.getLogger(__name__)

ATTACH_ID = "firm"
"""Name by which a site's job and the site's process find each other; it is not secret."""


def write_profile(path: Path, *, site: str, meeting_place: Path) -> None:
    """Writes the JSON file with which the Client API finds the site's job.

    Args:
        path: File to write.
        site: Name of the site.
        meeting_place: Private folder of this user, as configured in the site's FLARE.
    """
    profile = {
        "schema_version": 1,
        "execution_mode": "attach",
        "attach_id": ATTACH_ID,
        "site_name": site,
        "rendezvous_dir": str(meeting_place),
        "job_wait_timeout": None,
    }
    path.write_text(json_text(profile, indent=2), encoding="utf-8")


def serve(profile: Path, answer: Callable[[bytes], bytes]) -> None:
    """Waits for a job, answers its packed messages, and returns when the job ends.

    A process can call this only once: FLARE reserves the connection's name until the process ends.
    """
    api: Any = APIContext(rank="0", config_file=str(profile)).api
    logger.info("the job has started")
    while api.is_running():
        model = api.receive()
        if model is None:
            break
        api.send(to_model(answer(from_model(model))))
    logger.info("the job has ended")
