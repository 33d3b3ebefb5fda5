"""Names that exist nowhere: the line that refuses one names the nearest that there is."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from firm.base.preferences import parse_shares
from firm.base.quantities import of_clients
from firm.cli.main import main
from firm.federation.engine_registry import ENGINES
from firm.federation.options.robust import RULES, RobustConfig
from firm.federation.rounds import sample_clients
from firm.federation.tasks import TASKS
from firm.fmoo import DatasetConfig, ModelConfig
from firm.fmoo.config import DATASETS, MODELS
from firm.fmoo.task_data import LOSSES
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import CompareConfig, StudyConfig, SweepConfig
from firm.jobs.fmoo_config import ClassicConfig
from firm.network.site_policy import SitePolicy
from firm.run import UserError, parse
from firm.run.config import forms_of, lay_out, members_of
from reward_models.registry import REWARD_MODELS, check_name
from tests.smoke import SMOKE

JOBS = (AlignmentConfig, ClassicConfig, CompareConfig, StudyConfig, SweepConfig)
LENGTH = 5
"""Of shorter names a typing error leaves too little to recognise."""


def mistyped(name: str) -> str:
    """Returns a name with its last letter doubled."""
    return name + name[-1]


def choices(form: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields key paths and values of a configuration's choices, and the names of its forms."""
    for key, kind in get_type_hints(form).items():
        place = f"{path}{key}"
        forms = forms_of(kind)
        for each in forms:
            own = get_type_hints(each)
            if len(forms) > 1:
                yield from ((f"{place}.name", name) for name in get_args(own["name"]))
            elif each not in JOBS:
                yield from choices(each, f"{place}.")
        for part in members_of(kind):
            if get_origin(part) is Literal and key != "name":
                yield from ((place, str(value)) for value in get_args(part))


CHOICES = {
    (form, key): value
    for form in JOBS
    for key, value in choices(form)
    if len(value) >= LENGTH and (form is AlignmentConfig or "." not in key)
}
"""A value of every choice; of other jobs than `align`, which share most keys, the top keys."""


def test_a_choice_of_a_configuration():
    assert {"strategy.name", "estimator.name", "tracking.mode"} <= {key for _, key in CHOICES}
    for (form, key), value in CHOICES.items():
        with pytest.raises(UserError, match="did you mean '") as refused:
            lay_out(form, [], [(key, mistyped(value))])
        line = str(refused.value)
        assert f"{key} must be " in line
        assert line.endswith(f"; did you mean {value!r}?")


REGISTRIES: Mapping[str, tuple[Any, Any]] = {
    "engine": (lambda name: ENGINES[name], ENGINES),
    "robust rule": (lambda name: RobustConfig(name, num_attackers=1), RULES),
    "task of a site": (lambda name: SitePolicy(tasks=(name,)), TASKS),
    "quantity of a site": (lambda name: SitePolicy(metrics=(name,)), of_clients()),
    "client": (
        lambda name: sample_clients(["north", "south"], seed=0, round_number=1, always=[name]),
        ["north", "south"],
    ),
    "data set": (lambda name: DatasetConfig(name), DATASETS),
    "model": (lambda name: ModelConfig(name), MODELS),
    "loss": (lambda name: LOSSES[name], LOSSES),
    "reward": (check_name, REWARD_MODELS),
    "objective": (lambda name: parse_shares(f"{name}=1", ["helpful"]), ["helpful"]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("what", REGISTRIES)
def test_a_name_of_a_registry(what):
    look_up, known = REGISTRIES[what]
    name = next(name for name in known if len(name) >= LENGTH)
    with pytest.raises(ValueError, match=f"did you mean '?{name}"):
        look_up(mistyped(name))


@pytest.mark.parametrize("name", ["network submit", "align"])
def test_a_command(name, capsys):
    *group, word = name.split()
    with pytest.raises(SystemExit):
        main([*group, mistyped(word)])
    assert f"did you mean {name!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "end"),
    [
        ("strategy.always", "[clinet_1]", "'client_1'"),
        ("strategy.name", "FedAvg", "'fedavg'"),
        ("groups", "{a: {clients: [0], objectives: [brevty]}}", "'brevity'"),
        (
            "groups",
            "{a: {clients: [0], attack: {kind: label_flip, objective: brevty}}}",
            "'brevity'",
        ),
        ("groups", "{a: {clients: [0], attack: {kind: lable_flip}}}", "'label_flip'"),
        ("strategy.preference", "brevty=1", "'brevity'"),
        ("evaluation.calibrations", "{brevty: {method: sigmoid}}", "'brevity'"),
    ],
)
def test_a_name_within_a_run(key, value, end):
    with pytest.raises(ValueError) as refused:
        parse(AlignmentConfig, ["--config", str(SMOKE), f"--{key}", value])
    assert str(refused.value).endswith(f"; did you mean {end}?")
