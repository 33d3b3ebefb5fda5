"""The page that compares settings over seeds, such as the strategies of a study."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from firm.fronts import non_dominated
from firm.report import formats
from firm.report.page import (
    Block,
    Choice,
    Origin,
    Page,
    Samples,
    Section,
    Table,
    drawn_block,
    drawn_part,
    write_page,
)
from firm.report.plane import KL, Cloud, Spot, mean_spot, planes
from firm.report.record import (
    Record,
    final_figure,
    final_reward,
    final_row,
    final_score,
    rewards_of,
    score,
)
from firm.report.settings_sections import (
    ledger_table,
    left_out_notes,
    reward_quantity,
    reward_section,
    shared_samples,
    training_blocks,
    weights_section,
)
from firm.report.static import Curve, PaperFigure, curves_figure, plane_figure
from firm.report.tables import Setting, measure_of, scales, seeds_text, settings_of
from firm.run.comparison import score_label
from firm.run.guard import drawing
from firm.run.quantities import QUANTITIES

NUM_SHOWN = 6
"""Settings that the figures show at first; the reader chooses others."""
METHOD = (
    "Every setting and seed is a run with a folder of its own, which holds its configuration, "
    "every row of its metrics, its samples and its adapter. Rewards are mapped to [0, 1] by a "
    "calibration that is frozen before training and the same in all runs of a table."
)


def write_study_page(
    path: Path,
    runs: Mapping[str, Sequence[Record]],
    *,
    title: str = "A study",
    config: str = "",
    sets: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Writes the page of a study, in one step, and returns its path.

    Args:
        path: The page to be; the paths of adapters on it are relative to its folder.
        runs: The runs of each setting, by its name; settings without runs are left out.
        title: Heading.
        config: The study's configuration as YAML.
        sets: Settings to be shown together, by the name of their button. The first set is what
            the figures show at first.

    Raises:
        UserError: There are no runs with metrics, or the rewards of a setting's runs mean
            different things; nothing is written then.
    """
    page = study_page(runs, title=title, config=config, sets=sets or {}, folder=path.parent)
    return write_page(path, page)


def study_page(
    runs: Mapping[str, Sequence[Record]],
    *,
    title: str,
    config: str,
    sets: Mapping[str, Sequence[str]],
    folder: Path,
) -> Page:
    """Returns what the page of a study says; the arguments are those of `write_study_page`."""
    settings = settings_of(runs)
    names = [setting.name for setting in settings]
    groups = scales(settings)
    notices: list[str] = []
    part = partial(drawn_part, notices)
    first, tables, details = [], [], []
    for place, group in enumerate(groups, start=1):
        mark = f"-{place}" if len(groups) > 1 else ""
        scale = _scale_name(group, place) if mark else ""

        def block(draw: Callable[[], Block], name: str, scale: str = scale) -> Block:
            own = drawn_block(name.capitalize(), draw, name=name)
            if scale and isinstance(own, Section | Table):
                return replace(own, title=f"{own.title}, {scale}")
            return own

        name = f"trade-off{mark}"
        first.append(block(partial(_plane_section, group, name, folder), name))
        name = f"rewards{mark}"
        first.append(block(partial(reward_section, group, name), name))
        name = f"final{mark}"
        tables.append(block(partial(_final_table, group), name))
        name = f"weights{mark}"
        details.append(block(partial(weights_section, group, name), name))
    tables.append(drawn_block("Communication", lambda: ledger_table(settings), name="ledger"))
    details += training_blocks(settings)
    samples = part("The samples", lambda: shared_samples(groups[0]), Samples("", [], []))
    known = {name: [label for label in labels if label in names] for name, labels in sets.items()}
    shown = next(iter(known.values()), names[:NUM_SHOWN])
    records = [record for setting in settings for record in setting.records]
    return Page(
        product="FIRM · comparison of settings",
        title=title,
        summary=part("The summary", lambda: _summary(groups), []),
        facts=part("The list of facts", lambda: _facts(settings), {}),
        notices=[*notices, *left_out_notes(records)],
        blocks=[*first, *tables, samples, *details, Origin(METHOD, {formats.CONFIG: config})],
        choice=Choice(
            [setting.key for setting in settings],
            frozenset(shown),
            {"show all": names, "show none": [], **known},
        ),
    )


# --- The plane ------------------------------------------------------------------------------------


def setting_clouds(settings: Sequence[Setting], folder: Path) -> list[Cloud]:
    """Returns where the final models of each setting are, and their means over the seeds.

    A mean is dominated where another setting's mean is at least as good in all rewards and better
    in one.

    Args:
        settings: Of one scale; a run without all rewards of a final evaluation is left out.
        folder: What the adapters' paths are relative to.
    """
    models = {s.name: [spot for r in s.records if (spot := _model(s, r, folder))] for s in settings}
    shown = [setting for setting in settings if models[setting.name]]
    if not shown:
        return []
    means = []
    for setting in shown:
        spots = models[setting.name]
        facts = {"setting": setting.name, "mean over": f"{len(spots)} seeds, ± standard error"}
        if all(KL in spot.place for spot in spots):
            facts["KL"] = f"{formats.number(fmean(spot.place[KL] for spot in spots))} nats"
        means.append(mean_spot(spots, facts))
    objectives = settings[0].objectives
    kept = non_dominated([[mean.place[name] for name in objectives] for mean in means])
    clouds = []
    for setting, mean, is_kept in zip(shown, means, kept, strict=True):
        several = models[setting.name] if len(models[setting.name]) > 1 else []
        spot = replace(mean, is_dominated=not is_kept)
        clouds.append(Cloud(setting.key, setting.index, several, [spot]))
    return clouds


def base_place(settings: Sequence[Setting]) -> dict[str, float] | None:
    """Returns the base model's rewards on the test prompts, None where no run measured it."""
    for record in (record for setting in settings for record in setting.records):
        for row in record.evaluations.get("test", []):
            rewards = rewards_of(row, record.objectives)
            if row["round"] == 0 and rewards is not None:
                return {KL: 0.0, **dict(zip(record.objectives, rewards, strict=True))}
    return None


def _model(setting: Setting, record: Record, folder: Path) -> Spot | None:
    row = final_row(record)
    rewards = rewards_of(row, record.objectives) if row else None
    if row is None or rewards is None:
        return None
    place: dict[str, float] = dict(zip(record.objectives, rewards, strict=True))
    if row.get("kl") is not None:
        place[KL] = row["kl"]
    facts = {
        "setting": setting.name,
        "seed": str(record.seed),
        **({"preference": formats.shares(record.preference)} if record.preference else {}),
        "KL": f"{formats.number(row.get('kl'))} nats",
        "adapter": os.path.relpath(record.path / "adapter", folder),
    }
    errors = {name: score(row, "rewards", name, "se") for name in record.objectives}
    return Spot(place, errors, facts)


def _plane_section(settings: Sequence[Setting], name: str, folder: Path) -> Section:
    clouds = setting_clouds(settings, folder)
    objectives = settings[0].objectives
    which = "Up and to the right" if len(objectives) > 1 else "Up"
    return Section(
        name,
        "The trade-off" if len(objectives) > 1 else "Reward against KL",
        f"Final models on the test prompts. {which} is better. Large: mean over the seeds with "
        "one standard error, over the prompts where there is one seed; small: the seeds. Hollow: "
        "another setting's mean is better in all rewards. The star is the base model.",
        planes(name, clouds, objectives, base=base_place(settings)) if clouds else [],
    )


# --- Figures for a paper --------------------------------------------------------------------------


def study_figures(
    runs: Mapping[str, Sequence[Record]],
    *,
    sets: Mapping[str, Sequence[str]] | None = None,
    half_life: float | None = None,
    folder: Path,
) -> dict[str, PaperFigure]:
    """Returns figures for a paper, by name: curves and the plane of each set of settings.

    Curves are those of the rewards, the weights and every further registered quantity.

    Args:
        runs: The runs of each setting.
        sets: Settings that are drawn together, by a name that opens the figures' names; all are
            drawn together where there are none. Settings whose rewards mean different things never
            are.
        half_life: Of the running average of the curves, in rounds; None draws them as they are.
        folder: What the adapters' paths in the data are relative to.

    Raises:
        UserError: As `write_study_page`.
    """
    figures = {}
    for name, labels in (sets or {"": list(runs)}).items():
        known = [label for label in labels if any(record.header for record in runs.get(label, ()))]
        if not known:
            continue
        groups = scales(settings_of({label: runs[label] for label in known}))
        for place, group in enumerate(groups, start=1):
            stem = "-".join(filter(None, [name, str(place) if len(groups) > 1 else ""]))
            for kind, figure in _figures(group, half_life, folder).items():
                figures[f"{stem}-{kind}" if stem else kind] = figure
    return figures


def _figures(
    settings: Sequence[Setting], half_life: float | None, folder: Path
) -> dict[str, PaperFigure]:
    objectives = settings[0].objectives
    quantities = {
        "rewards": reward_quantity(settings),
        "weights": replace(QUANTITIES["client", "weights"], unit="weight λ"),
        **{q.name: q for q in QUANTITIES.values() if q.section == "further"},
    }
    figures = {}
    for kind, quantity in quantities.items():
        two = quantity.is_share and len(objectives) == 2
        names = objectives[:1] if two else objectives if quantity.by else [""]
        with drawing(f"The figure {kind}"):
            panels = {
                quantity.title.format(name): [
                    Curve(setting.key, curves.index.to_numpy(), curves.to_numpy().T)
                    for setting in settings
                    if not (curves := setting.whole_curves(quantity.name, name)).empty
                ]
                for name in names
            }
            if any(panels.values()):
                figures[kind] = curves_figure(panels, y_title=quantity.unit, half_life=half_life)
    with drawing("The figure plane"):
        if clouds := setting_clouds(settings, folder):
            figures["plane"] = plane_figure(clouds, objectives, base=base_place(settings))
    return figures


# --- Tables ---------------------------------------------------------------------------------------


def _final_table(settings: Sequence[Setting]) -> Table:
    objectives = settings[0].objectives
    records = [record for setting in settings for record in setting.records]
    finished = [record for record in records if final_row(record)]
    extras = dict.fromkeys(name for record in finished for name in record.extra_scores())
    columns = {
        **{objective: final_reward(objective) for objective in objectives},
        **{score_label(extra): final_score(extra) for extra in extras},
        "KL": final_figure("kl"),
    }
    rows = [
        [
            setting.name,
            *(spread([value(record) for record in setting.records]) for value in columns.values()),
            str(sum(final_row(record) is not None for record in setting.records)),
        ]
        for setting in settings
    ]
    bases = [row for r in records for row in r.evaluations.get("test", []) if row["round"] == 0]
    fields = [*(("rewards", n) for n in objectives), *(("scores", n) for n in extras)]
    base = [
        next((mean for row in bases if (mean := score(row, *field, "mean")) is not None), None)
        for field in fields
    ]
    rows.insert(0, ["base model", *map(formats.number, base), formats.MISSING, ""])
    return Table(
        "Final models",
        "On the test prompts: rewards in [0, 1], raw scores beside them, KL from the base model in "
        "nats per reply. Mean ± standard deviation over the seeds, as many as the last column "
        "says.",
        ["setting", *columns, "seeds"],
        rows,
    )


def spread(values: Sequence[float | None]) -> str:
    """Returns mean ± standard deviation over the seeds; of one seed the value alone.

    >>> spread([0.25, 0.75]).replace(formats.NBSP, " "), spread([0.5]), spread([None])
    ('0.50 ± 0.35', '0.500', '–')
    """
    return formats.measure(measure_of(values, ddof_error=False))


# --- Words and samples ----------------------------------------------------------------------------


def _scale_name(group: Sequence[Setting], place: int) -> str:
    """What a scale is called: by the first words of its settings' names, where these are one."""
    heads = {setting.name.partition(":")[0] for setting in group if ":" in setting.name}
    if len(heads) == 1 and all(":" in setting.name for setting in group):
        return heads.pop()
    return f"calibration {place}"


def _summary(groups: Sequence[Sequence[Setting]]) -> list[str]:
    """Which setting ends highest in each reward, by its mean over the seeds."""
    sentences = []
    for place, group in enumerate(groups, start=1):
        ends = []
        for objective in group[0].objectives:
            finals = {s.name: [final_reward(objective)(r) for r in s.records] for s in group}
            means = {name: m.mean for name, own in finals.items() if (m := measure_of(own))}
            if means:
                best = max(means, key=lambda name: means[name])
                ends.append(f"{objective} with {best} ({spread(finals[best])})")
        if len(group) > 1 and ends:
            where = f"Of {_scale_name(group, place)}, the" if len(groups) > 1 else "The"
            sentences.append(
                f"{where} highest mean rewards are {'; '.join(ends)}: the best of {len(group)} "
                "settings, so a little too good by chance."
            )
    if len(groups) > 1:
        sentences.append(
            f"Rewards mean different things in {len(groups)} groups of settings, which have "
            "figures and tables of their own."
        )
    settings = [setting for group in groups for setting in group]
    unfinished = [s.name for s in settings if not any(final_row(r) for r in s.records)]
    if unfinished:
        sentences.append(f"Without a final evaluation so far: {', '.join(unfinished)}.")
    return [*sentences, seeds_text(settings)]


def _facts(settings: Sequence[Setting]) -> dict[str, str]:
    records = [record for setting in settings for record in setting.records]
    models = dict.fromkeys(str((r.settings.get("policy") or {}).get("path")) for r in records)
    objectives = dict.fromkeys(", ".join(record.objectives) for record in records)
    facts = {
        "Model": "; ".join(models),
        "Objectives": "; ".join(objectives),
        "Settings": len(settings),
        "Seeds": ", ".join(map(str, dict.fromkeys(record.seed for record in records))),
        "Runs": f"{len(records)}, {sum(record.is_finished for record in records)} finished",
        "Clients": _range([len(record.clients) for record in records]),
        "Rounds": _range([record.num_rounds for record in records]),
        "Commit": "; ".join(dict.fromkeys(formats.commit(r.run.get("commit")) for r in records)),
    }
    return {label: str(value) for label, value in facts.items()}


def _range(counts: Sequence[int]) -> str:
    return " to ".join(str(count) for count in dict.fromkeys([min(counts), max(counts)]))
