"""Draws the figures of the FIRM paper from the settings that each of them shows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from firm.fronts import exponential_average
from firm.report import Record
from firm.report.drawing import Series, series_panel
from firm.report.plane import REWARD, Cloud
from firm.report.settings_page import base_place, setting_clouds
from firm.report.static import PaperFigure, curves_figure, plane_figure, save_figure
from firm.report.tables import Setting, settings_of
from recipes.paper.over_seeds import Figure, final_reward, over_seeds
from recipes.paper.trajectories import (
    rewards,
    solves,
    solves_by_client,
    weights_disagreement,
)

HALF_LIFE = 20
"""Half-life of the running averages in local solves, as in the paper."""
WORLDS = {"conflict": "", "aligned": "aligned: "}
"""Prefix of the names of a world's settings, by world."""
BETAS = ("0", "0.01", "0.05", "0.5", "2")
PREFERENCES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Preferences for helpful, the first objective."""

Runs = Mapping[str, Sequence[Record]]


def draw_all(runs: Runs, out: Path) -> dict[str, str]:
    """Writes all figures; returns the picture's file by figure."""
    figures = {
        "figure_1": _compared(runs, {"FIRM": "FIRM", "FedCMOO-A": "FedCMOO-A"}),
        "figure_2": _two_clients(runs),
        "beta": _betas(runs),
        "figure_3": _preferences(runs, out),
        "figure_4": _compared(
            runs, {"one helpfulness model": "FIRM", "two": "two helpful reward models"}
        ),
        "figure_5": _compared(runs, {"IID": "FIRM", "Dirichlet 0.3": "Dirichlet 0.3"}),
        "figure_6": _compared(runs, {"8 clients": "FIRM", "16 clients": "16 clients"}),
    }
    for name, figure in figures.items():
        save_figure(figure, out / name)
    return {name: f"{name}.png" for name in figures}


def _compared(runs: Runs, shown: Mapping[str, str]) -> PaperFigure:
    """Returns smoothed rewards and weights of settings over the rounds, with bands over seeds."""
    settings = settings_of({label: runs[name] for label, name in shown.items()})
    return _curves(
        {
            **_reward_panels(settings),
            f"λ {settings[0].objectives[0]}": [
                _weight_curve(s, [solves(record)[:, 0] for record in s.records]) for s in settings
            ],
        }
    )


def _two_clients(runs: Runs) -> PaperFigure:
    """Returns λ of both clients of one seed in both worlds, with and without β."""
    panels = {}
    for world, opening in WORLDS.items():
        names = {f"β = {beta}": f"{opening}β = {beta}, C = 2" for beta in ("0", "0.05")}
        settings = settings_of({label: runs[name] for label, name in names.items()})
        panels |= {f"{world}: {t}": c for t, c in _reward_panels(settings).items()}
        curves = []
        for setting in settings:
            by_client = solves_by_client(setting.records[0])
            for client, mark in zip(by_client, ("solid", "dash"), strict=True):
                key = replace(setting.key, label=f"{setting.name}, {client}", mark=mark)
                curve = _weight_curve(setting, [by_client[client][:, 0]])
                curves.append(replace(curve, key=key))
        panels[f"{world}: λ {settings[0].objectives[0]}, one seed"] = curves
    return _curves(panels)


def _betas(runs: Runs) -> PaperFigure:
    """Returns the spread of the clients' weights and the rewards, over β."""
    panels: dict[str, list[Series]] = {}
    for world, opening in WORLDS.items():
        names = [[f"{opening}β = {beta}, C = {count}" for beta in BETAS] for count in (2, 8)]
        names[1][BETAS.index("0.01")] = f"{opening}FIRM"
        settings = settings_of({f"C = {c}": runs[n[0]] for c, n in zip((2, 8), names, strict=True)})
        objectives = settings[0].objectives
        quantities: dict[str, Figure] = {
            "spread of λ between clients": weights_disagreement,
            **{f"reward {name}": final_reward(name) for name in objectives},
        }
        for title, figure in quantities.items():
            panels[f"{world}: {title}"] = [
                Series.of(
                    setting.key,
                    list(range(len(BETAS))),
                    np.array([over_seeds(runs[name], figure).values for name in row]).T,
                )
                for setting, row in zip(settings, names, strict=True)
            ]
    drawn = _curves(panels, x_title="β")
    for panel in drawn.figure.axes:
        panel.set_xticks(range(len(BETAS)), BETAS)
    rows = [[*row[:2], BETAS[int(row[2])], *row[3:]] for row in drawn.rows]
    return replace(drawn, rows=rows)


def _preferences(runs: Runs, out: Path) -> PaperFigure:
    """Returns final models by preference, with fixed weights and single objectives."""
    groups = {
        "FIRM with preference p": [f"p = ({p:g}, {1 - p:.1g})" for p in PREFERENCES],
        "λ fixed at p": [f"fixed λ = ({p:g}, {1 - p:.1g})" for p in (0.1, 0.5, 0.9)],
        "one objective alone": ["helpful alone", "harmless alone"],
        "FIRM, no preference": ["FIRM"],
    }
    clouds: list[Cloud] = []
    for index, (label, names) in enumerate(groups.items()):
        settings = settings_of({name: runs[name] for name in names})
        parts = setting_clouds(settings, folder=out)
        key = Setting(label, index, ()).key
        clouds.append(
            Cloud(
                key,
                index,
                [model for part in parts for model in part.models],
                [replace(mean, is_dominated=False) for part in parts for mean in part.means],
                list(range(len(names))) if index == 0 else (),
            )
        )
    settings = settings_of({"FIRM": runs["FIRM"]})
    objectives, base = settings[0].objectives, base_place(settings)
    return plane_figure(clouds, objectives, unit=REWARD, base=base)


def _curves(panels: Mapping[str, Sequence[Series]], *, x_title: str = "round") -> PaperFigure:
    """Returns curves by the title of their panel."""
    drawn = [series_panel(title, title, series, y_title="") for title, series in panels.items()]
    return curves_figure(drawn, x_title=x_title)


def _reward_panels(settings: Sequence[Setting]) -> dict[str, list[Series]]:
    panels = {}
    for place, name in enumerate(settings[0].objectives):
        panels[f"reward {name}"] = []
        for setting in settings:
            curves = [rewards(record)[:, place] for record in setting.records]
            per_round = _solves_per_round(setting.records[0])
            smooth = [exponential_average(c, half_life=HALF_LIFE / per_round) for c in curves]
            xs = list(range(1, len(smooth[0]) + 1))
            panels[f"reward {name}"].append(Series.of(setting.key, xs, np.array(smooth)))
    return panels


def _weight_curve(setting: Setting, curves: Sequence[np.ndarray]) -> Series:
    """Returns a weight by local solve, smoothed, drawn over the rounds."""
    per_round = len(curves[0]) / setting.records[0].last_round
    half_life = HALF_LIFE * per_round / _solves_per_round(setting.records[0])
    smooth = [exponential_average(curve, half_life=half_life) for curve in curves]
    xs = [(index + 1) / per_round for index in range(len(smooth[0]))]
    return Series.of(setting.key, xs, np.array(smooth))


def _solves_per_round(record: Record) -> float:
    """Returns a client's optimizer steps per round, the unit of the paper's half-life."""
    estimator = record.settings["estimator"]
    steps = record.settings["strategy"]["num_local_steps"]
    return steps * estimator["num_epochs"] * estimator["batch_size"] / estimator["minibatch_size"]
