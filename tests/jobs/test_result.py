"""A job in Python: its typed result says what its files say."""

from pathlib import Path

import pytest

from firm.alignment import comparison_table
from firm.jobs.alignment import align
from firm.jobs.alignment_config import AlignmentConfig
from firm.report.tables import COLUMNS
from firm.run import Run, compose


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("job") / "run"
    return align(compose(AlignmentConfig, [Path("smoke")], [("out", str(out))]))


def test_a_run_returns_where_everything_is_and_what_it_came_to(result):
    assert (result.adapter / "adapter_config.json").is_file()
    assert result.report.is_file()
    logged = [row for row in Run(result.path).rows() if row.get("split") == "test"]
    for evaluation, row in zip((result.base, result.final), logged, strict=True):
        for name, score in row["scores"].items():
            assert evaluation.scores[name].mean().item() == pytest.approx(score["mean"])
    assert result.comparison == comparison_table(result.base, result.final)


def test_its_metrics_are_the_logs_as_a_table(result):
    table = result.metrics
    assert list(table.columns) == COLUMNS
    for row in Run(result.path).rows():
        if row["kind"] == "client":
            own = table[(table["client"] == row["client"]) & (table["round"] == row["round"])]
            (kl,) = own[own["quantity"] == "kl"]["value"]
            assert kl == pytest.approx(row["kl"])
    assert set(table["round"]) == {0, 1, 2}
