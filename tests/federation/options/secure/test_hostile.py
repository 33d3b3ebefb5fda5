"""Mutated messages in each step of a secure sum: to a site, and from one."""

from dataclasses import replace

import pytest

from benchmarks.mutations import mutated_messages
from firm.federation import LocalEngine, RoundFailed
from firm.federation.engines.engine import checked_reply, split_outcomes
from firm.federation.options.secure import MasksConfig
from firm.federation.options.secure.messages import STEPS, MaskedTraining
from firm.federation.schema import Reading
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.fedavg import fedavg
from firm.federation.strategy_configs import FedAvgConfig

NAMES = ["a", "b", "c", "d"]
CFG = FedAvgConfig(secure="masks", masks=MasksConfig(num_colluders=0))  # one may drop out
KINDS = (MaskedTraining, *STEPS)
COUNT = 40


def _evenly(items):
    items = list(items)
    return [items[index * len(items) // COUNT] for index in range(COUNT)]


def _heard(engine):
    """Returns the requests of a round and the first client's answers, by type of the request."""
    requests, answers = {}, {}

    class Heard:
        def map(self, request, clients):
            replies, failures = engine.map(request, clients)
            requests[type(request)] = request
            answers[type(request)] = replies[0].content
            return replies, failures

    return Heard(), requests, answers


class Meddled:
    """An engine in which client b answers one kind of request with something else."""

    def __init__(self, engine, kind, content):
        self._engine, self._kind, self._content = engine, kind, content

    def map(self, request, clients):
        replies, failures = self._engine.map(request, clients)
        if not isinstance(request, self._kind):
            return replies, failures
        kept, own = split_outcomes(
            checked_reply(request, "b", self._content, 10, 10) if reply.client == "b" else reply
            for reply in replies
        )
        return kept, [*failures, *own]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_answer_leaves_the_round_to_the_others_or_ends_it_in_one_line(
    kind, new_clients, start
):
    heard, _, answers = _heard(CFG.around(LocalEngine(new_clients(NAMES)), len(NAMES)))
    fedavg(start, NAMES, heard, CFG)
    honest = {**vars(answers[kind]), "client": "b"}
    reading = Reading(start.objectives, start.adapter if kind is MaskedTraining else {})
    outcomes = set()
    for _, content in _evenly(mutated_messages(kind.answer, honest, reading)):
        engine = Meddled(CFG.around(LocalEngine(new_clients(NAMES)), len(NAMES)), kind, content)
        problem = ""
        try:
            state, rows = fedavg(start, NAMES, engine, CFG)
        except RoundFailed as error:
            problem = str(error)
        if problem:
            assert "could not be opened" in problem
            assert problem.isprintable()
            outcomes.add("failed")
            continue
        assert all(value.isfinite().all() for value in state.adapter.values())
        named = [failure["client"] for failure in rows["round"]["failures"]]
        assert named in ([], ["b"], ["a", "c", "d"])
        outcomes.add("refused" if named else "used")
    assert "refused" in outcomes


@pytest.mark.parametrize("kind", STEPS)
def test_a_mutated_request_gets_an_answer_of_its_kind_or_a_refusal(kind, new_network, start):
    sites = {name: [name] for name in NAMES}
    engine, channel = new_network(CFG, NAMES, sites=sites)
    steps = [kind.task for kind in STEPS]
    messages = []
    for index in range(COUNT):
        channel.asked, channel.answered = [], []
        state = replace(start, adapter={n: v + 0.01 * index for n, v in start.adapter.items()})
        taken = steps[steps.index(kind.task) :]
        channel.lose = {(task, "b") for task in taken}  # b waits for this step
        # b's site gets the honest request too, and refuses a second one: keep its own state
        site, own = channel.sites["b"], channel.sites["b"]._engine
        before = own._step
        held = []

        def hold(request, client, before=before, held=held):
            if isinstance(request, kind):
                held.append(request)
                raise RuntimeError("held")
            return before(request, client)

        own._step = hold
        fedavg(state, NAMES, engine, CFG)
        del own._step
        (request,) = held
        content = unpack(pack(vars(request.to_network("b"))))
        messages = messages or _evenly(
            mutated_messages(kind, content, Reading(start.objectives, {}))
        )
        what, mutated = messages[index]
        message = {
            "do": "map",
            "task": kind.task,
            "clients": ["b"],
            "request": mutated,
            "number": 1,
        }
        answer = unpack(site.answer(pack(message)))
        if not answer.get("problem"):
            assert answer["failures"] or answer["replies"][0]["content"]["client"] == "b", what
        reasons = [answer.get("problem") or "", *(f["reason"] for f in answer.get("failures", ()))]
        assert all(reason.isprintable() for reason in reasons)
        channel.lose = set()
