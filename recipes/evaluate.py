"""Adapters against their base model: rewards, KL, length and replies, side by side.

    python recipes/evaluate.py --runs '[runs/a, runs/b]'                 # as the first run measures
    python recipes/evaluate.py --runs '[runs/a]' --prompts.source my.jsonl
    python recipes/evaluate.py --adapters '[x/adapter, y/adapter]' --policy.path FOLDER \
        --rewards '{helpful: {path: FOLDER}}' --prompts.source my.jsonl

An evaluation is a directory: evaluation.html, figures.csv, samples.csv and config.yaml. With the
prompts and the seed of a run it repeats the figures of that run's held-out test.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import csv
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from firm.alignment import (
    Calibration,
    Comparison,
    Evaluation,
    PolicyConfig,
    PromptsConfig,
    RolloutConfig,
    check_vocabulary,
    comparison_table,
    evaluate,
    load_adapters,
    load_prompts,
    load_tokenizer,
    sample_replies,
    select_adapter,
)
from firm.federation import RandomStream
from firm.report import Record, read_record
from firm.report.comparison import Measure
from firm.report.comparison_page import Figure, Row, Sample, write_comparison
from firm.report.samples import Reply, dialogue
from firm.run import (
    Run,
    UserError,
    exit_on_user_error,
    leaves,
    parse,
    print_table,
    read_yaml,
    to_dict,
    to_yaml,
)
from firm.run.guard import drawing
from reward_models import RewardModelConfig, load_reward_model

PAGE_NAME = "evaluation.html"
BASE = "base"
NUM_PRINTED_SAMPLES = 2
"""Prompts whose replies the terminal shows; the files have `num_shown_samples`."""
SPEED_KEYS = ("batch_size", "device", "dtype")
"""Settings of a reward model that leave the meaning of its score alone."""

AnyConfig = TypeVar("AnyConfig")


@dataclass(frozen=True)
class Config:
    """One evaluation. What is not given comes from the first of `runs`, and then from here."""

    runs: list[Path] = field(default_factory=list)
    """Finished run directories, whose adapters are compared. The first one gives policy, rewards
    with their frozen maps to [0, 1], rollout, test prompts and seed."""
    adapters: list[Path] = field(default_factory=list)
    """Further adapters: PEFT folders, or run directories of which nothing else is read."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """The base model. Adapters bring their own `lora`."""
    check_base: bool = True
    """Refuses an adapter that names another base model than policy.path. Turn it off when it is
    the same model in another place; names and shapes of all tensors are compared anyway."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """What replies are scored by; there may be none."""
    metrics: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further scores."""
    normalized: bool = True
    """Reports the runs' rewards in [0, 1], too. Runs that froze different maps are refused then."""
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(split="test"))
    """Held-out prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    num_prompts: int = 256
    """The first so many prompts."""
    num_samples: int = 2
    """Replies per prompt."""
    num_shown_samples: int = 12
    """Prompts whose replies are written out; 0 keeps all texts out of terminal and files."""
    seed: int = 0
    """The same seed gives the same replies of an adapter, whichever others are evaluated."""
    num_threads: int | None = None
    """CPU threads; by default as many as torch takes."""
    out: Path | None = None
    """Directory of the results; by default runs/evaluation-TIME."""

    def __post_init__(self) -> None:
        if not (self.runs or self.adapters):
            raise ValueError(
                "there is nothing to evaluate: give --runs '[runs/mine]', or --adapters with "
                "--policy.path."
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(
                f"num_threads must be at least 1, got {self.num_threads}; null leaves it to torch."
            )
        if not self.policy.path:
            raise ValueError(
                "policy.path is empty: name the base model, or give --runs on the command line."
            )
        if shared := sorted(self.rewards.keys() & self.metrics.keys()):
            raise ValueError(f"{shared[0]!r} is both in rewards and in metrics: rename one.")
        if self.num_prompts < 2 or self.num_samples < 1 or self.num_shown_samples < 0:
            raise ValueError(
                "num_prompts must be at least 2 for a standard error, num_samples at least 1 and "
                f"num_shown_samples not negative, got {self.num_prompts}, {self.num_samples} and "
                f"{self.num_shown_samples}."
            )


def main(cfg: Config) -> Path:
    """Evaluates the base model and every adapter and returns the directory of the results."""
    transformers.utils.logging.disable_progress_bar()
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    out = cfg.out or Path("runs") / f"evaluation-{datetime.now():%Y%m%d-%H%M%S}"
    check_place(out)

    # load: whatever does not fit is found before the first reply is sampled
    records = [checked_record(path) for path in cfg.runs]
    check_comparable(cfg.runs, records, normalized=cfg.normalized)
    folder_by_name = named_folders([*cfg.runs, *cfg.adapters])
    policy = load_adapters(cfg.policy, list(folder_by_name.values()), check_base=cfg.check_base)
    tokenizer = load_tokenizer(cfg.policy)
    check_vocabulary(policy, tokenizer, cfg.policy.path)
    prompts = load_prompts(**asdict(cfg.prompts), tokenizer=tokenizer)[: cfg.num_prompts]
    score_fns = {
        name: load_reward_model(config, name)
        for name, config in {**cfg.rewards, **cfg.metrics}.items()
    }
    is_normalized = cfg.normalized and bool(records)
    calibrations = frozen_calibrations(cfg.rewards, records[0]) if is_normalized else {}

    # evaluate: the base model once, then every adapter on the same noise
    evaluations: dict[str, Evaluation] = {}
    for index, name in enumerate([BASE, *folder_by_name]):
        start = time.perf_counter()
        with select_adapter(policy, index - 1 if index else None) as reference:
            evaluations[name] = evaluate(
                partial(
                    sample_replies,
                    policy,
                    tokenizer=tokenizer,
                    prompt_format=cfg.policy.prompt,
                    config=cfg.rollout,
                    reference=reference,
                ),
                [prompt.text for prompt in prompts],
                {key: fn for key, fn in score_fns.items() if key in calibrations},
                calibrations=calibrations,
                stream=RandomStream(cfg.seed, "evaluation", "test"),
                extra_fns={key: fn for key, fn in score_fns.items() if key not in calibrations},
                num_samples=cfg.num_samples,
            )
        seconds = time.perf_counter() - start
        print(printable(f"{name}: {len(prompts)} prompts, {seconds:.1f} s"), flush=True)

    # show
    base = evaluations.pop(BASE)
    table_by_name = {
        name: comparison_table(base, evaluation, has_normalized=True)
        for name, evaluation in evaluations.items()
    }
    for name, table in table_by_name.items():
        print_table(
            f"\n{name} on {len(prompts)} prompts, {cfg.num_samples} replies each, "
            "mean ± standard error",
            ["", BASE, name, "change", "z"],
            [row.cells() for row in table],
        )
    samples = shown_samples({BASE: base, **evaluations}, cfg.num_shown_samples)
    for row in samples[: NUM_PRINTED_SAMPLES * (1 + len(evaluations))]:
        label = f"{row['prompt'].strip()}\n" if row["model"] == BASE else ""
        print(printable(f"{label}{row['model']}: {row['reply'].strip()}\n"))
    write_results(out, cfg, folder_by_name, table_by_name, samples, num_prompts=base.num_prompts)
    print(f"page     {out / PAGE_NAME}\nfigures  {out / 'figures.csv'}")
    return out


def check_place(out: Path) -> None:
    """Raises `UserError` where the results cannot be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists and is not empty; choose another --out.")
    parent = next(path for path in out.resolve().parents if path.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"out: no permission to write in {parent}; choose another --out.")


def check_comparable(runs: Sequence[Path], records: Sequence[Record], *, normalized: bool) -> None:
    """Raises `UserError`, with what differs, for runs that one evaluation cannot compare."""
    for run, record in zip(runs[1:], records[1:], strict=True):
        first = records[0]
        policies = [dict(leaves(r.settings.get("policy") or {}, "policy")) for r in (first, record)]
        for key in sorted(policies[0].keys() | policies[1].keys()):
            ours, theirs = (policy.get(key) for policy in policies)
            if ours != theirs and not key.startswith("policy.lora."):
                raise UserError(
                    f"the base models of two runs differ: {key} is {ours!r} in {runs[0]} and "
                    f"{theirs!r} in {run}; compare runs of one base model, or give the second "
                    "under --adapters, which takes no settings from it."
                )
        maps = [r.header.get("calibration") or {} for r in (first, record)]
        for name in [name for name in maps[0] if name in maps[1] and normalized]:
            if maps[0][name] != maps[1][name]:
                raise UserError(
                    f"the map of {name!r} to [0, 1] is {_words(maps[0][name])} in {runs[0]} and "
                    f"{_words(maps[1][name])} in {run}, so that equal rewards would not mean the "
                    "same; --normalized false compares raw scores alone."
                )


def _words(figures: Mapping[str, Any]) -> str:
    parts = [
        f"{key} {v:.6g}" if isinstance(v, float) else f"{key} {v}" for key, v in figures.items()
    ]
    return f"({', '.join(parts)})"


def named_folders(paths: Sequence[Path]) -> dict[str, Path]:
    """The PEFT folder of every run or adapter, under a name as short as can be.

    Raises:
        UserError: Two of them are the same.
    """
    folders = [adapter_folder(path) for path in paths]
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"the adapter in {folders[index]} is named twice; leave one out.")
    short = [place.parent.name if place.name == "adapter" else place.name for place in places]
    return {
        name if short.count(name) == 1 and name != BASE else str(folder): folder
        for name, folder in zip(short, folders, strict=True)
    }


def adapter_folder(path: Path) -> Path:
    """The PEFT folder itself, or the one that a finished run has in it."""
    is_run = (path / "run.json").is_file() and not (path / "adapter_config.json").exists()
    if is_run and not (path / "adapter").is_dir():
        raise UserError(f"the run in {path} has no adapter yet; finish it with --resume.")
    return path / "adapter" if is_run else path


def frozen_calibrations(
    rewards: Mapping[str, RewardModelConfig], record: Record
) -> dict[str, Calibration]:
    """The maps to [0, 1] that a run froze, for those rewards that are still the run's own."""

    def is_the_runs(config: RewardModelConfig, settings: Mapping[str, Any]) -> bool:
        given = to_dict(config)  # a run of an older version lacks keys that were added since
        return all(given.get(k) == value for k, value in settings.items() if k not in SPEED_KEYS)

    maps, settings = record.header.get("calibration") or {}, record.settings.get("rewards") or {}
    return {
        name: Calibration.from_dict(maps[name])
        for name, config in rewards.items()
        if name in maps and name in settings and is_the_runs(config, settings[name])
    }


def shown_samples(evaluations: Mapping[str, Evaluation], limit: int) -> list[dict[str, Any]]:
    """Rows with `prompt`, `model`, `reply` and `scores`: prompt by prompt, all models on each."""
    rows = zip(*(evaluation.samples[:limit] for evaluation in evaluations.values()), strict=True)
    return [
        {
            "prompt": sample["prompt"],
            "model": name,
            "reply": sample["completion"],
            "scores": sample["scores"],
        }
        for row in rows
        for name, sample in zip(evaluations, row, strict=True)
    ]


def printable(text: str) -> str:
    """The text without control characters, which a model may write and a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def write_results(
    out: Path,
    cfg: Config,
    folder_by_name: Mapping[str, Path],
    table_by_name: Mapping[str, Sequence[Comparison]],
    samples: Sequence[Mapping[str, Any]],
    *,
    num_prompts: int,
) -> None:
    """Writes the directory of the results, in one step."""
    place = out.resolve()
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    config = to_yaml(cfg)
    (draft / "config.yaml").write_text(config, encoding="utf-8")
    _write_csv(draft / "figures.csv", _figure_rows(table_by_name))
    if samples:
        _write_csv(
            draft / "samples.csv",
            [
                {key: row[key] for key in ("prompt", "model", "reply")} | row["scores"]
                for row in samples
            ],
        )
    num_models = 1 + len(folder_by_name)
    with drawing(f"The page {PAGE_NAME}"):
        write_comparison(
            draft / PAGE_NAME,
            title=f"{', '.join(folder_by_name)} against the base model",
            adapters={name: str(folder) for name, folder in folder_by_name.items()},
            rows=_page_rows(list(table_by_name.values()), scores=[*cfg.rewards, *cfg.metrics]),
            samples=[
                Sample(
                    dialogue(samples[start]["prompt"]),
                    [
                        Reply(row["reply"].strip(), row["scores"])
                        for row in samples[start : start + num_models]
                    ],
                )
                for start in range(0, len(samples), num_models)
            ],
            facts={
                "Base model": cfg.policy.path,
                "Prompts": f"{num_prompts} of {_source(cfg.prompts)}",
                "Replies per prompt": str(cfg.num_samples),
                "Temperature": str(cfg.rollout.temperature),
                "Seed": str(cfg.seed),
            },
            config=config,
        )
    draft.rename(place)


def _source(config: PromptsConfig) -> str:
    sources = [config.source] if isinstance(config.source, str) else config.source
    return ", ".join(sources)


def _figure_rows(tables: Mapping[str, Sequence[Comparison]]) -> list[dict[str, Any]]:
    """Every figure of every model, the base model first."""
    first = next(iter(tables.values()))
    rows: list[dict[str, Any]] = [
        {"model": BASE, "figure": row.name, "mean": row.base, "se": row.base_se,
         "change": None, "change_se": None, "z": None}
        for row in first
    ]  # fmt: skip
    rows += [
        {"model": name, "figure": row.name, "mean": row.final, "se": row.final_se,
         "change": row.change, "change_se": row.change_se, "z": row.z}
        for name, table in tables.items()
        for row in table
    ]  # fmt: skip
    return rows


def _page_rows(tables: Sequence[Sequence[Comparison]], *, scores: Sequence[str]) -> list[Row]:
    return [
        Row(
            rows[0].name,
            Measure(rows[0].base, rows[0].base_se),
            [
                Figure(Measure(row.final, row.final_se), Measure(row.change, row.change_se))
                for row in rows
            ],
            is_score=rows[0].name in scores,
        )
        for rows in zip(*tables, strict=True)
    ]


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def parse_over_run(
    config_class: type[AnyConfig], argv: Sequence[str] | None, *, key: str, description: str
) -> AnyConfig:
    """The command line's configuration, laid over the settings of a run that it names.

    Args:
        config_class: What to parse; it takes from the run what it has fields for.
        argv: Arguments without the program's name; those of the process when None.
        key: Names the run, or a list of runs of which the first one counts.
        description: Opens the help page.

    Raises:
        UserError: There is no such run, or the command line is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scout.add_argument(f"--{key}", dest="runs", nargs="?")
    try:
        runs = read_yaml(scout.parse_known_args(arguments)[0].runs or "")
    except UserError:
        runs = None
    runs = runs if isinstance(runs, list) else [runs]
    if not runs or runs[0] is None:  # or malformed, which `parse` says better
        return parse(config_class, arguments, description=description)
    run = str(runs[0])
    settings = run_settings(checked_record(Path(run)))
    names = {f.name for f in fields(config_class)}  # type: ignore[arg-type]  # a dataclass
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"settings of {Path(run).name}.yaml"
        file.write_text(to_yaml({k: v for k, v in settings.items() if k in names}))
        return parse(config_class, ["--config", str(file), *arguments], description=description)


def checked_record(path: Path) -> Record:
    """What a run's files say; a damaged one is named, since a run may come from elsewhere.

    Raises:
        UserError: There is no run at `path`, or a file of it is malformed.
    """
    run = Run(path)
    if (path / "config.yaml").is_file():
        settings = run.settings()
        sections = ("policy", "rewards", "rollout", "data", "evaluation")
        if not isinstance(settings, Mapping) or not all(
            isinstance(settings.get(key) or {}, Mapping) for key in sections
        ):
            raise UserError(
                f"{path / 'config.yaml'} holds no configuration of a run; restore the file, or "
                "choose another run."
            )
    return read_record(path)


def run_settings(record: Record) -> dict[str, Any]:
    """What a run's configuration says of the model and of how it is measured."""
    settings = record.settings
    evaluation = settings.get("evaluation") or {}
    found = {
        **{key: settings.get(key) for key in ("policy", "rewards", "rollout", "seed")},
        "num_threads": settings.get("num_threads"),
        "prompts": (settings.get("data") or {}).get("test"),
        "num_prompts": evaluation.get("num_test_prompts"),
        "num_samples": evaluation.get("num_samples"),
        "num_shown_samples": evaluation.get("num_shown_samples"),
        "metrics": evaluation.get("metrics"),
    }
    return {key: value for key, value in found.items() if value is not None}


def cli(argv: Sequence[str] | None = None) -> None:
    """Runs `main` with the command line's configuration; bad input ends in one line."""
    with exit_on_user_error():
        main(parse_over_run(Config, argv, key="runs", description=__doc__ or ""))


if __name__ == "__main__":
    cli()
