"""The page of one run: `report.html`, rewritten as rounds end."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from markupsafe import Markup

from firm.base.quantities import shown
from firm.federation.rivals import RIVALS
from firm.report import formats, front_tables
from firm.report import run_figures as figures
from firm.report.comparison import Comparison, best_comparison, comparison_table
from firm.report.drawing import INK, MUTED, LegendEntry, constant
from firm.report.formats import NBSP
from firm.report.front_page import plane_section, preference_section
from firm.report.ledger import total_bytes, uploads_so_far
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
    drawn_block,
    drawn_part,
    left_out_notes,
    prose,
    write_page,
)
from firm.report.plane import ACCURACY
from firm.report.record import Record, read_record, score
from firm.report.run_front import front_of_run, front_rows, volume_section
from firm.report.samples import sample_preferences, samples_of
from firm.report.tables import Setting
from firm.run.comparison import FEW_PROMPTS, score_notes
from firm.run.guard import drawing
from firm.run.sweep import sweep_folder

NOTABLE_MISMATCH = 1e-3
"""Nats per token; float32 leaves 1e-6, another precision or engine leaves 1e-2."""


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
    run = Setting.of(record.name, 0, [record])
    draws: dict[str, Callable[[], Block]] = {
        name: partial(draw, run) for name, draw in SECTIONS.items()
    }
    if comparison:
        draws["evaluation"] = partial(_evaluation, record, comparison)
    draws |= part("The front", lambda: _front(record), {})
    blocks = {name: drawn_block(name, draw) for name, draw in draws.items()}
    no_samples = Samples("", [], [])
    blocks["samples"] = part("The section 'Samples'", lambda: _samples(record), no_samples)
    blocks["failures"] = failures = _failures(record)
    blocks["settings"] = _origin(record)
    summary = part("The summary", lambda: _summary(record, comparison), "")
    facts = part("The list of facts", lambda: _facts(record), {})
    outcomes = part("The constraints", lambda: record.constraint_outcomes, [])
    signs = "; ".join(record.hacking_signs)
    notes += part("The number of prompts", lambda: _few_prompts(record), [])
    notes += left_out_notes([record]) + _dropped_fields(record)
    if num_failed := len(failures.rows):
        link = Markup('<a href="#failures">{}</a> left out of the average.')
        notes.append(link.format(formats.count(num_failed, "failed update")))
    return Page(
        product="FIRM run report",
        title=record.name,
        status=record.run.get("status", "unknown"),
        summary=[
            *filter(None, [summary, record.header.get("about")]),
            *([f"The adapter is that of {kept}."] if (kept := record.kept_adapter) else []),
            *(f"Constraint {outcome}." for outcome in outcomes),
            *([f"Signs of reward hacking, so read the samples: {signs}."] if signs else []),
        ],
        facts=facts,
        headlines=_headlines(record, comparison) if comparison else [],
        stats=_stats(record, comparison) if record.rounds else [],
        words=score_notes(line.name for line in comparison.lines) if comparison else "",
        alarms=[(alarm.when, alarm.text) for alarm in alarms([record.header, *record.rounds])],
        notices=notes,
        blocks=[blocks[name] for name in ORDER if name in blocks],
    )


# --- The head -------------------------------------------------------------------------------------


def _facts(record: Record) -> dict[str, str]:
    """Returns the facts on a run, text by label; unknown facts are omitted."""
    policy, strategy = (record.settings.get(key) or {} for key in ("policy", "strategy"))
    num_trainable = record.header.get("num_trainable")
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
        "Privacy": _guarantee(record),
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


def _guarantee(record: Record) -> str | None:
    """Returns the (ε, δ) of the clients so far; None without privacy."""
    spent = record.rounds[-1].get("privacy") if record.rounds else None
    if not spent:
        return None
    epsilon = "∞" if spent["epsilon"] is None else formats.number(spent["epsilon"])
    return f"ε {epsilon}, δ {spent['delta']:g} per client"


def _summary(record: Record, comparison: Comparison | None) -> str:
    """Returns a sentence on how the objectives changed."""
    if not record.evaluations:
        return "The run has started. Figures appear here as it writes them."
    if comparison is None and not record.rounds:
        return "The base model has been evaluated. The first training round is running."
    if comparison is None:
        return (
            f"{formats.count(record.last_round, 'training round')} completed. The aligned model "
            "has not been compared with the base model yet."
        )
    if ends := _front_ends(record):
        by_objective = (
            f"{name} from {formats.number(low)} to {formats.number(high)} (base "
            f"{formats.number(_base_mean(comparison, name))})"
            for name, (low, high) in ends.items()
        )
        return (
            f"After {formats.count(comparison.round, 'round')} on "
            f"{formats.count(len(record.clients), 'client')} one adapter serves every preference. "
            "As an objective's share grows from the least to the largest measured one, its "
            f"{_measured(record)} goes: {'; '.join(by_objective)}. On {comparison.prompts}."
        )
    changes = []
    for objective in record.objectives:
        line = comparison.line(objective)
        if line is None or line.change is None:
            continue
        amount = formats.measure(line.change, is_signed=True)
        if line.change.is_clear:
            changes.append(f"{objective} {'rose' if line.change.mean > 0 else 'fell'} ({amount})")
        else:
            changes.append(f"{objective} did not change measurably ({amount})")
    return (
        f"After {formats.count(comparison.round, 'round')} on "
        f"{formats.count(len(record.clients), 'client')}: {'; '.join(changes)}. Change of the "
        f"{_measured(record)} against the base model, {_spread(comparison, record)}, on "
        f"{comparison.prompts}."
    )


def _measured(record: Record) -> str:
    return ACCURACY if record.learns_from_pairs else "mean score"


def _spread(comparison: Comparison, record: Record) -> str:
    """Returns a name for what follows the changes of the objectives."""
    lines = [line for line in map(comparison.line, record.objectives) if line and line.change]
    exact = {bool(line.change.interval) for line in lines if line.change}
    if exact == {True}:
        return "with its exact 95 % interval"
    of_shares = ", or with the exact 95 % interval of a share" if any(exact) else ""
    return f"±{NBSP}standard error{of_shares}"


def _front_ends(record: Record) -> dict[str, tuple[float, float]]:
    """Returns each objective's mean scores at its least and largest share; {} without a front."""
    rows, ends = front_rows(record), {}
    for j, name in enumerate(record.objectives if len(rows) > 1 else ()):
        by_share = sorted(rows, key=lambda row: row["preference"][j])
        ends_of_shares = by_share[0], by_share[-1]
        means = [score(row, record.main_field, name, "mean") for row in ends_of_shares]
        if None not in means:
            ends[name] = (means[0], means[1])
    return ends


def _base_mean(comparison: Comparison, name: str) -> float | None:
    line = comparison.line(name)
    return line.base.mean if line and line.base else None


def _headlines(record: Record, comparison: Comparison) -> list[Headline]:
    headlines, ends = [], _front_ends(record)
    for name, values in ends.items():
        value = " → ".join(map(formats.number, values))
        base = f"base {formats.number(_base_mean(comparison, name))}"
        shares = [r["preference"][record.objectives.index(name)] for r in front_rows(record)]
        notes = [f"at shares of {min(shares):.2g} → {max(shares):.2g}", base]
        headlines.append(Headline(name, figures.objective_color(record, name), value, notes))
    for line in comparison.lines if not ends else ():
        if line.name in record.objectives and line.is_score:
            means = [formats.number(m.mean if m else None) for m in (line.base, line.aligned)]
            notes = [" → ".join(means)]
            if line.change and line.change.num_prompts is not None:
                notes.append(f"on {formats.count(line.change.num_prompts, 'prompt')}")
            if truth := comparison.line(f"true_{line.name}"):
                notes.append(f"true score {formats.measure(truth.change, is_signed=True)}")
            value = formats.measure(line.change, is_signed=True)
            color = figures.objective_color(record, line.name)
            headlines.append(Headline(line.name, color, value, notes))
    return headlines


def _stats(record: Record, comparison: Comparison | None) -> list[tuple[str, str, str]]:
    stats = []
    labels = {"kl": "KL, nats per reply", "length": "Reply length, tokens", "parse": "Parse rate"}
    front = front_rows(record)
    for name, label in labels.items():
        if comparison and (line := comparison.line(name)):
            base = f"base {formats.number(line.base.mean)}" if line.base and name != "kl" else ""
            values = [row[name] for row in front if row.get(name) is not None]
            value = formats.number(line.aligned and line.aligned.mean)
            if line.aligned and line.aligned.interval:
                interval = formats.measure(line.aligned).partition(" ")[2].replace(NBSP, " ")
                base = ", ".join(filter(None, [interval, base]))
            if values and not line.is_score:
                value = " – ".join(formats.number(end) for end in (min(values), max(values)))
                base = ", ".join(filter(None, ["by preference", base]))
            stats.append((label, value, base))
    sent = formats.size(sum(total_bytes(record, key) for key in ("bytes_up", "bytes_down")))
    time = formats.duration(sum(row.get("seconds") or 0 for row in record.rounds))
    return [*stats, ("Sent, both ways", sent, ""), ("Time in rounds", time, "")]


def _dropped_fields(record: Record) -> list[str]:
    """Returns a sentence on the clients' fields that the server dropped."""
    counts: Counter[str] = Counter()
    for row in record.rounds:
        counts.update({name: n or 0 for name, n in (row.get("dropped_fields") or {}).items()})
    clients = ", ".join(f"{name} ({count})" for name, count in (+counts).items())
    text = f"Fields that the server does not know were dropped from the metrics of {clients}."
    return [text] if clients else []


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
    text = (
        f"With {' and '.join(few)} most changes cannot be told from chance: hold out "
        f"{FEW_PROMPTS} or more for each objective."
    )
    return [text] if few else []


# --- The sections ---------------------------------------------------------------------------------


def _trade_off(run: Setting) -> Section:
    record = run.records[0]
    has_several, color = len(record.objectives) > 1, "var(--round-last)"
    by_round, legend = bool(record.evaluations.get("validation")), []
    if by_round:
        legend.append(LegendEntry("validation, by round", color, "path"))
    title, text = prose(
        f"run-plane-{'validation' if by_round else 'test'}",
        better="Up and to the right" if has_several else "Up",
        **_words(record),
    )
    panels = figures.trade_off_planes(record) if record.objectives else []
    return Section("trade-off", title if has_several else "Score against KL", text, panels, legend)


def _words(record: Record) -> dict[str, str]:
    """Returns names of the held-out data and of the error bars."""
    if record.learns_from_pairs:
        return {"data": "pairs", "bars": "exact 95 % intervals, counted by prompts"}
    return {"data": "prompts", "bars": "± one standard error over the prompts"}


def _front(record: Record) -> dict[str, Callable[[], Block]]:
    """Returns the blocks of a conditioned run: its front, and whether the preference steers."""
    front = front_of_run(record)
    if front is None:
        return {}
    fronts = {record.name: front}
    title, plane = prose("run-front", objectives=", ".join(record.objectives), **_words(record))
    steering = prose("run-front-preference", **_words(record))[1]
    return {
        "front": lambda: replace(plane_section(fronts), title=title, text=plane),
        "front-preference": lambda: replace(preference_section(fronts), text=steering),
        "front-models": lambda: replace(
            front_tables.models(fronts), title="The policy by preference"
        ),
    }


def _evaluation(record: Record, comparison: Comparison) -> Table:
    return comparison_table(
        {"aligned": comparison.lines},
        f"{comparison.prompts}, the same for both models; aligned is the "
        f"global model after round {comparison.round}"
        f"{', at equal shares of all objectives' if front_rows(record) else ''}.",
        chips={name: figures.objective_color(record, name) for name in record.objectives},
    )


def _truth(run: Setting) -> Section:
    record = run.records[0]
    legend = [LegendEntry("learned score", MUTED), LegendEntry("true score", MUTED, "dot")]
    has_truth = bool(figures.true_scores(record))
    title, text = prose("truth" if has_truth else "other-scores")
    text = f"{text} {score_notes(record.extra_scores())}".strip()
    return Section("truth", title, text, figures.learned_and_true(run), legend if has_truth else [])


def _quantities(run: Setting, name: str) -> Section:
    """Returns all registered quantities of a section; constants are named, not drawn."""
    is_of_pairs = name == "scores" and run.records[0].learns_from_pairs
    title, text = prose("quantities-pairs") if is_of_pairs else TEXTS[name]
    panels, keys = figures.quantity_panels(run, name)
    drawn = {panel.name for panel in panels}
    helps = [q.help for q in shown(name) if any(panel.startswith(q.name) for panel in drawn)]
    texts = [text, *helps]
    if figures.SERVER in keys:
        texts.append("In this run, the server solves for the weights of all clients.")
    constants = {panel.name: value for panel in panels if (value := constant(panel))}
    varying = [panel for panel in panels if panel.name not in constants]
    named = [f"{p.title} {constants[p.name]}" for p in panels if p.name in constants]
    note = f"Constant over the rounds: {'; '.join(named)}." if named else ""
    if not varying:
        return Section(name, title, note, [], is_text=bool(note))
    return Section(name, title, " ".join(filter(None, [*texts, note])), varying, keys)


def _cost(run: Setting) -> Section:
    would_send = _would_send(run.records[0])
    title, text = prose("cost")
    return Section(
        "cost",
        title,
        text + would_send + _secured(run.records[0]),
        figures.cost_curves(run),
        [
            figures.UP,
            figures.DOWN,
            *(figures.rival_keys().values() if would_send else ()),
            *figures.stage_keys([run]),
            LegendEntry("whole round", INK),
        ],
    )


def _would_send(record: Record) -> str:
    """Returns a sentence on the uploads of other algorithms; empty if unknown."""
    ends = {name: uploads_so_far(record, name)[-1:] for name in RIVALS}
    if len(record.objectives) < 2 or not all(ends.values()):
        return ""
    others = " and ".join(f"{formats.size(end[0][1])} with {name}" for name, end in ends.items())
    return (
        f" The clients uploaded {formats.size(total_bytes(record, 'bytes_up'))}; the same clients "
        f"would have uploaded {others}, by the sizes of their messages: "
        f"{'; '.join(rival.text for rival in RIVALS.values())}."
    )


def _secured(record: Record) -> str:
    """Returns sentences on the effect and cost of secure aggregation; empty without it."""
    rows = [row["secure"] for row in record.rounds if row.get("secure")]
    if not rows:
        return ""
    sizes = [row["num_updates"] for row in rows]
    hidden = formats.size(sum(row.get("masked_bytes") or 0 for row in rows))
    seconds = formats.number(fmean([row.get("seconds") or 0.0 for row in rows]))
    rounding = max(row.get("rounding") or 0.0 for row in rows)
    return (
        f" With secure aggregation the server received the {formats.count(sum(sizes), 'update')} "
        f"masked, {hidden} in total, and learned only the mean of each round, over "
        f"{min(sizes)} or more updates. Adding and opening the sums took {seconds} s per round. "
        f"Rounding changed no value of an update by more than {rounding:.1g}."
    )


def _privacy(run: Setting) -> Section:
    panels, keys = figures.privacy_curves(run)
    return Section(
        "privacy",
        *prose("privacy"),
        panels,
        keys,
    )


def _samples(record: Record) -> Samples:
    samples, preferences = samples_of(record), sample_preferences(record)
    if preferences:
        names = ", ".join(record.objectives)
        return Samples(
            "The same prompts answered by the base model and by the aligned one at each measured "
            f"preference. A column is headed by its preference: the shares of {names}.",
            samples,
            ["Base", *map(formats.shares, preferences)],
        )
    text = "The same prompts answered by the base model"
    if not samples or len(samples[0].replies) < 2:
        text += "; the aligned model's replies are added at the end of the run."
    elif record.learns_from_pairs:
        text += " and by the aligned one. The replies are sampled; nothing scores them."
    else:
        text += " and by the aligned one; small numbers are the changes of each score."
    return Samples(text, samples, ["Base", "Aligned"], has_changes=True)


def _failures(record: Record) -> Table:
    return Table(
        *prose("failures"),
        ["Round", "Client", "Reason"],
        [
            [str(row["round"]), failure["client"], failure["reason"]]
            for row in record.rounds
            for failure in row.get("failures") or ()
        ],
        words=frozenset({1, 2}),
        name="failures",
    )


def _origin(record: Record) -> Provenance:
    calibrations = record.header.get("calibration") or {}
    rows = [
        [
            name,
            ", ".join(
                f"{key.replace('_', ' ')} "
                f"{formats.number(value) if isinstance(value, int | float) else value}"
                for key, value in calibration.items()
            ),
        ]
        for name, calibration in calibrations.items()
    ]
    colors = {name: figures.objective_color(record, name) for name in record.objectives}
    table = Table("", "", ["Reward", "Map to [0, 1]"], rows, words=frozenset({1}), chips=colors)
    run = json.dumps(record.run, indent=2, ensure_ascii=False)
    files = {formats.CONFIG: record.config, "Program and versions (run.json)": run}
    calibration = "the frozen calibration of rewards to [0, 1], " if rows else ""
    return Provenance(
        f"Everything needed to repeat the run: {calibration}the resolved configuration, and the "
        "versions.",
        {heading: text for heading, text in files.items() if text.strip("{} \n")},
        table if rows else None,
    )


QUANTITY_SECTIONS = ("scores", "diagnostics", "weights", "gradients", "training", "further")
TEXTS = {name: prose(f"quantities-{name}") for name in QUANTITY_SECTIONS}
"""Title and first sentences of the sections of registered quantities."""
SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "trade-off": _trade_off,
    "truth": _truth,
    **{name: partial(_quantities, name=name) for name in TEXTS},
    "front-rounds": volume_section,
    "cost": _cost,
    "privacy": _privacy,
}
"""Functions that draw the sections, by name; sections without figures are omitted."""
ORDER = (
    *("front", "front-preference", "front-models"),
    *("trade-off", "evaluation", "samples", "scores", "truth", "front-rounds"),
    *("diagnostics", "weights", "gradients", "training", "further"),
    *("cost", "privacy", "failures", "settings"),
)
"""Blocks of the page in order: results, samples, training and cost."""
