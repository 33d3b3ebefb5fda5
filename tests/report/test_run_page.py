import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from firm.cli.main import COMMANDS
from firm.report import read_record, write_report
from firm.report import run_figures as figures
from firm.report.run_page import run_page, update_report
from tests.runs import edit_rows, figures_in, read_rows, write_rows

cli = COMMANDS["report"].run

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!-- <script>",
    "{{ 7 * 7 }} {% raw %}",
    '"><svg onload=alert(1)>',
    "</textarea></details><iframe src='https://example.org'>",
)


class Tags(HTMLParser):
    """All start tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open_raw = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open_raw = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.open_raw = ""

    def handle_data(self, data):
        self.text += "" if self.open_raw else data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def write(run_path: Path, *, final: bool = False) -> str:
    return write_report(run_path, final=final).read_text(encoding="utf-8")


STAGES = {
    "nothing evaluated": {"num_done": 0, "is_over": False},
    "first round": {"num_done": 1, "is_over": False},
    "running": {"num_done": 5, "is_over": False},
    "over": {},
    "without texts": {"has_samples": False},
    "without truth": {"has_truth": False},
    "one client": {"num_clients": 1},
    "sampled clients": {"num_clients": 16, "clients_per_round": 3},
    "failures": {"num_clients": 3, "failures": {2: ("client_1", "non-finite values")}},
    "before rewards were diagnosed": {"has_diagnostics": False},
    "with Gram matrices": {"has_gram": True},
    "alarms": {"alarms": {2: "β has no effect", 4: "β still has none"}},
    "one objective": {"objectives": ("helpful",)},
    "three objectives": {"objectives": ("a", "b", "c")},
    "four objectives": {"objectives": ("a", "b", "c", "d")},
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_of_a_run_has_a_page(make_run, stage):
    run_path = make_run(**STAGES[stage])
    html = write(run_path)
    tags = Tags(html)
    drawn = [a["data-figure"] for a in tags.of("div") if "data-figure" in a]
    assert drawn
    assert drawn == list(figures_in(html))
    assert set(drawn) == {a["data-save"] for a in tags.of("button")}
    linked = [(a["href"] or "")[1:] for a in tags.of("a")]
    sections = [a["id"] for a in tags.of("section")]
    assert [name for name in linked if name != "failures"] == [
        name for name in sections if name != "failures"
    ]
    assert set(linked) == set(sections)


@pytest.mark.parametrize("missing", ["validation", "client", "round", "run"])
def test_the_page_does_without_rows_of_any_kind(make_run, missing):
    run_path = make_run(num_done=3)
    rows = read_rows(run_path)
    kept = [row for row in rows if missing not in row.values()]
    assert len(kept) < len(rows)
    write_rows(run_path, kept)
    assert "FIRM run report" in write(run_path)


def test_the_page_of_a_run_that_has_just_been_created_says_so(make_run):
    run_path = make_run()
    (run_path / "metrics.jsonl").unlink()
    (run_path / "samples.jsonl").unlink()
    assert "The run has started" in write(run_path)


def test_without_validation_prompts_the_models_are_compared_at_the_end(make_run):
    def page_without_validation(run_path):
        edit_rows(run_path, lambda row: None if row.get("split") == "validation" else row)
        return Tags(write(run_path)).text

    running = page_without_validation(make_run("running", num_done=3, is_over=False))
    assert "3 training rounds completed. The aligned model has not been compared" in running
    over = page_without_validation(make_run("over", num_done=3))
    assert "After 3 rounds on 4 clients. Below: the change of each objective's mean score" in over
    assert "The base and the aligned model on the test prompts. Up" in over
    assert "on the validation prompts; the colour" not in over
    assert "Bold:" not in over
    validated = Tags(write(make_run("validated", num_done=3))).text
    assert "Bold:" in validated
    assert "The test prompts are others" in validated


def test_the_page_carries_the_figures_as_they_were_drawn(make_run):
    run_path = make_run()
    drawn = figures_in(write(run_path))
    record = read_record(run_path)
    (plane,) = figures.trade_off_planes(record)
    assert drawn[plane.name] == {"title": plane.title, "figure": plane.figure}


def test_scores_of_a_groups_own_reward_model_are_left_out_where_units_count(make_run):
    run_path = make_run()
    both, helpful = "scores-helpful", {"client_0", "client_1", "client_2", "client_3"}
    drawn = figures_in(write(run_path))[both]["figure"]["data"]
    assert {line["name"] for line in drawn} >= helpful
    with (run_path / "config.yaml").open("a") as file:
        file.write("groups: { clinic: { clients: [0, 2] } }\n")
    own = {"method": "sigmoid", "mean": 31.0, "scale": 4.9}
    edit_rows(
        run_path,
        lambda row: (
            {**row, "calibration": {**row["calibration"], "clinic/helpful": own}}
            if row["kind"] == "run"
            else row
        ),
    )
    html = write(run_path)
    drawn = figures_in(html)[both]["figure"]["data"]
    assert {line["name"] for line in drawn} & helpful == {"client_1", "client_3"}
    harmless = figures_in(html)["scores-harmless"]["figure"]["data"]
    assert {line["name"] for line in harmless} >= helpful
    text = "a group's own reward model has other units: helpful of clinic."
    assert text in " ".join(Tags(html).text.split())


def test_the_headline_is_the_paired_change_on_the_test_split(make_run):
    run_path = make_run()
    change = read_rows(run_path)[-1]["change"]["helpful"]
    text = Tags(write(run_path)).text.replace("\N{NO-BREAK SPACE}", " ")
    assert f"+{change['mean']:.3f} ± {change['se']:.3f}rose: " in " ".join(text.split())
    assert "on 256 test prompts" in text


@pytest.mark.slow
def test_the_head_has_the_mismatch_of_log_probabilities_only_beyond_rounding(make_run):
    run_path, facts = make_run(num_done=1), []
    for mismatch in (6e-7, 0.02):
        both = {"logprob_mismatch": mismatch, "logprob_mismatch_per_reply": 9 * mismatch}
        edit_rows(run_path, lambda row, own=both: row | (own if row["kind"] == "client" else {}))
        facts.append(run_page(read_record(run_path)).facts)
    expected = ["Model", "Objectives", "Strategy", "Clients", "Rounds", "Trained parameters"]
    assert list(facts[0]) == [*expected, "Seed", "Started"]
    assert facts[1] == facts[0] | {
        "Log-probability mismatch": "0.02 nats per token, 0.18 per reply"
    }


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [(0.5, "rose"), (-0.5, "fell"), (0.15, "did not change measurably"), (0.0, "did not change")],
)
def test_the_headlines_claim_no_more_than_the_standard_error_allows(make_run, mean, verdict):
    run_path = make_run()
    rows = read_rows(run_path)
    rows[-1]["change"]["helpful"] = {"mean": mean, "se": 0.1}
    write_rows(run_path, rows)
    headline = run_page(read_record(run_path)).headlines[0]
    assert (headline.label, headline.notes[0].startswith(verdict)) == ("helpful", True)


@pytest.mark.slow
def test_headlines_of_a_front_are_means_over_all_models_with_a_share(make_run):
    names = ("a", "b", "c")
    run_path = make_run(objectives=names)
    *rows, last = read_rows(run_path)
    at = [(1, 0, 0), (0.5, 0.5, 0), (0.5, 0, 0.5), (0, 1, 0), (0, 0, 1)]
    for preference, mean in zip(at, (0.9, 0.5, 0.5, 0.2, 0.4), strict=True):
        shares = ", ".join(f"{share:g}" for share in preference)
        own = {**last, "split": f"test at {shares}", "preference": list(preference)}
        own |= {"commonest_share": 0.1, "empty_share": 0.0}
        rows.append(own | {"scores": {n: {"mean": mean, "se": 0.1} for n in names}})
    write_rows(run_path, [*rows, last])
    first, second, _ = run_page(read_record(run_path)).headlines
    assert (first.value, first.notes[0]) == ("0.300 → 0.900", "means at shares of 0 → 1")
    assert second.value == "0.600 → 0.200"  # three models without it, one with nothing else


def test_while_the_run_goes_on_plotly_lies_beside_the_page(make_run):
    run_path = make_run(num_done=2, is_over=False)
    html = write(run_path)
    sources = [a["src"] for a in Tags(html).of("script") if "src" in a]
    assert sources == ["plotly.min.js"]
    assert (run_path / "plotly.min.js").stat().st_size > 1_000_000
    assert len(html) < 500_000


def test_plotly_is_copied_only_once(make_run):
    run_path = make_run(num_done=2, is_over=False)
    write(run_path)
    (run_path / "plotly.min.js").write_text("already here")
    write(run_path)
    assert (run_path / "plotly.min.js").read_text() == "already here"


def test_the_final_page_stands_alone(make_run):
    run_path = make_run()
    write(run_path)
    html = write(run_path, final=True)
    assert not [a for a in Tags(html).of("script") if "src" in a]
    assert "plotly.js v" in html
    assert not (run_path / "plotly.min.js").exists()


@pytest.fixture
def point(make_run, tmp_path):
    """The directory of a run that is a point of a sweep."""
    (tmp_path / "sweep.json").write_text("{}")
    return make_run("points/first")


@pytest.mark.parametrize("final", [False, True])
def test_the_points_of_a_sweep_share_plotly(point, tmp_path, final):
    html = update_report(point, final=final).read_text()
    sources = [a["src"] for a in Tags(html).of("script") if "src" in a]
    assert sources == ["../../plotly.min.js"]
    assert [path.parent for path in tmp_path.rglob("*.js")] == [tmp_path]
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


def test_the_page_of_a_point_can_be_made_one_file(point, tmp_path, capsys):
    update_report(point, final=True)
    cli([str(point)])
    assert capsys.readouterr().out.strip() == str(point / "report.html")
    html = (point / "report.html").read_text()
    assert not [a for a in Tags(html).of("script") if "src" in a]
    assert "plotly.js v" in html
    assert (tmp_path / "plotly.min.js").exists()  # the other points need it


def test_the_page_asks_nothing_of_the_network(make_run):
    html = write(make_run())
    assert "http://" not in html
    assert "https://" not in html
    policy = [a["content"] or "" for a in Tags(html).of("meta") if "http-equiv" in a]
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'")
    for tag, attributes in Tags(html).tags:
        for name in ("src", "href", "srcset", "action", "data"):
            assert attributes.get(name, "#") in ("plotly.min.js", "data:,") or str(
                attributes.get(name, "#")
            ).startswith("#"), (tag, attributes)


def test_texts_are_shown_and_never_run(make_run):
    run_path = make_run(objectives=("helpful", HOSTILE[0]), failures={2: ("client_1", HOSTILE[1])})
    with (run_path / "samples.jsonl").open("a") as file:
        for text in HOSTILE:
            for round_number in (0, 8):
                row = {"round": round_number, "prompt": text, "completion": text}
                file.write(json.dumps({**row, "scores": {text: 1.0}}) + "\n")
    (run_path / "config.yaml").write_text(json.dumps({"policy": {"path": HOSTILE[4]}}))
    html = write(run_path)
    tags = Tags(html)
    nonces = {a.get("nonce") for a in tags.of("script") if a.get("type") != "application/json"}
    assert len(tags.of("script")) == 3
    assert len(nonces) == 1
    assert not [tag for tag, _ in tags.tags if tag in ("img", "svg", "iframe", "textarea")]
    assert not [a for _, a in tags.tags if any(name.startswith("on") for name in a)]
    for text in HOSTILE:
        assert text in tags.text
    assert any(HOSTILE[0] in entry["title"] for entry in figures_in(html).values())


@pytest.mark.parametrize("text", HOSTILE)
def test_what_comes_from_a_site_is_shown_and_never_run(make_run, text):
    run_path = make_run(num_clients=2, num_rounds=2, num_done=2)
    rows = read_rows(run_path)
    for row in rows:
        if row["kind"] == "client" and row["client"] == "client_1":
            row |= {"client": text, "seconds": {text: 1.0}, "kl": text, text: math.inf}
        if row["kind"] == "round":
            row |= {
                "failures": [{"client": text, "reason": text}],
                "alarms": [text, f"again {text}"],
            }
            row["dropped_fields"] = {text: 2}
    write_rows(run_path, rows)
    html = write(run_path)
    tags = Tags(html)
    assert len(tags.of("script")) == 3
    assert not [tag for tag, _ in tags.tags if tag in ("img", "svg", "iframe", "textarea")]
    assert not [a for _, a in tags.tags if any(name.startswith("on") for name in a)]
    for words in (
        f"Rounds 1, 2: {text}",
        f"Rounds 1, 2: again {text}",
        f"dropped from the metrics of {text} (4).",
        f"kl of {text} in round 1: ",
    ):
        assert words in tags.text
    assert text not in html or "<" not in text
    lines = figures_in(html)["kl"]["figure"]["data"]
    assert {line["name"] for line in lines} <= {"client_0", figures.GLOBAL_MODEL.label}


def test_only_scripts_with_a_fresh_nonce_may_run(make_run):
    run_path = make_run()
    nonces = [re.findall(r"script-src 'nonce-([\w-]+)'", write(run_path)) for _ in range(2)]
    assert len(nonces[0]) == len(nonces[1]) == 1
    assert nonces[0] != nonces[1]


def test_a_reader_never_meets_half_a_page(make_run, monkeypatch):
    run_path = make_run(num_done=2, is_over=False)
    write(run_path)
    page_path = run_path / "report.html"
    seen = []
    monkeypatch.setattr(
        os,
        "fsync",  # called once the new page is written
        lambda _: seen.append(page_path.read_text(encoding="utf-8").endswith("</html>")),
    )
    inode = page_path.stat().st_ino
    write(run_path)
    assert seen == [True]
    assert page_path.stat().st_ino != inode


def test_failures_are_listed_with_client_and_reason(make_run):
    run_path = make_run(failures={3: ("client_2", "norm 1e9 over the limit of 10")})
    text = Tags(write(run_path)).text
    assert "1 failed update left out of the average" in " ".join(text.split())
    assert "norm 1e9 over the limit of 10" in text
    earlier = [{"client": "client_1", "reason": "no answer"}]
    is_second = {"kind": "round", "round": 2}.items()
    edit_rows(
        run_path,
        lambda row: row | ({"earlier_failures": earlier} if is_second <= row.items() else {}),
    )
    text = " ".join(Tags(write(run_path)).text.split())
    assert "1 failed update left out of the average" in text  # the next attempt had it
    assert "2, earlier attempt client_1 no answer" in text


def test_what_the_run_warned_of_stands_above_the_figures(make_run):
    text = "the β-effect stays below 5 %: β = 0.01 does nothing, β = 0.2 would matter"
    html = write(make_run(alarms={3: text}))
    assert f"<b>Round 3:</b> {text}</p>" in html
    assert html.index(text) < html.index("<main>")
    assert "<b>Round" not in write(make_run("calm"))


def test_true_scores_and_the_parse_rate_are_explained_where_they_stand_with_their_keys(make_run):
    page = run_page(read_record(make_run(is_over=True)))
    assert page.headlines[0].notes[1] == "on 256 prompts"
    assert "true score" in page.headlines[0].notes[2]
    for text in (page.words, page.block("truth").text):
        assert "evaluation.metrics.true_helpful" in text
        assert "evaluation.metrics.parse" in text
    bare = run_page(read_record(make_run("bare", has_truth=False)))
    assert bare.words == ""


def test_the_scores_say_why_training_and_validation_lie_apart(make_run):
    text = run_page(read_record(make_run())).block("scores").text
    assert "estimator.batch_size in each of strategy.num_local_steps" in text
    assert "A gap in round 1 is mostly due to prompts and chance" in text


def test_what_the_run_warned_of_at_its_start_stands_first(make_run):
    run_path = make_run(alarms={3: "β does nothing"})
    rows = read_rows(run_path)
    rows[0]["alarms"] = ["the KL controller is inert"]
    write_rows(run_path, rows)
    head = write(run_path).partition("<main>")[0]
    first = head.index("<b>Before round 1:</b> the KL controller is inert</p>")
    assert first < head.index("<b>Round 3:</b> β does nothing</p>")


def test_the_page_warns_of_few_held_out_prompts_unless_the_run_did(make_run):
    def notices(counts, own):
        def change(row):
            if row["kind"] != "evaluation":
                return row
            rewards = {
                name: {**entry, "num_prompts": own} for name, entry in row["rewards"].items()
            }
            return {**row, "num_prompts": counts[row["split"]], "rewards": rewards}

        edit_rows(run_path, change)
        return run_page(read_record(run_path)).notices

    run_path = make_run(num_done=1)
    assert notices({"test": 20, "validation": 20}, own=20) == []
    (notice,) = notices({"test": 19, "validation": 20}, own=20)
    assert notice.startswith("With 19 test prompts most changes cannot be told from chance")
    (notice,) = notices({"test": 30, "validation": 30}, own=6)
    assert notice.startswith("With 6 test prompts and 6 validation prompts most")
    alarm = {"alarms": ["data.hold_out: 6 prompts are held out for test, too few"]}
    edit_rows(run_path, lambda row: row | (alarm if row["kind"] == "run" else {}))
    assert "With 6 validation prompts most" in run_page(read_record(run_path)).notices[0]


def test_all_alarms_of_all_rounds_stand_above_the_figures_and_equal_ones_together(make_run):
    run_path = make_run(num_done=4)
    rows = read_rows(run_path)
    for row in (row for row in rows if row["kind"] == "round"):
        row["alarms"] = ["β does nothing", f"client_1 has failed {row['round']} times in a row"]
        row["dropped_fields"] = {"client_2": 1, "client_3": 0}
    write_rows(run_path, rows)
    head = write(run_path).partition("<main>")[0]
    assert head.count('<p class="notice"><b>Round') == 5
    assert "<b>Rounds 1, 2, 3, 4:</b> β does nothing</p>" in head
    for at in (1, 2, 3, 4):
        assert f"<b>Round {at}:</b> client_1 has failed {at} times in a row</p>" in head
    dropped = "Fields that the server does not know were dropped from the metrics of client_2 (4)."
    assert head.count(dropped) == 1
    assert "were dropped" not in write(make_run("calm"))


def test_the_page_of_an_older_run_says_nothing_of_what_it_did_not_measure(make_run):
    old = write(make_run("old", has_diagnostics=False))
    new = write(make_run("new", has_gram=True))
    for words in ("helpful / harmless</li>", "Pareto stationarity"):
        assert words in new
        assert words not in old


TOLD = ("kind", "round", "client", "num_examples", "num_steps", "bytes_up", "bytes_down")
"""What a client's row holds where privacy lets no statistics out."""


def _make_private(run_path: Path, **views: float | None) -> None:
    rows = read_rows(run_path)
    for row in rows:
        if row["kind"] == "client":
            for key in row.keys() - set(TOLD):
                del row[key]
        if row["kind"] == "round":
            del row["drift"], row["weights_spread"]
            spent = {key: v and v * row["round"] ** 0.5 for key, v in views.items()}
            row["privacy"] = {**spent, "delta": 1e-5}
    write_rows(run_path, rows)


def test_a_run_with_privacy_tells_epsilon_and_lacks_what_clients_kept(make_run):
    run_path = make_run(num_done=4)
    _make_private(run_path, epsilon=2.0, epsilon_server=7.0)
    html = write(run_path)
    assert "ε 4.00, δ 1e-05 per client" in Tags(html).text
    drawn = figures_in(html)
    lines = drawn["epsilon"]["figure"]["data"]
    assert [line["y"][-1] for line in lines] == [4.0, 14.0]
    keys = Tags(html[html.index('id="privacy"') :]).text
    assert figures.VIEWS["epsilon_server"].label in keys
    assert figures.VIEWS["epsilon_if_unknown"].label not in keys
    assert not {"clipped", "drift", "weights-helpful", "kl_coefficient"} & set(drawn)


def test_without_noise_epsilon_is_infinite_and_without_privacy_not_spoken_of(make_run):
    run_path = make_run()
    assert "Privacy" not in Tags(write(run_path)).text
    _make_private(run_path, epsilon=None)
    html = write(run_path)
    assert "ε ∞, δ 1e-05 per client" in Tags(html).text
    assert "epsilon" not in figures_in(html)


def test_a_run_with_secure_aggregation_tells_what_was_hidden_at_what_price(make_run):
    run_path = make_run(num_done=3)
    assert "secure aggregation" not in Tags(write(run_path)).text
    rows = read_rows(run_path)
    sizes = iter([3, 2, 3])
    for row in rows:
        if row["kind"] == "round":
            count = next(sizes)
            row["secure"] = {
                "num_updates": count,
                "masked_bytes": 1_000_000 * count,
                "seconds": 0.25,
                "rounding": 2.0**-29,
            }
    write_rows(run_path, rows)
    text = Tags(write(run_path)).text
    assert "the server received the 8 updates masked, 8 MB in total" in text
    assert "only the mean of each round, over 2 or more updates" in text
    assert "took 0.250 s per round" in text
    assert "by more than 2e-09" in text


def test_the_command_refuses_what_is_no_run_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        cli([str(tmp_path / "nothing")])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
