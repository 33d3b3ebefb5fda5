"""Integers of configurations have a largest value, so that none overflows or never ends."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from firm.base.fields import LARGEST, metadata
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import ChatConfig, CompareConfig, ExploreConfig, StudyConfig, SweepConfig
from firm.jobs.fmoo_config import ClassicConfig
from firm.jobs.network_config import FederationConfig, SiteConfig
from firm.run.config import forms_of
from tests import smoke

CONFIGS = (
    AlignmentConfig,
    ChatConfig,
    CompareConfig,
    ExploreConfig,
    ClassicConfig,
    FederationConfig,
    SiteConfig,
    StudyConfig,
    SweepConfig,
)


def integers(form: type) -> Iterator[tuple[str, Any]]:
    """Yields class and name of all integer fields of a configuration, with what they state."""
    hints = get_type_hints(form, include_extras=True)
    for field in dataclasses.fields(form):
        for part in parts(hints[field.name]):
            for section in forms_of(part):
                yield from integers(section)
        if any(part is int for part in parts(hints[field.name])):
            yield f"{form.__name__}.{field.name}", hints[field.name]


def parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind)[: 1 if get_origin(kind) is Annotated else None]:
        yield from parts(part)


@pytest.mark.parametrize("form", CONFIGS)
def test_every_integer_has_a_largest_value(form):
    free = {"RewardModelConfig.output", "Calibration.num_samples"}  # only compared, only shown
    for name, kind in integers(form):
        limits = [getattr(entry, "le", None) for entry in metadata(kind)]
        assert name in free or any(limit is not None for limit in limits), name


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", 10**24, f"at most {2**63 - 1:,}"),
        ("num_threads", 10**9, "at most 4,096"),
        ("rollout.max_new_tokens", 10**9, "at most 10,000,000"),
        ("evaluation.num_samples", 10**24, "at most 1,048,576"),
        ("rollout.forward_batch_size", 10**24, f"at most {LARGEST:,}"),
    ],
)
def test_a_number_that_is_too_large_is_refused_in_one_line(key, value, words):
    with pytest.raises(Exception, match=words) as refusal:
        smoke.config(f"--{key}", value)
    assert f"{key} must be" in str(refusal.value)
    assert f"got {value}" in str(refusal.value)
