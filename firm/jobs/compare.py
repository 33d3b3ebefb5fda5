"""Compares adapters with their base model: rewards, KL, length and replies."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from firm.alignment.calibration import Calibration
from firm.alignment.evaluation import Evaluation, MetricComparison, evaluate
from firm.alignment.held_out import USES, hold_out
from firm.alignment.prompt_data import load_prompts
from firm.base.inside import replace_text, whole_folder
from firm.base.randomness import RandomStream
from firm.base.sanitize import legible, printable
from firm.fronts.front import differing_figure
from firm.jobs.alignment_config import DEFAULT_SPLITS, GIVEN, NO_PROMPTS
from firm.jobs.configs import CompareConfig
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import (
    TEST_PROMPTS_NAME,
    adapter_folder,
    check_code,
    checked_record,
    frozen_calibrations,
    run_settings,
)
from firm.jobs.speakers import Speakers
from firm.report.comparison import write_comparison
from firm.report.record import Record
from firm.report.samples import Sample, ScoredReply, Turn, turns_of
from firm.run.comparison import Line, Measure, prompts_text, with_intervals
from firm.run.config import to_dict, to_yaml
from firm.run.differences import leaves
from firm.run.errors import UserError
from firm.run.files import file_errors, write_csv
from firm.run.guard import drawing
from firm.run.names import dated_folder
from firm.run.progress import SamplingLines, print_table, say
from firm.run.resuming import CONFIG_NAME
from firm.run.shipped import with_shipped_paths

PAGE_NAME = "evaluation.html"
BASE = "base"


@dataclass(frozen=True)
class ComparisonResult:
    """Comparison of adapters with their base model."""

    path: Path
    """Directory of the results: `evaluation.html`, `figures.csv`, `samples.csv`, `config.yaml`."""
    tables: dict[str, list[MetricComparison]]
    """Comparisons with the base model, by name of the adapter."""
    samples: list[tuple[str, dict[str, ScoredReply]]]
    """Prompts, each with the reply of every model."""
    prompts: str
    """Number of prompts and rows, in words."""
    turns: list[tuple[Turn, ...]]
    """Turns of the prompts in `samples`."""


def compare(cfg: CompareConfig) -> ComparisonResult:
    """Evaluates the base model and every adapter on the same prompts with the same noise.

    Prints the seconds that each evaluation takes.

    Raises:
        UserError: Runs or adapters are incompatible, or the results cannot be written.
    """
    out = cfg.out or dated_folder("evaluation")
    check_place(out)

    if cfg.prompts.source == NO_PROMPTS:
        raise UserError(
            "prompts.source: the run learned from pairs, and has no test prompts; pass "
            "--prompts.source FILE."
        )
    if cfg.prompts.source == GIVEN:
        raise UserError(
            "prompts.source: the run's test prompts were passed to firm.align as objects and were "
            "not saved, which needs evaluation.num_shown_samples above 0 and JSON-serializable "
            "fields; pass --prompts.source FILE."
        )
    records = [checked_record(path) for path in cfg.runs]
    if records:
        check_code({**cfg.rewards, **cfg.metrics}, records[0], allow_code=cfg.allow_code)
    fetch_policy(cfg.policy.path)
    cfg = with_shipped_paths(cfg)
    check_comparable(cfg.runs, records, calibrated=cfg.calibrated)
    if cfg.held_out and records:
        _check_held_out(cfg, records)
    for note in _notes_on_lists(cfg):
        print(f"note: {printable(note)}")
    folder_by_name = named_folders([*cfg.runs, *cfg.adapters])
    calibrations = {}
    if cfg.calibrated and records:
        calibrations = frozen_calibrations(cfg.rewards, records[0])
    evaluations = _evaluations(cfg, folder_by_name, calibrations)
    base = evaluations.pop(BASE)
    mapped = [name for name, own in calibrations.items() if own.method != "none"]
    tables = {
        name: evaluation.comparison(base, rewards=mapped)
        for name, evaluation in evaluations.items()
    }
    samples = shown_samples({BASE: base, **evaluations}, cfg.num_shown_samples)
    count = prompts_text(base.num_prompts, base.num_rows)
    turns = [turns_of(row) for row in base.samples[: cfg.num_shown_samples]]
    result = ComparisonResult(out, tables, samples, count, turns)
    write_results(cfg, result, folder_by_name)
    return result


def _evaluations(
    cfg: CompareConfig,
    folder_by_name: Mapping[str, Path],
    calibrations: Mapping[str, Calibration],
) -> dict[str, Evaluation]:
    """Returns the evaluations of base model and adapters, by name."""
    # load everything first: incompatibilities surface before the first reply is sampled
    rewards = {**cfg.rewards, **cfg.metrics}
    speakers = Speakers(cfg, list(folder_by_name.values()), rewards)
    prompts = load_prompts(
        cfg.prompts,
        speakers.tokenizer,
        prompt_format=cfg.policy.prompt,
        default_split=DEFAULT_SPLITS["train" if cfg.held_out else "test"],
        on_note=lambda text: print(f"note: {printable(text)}"),
    )
    if share := cfg.held_out:
        prompts = hold_out(prompts, USES, share, seed=cfg.held_out_seed, key="prompts")["test"]
    prompts = prompts[: cfg.num_prompts]
    reward_fns = speakers.reward_fns

    sampling = SamplingLines(say)

    def report_progress(done: float, total: int, *, what: str) -> None:
        sampling(what=what, done=done, total=total, num_tokens=cfg.rollout.max_new_tokens)

    evaluations: dict[str, Evaluation] = {}
    for index, name in enumerate([BASE, *folder_by_name]):
        start = time.perf_counter()
        with speakers.speaking(index - 1 if index else None) as sample:
            evaluations[name] = evaluate(
                sample,
                prompts,
                {key: fn for key, fn in reward_fns.items() if key in calibrations},
                calibrations=calibrations,
                stream=RandomStream(cfg.seed, "evaluation", "test"),
                extra_fns={key: fn for key, fn in reward_fns.items() if key not in calibrations},
                num_samples=cfg.num_samples,
                on_progress=partial(report_progress, what=name),
            )
        seconds = time.perf_counter() - start
        count = prompts_text(evaluations[name].num_prompts, evaluations[name].num_rows)
        print(printable(f"{name}: {count}, {seconds:.1f} s"), flush=True)
    return evaluations


def check_place(out: Path) -> None:
    """Raises `UserError` if the results cannot be written."""
    if out.exists() and out.samefile("."):
        raise UserError(
            f"out: {out} is the current folder, which the results replace; choose another --out."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists and is not empty; choose another --out.")
    parent = next(path for path in out.resolve().parents if path.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"out: no permission to write in {parent}; choose another --out.")


_OWN_KEYS = (
    *("policy.lora.", "policy.adapter", "policy.conditioning."),
    *("policy.device", "policy.shard", "policy.gradient_checkpointing"),
)
"""Settings of a run's adapter, which is saved as LoRA, and of its speed: base models are alike."""


def check_comparable(runs: Sequence[Path], records: Sequence[Record], *, calibrated: bool) -> None:
    """Raises `UserError` if the runs differ in base model or, if needed, calibration."""
    for run, record in zip(runs[1:], records[1:], strict=True):
        first = records[0]
        policies = [dict(leaves(r.settings.get("policy") or {}, "policy")) for r in (first, record)]
        for key in sorted(policies[0].keys() | policies[1].keys()):
            ours, theirs = (policy.get(key) for policy in policies)
            if ours != theirs and not key.startswith(_OWN_KEYS):
                raise UserError(
                    f"the base models of two runs differ: {key} is {ours!r} in {runs[0]} and "
                    f"{theirs!r} in {run}; compare runs of the same base model, or pass the second "
                    "run as --adapters to ignore its settings."
                )
        maps = [r.header.get("calibration") or {} for r in (first, record)]
        common = [name for name in first.objectives if name in maps[0] and name in maps[1]]
        for name in common if calibrated else ():
            if differing_figure(maps[0][name], maps[1][name]):
                ours, theirs = (
                    ", ".join(
                        f"{key} {v:.6g}" if isinstance(v, float) else f"{key} {v}"
                        for key, v in each[name].items()
                    )
                    for each in maps
                )
                raise UserError(
                    f"the calibration of {name!r} is ({ours}) in {runs[0]} and ({theirs}) in "
                    f"{run}, so their rewards cannot be compared; --calibrated false compares only "
                    "raw scores."
                )


def _check_held_out(cfg: CompareConfig, records: Sequence[Record]) -> None:
    """Raises `UserError` if a run was trained on prompts that the first one held out."""
    others = _runs_of(cfg.adapters)
    records = [*records[1:], *map(checked_record, others)]
    # filters decide what is drawn
    asked = {"held_out": cfg.held_out, "held_out_seed": cfg.held_out_seed, **to_dict(cfg.prompts)}
    for run, record in zip([*cfg.runs[1:], *others], records, strict=True):
        own, data = run_settings(record), record.settings.get("data") or {}
        drawn = {key: own.get(key) for key in ("held_out", "held_out_seed")}
        drawn |= {key: each for key, each in (own.get("prompts") or {}).items() if key in asked}
        source = with_shipped_paths((data.get("train") or {}).get("source"))
        is_same = {**asked, **drawn, "source": asked["source"]} == asked
        if not is_same and source == cfg.prompts.source:
            raise UserError(
                f"{run} did not hold out the prompts that {cfg.runs[0]} did (data.hold_out, "
                "data.hold_out_seed, the seed without it, and data.train's filters), so that it "
                "may have been trained on some of them; pass --prompts.source FILE, with prompts "
                "that no run was trained on."
            )


def _notes_on_lists(cfg: CompareConfig) -> list[str]:
    """Returns notes on runs of `firm.align` that held out other objects than the first one did."""
    kept = [run / TEST_PROMPTS_NAME for run in (*cfg.runs, *_runs_of(cfg.adapters))]
    if not kept or cfg.prompts.source != str(kept[0]):
        return []
    own, *others = (
        set(file.read_bytes().splitlines()) if file.is_file() else set() for file in kept
    )
    return [
        f"{file.parent} held out other prompts than {kept[0].parent}; if firm.align was given the "
        "same list, it was trained on some of these: set data.hold_out_seed in both runs, or pass "
        "--prompts.source FILE."
        for file, other in zip(kept[1:], others, strict=True)
        if not (other <= own or own <= other)
    ]


def _runs_of(adapters: Sequence[Path]) -> list[Path]:
    return [run for path in adapters for run in (path, *path.parents[:2]) if _is_run(run)]


def _is_run(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file() and (path / "run.json").is_file()


def named_folders(paths: Sequence[Path]) -> dict[str, Path]:
    """Returns the PEFT folder of every run or adapter, by its shortest unique name.

    Raises:
        UserError: Two paths are the same.
    """
    folders = [adapter_folder(path) for path in paths]
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"the adapter in {folders[index]} is given twice; remove one.")
    pairs = zip(folders, places, strict=True)
    long = [str(place if str(folder) == BASE else folder) for folder, place in pairs]
    short = [place.parent.name if place.name == "adapter" else place.name for place in places]
    return {
        name if short.count(name) == 1 and name != BASE else shown: folder
        for name, folder, shown in zip(short, folders, long, strict=True)
    }


def shown_samples(
    evaluations: Mapping[str, Evaluation], limit: int
) -> list[tuple[str, dict[str, ScoredReply]]]:
    """Returns the first `limit` prompts, each with the reply of every model."""
    rows = zip(*(evaluation.samples[:limit] for evaluation in evaluations.values()), strict=True)
    shown = []
    for samples in rows:
        replies = [
            ScoredReply(sample["completion"].strip(), sample["scores"]) for sample in samples
        ]
        shown.append((samples[0]["prompt"], dict(zip(evaluations, replies, strict=True))))
    return shown


def write_results(
    cfg: CompareConfig, result: ComparisonResult, folders: Mapping[str, Path]
) -> None:
    """Writes the results directory atomically; `folders` maps names to adapters."""
    with (
        file_errors(f"the comparison {result.path}", again="compare again"),
        whole_folder(result.path) as draft,
    ):
        config = to_yaml(cfg)
        replace_text(draft / "config.yaml", config)
        write_csv(draft / "figures.csv", _figure_rows(result.tables))
        if result.samples:
            rows = [
                {"prompt": prompt, "model": name, "reply": reply.text, **reply.scores}
                for prompt, replies in result.samples
                for name, reply in replies.items()
            ]
            write_csv(draft / "samples.csv", rows)
        source = cfg.prompts.source
        sources = source if isinstance(source, str) else ", ".join(source)
        samples = [
            Sample(turns, list(replies.values()))
            for turns, (_, replies) in zip(result.turns, result.samples, strict=True)
        ]
        with drawing(f"The page {PAGE_NAME}"):
            write_comparison(
                draft / PAGE_NAME,
                title=f"{', '.join(folders)} against the base model",
                adapters={name: str(folder) for name, folder in folders.items()},
                lines=_lines(result.tables, scores=[*cfg.rewards, *cfg.metrics]),
                samples=samples,
                facts={
                    "Base model": cfg.policy.path,
                    "Prompts": f"{result.prompts} of {sources}",
                    "Replies per prompt": str(cfg.num_samples),
                    "Temperature": str(cfg.rollout.temperature),
                    "Seed": str(cfg.seed),
                },
                config=config,
            )


def _figure_rows(tables: Mapping[str, Sequence[MetricComparison]]) -> list[dict[str, Any]]:
    """Returns a row for each metric of each model, the base model first."""
    columns = ("model", "figure", "mean", "se", "change", "change_se", "z", "num_prompts")
    first = next(iter(tables.values()))
    rows = [(BASE, r.name, r.base, r.base_se, None, None, None, r.num_prompts) for r in first]
    rows += [
        (name, r.name, r.aligned, r.aligned_se, r.change, r.change_se, r.z, r.num_prompts)
        for name, table in tables.items()
        for r in table
    ]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _lines(
    tables: Mapping[str, Sequence[MetricComparison]], *, scores: Sequence[str]
) -> dict[str, list[Line]]:
    return {
        name: [
            with_intervals(
                Line(
                    row.name,
                    Measure(row.base, row.base_se, row.num_prompts),
                    Measure(row.aligned, row.aligned_se, row.num_prompts),
                    Measure(row.change, row.change_se, row.num_prompts, row.is_partial),
                    is_score=row.name in scores,
                )
            )
            for row in table
        ]
        for name, table in tables.items()
    }


NUM_PRINTED_SAMPLES = 2
"""Number of prompts printed with their replies; the files have `num_shown_samples`."""


def main(cfg: CompareConfig) -> Path:
    """Compares the adapters and prints the result; returns the results directory."""
    result = compare(cfg)
    for name, table in result.tables.items():
        print_table(
            f"\n{name} on {result.prompts}, {cfg.num_samples} replies each, mean ± standard error",
            ["", BASE, name, "change", "z"],
            [row.cells() for row in table],
        )
    for prompt, replies in result.samples[:NUM_PRINTED_SAMPLES]:
        print(legible(prompt.strip()))
        for name, reply in replies.items():
            print(legible(f"{name}: {reply.text}\n"))
    print(legible(f"page     {result.path / PAGE_NAME}\nfigures  {result.path / 'figures.csv'}"))
    return result.path
