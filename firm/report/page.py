"""Writes report.html: one file with its style, script, data and, in the end, plotly inside."""

import html
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import jinja2
import plotly.offline

from firm.report import figures, formats, plane
from firm.report.comparison import Comparison, best_comparison
from firm.report.drawing import INK, MUTED, Key, Panel
from firm.report.ledger import WOULD_BE, total_bytes, uploads_so_far
from firm.report.record import Record, read_record
from firm.report.samples import sample_pairs
from firm.run.guard import drawing, drawn
from firm.run.rows import Row

PAGE_NAME = "report.html"
PLOTLY_NAME = "plotly.min.js"
CLEAR_Z = 2.0
"""From this many standard errors on, the summary says that a score rose or fell."""
ORDER = (
    "trade-off",
    "evaluation",
    "rewards",
    "truth",
    "samples",
    "diagnostics",
    "weights",
    "gradients",
    "training",
    "cost",
    "privacy",
    "failures",
    "settings",
)
"""The page's sections: what came out, what it looks like, how it came about, what it cost."""
NUM_OPEN_SAMPLES = 4
"""The other samples are folded."""
NUM_LEFT_OUT = 5
"""So many entries that are not valid are named; of the others the number is told."""

T = TypeVar("T")


@dataclass(frozen=True)
class Alarm:
    """What a run warned of, and in which rounds."""

    text: str
    rounds: tuple[int, ...]
    """0 stands for the run's start."""

    @property
    def when(self) -> str:
        """The rounds in words."""
        if self.rounds == (0,):
            return "Before round 1"
        return f"Round{'s' * (len(self.rounds) > 1)} {', '.join(map(str, self.rounds))}"


@dataclass(frozen=True)
class Section:
    """A heading, what one sees below it, and figures with the legend that they share."""

    name: str
    title: str
    text: str
    panels: list[Panel]
    legend: list[Key]
    note: str = ""
    """Why there are no figures, where they could not be drawn."""

    @property
    def is_shown(self) -> bool:
        """Whether there is anything to see."""
        return bool(self.panels or self.note)


def drawn_section(title: str, draw: Callable[[], Section], *, name: str) -> Section:
    """Returns a section or, where it cannot be drawn, one that says so in its place.

    Args:
        title: Heading in that case.
        draw: Returns the section, whose figures must be finite numbers, texts and lists.
        name: Of the section.
    """

    def checked() -> Section:
        section = draw()
        script_json(section.panels)
        return section

    return drawn(
        f"The section {title!r}",
        checked,
        instead=lambda note: Section(name, title, "", [], [], note),
    )


def drawn_part(notes: list[str], what: str, draw: Callable[[], T], default: T) -> T:
    """Returns a part of a page or, where it cannot be drawn, a default, and adds a note on that.

    Args:
        notes: The notes of the page, to which one may be added.
        what: Opens the note.
        draw: Returns the part.
        default: Stands in for it.
    """

    def leave_out(note: str) -> T:
        notes.append(note)
        return default

    return drawn(what, draw, leave_out)


def write_report(run_path: Path, *, final: bool) -> Path:
    """Writes the report of a run, at whatever stage it is, and returns the page's path.

    The page is replaced in one step: a reader never meets half of it.

    Args:
        run_path: The run's directory.
        final: Whether the run is over. The page then carries plotly itself and stands alone;
            before, plotly.min.js lies beside it, so that rewriting it every round stays cheap.

    Raises:
        UserError: There is no run at `run_path`.
        ValueError: One of its files is malformed.
        OSError: The page cannot be written.
    """
    record = read_record(run_path)
    script_path = run_path / PLOTLY_NAME
    if not final and not script_path.exists():
        replace_file(script_path, plotly.offline.get_plotlyjs())
    page_path = run_path / PAGE_NAME
    replace_file(page_path, render(record, inline=final))
    if final:
        script_path.unlink(missing_ok=True)
    return page_path


def update_report(run_path: Path, *, final: bool = False) -> Path:
    """Writes the report of a run as `write_report` does, but never raises, and returns its path.

    A page that cannot be written, because the disk is full for one, is a warning: the run goes on,
    and its next checkpoint tells of the disk.
    """
    with drawing(f"The page {PAGE_NAME}"):
        write_report(run_path, final=final)
    return run_path / PAGE_NAME


def render(record: Record, *, inline: bool) -> str:
    """Returns the page of a run as HTML.

    What cannot be drawn is left out with a note in its place, and a warning in the log.

    Args:
        record: The run.
        inline: Whether plotly stands in the page; if not, the page loads it from its own folder.
    """
    notes: list[str] = []
    part = partial(drawn_part, notes)
    comparison = part("The comparison", lambda: best_comparison(record), None)
    drawn_sections = [
        drawn_section(name.capitalize(), partial(draw, record), name=name)
        for name, draw in SECTIONS.items()
    ]
    sections = {section.name: section for section in drawn_sections if section.is_shown}
    pairs = part("The section 'Samples'", lambda: sample_pairs(record), [])
    failures = [
        {"round": row["round"], **failure}
        for row in record.rounds
        for failure in row.get("failures") or ()
    ]
    titles = {name: section.title for name, section in sections.items()}
    titles |= {"evaluation": "Base against aligned model"} if comparison else {}
    titles |= {"samples": "Samples"} if pairs else {}
    titles |= {"failures": "Failures"} if failures else {}
    titles |= {"settings": "How it was made"}
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            record=record,
            status=record.run.get("status", "unknown"),
            facts=part("The list of facts", lambda: _facts(record), {}),
            run_text=json.dumps(record.run, indent=2, ensure_ascii=False),
            comparison=comparison,
            summary=part("The summary", lambda: _summary(record, comparison), ""),
            bytes_sent=sum(
                row.get(key) or 0 for row in record.rounds for key in ("bytes_up", "bytes_down")
            ),
            seconds=sum(row.get("seconds") or 0 for row in record.rounds),
            contents={name: titles[name] for name in ORDER if name in titles},
            sections=sections,
            failures=failures,
            alarms=alarms([record.header, *record.rounds]),
            notes=[*notes, *left_out_notes(record), *_dropped_fields(record)],
            pairs=pairs,
            num_open_samples=NUM_OPEN_SAMPLES,
            objective_color=lambda name: figures.objective_color(record, name),
            figures=script_json([p for section in sections.values() for p in section.panels]),
            plotly=plotly.offline.get_plotlyjs() if inline else None,
            plotly_name=PLOTLY_NAME,
            nonce=secrets.token_urlsafe(16),
        )
    )


def alarms(rows: Iterable[Row]) -> list[Alarm]:
    """Returns all that a run warned of, in the order of its rows; equal texts stand together.

    Args:
        rows: The run's own row, which may have alarms of its start, and those of the rounds by
            rising round.
    """
    rounds_by_text: dict[str, list[int]] = {}
    for row in rows:
        for text in row.get("alarms") or ():
            rounds_by_text.setdefault(text, []).append(row.get("round", 0))
    return [Alarm(text, tuple(dict.fromkeys(at))) for text, at in rounds_by_text.items()]


def left_out_notes(*records: Record) -> list[str]:
    """Returns a sentence for each run on what was not valid in its files; none where all was."""
    return [
        left_out_note(f"the log of {record.name}", record.left_out)
        for record in records
        if record.left_out
    ]


def left_out_note(place: str, left_out: Sequence[str]) -> str:
    """Returns a sentence on what was not valid and is left out, one thing or more."""
    count = len(left_out)
    more = f" and {count - NUM_LEFT_OUT} more" if count > NUM_LEFT_OUT else ""
    return (
        f"{_count(count, 'entry', 'entries')} in {place} {'is' if count == 1 else 'are'} not valid "
        f"and left out: {'; '.join(left_out[:NUM_LEFT_OUT])}{more}."
    )


def _dropped_fields(record: Record) -> list[str]:
    """A sentence on what the server did not take over from clients."""
    counts: Counter[str] = Counter()
    for row in record.rounds:
        counts.update({name: n or 0 for name, n in (row.get("dropped_fields") or {}).items()})
    if not +counts:
        return []
    clients = ", ".join(f"{name} ({count})" for name, count in (+counts).items())
    return [f"Fields that the server does not know were dropped from the metrics of {clients}."]


def replace_file(path: Path, text: str) -> None:
    """Writes a file in one step: whoever opens it finds the old text or the new one, whole.

    Halves of characters, which UTF-8 cannot say, become escapes that can be read.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@cache
def environment() -> jinja2.Environment:
    """Templates of this package; what they print is escaped, a name they lack is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("firm.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": formats.number,
        "measure": formats.measure,
        "size": formats.size,
        "duration": formats.duration,
        "group": html.escape,  # as figures write names
    }
    return environment


def script_json(panels: list[Panel]) -> str:
    """Returns JSON of all figures by name that can stand inside a script element."""
    figure_by_name = {
        panel.name: {"title": panel.title, "figure": panel.figure} for panel in panels
    }
    # Inside a JSON string "<" may be written as its code: no tag, comment or script can end here.
    return json.dumps(figure_by_name, allow_nan=False).replace("<", "\\u003c")


def _facts(record: Record) -> dict[str, str]:
    """What the run is: label -> text; what its files do not say is left out."""
    policy = record.settings.get("policy") or {}
    num_trainable = record.header.get("num_trainable")
    facts = {
        "Model": policy.get("path"),
        "Objectives": ", ".join(record.objectives),
        "Clients": len(record.clients),
        "Rounds": f"{record.last_round} of {record.num_rounds}",
        "Trained parameters": None if num_trainable is None else f"{num_trainable:,}",
        "Seed": record.settings.get("seed"),
        "Commit": formats.commit(record.run["commit"]),
        "Started": formats.moment(record.run["started"]),
        "Log-probability mismatch": _mismatch(record),
        "Privacy": _guarantee(record),
    }
    return {label: str(value) for label, value in facts.items() if value not in (None, "")}


def _mismatch(record: Record) -> str | None:
    """How far log-probabilities at generation are from a forward pass's in the first round."""
    rows = [row for rows in record.trainings.values() for row in rows if row["round"] == 1]
    means = []
    for key in ("logprob_mismatch", "logprob_mismatch_per_reply"):
        found = [row[key] for row in rows if row.get(key) is not None]
        means += [fmean(found)] if found else []
    return "{:.2g} nats per token, {:.2g} per reply".format(*means) if len(means) == 2 else None


def _guarantee(record: Record) -> str | None:
    """The (ε, δ) of the clients so far, where there is any."""
    spent = record.rounds[-1].get("privacy") if record.rounds else None
    if not spent:
        return None
    epsilon = "∞" if spent["epsilon"] is None else formats.number(spent["epsilon"])
    return f"ε {epsilon}, δ {spent['delta']:g} per client"


def _summary(record: Record, comparison: Comparison | None) -> str:
    """What the run did to its objectives, in a sentence."""
    if not record.evaluations:
        return "The run has begun. Figures appear here as it writes them."
    if comparison is None and not record.rounds:
        return "The base model is evaluated. The first round of training is under way."
    if comparison is None:
        return (
            f"{_count(record.last_round, 'round')} of training done. The aligned model has not "
            "been compared with the base model yet."
        )
    changes = []
    for objective in record.objectives:
        line = comparison.line(objective)
        if line is None or line.change is None:
            continue
        amount = formats.measure(line.change, is_signed=True)
        z = line.change.z
        if z is None or abs(z) < CLEAR_Z:
            changes.append(f"{objective} did not change measurably ({amount})")
        else:
            changes.append(f"{objective} {'rose' if z > 0 else 'fell'} ({amount})")
    return (
        f"After {_count(comparison.round, 'round')} on {_count(len(record.clients), 'client')}: "
        f"{'; '.join(changes)}. Change of the mean reward against the base model, ± standard "
        f"error, on {comparison.num_prompts} {comparison.split} prompts."
    )


def _would_send(record: Record) -> str:
    """What other algorithms would have uploaded, in a sentence; empty where it is not known."""
    ends = {name: uploads_so_far(record, name)[-1:] for name in WOULD_BE}
    if len(record.objectives) < 2 or not all(ends.values()):
        return ""
    others = " and ".join(f"{formats.size(end[0][1])} with {name}" for name, end in ends.items())
    return (
        f" The clients sent {formats.size(total_bytes(record, 'bytes_up'))} up; with as many "
        f"clients it would have been {others}, by the sizes of what these send: the adapter and "
        "the uncompressed Jacobian, and one adapter per objective."
    )


def _count(number: int, noun: str, nouns: str | None = None) -> str:
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def _trade_off_section(record: Record) -> Section:
    has_several = len(record.objectives) > 1
    has_path, has_test = record.evaluations.get("validation"), plane.final_test(record)
    path = [Key("validation, by round", "var(--round-last)", "path")] if has_path else []
    test = [Key("test, base and aligned", "var(--round-last)", "diamond")] if has_test else []
    return Section(
        "trade-off",
        "The trade-off" if has_several else "Reward against KL",
        (
            "Each point is the global model after a round, scored on the validation prompts; "
            "its colour deepens from the base model on. "
            if path
            else ""
        )
        + ("Up and to the right is better. " if has_several else "Up is better. ")
        + ("Diamonds are base and aligned model on the test prompts. " if test else "")
        + "Bars: one standard error.",
        plane.trade_off_planes(record),
        path + test,
    )


def _reward_section(record: Record) -> Section:
    return Section(
        "rewards",
        "Rewards by round",
        "Bold: mean reward of the global model on the validation prompts, with its standard "
        "error. Thin: what each client saw on its own prompts while it trained.",
        figures.reward_curves(record),
        _client_keys(record),
    )


def _truth_section(record: Record) -> Section:
    has_truth = bool(figures.true_scores(record))
    return Section(
        "truth",
        "Learned and true scores" if has_truth else "Other scores",
        "Solid: what the reward model says. Dotted: the true score of the same replies. Where "
        "the solid line rises and the dotted one does not, the reward is being hacked. Both "
        "are changes since the base model, in standard deviations of its score over prompts."
        if has_truth
        else "What is measured on the validation prompts beside the rewards.",
        figures.learned_and_true(record),
        [Key("learned reward", MUTED), Key("true score", MUTED, "dot")] if has_truth else [],
    )


def _diagnostics_section(record: Record) -> Section:
    return Section(
        "diagnostics",
        "Can the rewards be trusted?",
        "What the reward models said of the clients' training replies, mean over clients. "
        "Replies with nearly equal rewards teach little; a reward that follows the length of "
        "the reply invites padding; a text that was cut short was not judged whole.",
        figures.reward_diagnostics(record),
        [*_objective_keys(record), *figures.pair_keys(record), figures.CUT],
    )


def _weights_section(record: Record) -> Section:
    has_server = figures.has_server_weights(record)
    return Section(
        "weights",
        "Weights of the clients",
        "λ says how much each objective's gradient counts in a client's step; with FIRM "
        "each client finds its own, and at the dashed line all objectives count alike. Clients "
        "whose lines lie apart weigh the objectives differently."
        + (" Here the server finds the weights, for all clients alike." if has_server else ""),
        figures.weight_curves(record),
        [
            *_client_keys(record),
            *_mean_key(record),
            *([figures.SERVER] if has_server else []),
            *(_objective_keys(record) if len(record.objectives) > 2 else []),
        ],
    )


def _gradients_section(record: Record) -> Section:
    return Section(
        "gradients",
        "Conflict of the gradients",
        "Below a cosine of zero, what serves one objective hurts the other. The β-effect is "
        "the share of the way to uniform weights that regularisation takes λ; below 5 % "
        "(dashed) β does nothing. Drift is the clients' distance from their mean, measured in "
        "steps of the server."
        + (
            " The bound on Pareto stationarity is the most that the squared norm of the "
            "shortest common gradient can be, on the batches that a round draws first, at the "
            "global model: near zero, no step serves all objectives on these batches. For the "
            "objectives themselves it is an estimate, which the batches' noise usually raises."
            if figures.has_stationarity(record)
            else ""
        ),
        figures.gradient_curves(record),
        [*_client_keys(record), *_mean_key(record)],
    )


def _training_section(record: Record) -> Section:
    return Section(
        "training",
        "Health of the training",
        "Thin: each client, mean over its round. Bold: the global model on the validation "
        "prompts. A KL that runs away, an entropy that collapses or replies that grow without "
        "end are signs of over-optimisation.",
        figures.training_curves(record),
        [*_client_keys(record), Key(figures.GLOBAL_MODEL, INK)],
    )


def _cost_section(record: Record) -> Section:
    would_send = _would_send(record)
    return Section(
        "cost",
        "Bytes and seconds",
        "What the federation sent so far, as serialised, and where the time went: bars are "
        "seconds per stage summed over the clients, the line is the elapsed time of the round."
        + would_send,
        figures.cost_curves(record),
        [
            figures.UP,
            figures.DOWN,
            *(figures.WOULD_SEND.values() if would_send else ()),
            *(Key(name, figures.stage_color(record, name)) for name in figures.stages(record)),
            Key("whole round", INK),
        ],
    )


def _privacy_section(record: Record) -> Section:
    return Section(
        "privacy",
        "Privacy spent",
        "ε of a client so far: how well those who know all but its data can tell whether it "
        "is this client or another. Below 1 is strong, above 10 close to none. It holds for "
        "the adapters and for noisy statistics, not for checkpoints, which hold the clients' "
        "own states.",
        figures.privacy_curves(record),
        figures.privacy_keys(record),
    )


SECTIONS: dict[str, Callable[[Record], Section]] = {
    "trade-off": _trade_off_section,
    "rewards": _reward_section,
    "truth": _truth_section,
    "diagnostics": _diagnostics_section,
    "weights": _weights_section,
    "gradients": _gradients_section,
    "training": _training_section,
    "cost": _cost_section,
    "privacy": _privacy_section,
}
"""The parts of the page that hold figures; one without figures is left out."""


def _client_keys(record: Record) -> list[Key]:
    return [figures.client_key(record, client) for client in record.clients]


def _mean_key(record: Record) -> list[Key]:
    return [Key("mean over clients", INK)] if len(record.clients) > 1 else []


def _objective_keys(record: Record) -> list[Key]:
    return [Key(name, figures.objective_color(record, name)) for name in record.objectives]
