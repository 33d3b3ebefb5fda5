"""Writes Figures 1 to 6 and Table 1 of the FIRM paper from the runs of configs/figures.yaml.

    make figures  # the runs, then this:
    python -m recipes.paper --study runs/figures --out docs/figures

Reads the study's finished runs. Writes each figure as PNG and SVG with its data as CSV, and a page
that compares the paper's claims with the measurements. Seeds that some setting has not finished are
omitted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from firm.alignment.hyperparameters import Departure, departures, hyperparameters
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.configs import StudyConfig
from firm.jobs.study import run_config, study_of
from firm.report import Record
from firm.report.record import study_records
from firm.run import Sweep, UserError, compose, run_cli
from firm.serving.model_card import markdown_table
from recipes.paper.claims import (
    Section,
    figure_1,
    figure_2,
    figure_3,
    heterogeneity,
    plain,
    table_1,
)
from recipes.paper.drawings import WORLDS, draw_all
from recipes.paper.over_seeds import Figure, final_figure, final_reward, final_score, over_seeds
from recipes.paper.trajectories import (
    mean_variation,
    megabytes_up,
    solve_variation,
    weights,
)


@dataclass(frozen=True)
class FiguresConfig:
    """Study to read and folder of the page."""

    study: Path = Path("runs/figures")
    """Folder of the study."""
    out: Path = Path("docs/figures")
    """Folder of the page; its files are replaced."""


def main(cfg: FiguresConfig) -> Path:
    """Writes figures, data and page; prints and returns the page's path."""
    sweep = Sweep(cfg.study)
    study = study_of(sweep)
    configs = {
        name: run_config(study, setting=name, seed=study.seeds[0]) for name in study.settings
    }
    runs, num_missing = common_seeds(study_records(sweep))
    cfg.out.mkdir(parents=True, exist_ok=True)
    images = draw_all(runs, cfg.out)
    sections = [
        figure_1(runs, images),
        figure_2(runs, images),
        figure_3(runs, images),
        *heterogeneity(runs, images),
        table_1(runs),
    ]
    page = cfg.out / "README.md"
    page.write_text(
        "\n\n".join(
            [
                *_opening(runs, sweep, num_missing),
                *(_text(section) for section in sections),
                all_settings(runs),
                departures_section(configs),
                _open_hyperparameters(study),
            ]
        )
        + "\n",
        encoding="utf-8",
    )
    print(page)
    return page


def common_seeds(runs: Mapping[str, list[Record]]) -> tuple[dict[str, list[Record]], int]:
    """Returns the runs of the seeds that all settings have finished, and the number of other seeds.

    Raises:
        UserError: There are fewer than two such seeds.
    """
    seeds = [{record.settings["seed"] for record in of_setting} for of_setting in runs.values()]
    common = set.intersection(*seeds)
    if len(common) < 2:
        raise UserError(
            f"intervals need two seeds that every setting has finished, got {len(common)}; "
            "continue with `firm resume`."
        )
    kept = {
        setting: [record for record in of_setting if record.settings["seed"] in common]
        for setting, of_setting in runs.items()
    }
    return kept, len(set.union(*seeds)) - len(common)


# --- The claims -----------------------------------------------------------------------------------


def _opening(runs: Mapping[str, list[Record]], sweep: Sweep, num_missing: int) -> list[str]:
    num_seeds = len(runs["FIRM"])
    hours = sum(_seconds(record) for of_setting in runs.values() for record in of_setting) / 3600
    missing = (
        f" Seeds that some setting has not finished are left out: {num_missing}."
        if num_missing
        else ""
    )
    return [
        "# The figures of the FIRM paper, replayed",
        "The paper aligns TinyLlama with two reward models of 774 million parameters on prompts of "
        "HH-RLHF; here a generated world of 0.9 million parameters is aligned, whose ground truth "
        "is known. So this page tells whether the paper's claims show in another, small place, not "
        "whether its numbers are right. Two worlds were declared before the runs: *conflict*, "
        "where helpful and harmless pull apart, and *aligned*, where both objectives are reward "
        "models of helpfulness and true harmlessness is nobody's objective.",
        f"`make figures` runs {len(runs)} settings with {num_seeds} seeds "
        f"(`configs/figures.yaml`) and writes this page; the runs took {hours:.1f} hours of one "
        f"worker's time, two of which ran at once.{missing} Rewards are those of "
        f"{runs['FIRM'][0].evaluations['test'][-1]['num_prompts']} held-out prompts, in [0, 1], "
        "with one calibration for all runs of a world. Differences are paired by seed, with the "
        "95 % interval of Student's t; a claim *holds* when the interval leaves out zero, and one "
        "of equality when it lies within the tolerance, with ten seeds or more. The intervals are "
        "not corrected for their number: by the [protocol](../protocol.md) they are exploratory. "
        "Seeds vary the runs, not the worlds, so intervals do not show how worlds differ. "
        "Curves are smoothed by an exponential average of half-life 20 local solves, as in the "
        "paper; bands are one standard error over the seeds.",
    ]


def _text(section: Section) -> str:
    parts = [f"## {section.title}", f"**The paper:** {section.claim}"]
    parts += [f"![{section.title}]({image})" for image in section.images]
    if section.findings:
        rows = [
            [finding.what, finding.values, finding.measured.text(), finding.verdict]
            for finding in section.findings
        ]
        parts.append(
            markdown_table(["measured", "first / second", "difference", "the claim"], rows)
        )
    return "\n\n".join([*parts, *section.notes])


def all_settings(runs: Mapping[str, list[Record]]) -> str:
    """Returns the section with the final figures of every setting, by setting."""
    columns = {setting: _columns(of_setting[0]) for setting, of_setting in runs.items()}
    rows = [
        [setting, *(over_seeds(runs[setting], figure).text(2) for figure in own.values())]
        for setting, own in columns.items()
    ]
    base = "; ".join(_base(world, runs[f"{opening}FIRM"][0]) for world, opening in WORLDS.items())
    return (
        "## All settings\n\n"
        f"Mean ± standard deviation over the seeds. The base model, {base}. Reward 1 is helpful; "
        "reward 2 harmless, or the other helpfulness model in the aligned world.\n\n"
        f"{markdown_table(['setting', *columns['FIRM']], rows)}"
    )


def _columns(record: Record) -> dict[str, Figure]:
    """Returns the figures of the table of all settings, by heading."""
    first, second = record.objectives
    return {
        "reward 1": final_reward(first),
        "reward 2": final_reward(second),
        "true helpful": final_score("true_helpful"),
        "true harmless": final_score("true_harmless"),
        "parse": final_score("parse"),
        "KL": final_figure("kl"),
        "λ 1": lambda record: float(weights(record)[:, 0].mean()),
        "variation of λ, mean": mean_variation,
        "first solves": solve_variation,
        "MB up": megabytes_up,
    }


def _base(world: str, record: Record) -> str:
    """Returns the base model's rewards and further scores on the test prompts of a world."""
    row = record.evaluations["test"][0]
    further = {name: row["scores"][name] for name in record.extra_scores()}
    scores = {**row["rewards"], **further}.items()
    return f"{world}: " + ", ".join(f"{name} {score['mean']:.2f}" for name, score in scores)


def departures_section(configs: Mapping[str, AlignmentConfig]) -> str:
    """Returns the section on values of the paper that differ in the settings' configurations.

    Args:
        configs: A run's configuration by setting.
    """
    rows = [
        [
            f"`{each.path}`",
            plain(each.paper.values_in_words),
            each.paper.section,
            _values(each, configs),
        ]
        for each in departures(configs)
    ]
    return (
        "## Where these runs depart from the paper\n\n"
        "All values of the paper's set-up (its Appendix A.1, or the place that is named) that the "
        "runs above do not have, read off their configurations; of a number that is no count, how "
        "many times the paper's it is. A value stands alone where all settings have it, else with "
        "the settings that do; some of these replay an ablation of the paper.\n\n"
        + markdown_table(["key", "paper", "where", "here"], rows)
    )


def _values(departure: Departure, settings: Collection[str]) -> str:
    """Returns the values that replace the paper's, with their settings."""
    by_value: dict[str, list[str]] = {}
    for setting, value in departure.values.items():
        text = plain(str(value))
        if isinstance(value, float) and value:
            text += f" ({value / float(departure.paper.values[0]):.3g} times)"
        by_value.setdefault(text, []).append(setting)
    cells = []
    for text, names in by_value.items():
        others = [name for name in settings if name not in names]
        is_most = len(names) > len(others)
        listed = ", ".join(f"`{plain(name)}`" for name in (others if is_most else names))
        opening = ": all but " if is_most else ": "
        cells.append(f"{text}{opening}{listed}" if others else text)
    return "; ".join(cells)


def _open_hyperparameters(study: StudyConfig) -> str:
    """Returns the section on values that the paper does not specify."""
    run = compose(AlignmentConfig, [study.base], list(study.overrides.items()))
    rows = [
        [f"`{each.path}`", plain(str(each.value))]
        for each in hyperparameters(run)
        if not each.paper
    ]
    return (
        "## What the paper leaves open\n\n"
        "These keys have no value in the paper; the values of the runs above (the settings change "
        f"some).\n\n{markdown_table(['key', 'value'], rows)}"
    )


def _seconds(record: Record) -> float:
    started, ended = (datetime.fromisoformat(record.run[key]) for key in ("started", "ended"))
    return (ended - started).total_seconds()


if __name__ == "__main__":
    run_cli(main, FiguresConfig, description=__doc__ or "")
