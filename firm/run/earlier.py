"""Translates what runs of earlier versions wrote into today's words."""

from collections.abc import Mapping
from typing import Any


def translated_settings(settings: Any) -> Any:
    """Returns a configuration's plain data with today's keys.

    The section `ppo` is now `estimator`, whose `name` is ppo.
    """
    if not isinstance(settings, Mapping) or "ppo" not in settings:
        return settings
    return {
        **{"estimator" if key == "ppo" else key: value for key, value in settings.items()},
        "estimator": {"name": "ppo", **(settings["ppo"] or {})},
    }
