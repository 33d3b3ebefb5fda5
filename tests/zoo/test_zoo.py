"""The zoo: small models with random weights, tokenizers and data, FIRM beside plain transformers.

The first tier has eight architectures that differ in kind, each tokenizer and all data;
`make test-slow` runs every architecture. `tests.zoo.table` writes what holds
into the guide.
"""

import os
from collections.abc import Container, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import checks
from tests.zoo.architectures import APART, ARCHITECTURES
from tests.zoo.kinds import KINDS
from tests.zoo.table import PAGE, page

pytestmark = pytest.mark.filterwarnings(  # plain PEFT's own
    "ignore:.*is_gradient_checkpointing.*:FutureWarning"
)

SAMPLE = [(APART[at % len(APART)], kind) for at, kind in enumerate(KINDS)]
"""Architectures with tokenizers of the first tier: every tokenizer once."""


def _each(names: Iterable[str], *, fast: Container[str]) -> list[Any]:
    """Every architecture with one tokenizer, another one each time; few are fast."""
    kinds = list(KINDS)
    return [
        pytest.param(name, kinds[at % len(kinds)], marks=() if name in fast else pytest.mark.slow)
        for at, name in enumerate(names)
    ]


def _by_kind() -> list[Any]:
    """Few architectures with every tokenizer, in the first tier, and every one with one."""
    return [*SAMPLE, *(each for each in _each(TAKEN, fast=()) if each.values not in SAMPLE)]


def _stacked() -> list[Any]:
    """Every architecture with one tokenizer and one estimator, another one each time."""
    estimators = cycle(checks.ESTIMATORS)
    each = _each(STACKED, fast=["deepseek_v3"])
    return [pytest.param(*p.values, next(estimators), marks=p.marks) for p in each]


TAKEN = [name for name, own in ARCHITECTURES.items() if "everywhere" not in own.refused]
STACKED = [name for name in TAKEN if "stacked" not in ARCHITECTURES[name].refused]
REFUSED = [
    pytest.param(name, where, line, id=f"{name} {where}")
    for name, own in ARCHITECTURES.items()
    for where, line in own.refused.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where files of data lie."""
    return tmp_path_factory.mktemp("zoo")


@pytest.mark.parametrize(("name", "kind"), _by_kind())
def test_prompts_replies_and_their_log_probabilities_are_plain_transformers(name, kind, folder):
    place = checks.place(name, kind)
    cases = checks.cases(place, folder)
    checks.check_prompts(place, cases)
    checks.check_logprobs(place, cases)
    checks.check_generation(place, cases[:6])
    checks.check_training_mode(place, cases)
    checks.check_rewards(place, cases)


@pytest.mark.parametrize(("name", "kind"), _each(TAKEN, fast=APART))
def test_a_trained_adapter_is_the_same_model_in_plain_peft_and_merged(name, kind, folder, tmp_path):
    place = checks.place(name, kind)
    checks.check_adapter(place, checks.cases(place, folder, ["text", "messages"]), tmp_path)


@pytest.mark.parametrize(("name", "kind"), _each(TAKEN, fast=["gemma3", "gpt2"]))
def test_gradients_of_sums_of_replies_are_those_of_autograd(name, kind, folder):
    place = checks.place(name, kind)
    checks.check_gradients(place, checks.cases(place, folder, ["text", "columns"]))


@pytest.mark.parametrize(("name", "kind"), _each(TAKEN, fast=["mamba2"]))
def test_a_resumed_run_trains_the_same_adapter_bit_for_bit(name, kind, folder):
    checks.check_resumed(name, kind, folder)


@pytest.mark.parametrize(("name", "kind", "estimator"), _stacked())
def test_clients_in_joint_passes_end_as_clients_in_turn(name, kind, estimator, folder):
    checks.check_stacked(name, kind, folder, estimator)


@pytest.mark.parametrize(("name", "kind"), _each(TAKEN, fast=["gemma3", "gemma3n_text"]))
def test_a_value_network_trains_or_is_refused(name, kind, folder):
    checks.check_network(name, kind, folder)


@pytest.mark.parametrize(("name", "kind"), _each(TAKEN, fast=["gpt2", "llama"]))
def test_an_adapter_on_the_head_is_the_same_model_merged_or_refused(name, kind, folder, tmp_path):
    checks.check_head(name, kind, folder, tmp_path)


@pytest.mark.parametrize(("name", "where", "line"), REFUSED)
def test_what_is_refused_is_refused_in_one_line(name, where, line, folder):
    assert line in checks.refused(name, where, folder)


@pytest.mark.parametrize(("model", "line"), checks.NO_LANGUAGE_MODELS.items())
def test_folders_of_other_models_are_refused_in_one_line(model, line, tmp_path):
    assert line in checks.refused_folder(model, tmp_path)


def test_the_guide_s_table_is_that_of_the_zoo():
    assert PAGE.read_text() == page(), "run `python -m tests.zoo.table`"


@pytest.mark.slow
def test_a_real_model_is_as_in_plain_transformers(folder, tmp_path):
    path = os.environ.get("FIRM_MODEL")
    if not path:
        pytest.skip("FIRM_MODEL is not set: no folder of a real chat model to test on")
    place = checks.place_of(path)
    cases = checks.cases(place, folder)
    checks.check_prompts(place, cases)
    checks.check_logprobs(place, cases)
    checks.check_generation(place, cases[:4])
    checks.check_training_mode(place, cases)
    checks.check_rewards(place, cases)
    short = [case for case in cases if len(case.ids) <= checks.MAX_PROMPT]
    checks.check_adapter(place, short, tmp_path)
