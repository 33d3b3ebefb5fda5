"""Hostile sites and servers: messages made from the schemas, none of which breaks a promise."""

from collections import Counter

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from benchmarks import hostile


def _check(outcomes, least):
    for task, count in Counter(outcome.task for outcome in outcomes).items():
        assert count >= least, task
    assert [each for each in outcomes if each.outcome not in ("refused", "used")] == []
    assert Counter(each.outcome for each in outcomes)["refused"] > least / 3


@pytest.mark.slow
@pytest.mark.parametrize("task", list(hostile.ROUNDS))
def test_no_answer_of_a_hostile_site_ends_a_run(task):
    _check(hostile.answers_in_memory([task], most=320), least=300)


@pytest.mark.parametrize("agreement", list(hostile.AGREEMENTS))
def test_no_request_of_a_hostile_server_gets_more_than_was_agreed(agreement):
    _check(hostile.requests_in_memory([agreement], most=120), least=100)


def test_the_suite_notices_what_it_looks_for(monkeypatch):
    """Without the types a hostile answer ends the run; without the agreement it gets the lot."""
    monkeypatch.setattr(hostile.schemas, "read", lambda kind, value, path, reading: value)
    broken = hostile.answers_in_memory(["local_training"], most=100)
    assert any(each.outcome.startswith("THE RUN ENDED") for each in broken)


def test_the_suite_notices_a_site_that_obeys(monkeypatch):
    def obey(self, task, content, clients=None):
        kind = hostile.TASKS[task].request
        reading = hostile.Reading(hostile.OBJECTIVES, hostile.START)
        return kind.read(content, reading)

    monkeypatch.setattr(hostile.Agreement, "request", obey)
    broken = hostile.requests_in_memory(["privacy"], most=400)
    assert any(each.outcome.startswith("IT SENT") for each in broken)
    assert any(each.outcome.startswith("IT TOLD") for each in broken)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
def test_no_promise_breaks_over_the_network():
    """Few of the messages of the tests above; each takes a trip of half a second."""
    outcomes = hostile.outcomes_of("nvflare", 12)
    _check(outcomes["answer"], least=12)
    _check(outcomes["request"], least=4)
