"""The record of an exported front: turns a preference, a target or requirements into scales."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Self

from firm.base.preferences import (
    FRONT_NAME,
    SAME,
    TRADE_OFFS,
    NamedShares,
    order_shares,
    split_shares,
)
from firm.fronts.certificate import Certificate
from firm.fronts.front import Front
from firm.fronts.json_record import read_record, write_record
from firm.fronts.reach import mean_preference, reaching
from firm.fronts.requirements import certify, meeting, parse_requirements
from firm.serving.chat_templates import check_exported

Shares = str | Mapping[str, float] | Sequence[float]
"""Shares of the objectives: "helpful=0.7,harmless=0.3", by name, or in the objectives' order."""

_FORMAT = 1


@dataclass(frozen=True)
class ServedFront:
    """Adapters whose scaled sum is a conditioned adapter at any preference.

    The scale of an objective's adapter is the objective's share of the preference, and shares sum
    to 1: ΔW(p) = Σ_j p_j ΔW(e_j), where e_j is the preference for objective j alone.

    Raises:
        ValueError: When the adapters do not match the objectives, or a path leaves the folder.
    """

    base_model: str
    """Base model, as the run names it."""
    base_file: str
    """GGUF file of the base model, relative to the record's folder; empty without one."""
    adapters: dict[str, str]
    """Each objective's adapter, a folder or a file relative to the record's folder."""
    front: Front
    """The measured points."""
    scales_are: str = "the preference: an adapter's scale is its objective's share of sum 1"
    """How a preference turns into scales, for readers of the file."""
    chat_template: str = ""
    """Jinja template of chats in place of the base model's; empty if that one was trained with.
    Other templates than those of `firm export` are refused."""
    system_prompt: str = ""
    """System message for conversations without one."""
    end_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a reply, the tokenizer's EOS first."""
    certificates: tuple[Certificate, ...] = ()
    """Certificates of models that `firm pick` chose, and of the one that the export is for."""
    request: dict[str, Any] = field(default_factory=dict)
    """Defaults of chat requests, by OpenAI's and llama.cpp's names: the sampling at which the front
    was measured."""

    def __post_init__(self) -> None:
        if list(self.adapters) != list(self.front.objectives):
            raise ValueError(
                f"adapters must be those of the objectives {', '.join(self.front.objectives)}, in "
                f"their order, got {', '.join(self.adapters) or 'none'}."
            )
        check_exported(self.chat_template)
        for place in (self.base_file, *self.adapters.values()):
            path = PurePosixPath(place)
            if path.is_absolute() or ".." in path.parts or "\\" in place:
                raise ValueError(f"paths must be inside the record's folder, got {place!r}.")

    def save(self, folder: Path) -> None:
        """Writes the record into a folder."""
        write_record(folder / FRONT_NAME, self, version=_FORMAT)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Returns the record in an export's folder.

        Raises:
            ValueError: When there is none, or it is malformed.
        """
        file = Path(folder) / FRONT_NAME
        if not file.is_file():
            raise ValueError(f"there is no {file}: pass a folder that `firm export` wrote.")
        return read_record(file, cls, version=_FORMAT, added={"end_ids": [], "certificates": []})

    def scales(self, preference: Shares | None = None, **request: Any) -> dict[str, float]:
        """Returns the scale of each objective's adapter for a request; see `stated_preference`."""
        shares = stated_preference(self.front, preference, **request)
        return dict(zip(self.adapters, shares, strict=True))


def stated_preference(
    front: Front,
    preference: Shares | None = None,
    *,
    target: Shares | None = None,
    require: str | None = None,
    confidence: float = 0.95,
) -> list[float]:
    """Returns the preference that a request to a front states, [M], with sum 1.

    Args:
        front: The front.
        preference: Shares of the objectives, which must sum to 1; equal shares by default. One
            objective may be left out; its share is the rest.
        target: Proportion of the measured gains, scaled to sum 1; see `firm.fronts.reaching`.
        require: Requirements such as "harmless>=0.6, kl<=3", as of `firm pick`; the rewards of the
            objectives without one are maximised.
        confidence: Confidence of the one-sided bounds that must meet the requirements.

    Raises:
        ValueError: When more than one is given, one is malformed, or no mixture of measured points
            meets the requirements.
    """
    given = zip(TRADE_OFFS, (preference, target, require), strict=True)
    if len(names := [name for name, value in given if value is not None]) > 1:
        raise ValueError(f"pass one of preference, target and require, got {', '.join(names)}.")
    objectives = front.objectives
    if preference is not None:
        return _preference(preference, objectives)
    if target is not None:
        return mean_preference(reaching(front, _in_order(target, objectives, "target")))
    if require is not None:
        if not isinstance(require, str):
            raise ValueError(f"require must be a text such as 'kl<=3', got {_short_json(require)}.")
        certificate = passing_certificate(front, require, confidence=confidence)
        return [certificate.preference[name] for name in objectives]
    return [1 / len(objectives)] * len(objectives)


def passing_certificate(front: Front, require: str, *, confidence: float) -> Certificate:
    """Returns the certificate of the model that meets requirements.

    Raises:
        ValueError: No model meets them, or the chosen one does not pass on the test prompts.
    """
    requirements = parse_requirements(require, front)
    parts = meeting(front, requirements, confidence=confidence, is_mixed=True)
    certificate = certify(front, parts, requirements, confidence=confidence)
    if not certificate.passes:
        raise ValueError(
            f"require: the chosen model does not pass its certificate ({certificate.describe()}): "
            "relax a requirement, or measure more prompts."
        )
    return certificate


def _preference(value: Shares, objectives: Sequence[str]) -> list[float]:
    shares = _in_order(value, objectives, "preference", has_rest=True)
    if not math.isclose(total := sum(shares), 1, abs_tol=SAME * len(shares)):
        given = value if isinstance(value, str) else _short_json(value)
        raise ValueError(f"preference must have shares that sum to 1, got {given!r}.")
    return [share / total for share in shares]


def _in_order(
    value: Any, objectives: Sequence[str], key: str, *, has_rest: bool = False
) -> list[float]:
    """Returns shares in any form in the order of the objectives."""
    if isinstance(value, str):
        value = split_shares(value, objectives, key=key)
    elif isinstance(value, NamedShares):
        value = value.by_name()
    elif not isinstance(value, Mapping):
        if not isinstance(value, Sequence) or len(value) != len(objectives):
            raise ValueError(
                f"{key} must be name=share pairs, an object of shares by objective, or a list of "
                f"{len(objectives)} shares ({', '.join(objectives)}), got {_short_json(value)}."
            )
        value = dict(zip(objectives, value, strict=True))
    return order_shares(value, objectives, key=key, has_rest=has_rest)


def _short_json(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}[...]"
