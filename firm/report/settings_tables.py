"""Tables and sentences that compare settings: final values, paired differences and bytes."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np
import pandas as pd

from firm.federation.rivals import RIVALS
from firm.fronts.measures import delta_m, rounds_to_loss, user_summary
from firm.report import formats
from firm.report.criteria import Column, Criterion, final_columns, further_scores
from firm.report.ledger import total_bytes, uploads_so_far
from firm.report.page import Table, prose
from firm.report.seeds import mean_difference
from firm.report.tables import Frame, Setting, measure_of, span_text
from firm.run.comparison import CLEAR_Z, score_notes
from firm.run.differences import leaves
from firm.run.guard import drawn

NUM_COLUMNS = 10
"""Maximum number of quantities shown as columns of the table; more become its rows."""
NUM_TABLE_USERS = 10
"""Maximum number of users shown in the table; for more, it shows their spread."""
RATES = ("local.lr", "strategy.server_learning_rate")
"""Learning rates of classic algorithms."""

Texts = Mapping[str, Mapping[str, str]]
"""Further columns: heading to setting to cell."""


# --- Final values ---------------------------------------------------------------------------------


def final_table(settings: Sequence[Setting], criterion: Criterion, texts: Texts) -> Table:
    """Returns the final values; a row for each setting, or for each quantity if these are many."""
    columns = final_columns(settings, criterion)
    headings = [column.heading for column in columns]
    table = [["setting", *headings, *texts, "uploaded (MB)", "rounds", "seeds"]]
    starts = [formats.number(column.start(settings)) for column in columns]
    if set(starts) != {formats.MISSING}:
        name = initial_name(settings, criterion)
        table.append([name, *starts, *[formats.MISSING] * (len(texts) + 2), ""])
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
    return Table("Final models", _final_text(settings, criterion), table[0], table[1:])


def initial_name(settings: Sequence[Setting], criterion: Criterion) -> str:
    """Returns the name of the model at round 0."""
    return "base model" if criterion.has_kl(settings) else "initial model"


def _final_text(settings: Sequence[Setting], criterion: Criterion) -> str:
    split, word = criterion.split.capitalize(), criterion.quantity.title
    text = f"{split} {word}".strip().capitalize() + " of the global model at the last evaluation"
    if max(len(setting.runs) for setting in settings) > 1:
        text += ", mean ± standard deviation over the seeds"
    if len(criterion.objectives) > 1:
        text += f". The worst is the {criterion.worst_how} of the objectives, taken in each run"
    scores = further_scores(settings, criterion)
    if criterion.has_kl(settings):
        text += ". Scores other than the objectives are raw; KL is in nats per reply"
    return f"{text}. {criterion.quantity.help} {score_notes(scores)}".strip()


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
    return formats.measure(measure_of(known, ddof_error=False))


def summary_table(
    settings: Sequence[Setting], criterion: Criterion, texts: Texts, *, has_spread: bool
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the final values as plain numbers, for a terminal or CSV."""
    columns = final_columns(settings, criterion)
    rows = []
    for setting in settings:
        cells = []
        for column in columns:
            value = measure_of(column.ends(setting) / column.scale, ddof_error=False)
            deviation = (
                f" ± {value.se:.3f}" if has_spread and value and value.se is not None else ""
            )
            cells.append(f"{value.mean:.3f}{deviation}" if value else "")
        cells += [cell_by_name.get(setting.name, "") for cell_by_name in texts.values()]
        rows.append([setting.name, *cells, f"{setting.megabytes_up or 0.0:.3f}"])
    return ["", *(column.name for column in columns), *texts, "MB up"], rows


def difference_table(settings: Sequence[Setting], criterion: Criterion) -> Table:
    """Returns the differences of final values from the first setting, paired by seed."""
    first, *others = settings
    columns = final_columns(settings, criterion)
    rows = [[s.name, *(_difference(column, s, first) for column in columns)] for s in others]
    return Table(
        *prose("differences", first=first.name),
        ["setting", *(column.heading for column in columns)],
        rows,
    )


def _difference(column: Column, setting: Setting, first: Setting) -> str:
    # subtraction aligns by seed: seeds that only one setting has become NaN and drop out
    changes = (column.ends(setting) - column.ends(first)).dropna()
    if len(changes) < 2:
        return formats.MISSING
    # a tenth of a per cent is as fine as three digits of a share
    digits = 1 if column.scale == 100 else 3
    return mean_difference(changes.to_numpy(), level=0.9).text(digits)


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
    is_higher = criterion.is_higher_better
    return {
        "Δ_M, %": {
            name: f"{100 * delta_m(own, reference, is_higher_better=is_higher):.1f}"
            for name, own in means.items()
            if own is not None
        }
    }


def user_values(setting: Setting, criterion: Criterion) -> Frame:
    """Returns the users' final accuracies, [S, C]; empty unless all runs have some.

    NaN marks users that got no sample in a seed's partition.
    """
    name = criterion.beside("users")
    columns = {user: setting.ends(name, [user])[user] for user in setting.objectives_with(name)}
    users = pd.DataFrame(columns)
    is_whole = len(users) == len(setting.runs) and users.notna().any(axis=1).all()
    return users if is_whole else pd.DataFrame(index=setting.seeds)


def _users(settings: Sequence[Setting], criterion: Criterion) -> Texts:
    """Returns the users' final accuracies in per cent, or their spread if there are many users."""
    users = {s.name: own for s in settings if len((own := user_values(s, criterion)).columns)}
    if not users:
        return {}
    # a seed's partition may leave a user without a sample
    everyone = pd.concat(users)
    shared = everyone.columns[everyone.notna().all()]
    if len(shared) <= NUM_TABLE_USERS:
        means = {name: 100 * own[shared].mean() for name, own in users.items()}
        return {user: {name: f"{own[user]:.1f}" for name, own in means.items()} for user in shared}
    spreads = {
        name: [user_summary((100 * seed.dropna()).tolist()) for _, seed in own.iterrows()]
        for name, own in users.items()
    }
    headings = {"users": "mean", "SD": "std", "worst 5 %": "worst", "best 5 %": "best"}
    return {
        heading: {
            name: f"{fmean(getattr(seed, attribute) for seed in seeds):.1f}"
            for name, seeds in spreads.items()
        }
        for heading, attribute in headings.items()
    }


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
            text = f"{fmean(known):.0f}" if len(known) == len(reached) else f"> {rounds}"
            columns.setdefault(f"rounds to {target:g}, {objective}", {})[setting.name] = text
    return columns


# --- Bytes ----------------------------------------------------------------------------------------


def ledger_table(settings: Sequence[Setting]) -> Table:
    """Returns the bytes sent by each setting, and the bytes that rivals would have uploaded."""
    columns: dict[str, list[str]] = {"setting": [setting.name for setting in settings]}
    for key, way in (("bytes_up", "up"), ("bytes_down", "down")):
        totals = [fmean(total_bytes(record, key) for record in s.records) for s in settings]
        rounds = [max(1, round(fmean(r.last_round for r in s.records))) for s in settings]
        means = [total / num_rounds for total, num_rounds in zip(totals, rounds, strict=True)]
        columns[f"{way} per round"] = [formats.size(mean) for mean in means]
        columns[f"{way} in total"] = [formats.size(total) for total in totals]
    text = "Serialised bytes of all clients together, means over the seeds."
    for name, rival in RIVALS.items():
        cells = [_rival_size(setting, name) for setting in settings]
        if set(cells) != {formats.MISSING}:
            columns[f"up with {name}"] = cells
            text += f" {name} would have uploaded {rival.text}."
    if len(columns) > 5:
        text += " These sizes assume the same clients and rounds and exclude names and metrics."
    return Table.of("Communication", text, columns)


def _rival_size(setting: Setting, name: str) -> str:
    ends = [uploads_so_far(record, name)[-1:] for record in setting.records]
    return formats.size(fmean(end[0][1] for end in ends)) if all(ends) else formats.MISSING


# --- Sentences ------------------------------------------------------------------------------------


def headlines(settings: Sequence[Setting], criterion: Criterion) -> list[str]:
    """Returns sentences on the best settings: on average, in the worst and in each objective.

    Classic algorithms at one untuned rate each are listed, but not ranked.
    """
    finals = {s.name: own for s in settings if len(own := criterion.finals(s))}
    names, word = criterion.objectives, criterion.quantity.title
    if not finals:
        return []
    if len(finals) > 1 and _is_untuned(settings):
        whose = f", mean over {len(names)} objectives" if len(names) > 1 else ""
        means = {name: values.mean(axis=1) for name, values in finals.items()}
        ends = ", ".join(f"{name} {_text(own, criterion)}" for name, own in means.items())
        return [f"Final {word}{whose}: {ends}.", _untuned_text(settings)]
    if len(names) == 1:
        return [_ranking(f"{names[0]}: the {word}", finals, criterion)]
    means = {name: values.mean(axis=1) for name, values in finals.items()}
    worsts = {name: criterion.worst(values) for name, values in finals.items()}
    sentences = [
        _ranking(f"The mean {word} over {len(names)} objectives", means, criterion),
        _ranking(f"The worst objective's {word}", worsts, criterion),
    ]
    if len(finals) > 1 and (best := _best_by_objective(finals, criterion)):
        sentences.append(
            f"{_superlative(criterion).capitalize()} by objective: {'; '.join(best)}. As the best "
            f"of {len(finals)} settings, these values are slightly too good by chance."
        )
    return sentences


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
    text = (
        f"Learning rates are untuned here, one per setting ({' and '.join(RATES)}): other rates "
        "can reverse the order, so these values do not rank the algorithms."
    )
    strategies = {s.name: s.method.get("strategy") or {} for s in settings}
    normalised = [name for name, own in strategies.items() if own.get("normalize_updates")]
    if normalised:
        does = "normalises" if len(normalised) == 1 else "normalise"
        text += (
            f" {' and '.join(normalised)} {does} the clients' updates: the length of a step "
            "follows from the server's rate alone, so equal rates are not equal steps."
        )
    return text


def _best_by_objective(finals: Mapping[str, np.ndarray], criterion: Criterion) -> list[str]:
    known = {name: values for name, values in finals.items() if np.isfinite(values).all()}
    best = []
    for index, objective in enumerate(criterion.objectives if known else ()):
        winner = max(known, key=lambda n: criterion.sign * known[n][:, index].mean())
        best.append(f"{objective} with {winner} ({_text(known[winner][:, index], criterion)})")
    return best


def _ranking(subject: str, finals: Mapping[str, np.ndarray], criterion: Criterion) -> str:
    """Returns the best and the second setting, and whether the seeds tell them apart."""
    known = {name: v for name, v in finals.items() if np.isfinite(v).all()}
    ends = {name: end for name, values in known.items() if (end := measure_of(values))}
    if not ends:
        return f"{subject} is not known: every setting diverged."
    ranked = sorted(ends, key=lambda name: -criterion.sign * ends[name].mean)
    quotes = [f"{name} ({_text(known[name], criterion)})" for name in ranked[:2]]
    sentence = f"{subject} ends {_superlative(criterion)} with {', before '.join(quotes)}"
    if len(ranked) == 1:
        return f"{sentence}."
    first, second = (ends[name] for name in ranked[:2])
    if first.se is None or second.se is None:
        return f"{sentence}."
    # standard errors of independent seeds add in squares
    is_clear = abs(first.mean - second.mean) > CLEAR_Z * np.hypot(first.se, second.se)
    return f"{sentence}{'' if is_clear else '; the difference is not significant'}."


def _superlative(criterion: Criterion) -> str:
    return "highest" if criterion.is_higher_better else "lowest"


def _text(values: np.ndarray, criterion: Criterion) -> str:
    unit = f"{formats.NBSP}%" if criterion.is_percent else ""
    return f"{spread(criterion.scale * values)}{unit}"
