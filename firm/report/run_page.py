"""The page of one run: `report.html`, rewritten as rounds end."""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from firm.base.quantities import shown
from firm.report import formats
from firm.report import run_figures as figures
from firm.report.comparison import (
    RunComparison,
    best_comparison,
    comparison_of,
    comparison_table,
)
from firm.report.drawing import MUTED, LegendEntry, constant
from firm.report.formats import NBSP
from firm.report.front_sections import front_sections
from firm.report.ledger import cost_section, ledger_table, total_bytes
from firm.report.page import (
    PAGE_NAME,
    Block,
    Headline,
    Page,
    Provenance,
    Samples,
    Section,
    Table,
    alarms,
    draw_blocks,
    drawn_part,
    left_out_notes,
    prose,
    write_page,
)
from firm.report.plane import ACCURACY
from firm.report.record import Record, read_record, score
from firm.report.run_front import front_of_run, front_rows, volumes_of_run
from firm.report.samples import sample_preferences, samples_of
from firm.report.tables import Setting
from firm.run.comparison import FEW_PROMPTS, score_notes
from firm.run.guard import drawing
from firm.run.sweep import sweep_folder

NOTABLE_MISMATCH = 1e-3
"""Nats per token; float32 leaves 1e-6, another precision or engine leaves 1e-2."""
STATS = {"kl": "KL, nats per reply", "length": "Reply length, tokens", "parse": "Parse rate"}
"""Labels of the evaluated figures in the head."""


def write_report(run_path: Path, *, final: bool, shared: Path | None = None) -> Path:
    """Writes the report of a run, finished or not, and returns the page's path.

    The final page embeds plotly unless it loads plotly from a shared folder.

    Raises:
        UserError: There is no run at `run_path`.
        ValueError: One of its files is malformed.
        OSError: The page cannot be written.
    """
    page = run_page(read_record(run_path))
    return write_page(run_path / PAGE_NAME, page, final=final, shared=shared)


def update_report(run_path: Path, *, final: bool = False) -> Path:
    """Writes the report of a run like `write_report`, but warns instead of raising.

    Points of a sweep or study share one copy of plotly. If the page cannot be written, for example
    because the disk is full, the run continues; its next checkpoint reports the full disk.
    """
    with drawing(f"The page {PAGE_NAME}"):
        write_report(run_path, final=final, shared=sweep_folder(run_path))
    return run_path / PAGE_NAME


def run_page(record: Record) -> Page:
    """Returns the page of a run; parts that cannot be drawn become notes."""
    notes: list[str] = []
    part = partial(drawn_part, notes)
    comparison = part("The comparison", lambda: best_comparison(record), None)
    front = part("The front", lambda: front_of_run(record), None)
    run = Setting.of(record.name, 0, [record])
    draws: dict[str, Callable[[], Block | None]] = {
        name: partial(draw, run) for name, draw in SECTIONS.items()
    }
    draws["evaluation"] = lambda: comparison and _evaluation(record, comparison)
    if front:
        draws = {**front_sections({record.name: front}), **draws}
    blocks = draw_blocks(draws)
    summary = part("The summary", lambda: _summary(record, comparison), "")
    facts = part("The list of facts", lambda: _facts(record), {})
    outcomes = part("The constraints", lambda: record.constraint_outcomes, [])
    signs = "; ".join(record.hacking_signs)
    notes += part("The number of prompts", lambda: _few_prompts(record), [])
    notes += left_out_notes([record]) + _dropped_fields(record)
    if num_failed := sum(len(row.get("failures") or ()) for row in record.rounds):
        link = Markup('<a href="#failures">{}</a> left out of the average.')
        notes.append(link.format(formats.count(num_failed, "failed update")))
    return Page(
        product="FIRM run report",
        title=record.name,
        status=record.run.get("status", "unknown"),
        summary=[
            *filter(None, [summary, record.header.get("about")]),
            *([f"The adapter is that of {kept}."] if (kept := record.kept_adapter) else []),
            *([prose("no-update-kept")[1]] if record.kept_no_update else []),
            *(f"Constraint {outcome}." for outcome in outcomes),
            *([f"Signs of reward hacking, so read the samples: {signs}."] if signs else []),
        ],
        facts=facts,
        headlines=_headlines(record, comparison) if comparison else [],
        stats=_stats(record, comparison) if record.rounds else [],
        words=score_notes(line.name for line in comparison.lines) if comparison else "",
        alarms=[(alarm.when, alarm.text) for alarm in alarms([record.header, *record.rounds])],
        notices=notes,
        blocks=blocks,
    )


# --- The head -------------------------------------------------------------------------------------


def _facts(record: Record) -> dict[str, str]:
    """Returns the facts on a run, text by label; unknown facts are omitted."""
    policy, strategy = (record.settings.get(key) or {} for key in ("policy", "strategy"))
    num_trainable = record.header.get("num_trainable")
    spent = record.rounds[-1].get("privacy") if record.rounds else None
    facts = {
        "Model": policy.get("path"),
        "Objectives": ", ".join(record.objectives),
        "Strategy": strategy.get("name"),
        "Estimator": (record.settings.get("estimator") or {}).get("name"),
        "Clients": len(record.clients),
        "Rounds": f"{record.last_round} of {record.num_rounds}",
        "Trained parameters": None if num_trainable is None else f"{num_trainable:,}",
        "Seed": record.settings.get("seed"),
        "Started": formats.moment(record.run["started"]),
        "Log-probability mismatch": _mismatch(record),
        "Privacy": _guarantee(spent) if spent else None,
        "Secure aggregation": "yes" if strategy.get("secure") else None,
    }
    return {label: str(value) for label, value in facts.items() if value not in (None, "")}


def _mismatch(record: Record) -> str | None:
    """Returns the difference of log-probabilities in generation and forward pass, in round 1.

    None where it is rounding alone.
    """
    rows = [row for rows in record.trainings.values() for row in rows if row["round"] == 1]
    means = []
    for key in ("logprob_mismatch", "logprob_mismatch_per_reply"):
        known = [row[key] for row in rows if row.get(key) is not None]
        means += [fmean(known)] if known else []
    is_notable = len(means) == 2 and means[0] >= NOTABLE_MISMATCH
    return "{:.2g} nats per token, {:.2g} per reply".format(*means) if is_notable else None


def _guarantee(spent: dict[str, float | None]) -> str:
    """Returns the (ε, δ) of the clients so far."""
    epsilon = "∞" if spent["epsilon"] is None else formats.number(spent["epsilon"])
    return f"ε {epsilon}, δ {spent['delta']:g} per client"


def _summary(record: Record, comparison: RunComparison | None) -> str:
    """Returns a sentence on how far the run is, and on what the headlines show."""
    status = record.run.get("status")
    rounds = formats.count(record.last_round, "training round")
    if comparison is None and status in ("interrupted", "failed"):
        ended = "was interrupted" if status == "interrupted" else "failed"
        return prose("summary-stopped", rounds=rounds, ended=ended)[1]
    if not record.evaluations:
        return prose("summary-started")[1]
    if comparison is None and not record.rounds:
        return prose("summary-first-round")[1]
    if comparison is None:
        return prose("summary-running", rounds=rounds)[1]
    lines = [line for line in map(comparison.line, record.objectives) if line and line.change]
    exact = {bool(line.change and line.change.interval) for line in lines}
    spread = f"±{NBSP}standard error"
    if True in exact:
        interval = "with its exact 95 % interval"
        spread = interval if exact == {True} else f"{spread}, or {interval} if it is a share"
    return prose(
        "summary-front" if len(front_rows(record)) > 1 else "summary-over",
        rounds=formats.count(comparison.round, "round"),
        clients=formats.count(len(record.clients), "client"),
        measured=ACCURACY if record.learns_from_pairs else "mean score",
        prompts=comparison.prompts,
        spread=spread,
    )[1]


def _headlines(record: Record, comparison: RunComparison) -> list[Headline]:
    """Returns each objective's change, or its values at its least and largest share."""
    headlines, rows = [], front_rows(record)
    for j, name in enumerate(record.objectives):
        line = comparison.line(name)
        if line is None or not line.is_score:
            continue
        base = formats.number(line.base.mean if line.base else None)
        aligned = formats.number(line.aligned.mean if line.aligned else None)
        if len(rows) > 1:
            by_share: dict[float, list[float]] = {}
            for row in rows:
                if (mean := score(row, record.main_field, name, "mean")) is not None:
                    by_share.setdefault(round(row["preference"][j], 6), []).append(mean)
            if not by_share:
                continue
            ends = min(by_share), max(by_share)
            value = " → ".join(formats.number(fmean(by_share[share])) for share in ends)
            is_mean = any(len(by_share[share]) > 1 for share in ends)
            shares = " → ".join(f"{share:.2g}" for share in ends)
            notes = [f"{'means ' * is_mean}at shares of {shares}", f"base {base}"]
        else:
            value = formats.measure(line.change, is_signed=True)
            verdict = "rose" if line.change and line.change.mean > 0 else "fell"
            is_clear = line.change and line.change.is_clear
            notes = [f"{verdict if is_clear else 'did not change measurably'}: {base} → {aligned}"]
            if line.change and line.change.num_prompts is not None:
                notes.append(f"on {formats.count(line.change.num_prompts, 'prompt')}")
            if truth := comparison.line(f"true_{name}"):
                notes.append(f"true score {formats.measure(truth.change, is_signed=True)}")
        headlines.append(Headline(name, figures.objective_color(record, name), value, notes))
    return headlines


def _stats(record: Record, comparison: RunComparison | None) -> list[tuple[str, str, str]]:
    """Returns label, value and note of the numbers in the head."""
    stats, front = [], front_rows(record)
    for name, label in STATS.items():
        line = comparison.line(name) if comparison else None
        if line is None or line.aligned is None:
            continue
        value, notes = formats.number(line.aligned.mean), []
        if line.aligned.interval:
            notes.append(formats.measure(line.aligned).partition(" ")[2].replace(NBSP, " "))
        notes += [f"base {formats.number(line.base.mean)}"] if line.base and name != "kl" else []
        values = [row[name] for row in front if row.get(name) is not None]
        if values and not line.is_score:
            value = " to ".join(formats.number(end) for end in (min(values), max(values)))
            notes.insert(0, "by preference")
        stats.append((label, value, ", ".join(notes)))
    sent = formats.size(sum(total_bytes(record, key) for key in ("bytes_up", "bytes_down")))
    time = formats.duration(sum(row.get("seconds") or 0 for row in record.rounds))
    return [*stats, ("Sent, both ways", sent, ""), ("Time in rounds", time, "")]


def _dropped_fields(record: Record) -> list[str]:
    """Returns a sentence on the clients' fields that the server dropped."""
    counts: Counter[str] = Counter()
    for row in record.rounds:
        counts.update({name: n or 0 for name, n in (row.get("dropped_fields") or {}).items()})
    clients = ", ".join(f"{name} ({count})" for name, count in (+counts).items())
    return [prose("dropped-fields", clients=clients)[1]] if clients else []


def _few_prompts(record: Record) -> list[str]:
    """Returns a sentence on the splits on which an objective has few held-out prompts."""
    said = " ".join(record.header.get("alarms") or ())
    few = []
    for split in ("test", "validation"):
        row = next(iter(record.evaluations.get(split, ())), {})
        counts = [own.get("num_prompts") for own in (row.get("rewards") or {}).values()]
        count = min(filter(None, [row.get("num_prompts"), *counts]), default=FEW_PROMPTS)
        if count < FEW_PROMPTS and f"held out for {split}" not in said:
            few.append(f"{count} {split} prompts")
    return [prose("few-prompts", few=" and ".join(few), least=FEW_PROMPTS)[1]] if few else []


# --- The sections ---------------------------------------------------------------------------------


def _trade_off(run: Setting) -> Section | None:
    record = run.records[0]
    has_several, by_round = len(record.objectives) > 1, bool(record.evaluations.get("validation"))
    data = "pairs" if record.learns_from_pairs else "prompts"
    more = [prose("run-plane-equal")[1]] if front_rows(record) else []
    if by_round and comparison_of(record, "test"):
        more.append(prose("run-plane-others", data=data)[1])
    title, text = prose(
        f"run-plane-{'validation' if by_round else 'test'}",
        more=" ".join(more),
        better="Up and to the right" if has_several else "Up",
        data=data,
        bars=prose(f"bars-{data}")[1],
    )
    path = LegendEntry("validation, by round", "var(--round-last)", "path")
    panels = figures.trade_off_planes(record) if record.objectives else []
    title = title if has_several else "Score against KL"
    return Section("trade-off", title, text, panels, [path] if by_round else [])


def _evaluation(record: Record, comparison: RunComparison) -> Table:
    equal = ", at equal shares of all objectives" if front_rows(record) else ""
    return comparison_table(
        {"aligned": comparison.lines},
        f"{comparison.prompts}, the same for both models; aligned is the global model after round "
        f"{comparison.adapter_round}{equal}.",
        chips={name: figures.objective_color(record, name) for name in record.objectives},
    )


def _samples(run: Setting) -> Samples:
    record = run.records[0]
    samples, preferences = samples_of(record), sample_preferences(record)
    if preferences:
        text = prose("samples-front", objectives=", ".join(record.objectives))[1]
        return Samples(text, samples, ["Base", *map(formats.shares, preferences)])
    kind = "pairs" if record.learns_from_pairs else "scored"
    if not samples or len(samples[0].replies) < 2:
        kind = "running"
    return Samples(prose(f"samples-{kind}")[1], samples, ["Base", "Aligned"], has_changes=True)


def _truth(run: Setting) -> Section:
    record = run.records[0]
    legend = [LegendEntry("learned score", MUTED), LegendEntry("true score", MUTED, "dot")]
    has_truth = bool(figures.true_scores(record))
    title, text = prose("truth" if has_truth else "other-scores")
    text = f"{text} {score_notes(record.extra_scores())}".strip()
    return Section("truth", title, text, figures.learned_and_true(run), legend if has_truth else [])


def _quantities(run: Setting, name: str) -> Section:
    """Returns all registered quantities of a section; constants are named, not drawn."""
    is_of_pairs = name in ("scores", "diagnostics") and run.records[0].learns_from_pairs
    kind = {"scores": "pairs", "diagnostics": "truncation"}.get(name, name)
    title, text = prose(f"quantities-{kind}") if is_of_pairs else TEXTS[name]
    panels, keys = figures.quantity_panels(run, name)
    if name in ("scores", "training") and figures.GLOBAL_MODEL not in keys:  # nothing was validated
        text = prose(f"quantities-{'pairs' if is_of_pairs else name}-blind")[1]
    drawn = {panel.name.partition("-")[0] for panel in panels}
    helps = [q.help for q in shown(name) if q.name in drawn]
    constants = {panel.name: value for panel in panels if (value := constant(panel))}
    varying = [panel for panel in panels if panel.name not in constants]
    named = [f"{p.title} {constants[p.name]}" for p in panels if p.name in constants]
    note = f"Constant over the rounds: {'; '.join(named)}." if named else ""
    traces = {trace["name"] for panel in varying for trace in panel.figure["data"]}
    keys = [key for key in keys if escape(key.label) in traces]
    if not varying:
        return Section(name, title, note, [], is_text=bool(note))
    server = prose("server-weights")[1] if figures.SERVER in keys else ""
    record = run.records[0]
    own = {name: record.of_own_model(name) for name in record.objectives if drawn & {*figures.RAW}}
    models = ", ".join(f"{name} of {group}" for name, groups in own.items() for group in groups)
    left_out = prose("own-models", models=models)[1] if models else ""
    texts = [text, *dict.fromkeys(helps), server, left_out, note]
    return Section(name, title, " ".join(filter(None, texts)), varying, keys)


def _cost(run: Setting) -> Section:
    """Returns bytes and seconds, with sentences on secure aggregation if it was on."""
    section = cost_section([run])
    rows = [row["secure"] for row in run.records[0].rounds if row.get("secure")]
    if not rows:
        return section
    sizes = [row["num_updates"] for row in rows]
    secured = prose(
        "secured",
        updates=formats.count(sum(sizes), "update"),
        hidden=formats.size(sum(row.get("masked_bytes") or 0 for row in rows)),
        least=min(sizes),
        seconds=formats.number(fmean([row.get("seconds") or 0.0 for row in rows])),
        rounding=f"{max(row.get('rounding') or 0.0 for row in rows):.1g}",
    )[1]
    return Section(
        "cost", section.title, f"{section.text} {secured}", section.panels, section.legend
    )


def _failures(run: Setting) -> Table:
    rows = [
        [f"{row['round']}{when}", failure["client"], failure["reason"]]
        for row in run.records[0].rounds
        for key, when in (("earlier_failures", ", earlier attempt"), ("failures", ""))
        for failure in row.get(key) or ()
    ]
    headings = ["Round", "Client", "Reason"]
    return Table(*prose("failures"), headings, rows, words=frozenset({1, 2}))


def _origin(run: Setting) -> Provenance:
    record = run.records[0]
    rows = []
    for name, calibration in (record.header.get("calibration") or {}).items():
        values = {
            key.replace("_", " "): formats.number(own) if isinstance(own, float) else own
            for key, own in calibration.items()
            if own != 0 or key != "num_samples"  # none in this run: the map was given
        }
        rows.append([name, ", ".join(f"{key} {own}" for key, own in values.items())])
    colors = {name: figures.objective_color(record, name) for name in record.objectives}
    table = Table("", "", ["Reward", "Map to [0, 1]"], rows, words=frozenset({1}), chips=colors)
    versions = json.dumps(record.run, indent=2, ensure_ascii=False)
    files = {formats.CONFIG: record.config, "Program and versions (run.json)": versions}
    return Provenance(
        prose("origin-calibrated" if rows else "origin")[1],
        {heading: text for heading, text in files.items() if text.strip("{} \n")},
        table if rows else None,
    )


QUANTITY_SECTIONS = ("scores", "diagnostics", "weights", "gradients", "training", "further")
TEXTS = {name: prose(f"quantities-{name}") for name in QUANTITY_SECTIONS}
"""Title and first sentences of the sections of registered quantities."""
SECTIONS: dict[str, Callable[[Setting], Block | None]] = {
    "trade-off": _trade_off,
    "evaluation": lambda run: None,  # drawn from the comparison that the head shows, too
    "samples": _samples,
    "scores": partial(_quantities, name="scores"),
    "constraints": lambda run: Section(
        "constraints", *prose("constraints"), *figures.constraint_panels(run)
    ),
    "truth": _truth,
    "hypervolume": volumes_of_run,
    **{name: partial(_quantities, name=name) for name in QUANTITY_SECTIONS[1:]},
    "cost": _cost,
    "ledger": lambda run: ledger_table([run]) if run.records[0].rounds else None,
    "privacy": lambda run: Section("privacy", *prose("privacy"), *figures.privacy_curves(run)),
    "failures": _failures,
    "settings": _origin,
}
"""Functions that draw the sections of the page, by name and in order."""
