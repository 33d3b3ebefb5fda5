"""Writes the page that compares settings over seeds, such as the strategies of a study."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from firm.fronts import non_dominated
from firm.report import formats
from firm.report.cloud_plane import KL, Cloud, Spot, cloud_planes
from firm.report.fmoo_figures import Value, values_by_round
from firm.report.page import (
    Section,
    drawn_part,
    drawn_section,
    left_out_notes,
    replace_file,
)
from firm.report.paper import Curve, PaperFigure, curves_figure, plane_figure
from firm.report.record import Record, rewards_of
from firm.report.settings import (
    Setting,
    cost_section,
    drift_section,
    final_figure,
    final_reward,
    final_row,
    final_score,
    is_validated,
    ledger_table,
    reward_in,
    reward_section,
    scales,
    seeds_text,
    settings_of,
    shared_samples,
    spread,
    weights_section,
)
from firm.report.study_page import Choice, Study, Table, drawn_table, render_study
from firm.run.guard import drawing

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
    study = settings_study(runs, title=title, config=config, sets=sets, folder=path.parent)
    replace_file(path, render_study(study))
    return path


def settings_study(
    runs: Mapping[str, Sequence[Record]],
    *,
    title: str,
    config: str,
    sets: Mapping[str, Sequence[str]] | None = None,
    folder: Path,
) -> Study:
    """Returns what the page of a study says; the arguments are those of `write_study_page`."""
    settings = settings_of(runs)
    names = [setting.name for setting in settings]
    groups = scales(settings)
    notices: list[str] = []
    part = partial(drawn_part, notices)
    sections, tables, details = [], [], []
    for place, group in enumerate(groups, start=1):
        mark = f"-{place}" if len(groups) > 1 else ""
        told = _told(group, place) if mark else ""

        def section(draw: Callable[[], Section], name: str, told: str = told) -> Section:
            return _named(drawn_section(name.capitalize(), draw, name=name), told)

        name = f"trade-off{mark}"
        sections.append(section(partial(_plane_section, group, name, folder), name))
        name = f"rewards{mark}"
        sections.append(section(partial(reward_section, group, name), name))
        name = f"weights{mark}"
        details.append(section(partial(weights_section, group, name), name))
        tables.append(drawn_table("Final models", partial(_final_table, group, told)))
    details += [
        drawn_section("Drift and stationarity", partial(drift_section, settings), name="drift"),
        drawn_section("Bytes and seconds", partial(cost_section, settings), name="cost"),
    ]
    tables.append(drawn_table("Communication", partial(ledger_table, settings)))
    samples, sample_names = part("The samples", lambda: shared_samples(groups[0]), ([], []))
    known = {
        name: [label for label in labels if label in names] for name, labels in (sets or {}).items()
    }
    shown = next(iter(known.values()), names[:NUM_SHOWN])
    buttons = {"show all": names, "show none": [], **known}
    records = [record for setting in settings for record in setting.records]
    return Study(
        product="FIRM · comparison of settings",
        title=title,
        summary=part("The summary", lambda: _summary(groups), []),
        facts=part("The list of facts", lambda: _facts(settings), {}),
        sections=[section for section in sections if section.is_shown],
        details=[section for section in details if section.is_shown],
        table=tables[0],
        tables=tables[1:],
        method=METHOD,
        config=config,
        choice=Choice([s.key for s in settings], frozenset(shown), buttons),
        samples=samples,
        sample_names=sample_names,
        notices=[*notices, *left_out_notes(*records)],
    )


def setting_clouds(settings: Sequence[Setting], folder: Path) -> list[Cloud]:
    """Returns where the final models of each setting are, and their means over the seeds.

    A mean is dominated where another setting's mean is at least as good in all rewards and better
    in one.

    Args:
        settings: Of one scale; a run without all rewards of a final evaluation is left out.
        folder: What the adapters' paths are relative to.
    """
    models = {s.name: [_model(s, r, folder) for r in s.records if _is_placed(r)] for s in settings}
    shown = [setting for setting in settings if models[setting.name]]
    if not shown:
        return []
    means = [_mean_spot(setting.name, models[setting.name]) for setting in shown]
    objectives = settings[0].objectives
    kept = non_dominated([[mean.place[name] for name in objectives] for mean in means])
    clouds = []
    for setting, mean, is_kept in zip(shown, means, kept, strict=True):
        spot = Spot(mean.place, mean.errors, mean.facts, is_dominated=not is_kept)
        several = models[setting.name] if len(models[setting.name]) > 1 else []
        clouds.append(Cloud(setting.key, setting.index, several, [spot]))
    return clouds


def study_figures(
    runs: Mapping[str, Sequence[Record]],
    *,
    sets: Mapping[str, Sequence[str]] | None = None,
    half_life: float | None = None,
    folder: Path,
) -> dict[str, PaperFigure]:
    """Returns figures for a paper, by name: rewards, weights and the plane of each set of settings.

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
    validated = is_validated(settings)
    values: dict[str, dict[str, Value]] = {
        "rewards": {
            name: lambda row, key=name: reward_in(row, key, validated=validated)
            for name in objectives
        },
        "weights": {
            f"λ of {name}": lambda row, key=name: (row.get("weights") or {}).get(key)
            # two weights sum to one: the second is the first upside down
            for name in (objectives[:1] if len(objectives) == 2 else objectives)
        },
    }
    titles = {"rewards": "mean reward in [0, 1]", "weights": "weight λ"}
    figures = {}
    for kind, value_by_name in values.items():
        with drawing(f"The figure {kind}"):
            panels = {name: _curves(settings, value) for name, value in value_by_name.items()}
            if any(panels.values()):
                figures[kind] = curves_figure(panels, y_title=titles[kind], half_life=half_life)
    with drawing("The figure plane"):
        if clouds := setting_clouds(settings, folder):
            figures["plane"] = plane_figure(clouds, objectives, base=base_place(settings))
    return figures


def _curves(settings: Sequence[Setting], value: Value) -> list[Curve]:
    """A quantity of each setting that has it, in the rounds in which its seeds that do have it."""
    curves = []
    for setting in settings:
        seeds = [s for rows in setting.runs().seeds if (s := values_by_round(rows, value))]
        rounds = [at for at in seeds[0] if all(at in seed for seed in seeds)] if seeds else []
        if rounds:
            table = np.array([[seed[at] for at in rounds] for seed in seeds])
            curves.append(Curve(setting.key, rounds, table))
    return curves


def base_place(settings: Sequence[Setting]) -> dict[str, float] | None:
    """Returns the base model's rewards on the test prompts, None where no run measured it."""
    for setting in settings:
        for record in setting.records:
            for row in record.evaluations.get("test", []):
                rewards = rewards_of(row, record.objectives)
                if row["round"] == 0 and rewards is not None:
                    return {KL: 0.0, **dict(zip(record.objectives, rewards, strict=True))}
    return None


def _is_placed(record: Record) -> bool:
    """Whether the run has a place in the plane."""
    row = final_row(record)
    return row is not None and rewards_of(row, record.objectives) is not None


def _model(setting: Setting, record: Record, folder: Path) -> Spot:
    row = final_row(record) or {}
    place = {name: row["normalized"][name]["mean"] for name in record.objectives}
    errors = {name: row["normalized"][name].get("se") for name in record.objectives}
    if row.get("kl") is not None:
        place[KL] = row["kl"]
    facts = {
        "setting": setting.name,
        "seed": str(record.seed),
        **({"preference": _shares(record.preference)} if record.preference else {}),
        "KL": f"{formats.number(row.get('kl'))} nats",
        "adapter": os.path.relpath(record.path / "adapter", folder),
    }
    return Spot(place, errors, facts)


def _mean_spot(name: str, models: Sequence[Spot]) -> Spot:
    if len(models) == 1:
        return models[0]
    keys = [key for key in models[0].place if all(key in model.place for model in models)]
    values = {key: [model.place[key] for model in models] for key in keys}
    facts = {
        "setting": name,
        "mean over": f"{len(models)} seeds, ± standard error",
        **({"KL": f"{formats.number(fmean(values[KL]))} nats"} if KL in values else {}),
    }
    return Spot(
        {key: fmean(entries) for key, entries in values.items()},
        {key: stdev(entries) / len(entries) ** 0.5 for key, entries in values.items()},
        facts,
    )


def _shares(preference: Sequence[float]) -> str:
    return ", ".join(f"{share:g}" for share in preference)


def _plane_section(settings: Sequence[Setting], name: str, folder: Path) -> Section:
    clouds = setting_clouds(settings, folder)
    objectives = settings[0].objectives
    panels = cloud_planes(name, clouds, objectives, base=base_place(settings)) if clouds else []
    which = "Up and to the right" if len(objectives) > 1 else "Up"
    return Section(
        name,
        "The trade-off" if len(objectives) > 1 else "Reward against KL",
        f"Final models on the test prompts. {which} is better. Large: mean over the seeds with "
        "one standard error, over the prompts where there is one seed; small: the seeds. Hollow: "
        "another setting's mean is better in all rewards. The star is the base model.",
        panels,
        [],
    )


def _named(section: Section, told: str) -> Section:
    if not told:
        return section
    return replace(section, title=f"{section.title}, {told}")


def _told(group: Sequence[Setting], place: int) -> str:
    """What a scale is called: by the names of its settings' first words, where these are one."""
    heads = {setting.name.partition(":")[0] for setting in group if ":" in setting.name}
    if len(heads) == 1 and all(":" in setting.name for setting in group):
        return heads.pop()
    return f"calibration {place}"


def _final_table(settings: Sequence[Setting], told: str) -> Table:
    objectives = settings[0].objectives
    extras = dict.fromkeys(
        name for s in settings for r in s.records for name in r.extra_scores() if final_row(r)
    )
    columns = {
        **{name: final_reward(name) for name in objectives},
        **{_label(name): final_score(name) for name in extras},
        "KL": final_figure("kl"),
    }
    rows = [
        [
            setting.name,
            *(spread(setting.finals(value)) for value in columns.values()),
            str(sum(final_row(record) is not None for record in setting.records)),
        ]
        for setting in settings
    ]
    base = {name: _base(settings, "normalized", name) for name in objectives}
    base |= {_label(name): _base(settings, "scores", name) for name in extras}
    rows.insert(0, ["base model", *(base.get(name, formats.MISSING) for name in columns), ""])
    return Table(
        f"Final models{', ' + told if told else ''}",
        "On the test prompts: rewards in [0, 1], raw scores beside them, KL from the base model in "
        "nats per reply. Mean ± standard deviation over the seeds, as many as the last column "
        "says.",
        ["setting", *columns, "seeds"],
        rows,
    )


def _label(score: str) -> str:
    return "parse rate" if score == "parse" else score.replace("true_", "true ", 1)


def _base(settings: Sequence[Setting], field: str, name: str) -> str:
    for setting in settings:
        for record in setting.records:
            for row in record.evaluations.get("test", []):
                if row["round"] == 0 and name in row.get(field, {}):
                    return formats.number(row[field][name]["mean"])
    return formats.MISSING


def _summary(groups: Sequence[Sequence[Setting]]) -> list[str]:
    """Which setting ends highest in each reward, by its mean over the seeds."""
    sentences = []
    for place, group in enumerate(groups, start=1):
        ends = []
        for objective in group[0].objectives:
            means = {s.name: v for s in group if (v := s.finals(final_reward(objective)))}
            if means:
                best = max(means, key=lambda name: fmean(means[name]))
                ends.append(f"{objective} with {best} ({spread(means[best])})")
        if len(group) > 1 and ends:
            where = f"Of {_told(group, place)}, " if len(groups) > 1 else ""
            verb = "the highest mean rewards are" if where else "The highest mean rewards are"
            sentences.append(
                f"{where}{verb} {'; '.join(ends)}: the best of {len(group)} settings, so a little "
                "too good by chance."
            )
    if len(groups) > 1:
        sentences.append(
            f"Rewards mean different things in {len(groups)} groups of settings, which have "
            "figures and tables of their own."
        )
    counts = [s for group in groups for s in group if not any(final_row(r) for r in s.records)]
    if counts:
        sentences.append(f"Without a final evaluation so far: {', '.join(s.name for s in counts)}.")
    return [*sentences, seeds_text([s for group in groups for s in group])]


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
