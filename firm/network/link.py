"""A site's end of the wire: FLARE's Client API, attached to a process that is ours."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.client.api_context import APIContext

from firm.network.wire import from_model, to_model

logger = logging.getLogger(__name__)

ATTACH_ID = "firm"
"""Where a site's job and the site's process meet; a name, no secret."""


def write_profile(path: Path, *, site: str, meeting_place: Path) -> None:
    """Writes what the Client API needs to find the site's job.

    Args:
        path: JSON file to be.
        site: Name of the site.
        meeting_place: Folder that belongs to this user alone, as the site's FLARE knows it.
    """
    profile = {
        "schema_version": 1,
        "execution_mode": "attach",
        "attach_id": ATTACH_ID,
        "site_name": site,
        "rendezvous_dir": str(meeting_place),
        "job_wait_timeout": None,
    }
    path.write_text(json.dumps(profile, indent=2), encoding="utf-8")


def serve(profile: Path, answer: Callable[[bytes], bytes]) -> None:
    """Waits for a job, answers its messages, and returns when it ends.

    A process can do this once: FLARE keeps the name of its connection for as long as it lives.

    Args:
        profile: What ``write_profile`` wrote.
        answer: From a packed message to a packed answer.
    """
    api: Any = APIContext(rank="0", config_file=str(profile)).api
    logger.info("a job has begun")
    while api.is_running():
        model = api.receive()
        if model is None:
            break
        api.send(to_model(answer(from_model(model))))
    logger.info("the job has ended")
