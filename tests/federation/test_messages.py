"""Messages: requests are read strictly, answers leave out what nobody knows."""

from dataclasses import replace

import pytest
import torch

from firm.federation import Update
from firm.federation.messages import Request, Sizes
from firm.federation.objective_training import ObjectiveTraining
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.schema import Invalid, Reading, fields_of, read
from firm.federation.serialization import pack, packed_size, unpack
from firm.federation.sharing import CorrectionRequest, JacobianRequest
from firm.federation.tasks import TASKS
from firm.federation.training import LocalTraining

ADAPTER = {"a": torch.zeros(2)}
PRIVACY = PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0, noise_seed=5)
REQUEST = LocalTraining(
    round=12,
    objectives=("left", "right"),
    adapter=ADAPTER,
    accepted={"x": 11, "y": 3},
    num_local_steps=2,
    weighting="firm",
    weighting_options={"beta": 0.1, "preference": (0.5, 0.5)},
    options_by_client={"x": {"beta": 1.0}, "z": {"beta": 2.0}},
    options={"privacy": PRIVACY},
)
READING = Reading(("left", "right"), ADAPTER)


def test_a_request_is_read_as_it_was_sent(same):
    read = LocalTraining.read(unpack(pack(REQUEST)), READING)
    assert same(
        unpack(pack(read)),
        unpack(pack(replace(REQUEST, objectives=["left", "right"])))
        | {"weighting_options": {"beta": 0.1, "preference": [0.5, 0.5]}},
    )
    assert read.options == REQUEST.options


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": 1}, "the message has the unknown field 'extra'"),
        ({"round": 0}, "round must be at least 1, got 0"),
        ({"weighting_options": {"gamma": 1}}, "weighting_options has the unknown field 'gamma'"),
        (
            {"options": {"privacy": {"clip_norm": 1.0}}},
            "options.privacy lacks the field",
        ),
        ({"options": {"magic": {}}}, "options has the unknown option 'magic'"),
        ({"options": 3}, "options must be a mapping, got 3"),
        (
            {"options": {"privacy": {"clip_norm": 0.0, "noise_multiplier": 1.0}}},
            "options.privacy.clip_norm must be",
        ),
        ({"solve_per": "epoch"}, "solve_per must be 'minibatch' or 'batch', got 'epoch'"),
    ],
)
def test_a_request_with_anything_else_is_refused(change, reason):
    with pytest.raises(Invalid, match=f"^{reason}"):
        LocalTraining.read({**unpack(pack(REQUEST)), **change}, READING)


def test_a_request_that_lacks_a_field_without_default_is_refused():
    content = unpack(pack(REQUEST))
    del content["options"]  # it has a default
    assert LocalTraining.read(content, READING).options == {}
    del content["num_local_steps"]
    with pytest.raises(Invalid, match="the message lacks the field 'num_local_steps'"):
        LocalTraining.read(content, READING)


def test_an_answer_leaves_out_what_nobody_knows_and_counts_it():
    reading = Reading(("left", "right"), ADAPTER)
    content = {**vars(Update("x", ADAPTER, 3, {"mine": 1})), "mood": "good"}
    assert Update.read(content, reading).metrics == {}
    assert reading.dropped == ["mood", "metrics.mine"]


def test_to_a_client_goes_what_concerns_it_alone():
    own = REQUEST.of("x")
    assert own.accepted == {"x": 11}
    assert own.options_by_client == {"x": {"beta": 1.0}}
    assert own.options == REQUEST.options
    assert REQUEST.of("y").options_by_client == {}


def test_the_seed_of_the_noise_never_leaves_the_program():
    assert REQUEST.to_network("x").options == {"privacy": replace(PRIVACY, noise_seed=None)}
    assert replace(REQUEST, options={}).to_network("x").options == {}


@pytest.mark.parametrize("client", ["x", "y", "z", "nobody"])
def test_the_size_of_a_request_is_that_of_the_clients_own(client):
    assert packed_size(REQUEST.of(client)) == len(pack(REQUEST.of(client)))


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_every_message_has_a_type_that_is_checked(task):
    kind = TASKS[task].request
    assert issubclass(kind, Request)
    assert kind.task == task
    for message in (kind, kind.answer):
        for name, field in fields_of(message)[0].items():
            with pytest.raises(Invalid, match=f"^{name}"):
                read(field, object(), name, READING)


OBJECTIVES, LARGER = ("left", "right"), {"a": torch.zeros(4)}
SIZES = Sizes(num_columns=3, num_passes=4, metrics={})
EXAMPLES = {
    "a Jacobian": JacobianRequest(round=1, objectives=OBJECTIVES, adapter=LARGER),
    "a compressed one": JacobianRequest(
        round=1, objectives=OBJECTIVES, adapter=LARGER, compressor="low_rank", budget=3.0
    ),
    "a correction": CorrectionRequest(round=1, objectives=OBJECTIVES, adapter=LARGER, broadcast={}),
    "updates": ObjectiveTraining(round=1, objectives=OBJECTIVES, adapter=LARGER, num_local_steps=2),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_an_example_is_an_answer_that_the_server_reads(case):
    request = EXAMPLES[case]
    answer = request.example("a", SIZES)
    assert type(request.answer.read(answer, request.reading())) is request.answer
    assert request.num_trainings == (2 if case == "updates" else 0)
    assert request.num_solves(4) == 0
    assert request.takes_whole_batches == (case != "updates")
    assert all(hasattr(answer, name) for name in answer.column_fields)
    assert packed_size(answer) == len(pack(answer))
    assert packed_size(request) == len(pack(request))


@pytest.mark.parametrize("solve_per", ["minibatch", "batch"])
def test_solves_are_counted_where_clients_solve(solve_per):
    fields = {"round": 1, "objectives": OBJECTIVES, "adapter": LARGER, "num_local_steps": 2}
    request = LocalTraining(**fields, weighting="firm", solve_per=solve_per)
    count = {"minibatch": 4, "batch": 2}[solve_per]
    assert request.num_solves(4) == count
    assert len(request.example("a", SIZES).metrics["weights"]) == count
    assert request.takes_whole_batches == (solve_per == "batch")
    assert LocalTraining(**fields, weighting="fixed").num_solves(4) == 0


def test_a_request_without_an_example_says_so():
    class Silent(JacobianRequest):
        example = Request.example

    with pytest.raises(NotImplementedError, match="Silent must implement example"):
        Silent(round=1, objectives=OBJECTIVES, adapter=LARGER).example("a", SIZES)
