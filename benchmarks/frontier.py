"""Gain against uploaded bytes: chooses learning rates, and measures adapters against one of them.

    python benchmarks/frontier.py runs/frontier_rates --choose
    python benchmarks/frontier.py runs/frontier --against "LoRA r = 16, float32" --markdown

With --choose, settings are named "ADAPTER, rate RATE". Of the rates whose KL is at most 3 nats in
the mean over the seeds, the one with the largest gain in the sum of the rewards is taken. Both are
those of the last round on the validation prompts: what is reported later, test prompts and true
scores, chooses nothing (docs/protocol.md).

Otherwise a gain is the final model's less the base model's on the test prompts. Against a
yardstick: the share of its mean gain that a setting keeps, and the setting's gain less --kept of
the yardstick's (nine tenths), paired by seed, with a 90 % interval by Student's t. It keeps as much
if the interval is above zero; with --kept 1 it is the interval of the difference.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from firm.report import Record
from firm.report.ledger import total_bytes
from firm.report.record import final_row, study_records
from firm.report.seeds import mean_difference
from firm.run import Sweep, print_table
from firm.serving.model_card import markdown_table

MAX_KL = 3.0


Gains = Mapping[str, float]
"""What a run has gained over its base model, and its price, by name.

helpful is the first objective's calibrated reward, rewards the sum of all; true_helpful and
true_scores are the same by the truth, parse the parse rate, in a world that has them. kl is in nats
per reply from the base model; megabytes were uploaded by all clients in all rounds.
"""

SHOWN = ("helpful", "rewards", "true_helpful", "true_scores")


def gains(record: Record) -> Gains:
    """Returns the gains of a finished run."""
    base, final = record.evaluations["test"][0], final_row(record)
    assert final is not None

    def change(kind: str, name: str) -> float:
        return final[kind][name]["mean"] - base[kind][name]["mean"]

    extra = {name: change("scores", name) for name in record.extra_scores()}
    true = [gain for name, gain in extra.items() if name.startswith("true_")]
    return {
        "helpful": change("rewards", record.objectives[0]),
        "rewards": sum(change("rewards", name) for name in record.objectives),
        **{name: extra[name] for name in ("true_helpful", "parse") if name in extra},
        **({"true_scores": sum(true)} if true else {}),
        "kl": final["kl"],
        "megabytes": total_bytes(record, "bytes_up") / 1e6,
    }


def validation_gains(record: Record) -> Gains:
    """Returns the gain in the sum of the rewards on the validation prompts, and the KL there.

    Raises:
        ValueError: The run was not measured on validation prompts.
    """
    rows = record.evaluations.get("validation", [])
    if len(rows) < 2:
        raise ValueError(
            f"{record.name} was not measured on validation prompts, which choose its rate; set "
            "evaluation.num_validation_prompts and run it again."
        )
    first, last = (rows[at]["rewards"] for at in (0, -1))
    gain = sum(last[name]["mean"] - first[name]["mean"] for name in record.objectives)
    return {"rewards": gain, "kl": rows[-1]["kl"]}


def stored_gains(folder: Path, part: str, split: str) -> dict[str, dict[int, Gains]]:
    """Returns the gains that benchmarks/adapter_runs.py has stored, by setting and seed."""
    by_seed: dict[str, dict[int, Gains]] = {}
    for path in sorted(folder.glob(f"{part}_*.json")):
        models = {name: own[split] for name, own in json.loads(path.read_text()).items()}
        base = models.pop("base")
        for name, own in models.items():
            change = {key: own[key] - base[key] for key in own}
            by_seed.setdefault(name, {})[int(path.stem.removeprefix(f"{part}_"))] = {
                "helpful": change["reward helpful"],
                "rewards": sum(gain for key, gain in change.items() if key.startswith("reward ")),
                "true_helpful": change["true_helpful"],
                "true_scores": sum(gain for key, gain in change.items() if key.startswith("true_")),
                "parse": change["parse"],
                "kl": own["KL"],
            }
    return by_seed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--choose", action="store_true", help="choose each adapter's rate")
    parser.add_argument("--against", metavar="SETTING", help="the yardstick")
    parser.add_argument("--kept", type=float, default=0.9, help="share of its gain to be kept")
    parser.add_argument("--markdown", action="store_true", help="print tables for the docs")
    options = parser.parse_args(arguments)
    records = study_records(Sweep(options.study))
    read = validation_gains if options.choose else gains
    by_seed = {
        setting: {run.seed: read(run) for run in runs} for setting, runs in records.items() if runs
    }
    show = show_markdown if options.markdown else print_table
    if options.choose:
        header, rows = chosen(by_seed)
        show("Gains on validation prompts by learning rate; * is chosen", header, rows)
        return
    if options.against not in by_seed:
        parser.error(f"--against must be one of {', '.join(by_seed)}, got {options.against}.")
    seeds = set.intersection(*(set(runs) for runs in by_seed.values()))
    if len(seeds) < 2:
        parser.error(f"intervals need 2 seeds that all settings have, got {len(seeds)}.")
    paired = {setting: [runs[seed] for seed in sorted(seeds)] for setting, runs in by_seed.items()}
    print(f"{len(seeds)} seeds that all settings have.")
    for title, (header, rows) in {
        "Means": means(paired, options.against),
        "Share of the yardstick's mean gain": shares(paired, options.against),
        f"Gain less {options.kept:g} of the yardstick's": contrasts(
            paired, options.against, options.kept
        ),
    }.items():
        show(title, header, rows)


def chosen(by_seed: Mapping[str, Mapping[Any, Gains]]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of all rates; the chosen ones have a star."""
    adapters: dict[str, dict[str, list[Gains]]] = {}
    for setting, runs in by_seed.items():
        adapter, rate = setting.rsplit(", rate ", 1)
        adapters.setdefault(adapter, {})[rate] = list(runs.values())
    rows = []
    for adapter, rates in adapters.items():
        able = {
            rate: _mean(runs, "rewards")
            for rate, runs in rates.items()
            if _mean(runs, "kl") <= MAX_KL
        }
        best = max(able, key=lambda rate: able[rate], default=None)
        for rate, runs in rates.items():
            figures = [f"{_mean(runs, key):+.3f}" for key in ("rewards", "kl")]
            rows.append([adapter, rate, *figures, str(len(runs)), "*" if rate == best else ""])
    return ["adapter", "rate", words("rewards"), words("kl"), "seeds", ""], rows


def means(paired: Mapping[str, Sequence[Gains]], against: str) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of bytes, gains, parse rate's change and KL, means over the seeds."""
    yardstick, keys = _mean(paired[against], "megabytes"), measured(paired)
    rows = [
        [
            setting,
            f"{_mean(runs, 'megabytes'):.3g}",
            f"{_mean(runs, 'megabytes') / yardstick:.3f}",
            *(f"{_mean(runs, key):+.3f}" for key in keys),
        ]
        for setting, runs in paired.items()
    ]
    return ["", "MB up", "of its bytes", *map(words, keys)], rows


def shares(
    paired: Mapping[str, Sequence[Gains]], against: str
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of the shares of the yardstick's mean gains."""
    keys = measured(paired, SHOWN)
    rows = [
        [setting, *(f"{_mean(runs, key) / _mean(paired[against], key):.2f}" for key in keys)]
        for setting, runs in paired.items()
    ]
    return ["", *map(words, keys)], rows


def contrasts(
    paired: Mapping[str, Sequence[Gains]], against: str, kept: float
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of gains less a share of the yardstick's, with intervals."""
    keys, rows = measured(paired, SHOWN), []
    for setting, runs in paired.items():
        cells = []
        for key in keys:
            differences = [
                run[key] - kept * other[key]
                for run, other in zip(runs, paired[against], strict=True)
            ]
            found = mean_difference(differences, level=0.9)
            cells.append(f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]")
        rows.append([setting, *cells])
    return ["", *map(words, keys)], rows


def measured(
    paired: Mapping[str, Sequence[Gains]], keys: Sequence[str] = (*SHOWN, "parse", "kl")
) -> list[str]:
    """Returns those of the keys that all runs have, in this order."""
    return [key for key in keys if all(key in run for runs in paired.values() for run in runs)]


def words(key: str) -> str:
    """Returns what tables call a figure."""
    names = {"rewards": "sum of rewards", "true_scores": "sum of true scores", "kl": "KL"}
    return names.get(key, key.replace("_", " "))


def _mean(runs: Sequence[Gains], key: str) -> float:
    return fmean(run[key] for run in runs)


def show_markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n\n{markdown_table(header, rows)}")


if __name__ == "__main__":
    main()
