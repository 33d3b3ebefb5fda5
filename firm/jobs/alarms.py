"""Warnings about an alignment run's configuration and its rounds."""

from collections.abc import Callable
from functools import partial

from firm.alignment.course_alarms import course_alarms
from firm.alignment.estimator_config import KLConfig
from firm.alignment.kl_alarms import kl_alarm, mismatch_alarm, ratio_alarm
from firm.alignment.rollout import logprobs_from
from firm.federation.diagnostics import failure_alarms
from firm.jobs.alignment_config import (
    AlignmentConfig,
    every_source,
    solves_at_preferences,
    training_sources,
)
from firm.run.guard import drawn
from firm.run.rows import Row, as_one_training

MINIATURE = "firm/miniature/checkpoints/"
"""Folder of the models and prompts that are part of the package."""


def alarms_at_start(cfg: AlignmentConfig) -> list[str]:
    """Returns warnings that follow from the configuration alone."""
    texts = [note for option in cfg.strategy.options for note in option.notes()]
    texts += _leftovers(cfg)
    # the local steps depend on the prompts; the defaults are the paper's, and known to do little
    if cfg.strategy.num_local_epochs is not None or cfg.estimator.kl == KLConfig():
        return texts
    num_steps = cfg.rounds * cfg.strategy.num_local_steps
    alarm = kl_alarm(cfg.estimator.kl, batch_size=cfg.estimator.batch_size, num_steps=num_steps)
    return [*texts, alarm] if alarm else texts


def _leftovers(cfg: AlignmentConfig) -> list[str]:
    """Returns a warning if the user replaced only some of the miniature's models and prompts."""
    places = {
        "policy.path": cfg.policy.path,
        **{f"{key}.source": own.source for key, own in every_source(cfg).items()},
        **{f"rewards.{name}.path": reward.path for name, reward in cfg.rewards.items()},
    }
    first = ["policy.path", *(f"{key}.source" for key in training_sources(cfg))]
    own = [key for key in first if MINIATURE not in str(places[key])]
    left = [key for key, place in places.items() if MINIATURE in str(place)]
    if not own or not set(left) - set(first):
        return []
    return [
        f"{' and '.join(own)} {'is' if len(own) == 1 else 'are'} your own, but {', '.join(left)} "
        f"{'is' if len(left) == 1 else 'are'} still the miniature's: `firm init` writes a complete "
        "configuration."
    ]


def alarms_of_rounds(cfg: AlignmentConfig, rows: list[Row]) -> list[str]:
    """Returns the alarms about the rounds so far that no earlier row contains.

    Args:
        cfg: The run.
        rows: Its logged rows; the last row describes the round that has just ended.
    """
    is_of_generation = logprobs_from(cfg.policy.dtype, cfg.rollout) == "generation"
    has_dropout = cfg.policy.lora.dropout > 0  # dropout moves ratios away from 1 by design
    texts = failure_alarms(rows)
    texts += _drawn(
        "The check of the run's course",
        lambda: course_alarms(
            [as_one_training(row) if "by_objective" in row else row for row in rows],
            max_approx_kl=cfg.estimator.max_approx_kl,
        ),
    )
    if is_of_generation or not has_dropout:
        texts += _drawn(
            "The check of an unchanged policy's ratio",
            lambda: ratio_alarm(
                rows,
                dtype=cfg.policy.dtype,
                temperature=cfg.rollout.temperature,
                key="logprob_mismatch" if has_dropout else "first_log_ratio",
            ),
        )
    if is_of_generation:
        check = partial(mismatch_alarm, rows, cfg.estimator.kl)
        texts += _drawn("The check of rounding against the KL", check)
    if not solves_at_preferences(cfg):  # otherwise there is no beta to warn about
        texts += _drawn("The strategy's alarms", partial(cfg.strategy.alarms, rows))
    return texts


def _drawn(what: str, check: Callable[[], list[str] | str | None]) -> list[str]:
    """Returns the alarms of a check, or a note if it fails."""
    found = drawn(what, check, instead=str)
    return [found] if isinstance(found, str) else found or []
