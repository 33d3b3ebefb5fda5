"""Tables and sentences that compare settings: final values and paired differences."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from firm.base.sanitize import by_reason
from firm.fronts.measures import delta_m, rounds_to_loss, user_summary
from firm.report import formats
from firm.report.criteria import Column, Criterion, final_columns, further_scores
from firm.report.page import Table, prose
from firm.report.seeds import mean_difference
from firm.report.tables import Frame, Setting, span_text
from firm.run.comparison import Measure, score_notes
from firm.run.differences import leaves
from firm.run.guard import drawn

NUM_COLUMNS = 10
"""Maximum number of quantities shown as columns of the table; more become its rows."""
NUM_TABLE_USERS = 10
"""Maximum number of users shown in the table; for more, it shows their spread."""
LEVEL = 0.9
"""Confidence of the intervals of differences between settings."""
RATES = ("local.lr", "strategy.server_learning_rate")
"""Learning rates of classic algorithms."""

Texts = Mapping[str, Mapping[str, str]]
"""Further columns: heading to setting to cell."""


# --- Final values ---------------------------------------------------------------------------------


def final_table(settings: Sequence[Setting], criterion: Criterion, texts: Texts) -> Table:
    """Returns the final values; a row for each setting, or for each quantity if these are many."""
    columns = final_columns(settings, criterion)
    names = [column.name for column in columns]
    table = [["setting", *names, *texts, "uploaded (MB)", "rounds", "seeds"]]
    starts = [formats.number(column.start(settings)) for column in columns]
    if set(starts) != {formats.MISSING}:
        name = initial_name(settings, criterion)
        further = [own.get(name, formats.MISSING) for own in texts.values()]
        table.append([name, *starts, *further, *[formats.MISSING] * 2, ""])
    for setting in settings:
        cells = [spread(column.ends(setting)) for column in columns]
        cells += [own.get(setting.name, formats.MISSING) for own in texts.values()]
        rounds = setting.values(criterion.final).groupby("seed")["round"].max().tolist()
        num_seeds = len(criterion.finals(setting))
        sent = formats.number(setting.megabytes_up)
        table.append([setting.name, *cells, sent, span_text(rounds or [0]), str(num_seeds)])
    # a table wider than it is long scrolls sideways on every screen
    if len(table[0]) - 2 > max(NUM_COLUMNS, len(settings)):
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "quantity"
    return Table(*_final_text(settings, criterion), table[0], table[1:])


def initial_name(settings: Sequence[Setting], criterion: Criterion) -> str:
    """Returns the name of the model at round 0."""
    return "base model" if criterion.has_kl(settings) else "initial model"


def _final_text(settings: Sequence[Setting], criterion: Criterion) -> tuple[str, str]:
    has_seeds = max(len(setting.runs) for setting in settings) > 1
    has_worst, has_kl = len(criterion.objectives) > 1, criterion.has_kl(settings)
    scores = score_notes(further_scores(settings, criterion))
    left_out = drawn(
        "The note on users", lambda: users_left_out(settings, criterion), instead=lambda note: ""
    )
    notes = " ".join(filter(None, [criterion.quantity.help, scores, left_out]))
    title, text = prose(
        "final",
        measured=f"{criterion.split} {criterion.quantity.title}".strip().capitalize(),
        deviation=prose("final-deviation")[1] if has_seeds else "",
        worst=prose("final-worst", how=criterion.worst_how)[1] if has_worst else "",
        further=prose("final-further")[1] if has_kl else "",
        notes=notes,
    )
    return title, text.strip()


def spread(values: Sequence[float | None] | np.ndarray) -> str:
    """Returns mean ± standard deviation over the seeds, or the number of runs that diverged.

    >>> spread([0.25, 0.75]).replace(formats.NBSP, " "), spread([0.5]), spread([])
    ('0.50 ± 0.35', '0.500', '–')
    >>> spread([0.25, float("nan")])
    'diverged in 1 of 2'
    """
    known = np.asarray(values, dtype=float)
    num_lost = int((~np.isfinite(known)).sum())
    if num_lost:
        return "diverged" if len(known) == 1 else f"diverged in {num_lost} of {len(known)}"
    return formats.measure(_mean_and_deviation(known))


def _mean_and_deviation(values: Sequence[float] | np.ndarray) -> Measure | None:
    """Returns the mean over the seeds with the standard deviation; None without seeds."""
    known = np.asarray(values, dtype=float)
    if not len(known):
        return None
    return Measure(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else None)


def summary_table(
    settings: Sequence[Setting], criterion: Criterion, texts: Texts, *, has_spread: bool
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the final values, for a terminal or CSV.

    They are plain numbers, or say in how many runs the value diverged.
    """
    columns = final_columns(settings, criterion)
    rows = []
    for setting in settings:
        cells = []
        for column in columns:
            ends = column.ends(setting)
            if not np.isfinite(ends.to_numpy(dtype=float)).all():
                cells.append(spread(ends))
                continue
            value = _mean_and_deviation(ends)
            cells.append(f"{value.mean:.3f}" if value else "")
            if has_spread and value and value.se is not None:
                cells[-1] += f" ± {value.se:.3f}"
        cells += [own.get(setting.name, "") for own in texts.values()]
        rows.append([setting.name, *cells, f"{setting.megabytes_up or 0.0:.3f}"])
    return ["", *(column.name for column in columns), *texts, "MB up"], rows


def difference_table(settings: Sequence[Setting], criterion: Criterion) -> Table:
    """Returns the differences of final values from the first setting, paired by seed.

    Without two seeds that it shares with another setting, the table has no rows.
    """
    first, *others = settings
    columns = final_columns(settings, criterion)
    rows = [[s.name, *(_difference(column, s, first) for column in columns)] for s in others]
    headings = ["setting", *(column.name for column in columns)]
    if all(set(cells) == {formats.MISSING} for _, *cells in rows):
        rows = []
    return Table(*prose("differences", first=first.name), headings, rows)


def _difference(column: Column, setting: Setting, first: Setting) -> str:
    # subtraction aligns by seed: seeds that only one setting has become NaN and drop out
    changes = (column.ends(setting) - column.ends(first)).dropna()
    if len(changes) < 2:
        return formats.MISSING
    return mean_difference(changes.to_numpy(), level=LEVEL).text()


# --- Columns of text ------------------------------------------------------------------------------


def further_texts(settings: Sequence[Setting], criteria: Sequence[Criterion]) -> Texts:
    """Returns the columns that some studies have: Δ_M, users, rounds to the target loss."""
    losses = [criterion for criterion in criteria if criterion.quantity.name == "losses"]
    draws: dict[str, Callable[[], Texts]] = {
        "Δ_M": lambda: _relative_loss(settings, criteria[0]),
        "users": lambda: _users(settings, criteria[0]),
        "rounds to the target loss": lambda: _rounds(settings, losses[0]) if losses else {},
    }
    texts: dict[str, Mapping[str, str]] = {}
    for heading, draw in draws.items():
        texts |= drawn(f"The column of {heading}", draw, instead=lambda note: {})
    return texts


def trained_alone(settings: Sequence[Setting], criterion: Criterion) -> dict[str, Setting]:
    """Returns the settings that train a single objective, by objective: one weight is not 0."""
    alone = {}
    for setting in settings:
        weights = (setting.method.get("strategy") or {}).get("weights")
        if isinstance(weights, list) and sum(weight > 0 for weight in weights) == 1:
            alone[criterion.objectives[int(np.argmax(weights))]] = setting
    return alone


def least_values(settings: Sequence[Setting], criterion: Criterion) -> list[float] | None:
    """Returns each objective's final value when trained alone; None if one is unknown."""
    alone = trained_alone(settings, criterion)
    means = [criterion.mean(alone[name]) for name in criterion.objectives if name in alone]
    ends = [float(own[index]) for index, own in enumerate(means) if own is not None]
    return ends if len(ends) == len(criterion.objectives) else None


def _relative_loss(settings: Sequence[Setting], criterion: Criterion) -> Texts:
    reference = least_values(settings, criterion)
    if reference is None or min(reference) <= 0:
        return {}
    alone = [setting.name for setting in trained_alone(settings, criterion).values()]
    means = {s.name: criterion.mean(s) for s in settings if s.name not in alone}
    is_higher = criterion.sign > 0
    return {
        "Δ_M, %": {
            name: f"{100 * delta_m(own, reference, is_higher_better=is_higher):.1f}"
            for name, own in means.items()
            if own is not None
        }
    }


def user_values(
    setting: Setting,
    criterion: Criterion,
    values_of: Callable[[Setting, str, Sequence[str]], Frame] = Setting.ends,
) -> Frame:
    """Returns the users' accuracies, [S, C], by default final; empty unless all runs have some.

    NaN marks users that got no sample in a seed's partition.
    """
    name = criterion.beside("users")
    users = setting.objectives_with(name)
    columns = {user: values_of(setting, name, [user])[user] for user in users}
    users = pd.DataFrame(columns)
    is_whole = len(users) == len(setting.runs) and users.notna().any(axis=1).all()
    return users if is_whole else pd.DataFrame(index=setting.seeds)


def _users(settings: Sequence[Setting], criterion: Criterion) -> Texts:
    """Returns the users' accuracies or their spread if there are many users, also at the start."""
    users = _users_by_setting(settings, criterion)
    if not users:
        return {}
    shared = _shared_users(users)
    starts = pd.concat([user_values(s, criterion, Setting.starts) for s in settings])
    if set(shared) <= set(starts.columns) and not starts[shared].isna().to_numpy().any():
        users = {initial_name(settings, criterion): starts, **users}
    if len(shared) <= NUM_TABLE_USERS:
        means = {name: own[shared].mean() for name, own in users.items()}
        return {user: {name: f"{own[user]:.3f}" for name, own in means.items()} for user in shared}
    spreads = {
        name: [user_summary(seed.dropna().tolist()) for _, seed in own.iterrows()]
        for name, own in users.items()
    }
    headings = {"users": "mean", "SD": "std", "worst 5 %": "worst", "best 5 %": "best"}
    return {
        heading: {
            name: f"{fmean(getattr(seed, attribute) for seed in seeds):.3f}"
            for name, seeds in spreads.items()
        }
        for heading, attribute in headings.items()
    }


def users_left_out(settings: Sequence[Setting], criterion: Criterion) -> str:
    """Returns a sentence that names the users without a column; empty if all have one.

    Where there are many users, the columns are their spread, which leaves out none.
    """
    users = _users_by_setting(settings, criterion)
    shared = _shared_users(users) if users else []
    if not users or len(shared) > NUM_TABLE_USERS:
        return ""
    reason = "not shown, since not all runs have them."
    others = [(user, reason) for user in pd.concat(users).columns if user not in shared]
    return f"Users {by_reason(others)[0]}" if others else ""


def _users_by_setting(settings: Sequence[Setting], criterion: Criterion) -> dict[str, Frame]:
    """Returns the users' final accuracies of each setting that has some."""
    users = {setting.name: user_values(setting, criterion) for setting in settings}
    return {name: own for name, own in users.items() if len(own.columns)}


def _shared_users(users: Mapping[str, Frame]) -> Sequence[str]:
    """Returns the users of all runs: a seed may draw others, or leave one without a sample."""
    everyone = pd.concat(users)
    return list(everyone.columns[everyone.notna().all()])


def _rounds(settings: Sequence[Setting], losses: Criterion) -> Texts:
    """Returns the number of rounds until each loss reached the target, means over the seeds."""
    columns: dict[str, dict[str, str]] = {}
    for setting in (setting for setting in settings if setting.records):
        config = setting.records[0].settings
        if not (target := config.get("target_loss")):
            continue
        for objective in losses.objectives:
            lines = setting.values(losses.final)
            lines = lines[lines["objective"] == objective]
            reached = [
                rounds_to_loss(own["round"].tolist(), own["value"].tolist(), target)
                if np.isfinite(own["value"]).all()
                else None
                for _, own in lines.groupby("seed")
            ]
            known = [count for count in reached if count is not None]
            rounds = setting.method.get("rounds") or config.get("rounds")
            text = f"> {rounds}"
            if len(known) == len(reached):
                mean = fmean(known)
                text = f"{mean:.0f}" if mean.is_integer() else f"{mean:.1f}"
            columns.setdefault(f"rounds to {target:g}, {objective}", {})[setting.name] = text
    return columns


# --- Sentences ------------------------------------------------------------------------------------


def headlines(settings: Sequence[Setting], criterion: Criterion) -> list[str]:
    """Returns sentences on the best settings: on average, and in the worst objective.

    Classic algorithms at one untuned rate each are listed, but not ranked.
    """
    ends = {s.name: s.ends(criterion.final, criterion.objectives) for s in settings}
    finals = {name: own for name, own in ends.items() if len(own)}
    names, word = criterion.objectives, criterion.quantity.title
    if not finals:
        return []
    means = {name: values.mean(axis=1, skipna=False) for name, values in finals.items()}
    if len(finals) > 1 and _is_untuned(settings):
        whose = f", mean over {len(names)} objectives" if len(names) > 1 else ""
        ends = ", ".join(f"{name} {spread(own)}" for name, own in means.items())
        return [f"Final {word}{whose}: {ends}.", _untuned_text(settings)]
    if len(names) == 1:
        return [_ranking(f"{names[0]}: the {word}", means, criterion)]
    worsts = {
        name: criterion.sign * (criterion.sign * values).min(axis=1, skipna=False)
        for name, values in finals.items()
    }
    return [
        _ranking(f"The mean {word} over {len(names)} objectives", means, criterion),
        _ranking(f"The worst objective's {word}", worsts, criterion),
    ]


def _is_untuned(settings: Sequence[Setting]) -> bool:
    """Returns whether several classic algorithms ran, one of them with a single learning rate."""
    rates: dict[str, set[str]] = {}
    for setting in settings:
        method = dict(leaves(setting.method))
        own = {key: method.pop(key, None) for key in RATES}
        if own["local.lr"] is None:
            return False
        rates.setdefault(repr(method), set()).add(repr(own))
    return len(rates) > 1 and any(len(own) == 1 for own in rates.values())


def _untuned_text(settings: Sequence[Setting]) -> str:
    text = prose("untuned", rates=" and ".join(RATES))[1]
    strategies = {s.name: s.method.get("strategy") or {} for s in settings}
    normalised = [name for name, own in strategies.items() if own.get("normalize_updates")]
    if not normalised:
        return text
    does = "normalises" if len(normalised) == 1 else "normalise"
    names = f"{' and '.join(normalised)} {does}"
    return f"{text} {prose('untuned-normalised', names=names)[1]}"


def _ranking(subject: str, finals: Mapping[str, pd.Series], criterion: Criterion) -> str:
    """Returns the best and the second setting, and whether the seeds tell them apart."""
    known = {name: v for name, v in finals.items() if np.isfinite(v).all()}
    ends = {name: float(v.to_numpy().mean()) for name, v in known.items()}
    if not ends:
        return f"{subject} is not known: every setting diverged."
    ranked = sorted(ends, key=lambda name: -criterion.sign * ends[name])
    quotes = [f"{name} ({spread(known[name].to_numpy())})" for name in ranked[:2]]
    if len(finals) == 1:
        return f"{subject} ends at {spread(known[ranked[0]].to_numpy())} with {ranked[0]}."
    if len({ends[name] for name in ranked[:2]}) < len(quotes):
        return f"{subject} ends equal with {' and '.join(quotes)}."
    best = "highest" if criterion.sign > 0 else "lowest"
    sentence = f"{subject} ends {best} with {', before '.join(quotes)}"
    if len(ranked) == 1 or _are_apart(*(known[name] for name in ranked[:2])):
        return f"{sentence}."
    return f"{sentence}; the difference is not significant."


def _are_apart(first: pd.Series, second: pd.Series) -> bool:
    """Returns whether seeds tell two settings apart, or are too few to say anything of it.

    Seeds that both have are paired, as in the table of differences.
    """
    changes = (first - second).dropna()
    if len(changes) > 1:
        return mean_difference(changes.to_numpy(), level=LEVEL).is_clear
    if min(len(first), len(second)) < 2:
        return True
    welch: Any = stats.ttest_ind(first, second, equal_var=False)
    return bool(welch.pvalue < 1 - LEVEL)
