"""The front of a single run with a preference-conditioned policy."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from firm.base.preferences import preference_folder
from firm.base.sanitize import printable
from firm.fronts.collapse import collapse_reason
from firm.fronts.front import KL, Front, Point
from firm.report import formats
from firm.report.front_sections import volume_section, volumes_by_round
from firm.report.page import Section
from firm.report.record import Record, final_row, rewards_of
from firm.report.tables import Setting
from firm.run.rows import Row

SCORES_NAME = "test_scores.safetensors"
"""Scores and rewards of the aligned model by row of the test data, in the run's directory."""


def split_at(split: str, preference: Sequence[float]) -> str:
    """Returns the name of a split in the rows of a preference."""
    return f"{split} at {formats.shares(preference)}"


def point_of(
    name: str,
    base: Row,
    final: Row,
    objectives: Sequence[str],
    *,
    preference: tuple[float, ...],
    seed: int,
    adapter: str,
) -> Point:
    """Returns a model's point of the front, from its evaluation and the base model's.

    Raises:
        ValueError: A row lacks rewards.
    """
    if any(rewards_of(row, objectives) is None for row in (base, final)):
        raise ValueError("its log lacks rewards on the test prompts")
    parse = {
        key: row["scores"]["parse"]["mean"]
        for key, row in (("parse_rate", final), ("base_parse_rate", base))
        if "parse" in row["scores"]
    }
    errors = {n: s["se"] for n, s in final["scores"].items()} | {KL: final.get("kl_se", math.nan)}
    return Point(
        name=name,
        preference=preference,
        seed=seed,
        rewards={n: final["rewards"][n]["mean"] for n in objectives},
        errors={n: error for n, error in errors.items() if math.isfinite(error)}
        | {n: final["rewards"][n]["se"] for n in objectives},
        scores={n: s["mean"] for n, s in final["scores"].items() if n not in objectives},
        kl=final.get("kl", math.nan),
        adapter=adapter,
        collapse=collapse_reason(
            commonest_share=final["commonest_share"],
            empty_share=final["empty_share"],
            mean_kl=final["kl"],
            **parse,
        )
        if "kl" in final  # rankings of held-out pairs show no collapse of replies
        else None,
    )


def num_scored(base: Row, objectives: Sequence[str]) -> dict[str, int]:
    """Returns the number of prompts with a reward, for objectives that not all prompts have."""
    counts = {name: base["rewards"][name].get("num_prompts") for name in objectives}
    return {n: count for n, count in counts.items() if count not in (None, base["num_prompts"])}


def values_by_prompt(file: Path, objectives: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Returns a model's values by prompt from a file of its metrics by row; {} without the file.

    They are means over the rows of a prompt, of rewards, further scores and KL, to six digits.
    """
    try:
        table = load_file(file)
        # renumbered, since the sizes of a stranger's indices would be allocated
        prompts = np.unique(table.pop("prompt").numpy().ravel(), return_inverse=True)[1]
    except (OSError, SafetensorError, KeyError, TypeError):  # NumPy lacks some dtypes
        return {}
    values = {}
    for key, tensor in table.items():
        kind, _, name = key.rpartition("/")
        is_shown = kind == "rewards" or (kind == "scores" and name not in objectives) or key == KL
        if is_shown and tensor.shape == prompts.shape:
            own = tensor.double().numpy()
            known = np.isfinite(own)
            counts = np.bincount(prompts, known)
            sums = np.bincount(prompts, np.where(known, own, 0.0))
            with np.errstate(invalid="ignore"):
                values[name] = tuple((sums / counts).round(6).tolist())
    return values


def front_rows(record: Record) -> list[Row]:
    """Returns the final evaluations of a conditioned run on the test prompts, by preference.

    By falling share of the first objective; empty before the end of the run.
    """
    return _rows(record, "test").get(_last(record), [])


def _last(record: Record) -> int:
    """Returns the round of the final evaluation, which ended the run; -1 before its end."""
    return (final_row(record) or {"round": -1})["round"]


def front_of_run(record: Record) -> Front | None:
    """Returns the front on the test prompts after the last round; None if there is none."""
    rows = front_rows(record)
    if len(rows) < 2:
        return None
    base = record.evaluations["test"][0]
    kept = [row for split, row in record.chosen.items() if split.startswith("validation at ")]
    chosen = kept or _rows(record, "validation").get(_last(record), [])
    names = [preference_folder(row["preference"]) for row in rows]

    def values(split: str) -> dict[str, dict[str, tuple[float, ...]]]:
        files = {n: record.path / "front" / n / f"{split}_scores.safetensors" for n in names}
        found = {n: values_by_prompt(file, record.objectives) for n, file in files.items()}
        return {name: own for name, own in found.items() if own}

    validation_values = values("validation")
    validation = {
        preference_folder(row["preference"]): {
            name: row["rewards"][name]["mean"] for name in record.objectives
        }
        for row in chosen
        if rewards_of(row, record.objectives) is not None
    }
    if not chosen:  # a run without rounds measures them at its end alone
        validation = {
            name: {own: float(np.nanmean(rows[own])) for own in record.objectives}
            for name, rows in validation_values.items()
        }

    return Front(
        objectives=record.objectives,
        points=tuple(
            point_of(
                preference_folder(row["preference"]),
                base,
                row,
                record.objectives,
                preference=tuple(row["preference"]),
                seed=record.seed or 0,
                adapter=f"front/{preference_folder(row['preference'])}",
            )
            for row in rows
        ),
        reference=tuple(0.0 for _ in record.objectives),
        # shares of held-out pairs have no calibration
        calibrations={
            name: record.header["calibration"].get(name, {"method": "pairs"})
            for name in record.objectives
        },
        base={name: base["rewards"][name]["mean"] for name in record.objectives},
        strategy=printable(record.name),
        num_prompts=base["num_prompts"],
        is_conditioned=True,
        num_scored=num_scored(base, record.objectives),
        validation=validation,
        test_values=values("test"),
        validation_values=validation_values,
    )


def volumes_of_run(run: Setting) -> Section:
    """Returns the hypervolume of a conditioned run on the validation prompts over the rounds.

    It is that of the preferences measured in every round; the last one may have refined others.
    """
    record = run.records[0]
    by_round = _rows(record, "validation")
    models: dict[str, dict[int, list[float]]] = {}
    for at, rows in by_round.items():
        for row in rows:
            if (rewards := rewards_of(row, record.objectives)) is not None:
                models.setdefault(row["split"], {})[at] = rewards
    whole = [own for own in models.values() if len(own) == len(by_round)]
    seeds = [whole] if len(whole) > 1 and len(by_round) > 1 else []
    if not (record.learns_from_pairs or all(map(record.is_bounded, record.objectives))):
        seeds = []  # raw rewards have no reference point
    volumes = volumes_by_round(seeds, [0.0] * len(record.objectives))
    data = "pairs" if record.learns_from_pairs else "prompts"
    return volume_section({run: volumes}, data=data)


def _rows(record: Record, split: str) -> Mapping[int, list[Row]]:
    """Returns the rows at preferences by round, by falling share of the first objective."""
    by_round: dict[int, list[Row]] = {}
    for name, rows in record.evaluations.items():
        if name.startswith(f"{split} at "):
            for row in rows:
                if not row.get("preference"):  # a malformed one has been dropped from the log
                    continue
                by_round.setdefault(row["round"], []).append(row)
    return {
        number: sorted(by_round[number], key=lambda row: row["preference"], reverse=True)
        for number in sorted(by_round)
    }
