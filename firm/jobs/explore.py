"""Explores a conditioned run at any preference: its point on the front, and its replies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from firm.alignment.prompts import ChatMessage
from firm.fronts.nearest import Expectation, expected_rewards
from firm.fronts.reach import mean_preference, reaching
from firm.jobs.chat import ChatReply, Conversation
from firm.jobs.configs import ChatConfig, ExploreConfig, SpeakersConfig
from firm.jobs.pick import conditioned_front
from firm.report.drawing import LegendEntry
from firm.report.front_page import front_clouds
from firm.report.plane import KL, Cloud, Spot, planes
from firm.report.static import light_color

CLEAR, GRAY = "rgba(0, 0, 0, 0)", "#808890"
"""Colours that are legible on light and dark pages."""
POINT = LegendEntry("the sliders' trade-off", "var(--objective-1)")


@dataclass(frozen=True)
class TargetPoint:
    """The point on the measured front for a target trade-off."""

    preference: list[float]
    """Preference at which the adapter replies."""
    expected: Expectation
    """Expected rewards, interpolated linearly between the measured preferences."""


class Explorer:
    """The front and the policy of a conditioned run.

    Args:
        cfg: The run, and the sampling and scoring of replies.

    Raises:
        UserError: The run has no front, or its model or reward models cannot be loaded.
    """

    def __init__(self, cfg: ExploreConfig) -> None:
        run = cfg.run or Path()
        self.front = conditioned_front(run, "explore")
        own = {f.name: getattr(cfg, f.name) for f in fields(SpeakersConfig)}
        equal = [1.0] * len(self.front.objectives)
        chat = ChatConfig(run=run, show_rewards=cfg.show_rewards, preference=equal, **own)
        self._conversation = Conversation(chat)
        self._clouds = front_clouds({run.name: self.front})

    def reach(self, target: Sequence[float]) -> TargetPoint:
        """Returns the point on the front for target shares [M]; see `firm.fronts.reaching`.

        Raises:
            ValueError: The target is not a valid preference, or all models have collapsed.
        """
        parts = reaching(self.front, target)
        return TargetPoint(mean_preference(parts), expected_rewards(parts))

    def planes(self, point: TargetPoint) -> list[dict[str, Any]]:
        """Returns a plotly figure of the front for each pair of objectives, with `point` marked."""
        facts = {
            f"preference for {name}": f"{share:.3f}"
            for name, share in zip(self.front.objectives, point.preference, strict=True)
        }
        spot = Spot(point.expected.rewards, point.expected.errors, facts)
        here = Cloud(POINT, len(self._clouds), [], [spot])
        base = {KL: 0.0, **self.front.base}
        panels = planes("front", [*self._clouds, here], self.front.objectives, base=base)
        figures = [_in_any_light(panel.figure) for panel in panels]
        for figure in figures:
            figure["layout"]["modebar"] = {"bgcolor": CLEAR, "color": GRAY}
        return figures

    def answer(
        self, point: TargetPoint, dialogues: Mapping[str, list[ChatMessage]], line: str, turn: int
    ) -> tuple[dict[str, ChatReply], dict[str, list[ChatMessage]]]:
        """Returns the replies of the base model and at `point`, and the extended dialogues."""
        self._conversation.turn_to(point.preference)
        return self._conversation.extend(dialogues, line, turn)


def _in_any_light(figure: Any) -> Any:
    """Returns a figure with a transparent background and without CSS color variables."""
    match figure:
        case dict():
            return {key: _in_any_light(value) for key, value in figure.items()}
        case list() | tuple():
            return [_in_any_light(value) for value in figure]
        case "var(--surface)":
            return CLEAR
        case "var(--ink)" | "var(--muted)":
            return GRAY
        case "var(--grid)":
            return "rgba(128, 136, 144, 0.25)"
        case str() if figure.startswith("var("):
            return light_color(figure)
    return figure
