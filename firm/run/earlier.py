"""Translates what runs of earlier versions wrote into today's words."""

import re
from collections.abc import Mapping
from typing import Any

FIGURES = {
    "normalized": "rewards",
    "reward": "rewards",
    "reward_correlation": "score_correlation",
    "reward_length_correlation": "score_length_correlation",
    "reward_raw": "scores",
    "reward_raw_std": "scores_std",
    "reward_truncated_share": "truncated_share",
}
"""Today's names of logged figures by their earlier ones."""


def translated_settings(settings: Any) -> Any:
    """Returns a configuration's plain data with today's keys.

    The section `ppo` is now `estimator`, whose `name` is ppo; its `kl.estimator` is now `kl.form`.
    What a site lets go, its `policy.metrics`, has today's names of figures, and a policy has no
    `pad_token`.
    """
    if not isinstance(settings, Mapping):
        return settings
    translated = {}
    for key, value in settings.items():
        if key == "ppo":
            key, value = "estimator", {"name": "ppo", **(value or {})}
        kl = value.get("kl") if key == "estimator" and isinstance(value, Mapping) else None
        if isinstance(kl, Mapping):
            names = {"estimator": "form"}
            value = {**value, "kl": {names.get(name, name): own for name, own in kl.items()}}
        if key == "policy" and isinstance(value, Mapping):  # masks came from a token that pads
            value = {name: own for name, own in value.items() if name != "pad_token"}
        metrics = value.get("metrics") if key == "policy" and isinstance(value, Mapping) else None
        if isinstance(metrics, list):
            value = {**value, "metrics": [FIGURES.get(str(name), name) for name in metrics]}
        translated[key] = value
    return translated


def translated_run(settings: Any) -> Any:
    """Returns a run's configuration with today's keys, and with splits that mean what they did.

    New keys have their defaults. Files were taken whole whatever the split's name, that of the
    defaults too.
    """
    settings = translated_settings(settings)
    data = settings.get("data") if isinstance(settings, Mapping) else None
    if not isinstance(data, Mapping):
        return settings
    translated = {}
    for use, prompts in data.items():
        if isinstance(prompts, Mapping) and prompts.get("split") in ("test[:50%]", "test[50%:]"):
            sources = prompts.get("source")
            names = sources if isinstance(sources, list) else [sources]
            if all(re.search(r"\.jsonl?(\.gz)?$", str(name)) for name in names):
                prompts = {**prompts, "split": None}
        if isinstance(prompts, Mapping) and "source" in prompts:  # not a classic study's losses
            prompts = {"reader": "auto", "drop_duplicates": False, **prompts}
        translated[use] = prompts
    policy = settings.get("policy")
    if isinstance(policy, Mapping) and isinstance(policy.get("prompt"), Mapping):
        prompt = {"template_options": {}, **policy["prompt"]}
        settings = {**settings, "policy": {**policy, "prompt": prompt}}
    return {**settings, "data": translated}


def translated_figures(figures: Any) -> Any:
    """Returns figures by name with today's names, those of single objectives included.

    Args:
        figures: A row of a log, the evaluation of a checkpoint, or tensors such as
            "normalized/helpful"; anything else is returned as it is.
    """
    if not isinstance(figures, Mapping):
        return figures
    translated = {}
    for key, value in figures.items():
        if key == "by_objective" and isinstance(value, Mapping):
            value = {name: translated_figures(own) for name, own in value.items()}
        name, *rest = key.split("/")
        translated["/".join([FIGURES.get(name, name), *rest])] = value
    return translated
