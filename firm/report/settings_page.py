"""The page that compares settings over seeds, such as the strategies of a study."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from firm.fields import did_you_mean
from firm.quantities import QUANTITIES
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
    left_out_notes,
    write_page,
)
from firm.report.plane import KL, Cloud, Spot, clouds_of, planes
from firm.report.record import (
    Record,
    final_figure,
    final_reward,
    final_row,
    final_score,
    rewards_of,
    score,
    study_records,
)
from firm.report.seeds import Figure, difference
from firm.report.settings_sections import (
    further_quantities,
    ledger_table,
    reward_quantity,
    reward_section,
    shared_samples,
    training_blocks,
    weights_section,
)
from firm.report.static import Curve, PaperFigure, curves_figure, plane_figure
from firm.report.tables import (
    Setting,
    drawn_objectives,
    measure_of,
    scales,
    seeds_text,
    settings_of,
    span_text,
)
from firm.run import Sweep, UserError, print_table
from firm.run.comparison import score_label, score_notes
from firm.run.guard import drawing
from firm.run.rows import Row

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

    It loads the plotly.min.js of its folder, as the pages of the runs do.

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
    settings = settings_of(runs)
    groups = scales(settings)
    notices: list[str] = []
    part = partial(drawn_part, notices)
    plane = partial(_plane_section, folder=path.parent)
    blocks = [
        *_by_scale(groups, {"trade-off": plane, "rewards": reward_section}),
        *_by_scale(groups, {"final": _final_table}),
        *_by_scale([g for g in groups if len(g) > 1], {"differences": difference_table}),
        drawn_block("ledger", lambda: ledger_table(settings)),
        part("The samples", lambda: shared_samples(groups[0]), Samples("", [], [])),
        *_by_scale(groups, {"weights": weights_section}),
        *training_blocks(settings),
        Origin(METHOD, {formats.CONFIG: config}),
    ]
    names = [setting.name for setting in settings]
    known = {
        name: [label for label in labels if label in names] for name, labels in (sets or {}).items()
    }
    page = Page(
        product="FIRM · comparison of settings",
        title=title,
        summary=part("The summary", lambda: _summary(groups), []),
        facts=part("The list of facts", lambda: _facts(settings), {}),
        notices=[*notices, *left_out_notes([r for s in settings for r in s.records])],
        blocks=blocks,
        choice=Choice(
            [setting.key for setting in settings],
            frozenset(next(iter(known.values()), names[:NUM_SHOWN])),
            {"show all": names, "show none": [], **known},
        ),
    )
    return write_page(path, page, shared=path.parent)


def _by_scale(
    groups: Sequence[Sequence[Setting]],
    draws: Mapping[str, Callable[[Sequence[Setting], str], Section | Table]],
) -> list[Block]:
    """Blocks by their name for each group whose rewards mean the same."""
    blocks = []
    for place, group in enumerate(groups, start=1):
        for kind, draw in draws.items():
            name = f"{kind}-{place}" if len(groups) > 1 else kind
            block = drawn_block(name, partial(draw, group, name))
            if len(groups) > 1 and isinstance(block, Section | Table):
                block = replace(block, title=f"{block.title}, {_scale_name(group, place)}")
            blocks.append(block)
    return blocks


# --- The plane ------------------------------------------------------------------------------------


def setting_clouds(settings: Sequence[Setting], folder: Path) -> list[Cloud]:
    """Returns where the final models of each setting are, and their means over the seeds.

    Args:
        settings: Of one scale; a run without all rewards of a final evaluation is left out.
        folder: What the adapters' paths are relative to.
    """
    groups = {}
    for setting in settings:
        spots = [spot for record in setting.records if (spot := _model(setting, record, folder))]
        if spots:
            groups[setting] = [({"setting": setting.name}, spots)]
    return clouds_of(groups, settings[0].objectives)


def base_place(settings: Sequence[Setting]) -> dict[str, float] | None:
    """Returns the base model's rewards on the test prompts, None where no run measured it."""
    for row in _base_rows(settings):
        objectives = settings[0].objectives
        if (rewards := rewards_of(row, objectives)) is not None:
            return {KL: 0.0, **dict(zip(objectives, rewards, strict=True))}
    return None


def _base_rows(settings: Sequence[Setting]) -> list[Row]:
    """Returns the evaluations of base models on the test prompts."""
    records = [record for setting in settings for record in setting.records]
    return [row for r in records for row in r.evaluations.get("test", []) if row["round"] == 0]


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


def _plane_section(settings: Sequence[Setting], name: str, *, folder: Path) -> Section:
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
            stem = [name, str(place) if len(groups) > 1 else ""]
            for kind, figure in _figures(group, half_life, folder).items():
                figures["-".join(filter(None, [*stem, kind]))] = figure
    return figures


def _figures(
    settings: Sequence[Setting], half_life: float | None, folder: Path
) -> dict[str, PaperFigure]:
    objectives = settings[0].objectives
    quantities = {
        "rewards": reward_quantity(settings),
        "weights": replace(QUANTITIES["client", "weights"], unit="weight λ"),
        **{quantity.name: quantity for quantity in further_quantities()},
    }
    figures = {}
    for kind, quantity in quantities.items():
        names = drawn_objectives(quantity, objectives) if quantity.by else [""]
        with drawing(f"The figure {kind}"):
            panels = {
                quantity.title.format(name): [
                    Curve(setting.key, curves.index.to_numpy(), curves.to_numpy().T)
                    for setting in settings
                    if not (curves := setting.curves(quantity.name, name)).empty
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


def _final_table(settings: Sequence[Setting], name: str) -> Table:
    objectives, extras, figures = settings[0].objectives, _extras(settings), _figures_of(settings)
    fields = [*(("rewards", n) for n in objectives), *(("scores", n) for n in extras)]
    base = []
    for field in fields:
        means = [score(row, *field, "mean") for row in _base_rows(settings)]
        base.append(formats.number(next((mean for mean in means if mean is not None), None)))
    rows = [["base model", *base, formats.MISSING, ""]]
    for setting in settings:
        ends = [spread([value(record) for record in setting.records]) for value in figures.values()]
        num_ends = sum(final_row(record) is not None for record in setting.records)
        rows.append([setting.name, *ends, str(num_ends)])
    return Table(
        "Final models",
        "On the test prompts: rewards in [0, 1], raw scores beside them, KL from the base model in "
        "nats per reply. Mean ± standard deviation over the seeds, as many as the last column "
        f"says. {score_notes(extras)}".strip(),
        ["setting", *figures, "seeds"],
        rows,
        name=name,
    )


def print_differences(study: Path, against: str) -> None:
    """Prints how much higher a study's settings end than one of them, paired by seed.

    Settings whose rewards mean something else are left out.

    Raises:
        UserError: The folder holds no study, or none of its finished runs has that setting.
    """
    settings = settings_of(study_records(Sweep(study)))
    for group in scales(settings):
        if named := [setting for setting in group if setting.name == against]:
            table = difference_table([*named, *(s for s in group if s not in named)])
            title = f"{table.title} on the test prompts, by seed, with 90 % intervals"
            print_table(title, table.headings, table.rows)
            return
    names = [setting.name for setting in settings]
    raise UserError(
        f"{study} has finished runs of {', '.join(names)}, got {against!r}"
        f"{did_you_mean(against, names)}"
    )


def difference_table(settings: Sequence[Setting], name: str = "differences") -> Table:
    """Returns how much higher the settings end than the first of them, paired by seed."""
    first, *others = settings
    figures = _figures_of(settings)
    rows = [
        [other.name, *(_difference(other, first, figure) for figure in figures.values())]
        for other in others
    ]
    return Table(
        f"Differences from {first.name}",
        "Final models on the test prompts, mean over the seeds that both have, with the 90 % "
        "interval of Student's t over the differences by seed: each end is a one-sided bound at "
        "95 %.",
        ["setting", *figures],
        rows,
        name=name,
    )


def _difference(setting: Setting, first: Setting, figure: Figure) -> str:
    ends = [{r.seed: r for r in each.records if figure(r) is not None} for each in (setting, first)]
    seeds = sorted(ends[0].keys() & ends[1].keys(), key=str)
    if len(seeds) < 2:
        return formats.MISSING
    own, theirs = ([records[seed] for seed in seeds] for records in ends)
    return difference(own, theirs, figure, level=0.9).text()


def _extras(settings: Sequence[Setting]) -> list[str]:
    """Returns the scores of final models beside their rewards."""
    records = [record for setting in settings for record in setting.records]
    return list(dict.fromkeys(x for r in records if final_row(r) for x in r.extra_scores()))


def _figures_of(settings: Sequence[Setting]) -> dict[str, Figure]:
    """Returns the functions that read a final model's figures, by their names."""
    return {
        **{objective: final_reward(objective) for objective in settings[0].objectives},
        **{score_label(extra): final_score(extra) for extra in _extras(settings)},
        "KL": final_figure("kl"),
    }


def spread(values: Sequence[float | None]) -> str:
    """Returns mean ± standard deviation over the seeds; of one seed the value alone.

    >>> spread([0.25, 0.75]).replace(formats.NBSP, " "), spread([0.5]), spread([None])
    ('0.50 ± 0.35', '0.500', '–')
    """
    return formats.measure(measure_of(values, ddof_error=False))


# --- Words and samples ----------------------------------------------------------------------------


def _scale_name(group: Sequence[Setting], place: int) -> str:
    """Returns a scale's name: the first words of its settings' names, where these are one."""
    heads = {setting.name.partition(":")[0] for setting in group if ":" in setting.name}
    if len(heads) == 1 and all(":" in setting.name for setting in group):
        return heads.pop()
    return f"calibration {place}"


def _summary(groups: Sequence[Sequence[Setting]]) -> list[str]:
    """Returns which setting ends highest in each reward, by its mean over the seeds."""
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
        "Clients": span_text([len(record.clients) for record in records]),
        "Rounds": span_text([record.num_rounds for record in records]),
        "Commit": "; ".join(dict.fromkeys(formats.commit(r.run.get("commit")) for r in records)),
    }
    return {label: str(value) for label, value in facts.items()}
