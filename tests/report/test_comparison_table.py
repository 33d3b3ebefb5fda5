import re

import pytest

from firm.report.comparison import write_comparison
from firm.report.samples import Sample, ScoredReply, Turn
from firm.run.comparison import Line, Measure

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}"


def row(name="helpful", *changes: Measure, is_score=True) -> list[Line]:
    """One line of each adapter."""
    ends = Measure(0.5, 0.1), Measure(1.0, 0.1)
    return [Line(name, *ends, change, is_score=is_score) for change in changes]


@pytest.fixture
def write(tmp_path):
    def write(*, rows=None, samples=(), adapters=("first", "second"), title="Two adapters") -> str:
        path = tmp_path / "evaluation.html"
        changes = [Measure(0.5, 0.1)] * len(adapters)
        write_comparison(
            path,
            title=title,
            adapters={name: f"runs/{name}/adapter" for name in adapters},
            lines={
                name: [own[place] for own in rows or [row("helpful", *changes)]]
                for place, name in enumerate(adapters)
            },
            samples=samples,
            facts={"Base model": "models/base"},
            config="seed: 0\n",
        )
        assert [file.name for file in tmp_path.iterdir()] == ["evaluation.html"]
        return path.read_text(encoding="utf-8")

    return write


def text_of(html: str) -> str:
    body = html.partition("<body>")[2].replace("&nbsp;", " ").replace("\N{NO-BREAK SPACE}", " ")
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_every_figure_stands_under_its_model_with_change_and_z(write):
    rows = [
        row("helpful", Measure(0.5, 0.1), Measure(-0.125, 0.125)),
        row("distinct_1", Measure(0.25), Measure(0.25), is_score=False),
    ]
    text = text_of(write(rows=rows))
    assert "Figure base first second" in text
    assert "0.50 ± 0.10 1.00 ± 0.10 +0.50 ± 0.10, z +5.00" in text
    assert "−0.12 ± 0.12, z −1.00" in text
    assert "Distinct words (share)" in text
    assert "runs/second/adapter" in text


def test_only_changes_beyond_two_standard_errors_are_bold(write):
    html = write(rows=[row("helpful", Measure(0.5, 0.1), Measure(0.19, 0.1))])
    assert re.findall(r'class="(change|change clear)">([^,]*),', html) == [
        ("change clear", "+0.50\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.10"),
        ("change", "+0.19\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}0.10"),
    ]


def test_kl_is_shown_without_a_change_because_it_is_one(write):
    html = write(rows=[row("kl", Measure(0.5, 0.1), Measure(0.5, 0.1), is_score=False)])
    assert re.findall(r'<td data-label="base"[^>]*>(.*)</td>', html) == ["–"]
    assert 'class="change' not in html


def test_scores_alone_are_drawn(write):
    changes = Measure(0.5, 0.1), Measure(0.2, 0.1)
    html = write(rows=[row("helpful", *changes), row("length", *changes, is_score=False)])
    assert html.count("<svg") == 2
    assert "<svg" not in write(rows=[row("length", *changes, is_score=False)])


def test_bars_end_at_the_edge_and_no_change_is_the_middle(write):
    def ends(*changes):
        found = re.findall(r'x1="([\d.]+)" x2="([\d.]+)" y1="5"', write(rows=[row("a", *changes)]))
        return [tuple(map(float, pair)) for pair in found]

    drawn = ends(Measure(0.3, 0.1), Measure(-0.1, 0.1))
    assert drawn == [(75, 100), (87.5, 87.5), (25, 50), (37.5, 37.5)]
    assert ends(Measure(0.0, 0.0), Measure(0.0)) == [(50, 50)] * 4


def test_replies_stand_side_by_side_and_many_are_folded(write):
    samples = [
        Sample(
            [Turn("Human", f"question {i}")],
            [ScoredReply(f"{who} {i}", {"helpful": i / 8}) for who in ("plain", "good", "")],
        )
        for i in range(6)
    ]
    html = write(samples=samples)
    text = text_of(html)
    assert "Human question 0 base plain 0 helpful 0.000 first good 0" in text
    assert "2 more" in text
    assert html.index("question 3") < html.index("<details>") < html.index("question 4")
    assert "Samples" not in text_of(write(samples=[]))


def test_texts_are_shown_and_never_run(write):
    samples = [Sample([Turn("Human", HOSTILE)], [ScoredReply(HOSTILE, {}), ScoredReply("", {})])]
    html = write(samples=samples, adapters=[HOSTILE], title=HOSTILE)
    assert "<script" not in html
    assert "<img" not in html
    assert "{{ 7 * 7 }}" in html
    assert "(empty reply)" in html


def test_the_page_asks_nothing_of_the_network_and_runs_no_script(write):
    html = write()
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src' in html
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]+", html)
    assert "@import" not in html
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
