"""Conversion of packed messages to and from FLARE's model, as one named array of bytes."""

from typing import Any

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel

TASK = "firm"
"""The only task that a site's executor accepts; the message says which request to execute."""

THERE = "firm.there"
"""FLARE topic by which the server asks whether a site still runs the job."""

LISTENING = "listening"
"""File in a job's folder at the server while the job answers commands of an administrator."""

_KEY = "message"


def to_model(message: bytes) -> FLModel:
    """Returns FLARE's model with a packed message."""
    return FLModel(params={_KEY: np.frombuffer(message, dtype=np.uint8)})


def from_model(model: Any) -> bytes:
    """Returns the packed message in FLARE's model; raises ``ValueError`` if there is none."""
    content = (getattr(model, "params", None) or {}).get(_KEY)
    if not isinstance(content, np.ndarray) or content.dtype != np.uint8:
        raise ValueError(f"FLARE delivered {type(content).__name__} instead of a message.")
    return content.tobytes()
