"""Verdicts follow the protocol, and the page states what the data in the repository give."""

import json
import re

import numpy as np
import pytest
from scipy import stats

from benchmarks.findings import (
    MARGIN,
    PAGE,
    PROTOCOL,
    TABLES,
    Claim,
    at_equal_kl,
    at_kl,
    chosen,
    coverage,
    difference_p,
    equality_p,
    expected_utility,
    family_a,
    family_f,
    family_j,
    family_k,
    family_l,
    findings,
    gained_volume,
    holm,
    interval,
    older_differences,
    replies_table,
    rich_of_folds,
    seeds_for_equality,
    soups,
    verdicts,
    volume_of,
    warm_sweep,
    written,
)
from firm.report.seeds import mean_difference
from tests.docs.test_links import FENCE
from tests.smoke import ROOT

FIGURE = re.compile(r"\d\.\d")
MARKED = re.compile(r"<!-- [\w ]+ -->\n.*?<!-- end -->", re.DOTALL)


def claim(differences, *, planned=10, margin=MARGIN):
    sides = ("first", "second")
    return Claim("A", "a claim", sides, "reward", planned, tuple(differences), "front", margin)


def table_cells(table):
    """The cells of a table's rows, without its header."""
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.split("\n")[2:]]


def around(mean, width, count=10):
    """Differences with this mean, and spread evenly by ± width."""
    return mean + np.linspace(-width, width, count)


def test_the_conditioned_run_is_compared_at_the_constrained_runs_reward():
    def models(plain):
        rewards = {"conditioned 0.1": (0.4, 0.7), "conditioned 0.5": (0.5, 0.6),
                   "conditioned 0.9": (0.7, 0.2), "constrained": (plain, 0.0)}  # fmt: skip
        return {
            name: {"test": {"reward plain": p, "reward rich": r}}
            for name, (p, r) in rewards.items()
        }

    assert rich_of_folds(models(0.6)) == pytest.approx(0.4)
    assert rich_of_folds(models(0.9)) == pytest.approx(0.2)  # the nearer fold outside


def test_a_wide_interval_around_zero_is_no_equality():
    assert verdicts([claim(around(0.0, 0.05))]) == ["open"]


def test_a_narrow_interval_within_the_margin_is_equality():
    assert verdicts([claim(around(0.001, 0.004))]) == ["equal within the margin"]


def test_a_small_clear_difference_is_both():
    words = verdicts([claim(around(-0.004, 0.002))])
    assert words == ["equal within the margin, second ahead"]


def test_without_a_margin_nothing_is_equal():
    assert verdicts([claim(around(0.0, 1e-6), margin=None)]) == ["open"]


def test_a_comparison_that_is_not_finished_is_open_however_clear():
    words = verdicts([claim(around(0.5, 0.001, 9)), claim(around(0.5, 0.001, 10))])
    assert words == ["open: 9 of 10 seeds", "first ahead"]


def test_more_claims_ask_for_stronger_evidence():
    weak = around(0.01, 0.02, 10)
    alone = verdicts([claim(weak, margin=None)])
    among = verdicts([claim(weak, margin=None), *[claim([0.0, 1e-3], planned=9)] * 6])
    assert alone == ["first ahead"]
    assert among[0] == "open"


def test_p_values_are_those_of_scipy():
    values = around(0.004, 0.02)
    assert difference_p(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    low = stats.ttest_1samp(values, -0.01, alternative="greater").pvalue
    high = stats.ttest_1samp(values, 0.01, alternative="less").pvalue
    assert equality_p(values, 0.01) == pytest.approx(max(low, high))
    assert difference_p([0.0] * 5) == 1.0


def test_holms_method_stops_at_the_first_that_stands():
    assert holm([0.01, 0.02, 0.04]) == [True, True, True]
    assert holm([0.04, 0.03, 0.012]) == [False, False, True]


def model(validation, test, **scores):
    """A model with two rewards on each split."""
    rows = {"validation": validation, "test": test}
    return {
        split: {"reward helpful": row[0], "reward harmless": row[1], "KL": 1.0, **scores}
        for split, row in rows.items()
    }


def test_models_are_chosen_on_validation_prompts_and_reported_on_test_prompts():
    lucky = model(validation=(0.5, 0.5), test=(0.9, 0.9))
    good = model(validation=(0.6, 0.6), test=(0.6, 0.7))
    assert chosen([lucky, good]) == [good] * 21
    assert expected_utility([lucky, good]) == pytest.approx(0.65)


def test_a_set_of_noisy_models_gains_nothing_from_its_size():
    """The largest of many noisy estimates is above their mean; values on other prompts are not."""
    random = np.random.default_rng(0)

    def noisy():
        return 0.5 + 0.02 * random.standard_normal(2)

    many = [[model(noisy(), noisy()) for _ in range(9)] for _ in range(300)]
    assert np.mean([expected_utility(models) for models in many]) == pytest.approx(0.5, abs=3e-3)


def test_volume_and_coverage_by_hand():
    base = model((0.4, 0.4), (0.4, 0.4))
    ends = [model((0.6, 0.5), (0.6, 0.5)), model((0.5, 0.7), (0.5, 0.7))]
    assert gained_volume(ends, base) == pytest.approx(0.2 * 0.1 + 0.1 * 0.2)
    assert gained_volume([base], base) == 0.0
    others = [model((0, 0), (0.6, 0.5 + MARGIN)), model((0, 0), (0.6, 0.6))]
    assert coverage(ends, others) == 0.5


def test_utility_at_equal_kl_lies_on_the_line():
    curve = [(2.0, 0.6), (0.0, 0.4), (1.0, 0.55)]
    assert at_kl(curve, 0.5) == pytest.approx(0.475)
    assert at_kl(curve, 2.0) == 0.6


def test_pairs_are_compared_at_the_smaller_of_their_two_kls():
    def at(kl, reward):
        return {"test": {"reward helpful": reward, "KL": kl}, "validation": {"reward helpful": 0.9}}

    shares = ("0.1", "0.5", "0.9")
    whole = {f"conditioned {p}": at(4.0, 0.8) for p in shares}
    whole |= {f"separate {p}": at(2.0, 0.7) for p in shares}
    shrunk = {f"conditioned {p}": at(1.0, 0.6) for p in shares}
    shrunk |= {"base": at(0.0, 0.4)} | {f"separate {p}": at(1.0, 0.5) for p in shares}
    models = at_equal_kl(whole, shrunk)
    for p in shares:
        fold, run = models[f"conditioned {p}"], models[f"separate {p}"]
        assert fold["test"]["KL"] == run["test"]["KL"] == 2.0
        assert fold["test"]["reward helpful"] == pytest.approx(0.6 + 0.2 / 3)
        assert run["test"]["reward helpful"] == 0.7
        assert fold["validation"] == {"reward helpful": 0.9}  # of the whole model: it chooses


def test_replies_are_compared_with_the_bases_by_side_and_preference(tmp_path):
    def rows(model, mean, change):
        names = ("helpful", "harmless", "kl", "length")
        return [f"{model},{name},{mean + at:g},0,{f'{change + at:g}' if change else ''},,,9\n"
                for at, name in enumerate(names)]  # fmt: skip

    header = "model,figure,mean,se,change,change_se,z,num_prompts\n"
    lines = [header, *rows("base", 1, 0)]
    for seed, change in ((410, 2), (411, 4)):
        lines += rows(f"separate_runs-90_10-seed_{seed}", 7, change)
    lines += rows("one_conditioned_run-10_90-seed_410", 8, -0.5)
    (tmp_path / "pairs_replies_harmless.csv").write_text("".join(lines), encoding="utf-8")
    between = interval([2, 4]), interval([3, 5])
    assert table_cells(replies_table(tmp_path)) == [
        ["harmless", "base", "–", "–", "1.000", "2.000", "0", "4.0"],
        ["harmless", "separate runs", "(0.9, 0.1)", "2", *between, "9.0 ± 0.0", "10.0 ± 0.0"],
        ["harmless", "one conditioned run", "(0.1, 0.9)", "1", "-0.500", "+0.500", "10.0", "11.0"],
    ]


def test_hypervolume_is_of_the_models_that_validation_prompts_keep():
    lucky = model(validation=(0.4, 0.4), test=(0.9, 0.9))
    assert volume_of([lucky, model((0.5, 0.5), (0.5, 0.6))], np.zeros(2)) == pytest.approx(0.3)


def test_soups_and_sweeps_have_one_model_for_each_preference():
    front, nine = (json.loads((PROTOCOL / f"{part}_100.json").read_text())
                   for part in ("front", "nine"))  # fmt: skip
    models = {name: name for name in (*front, *nine)}
    models |= {f"warm {share:g}": f"warm {share:g}" for share in np.arange(1, 10) / 10}
    for count, number in ((2, 5), (3, 5), (5, 9)):
        own = soups(models, count)
        assert len(set(own)) == number
        assert sum(name.startswith("separate") for name in own) == count
    assert len(set(warm_sweep(models))) == 9


@pytest.mark.parametrize("deviation", [0.01, 0.0232])
def test_equality_is_shown_in_four_of_five_simulations_with_these_seeds_and_no_fewer(deviation):
    def power(count):
        samples = deviation * np.random.default_rng(0).standard_normal((20_000, count))
        bounds = stats.t.ppf(0.95, count - 1) * samples.std(1, ddof=1) / count**0.5
        return np.mean(abs(samples.mean(1)) + bounds < 0.01)

    count = seeds_for_equality(deviation, 0.01, power=0.8, alpha=0.05)
    assert power(count - 1) - 0.01 < 0.8 < power(count) + 0.01


def test_seeds_of_a_family_are_read_from_its_files(tmp_path):
    part = json.loads(next(PROTOCOL.glob("front_*.json")).read_text())
    for seed in (100, 105, 999):
        (tmp_path / f"front_{seed}.json").write_text(json.dumps(part))
    assert [len(each.differences) for each in family_a(tmp_path)] == [2, 2, 0, 0]


def test_the_page_states_what_the_data_give(monkeypatch):
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python benchmarks/findings.py --write"
    monkeypatch.setattr("benchmarks.findings.TABLES", {"search": lambda: "other"})
    assert "<!-- search -->\n\nother\n\n<!-- end -->" in written(page)


def test_the_page_states_no_figure_that_is_not_in_a_table():
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- ([\w ]+) -->", page)) - {"end"} == set(TABLES)
    prose = FENCE.sub("", MARKED.sub("", page))
    assert [line for line in prose.splitlines() if FIGURE.search(line)] == []


def test_the_table_of_findings_is_short_and_names_command_and_data():
    header, _, *rows = findings().splitlines()
    assert len(rows) <= 29
    assert [cell.strip() for cell in header.split("|")][-3:-1] == ["command", "data"]
    for row in rows:
        *_, command, data, _ = (cell.strip(" `") for cell in row.split("|"))
        assert command
        assert any(PAGE.parents[1].glob(data)) or "open: 0 of" in row


SOUPS = "Aligned world: Rewarded Soups, nine separate runs"


def cells(table: str, first: str, second: str) -> list[str]:
    """The cells after the first of the row of a Markdown table that begins with these two."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    (row,) = (row for row in rows if row[:2] == [first, second])
    return row[1:]


STATED = ("K1", "K4", "F1", "J1", "J2", "L2", "L3")
"""Claims whose intervals README states."""


def test_the_readme_states_the_intervals_of_the_findings():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## What to expect") : text.index("[On an H200]")]
    found = {key[:2]: mean_difference(own) for key, own in older_differences().items()}
    claims = {each.name: each for each in (*family_f(), *family_j(), *family_k(), *family_l())}
    ends = "With PPO: FIRM at p = ({}), at ({})"
    low, high = "0.1, 0.9", "0.9, 0.1"
    stated = [
        f"{found[ends.format(high, low), 'reward helpful'].mean:.2f}",
        f"{found[ends.format(low, high), 'reward harmless'].mean:.2f}",
        *(interval(claims[name].differences) for name in STATED),
    ]
    for figure in stated:
        assert figure in section
        section = section.replace(figure, "")
    assert not FIGURE.search(section)
