"""What others would have sent: the formulas against what the strategies themselves send."""

import pytest
import torch

from firm.federation.engines import LocalEngine
from firm.federation.server import ServerState
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy_configs import FedCmooConfig, FirmConfig, FsmgdaConfig
from firm.report.ledger import (
    RIVALS,
    STAGES,
    cost_section,
    ledger_table,
    total_bytes,
    uploads_so_far,
)
from firm.report.record import read_record
from firm.report.tables import Setting
from tests.quadratic import QuadraticClient

NUM_TRAINABLE = 20_000
OVERHEAD = 4_000
"""Bytes per client, at most, of names, shapes and metrics in these rounds."""
UPLOADS = {
    "FIRM": lambda num_objectives, num_trainable, adapter_bytes: adapter_bytes,
    **{name: rival.upload for name, rival in RIVALS.items()},
}
CONFIGS = {
    "FIRM": FirmConfig(num_local_steps=1),
    "FedCMOO-A": FedCmooConfig(
        num_local_steps=1, communication="one_way", compressor="none", solver="exact"
    ),
    "FSMGDA": FsmgdaConfig(num_local_steps=1),
}


@pytest.mark.parametrize("algorithm", CONFIGS)
@pytest.mark.parametrize("num_objectives", [2, 3])
def test_the_formulas_are_what_the_strategies_send(algorithm, num_objectives):
    torch.manual_seed(0)
    objectives = ("a", "b", "c")[:num_objectives]
    names = ["client_0", "client_1"]
    cfg = CONFIGS[algorithm]
    adapter = {"w": torch.zeros(NUM_TRAINABLE)}
    state = ServerState(adapter, objectives=objectives, seed=0)
    targets = torch.randn(len(names), num_objectives, NUM_TRAINABLE)
    options = {"objectives": objectives, "num_minibatches": 1, "parameters": adapter}
    clients = [QuadraticClient(*each, **options) for each in zip(names, targets, strict=True)]
    engine = LocalEngine(clients)
    _, rows = STRATEGIES[cfg.name](state, names, engine, cfg)
    each = UPLOADS[algorithm](num_objectives, NUM_TRAINABLE, 4 * NUM_TRAINABLE)
    assert 0 < rows["round"]["bytes_up"] - len(names) * each < len(names) * OVERHEAD


def test_only_clients_that_arrived_count_and_rounds_add_up(make_run):
    record = read_record(make_run(num_done=3, failures={2: ("client_1", "lost")}))
    each = 2 * record.header["adapter_bytes"]
    assert uploads_so_far(record, "FSMGDA") == [(1, 4 * each), (2, 7 * each), (3, 11 * each)]


def test_measured_bytes_add_up_over_the_rounds(make_run):
    record = read_record(make_run(num_done=3))
    by_round = [row["bytes_up"] for row in record.rounds]
    sent = Setting.of("run", 0, [record]).bytes_so_far("bytes_up")[0]
    assert sent.to_dict() == {at: sum(by_round[:at]) for at in (1, 2, 3)}
    assert total_bytes(record, "bytes_up") == sum(by_round)


def test_the_cost_has_bytes_so_far_elapsed_seconds_and_stages_over_clients(make_run):
    record = read_record(make_run(num_done=3))
    section = cost_section([Setting.of("run", 0, [record])])
    up, down, seconds, stages = (panel.figure["data"] for panel in section.panels)
    by_round = [row["bytes_up"] for row in record.rounds]
    assert up[0]["y"] == pytest.approx([sum(by_round[:at]) / 1e6 for at in (1, 2, 3)])
    assert down[0]["y"][-1] == pytest.approx(total_bytes(record, "bytes_down") / 1e6)
    assert seconds[0]["y"] == [row["seconds"] for row in record.rounds]
    assert [key.label for key in section.legend] == list(STAGES)
    assert len({key.color for key in section.legend}) == 11
    for bar, stage in zip(stages, STAGES, strict=True):
        rows = [row["seconds"][stage] for rows in record.trainings.values() for row in rows]
        assert bar["x"] == [pytest.approx(sum(rows) / 3)]


def test_rivals_stand_beside_a_run_of_several_objectives(make_run):
    for objectives, count in ((("a",), 0), (("a", "b"), len(RIVALS))):
        run = Setting.of("run", 0, [read_record(make_run(str(count), objectives=objectives))])
        table = ledger_table([run])
        assert len([name for name in table.headings if name.startswith("up with")]) == count


def test_a_run_that_tells_no_sizes_is_set_beside_nothing(make_run):
    record = read_record(make_run(num_done=2))
    del record.header["num_trainable"]
    assert all(uploads_so_far(record, name) == [] for name in RIVALS)
