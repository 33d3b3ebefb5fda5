"""Picks a model for a target trade-off or requirements from a front, and describes it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard

from firm.base.preferences import in_words, parse_shares
from firm.fronts.certificate import Certificate
from firm.fronts.front import Front, Point
from firm.fronts.nearest import Expectation, expected_rewards, nearest, neighbours, sound
from firm.fronts.reach import mean_preference, reaching
from firm.fronts.requirements import (
    Requirement,
    certify,
    free_weights,
    meeting,
    parse_requirements,
)
from firm.serving.adapter_folders import check_there, read_settings, tokenizer_files
from firm.serving.model_card import markdown_table, markdown_text, model_card, tags_of


@dataclass(frozen=True)
class PickedModel:
    """The model for a target preference."""

    front: Front
    target: list[float]
    """Target trade-off, as shares of the objectives."""
    preference: list[float]
    """Preference that reaches the target: the target itself unless the adapter is conditioned."""
    parts: list[tuple[Point, float]]
    """Models and their shares in the merged one; a single model without merging."""
    folders: list[Path]
    """Adapter folders of the parts."""
    merged: Path | None
    """Folder of the merged adapter; None without merging."""
    run: Path | None
    """Conditioned run that the front belongs to; None for the front of a sweep."""
    requirements: Sequence[Requirement] = ()
    """Requirements that the model must meet."""
    certificate: Certificate | None = None
    """Whether it does, with requirements."""

    @property
    def adapter(self) -> Path:
        """Returns the adapter for the target preference."""
        return self.merged or self.folders[0]

    @property
    def expected(self) -> Expectation:
        """Returns the expected rewards."""
        return expected_rewards(self.parts)

    @property
    def reward_rows(self) -> list[list[str]]:
        """Returns a table row per objective: name, base model's reward, expected reward."""
        expected = self.expected
        return [
            [name, f"{self.front.base[name]:.3f}", f"{reward:.3f} ± {expected.errors[name]:.3f}"]
            for name, reward in expected.rewards.items()
        ]

    @property
    def requirement_rows(self) -> list[list[str]]:
        """Returns a table row per requirement: mean, bound and prompts."""
        rows = self.certificate.bounds if self.certificate else ()
        return [
            [
                own.requirement,
                f"{own.mean:.3f}",
                f"{own.bound:.3f}" if own.is_known else "none",
                str(own.num_prompts),
            ]
            for own in rows
        ]

    @property
    def evidence(self) -> str:
        """Explains the source of the expected rewards, in one or two sentences."""
        prompts = self.front.prompts("held-out prompts")
        if len(self.parts) > 1:
            return (
                f"Interpolated between rewards on {prompts}, not measured; the rewards of a merged "
                "model may differ."
            )
        trained = _scale(self.parts[0][0].preference)
        pairs = zip(_scale(self.preference), trained, strict=True)
        if all(math.isclose(chosen, given, abs_tol=1e-6) for chosen, given in pairs):
            nearby = ""
        elif (nearer := self._nearer()) is not None:
            split = "validation" if self.front.has_validation else "test"
            why = nearer.collapse or (
                f"on the {split} prompts another model is at least as good in every reward"
            )
            nearby = f" The model nearer to the target, {nearer.name}, is left out: {why}."
        elif self.front.is_conditioned:
            nearby = " This is the nearest measured preference."
        else:
            nearby = " It was trained for the nearest available preference."
        if nearby and self.front.is_conditioned:
            nearby += (
                f" The target is reached at {self.in_words(self.preference)}: --merge writes that "
                "adapter, and firm chat takes it as --preference."
            )
        is_apart = self.front.has_validation
        if self.certificate is not None:
            is_apart = self.certificate.num_models == 1
        front_every = " and evaluation.front_every" if self.front.is_conditioned else ""
        selected = (
            " It was selected by rewards on validation prompts."
            if is_apart
            else " It was selected on the same prompts, so expect a little less: runs with "
            f"evaluation.num_validation_prompts above 0{front_every} select on others."
        )
        return f"Measured on {prompts} at the end of its run.{selected}{nearby}"

    def _nearer(self) -> Point | None:
        """Returns the model nearest to the target if it is nearer than the one that is picked."""
        target = _scale(self.preference)
        known = [point for point in self.front.points if point.preference is not None]
        found = min(known, key=lambda point: math.dist(_scale(point.preference), target))
        own = math.dist(_scale(self.parts[0][0].preference), target)
        return found if math.dist(_scale(found.preference), target) < own - 1e-6 else None

    @property
    def made(self) -> str:
        """Returns the relation of models to preferences: "trained for" or "measured at"."""
        return "measured at" if self.front.is_conditioned else "trained for"

    def in_words(self, preference: Sequence[float] | None) -> str:
        """Formats a preference, scaled to sum 1, with the names of its objectives."""
        return in_words(self.front.objectives, preference or ())

    def commands(self) -> dict[str, list[str]]:
        """Returns the commands to chat with the model and to evaluate it, by purpose.

        There is no command to evaluate if the adapters' runs no longer exist.
        """
        if self.run is not None:
            chosen = ["--adapter", str(self.merged)] if self.merged else []
            # that of the expected rewards
            shares = zip(self.front.objectives, _scale(self.parts[0][0].preference), strict=True)
            preference = ",".join(f"{name}={round(share, 6)}" for name, share in shares)
            asked = chosen or ["--preference", preference]
            return {"chat": ["firm", "chat", str(self.run), *asked]}
        runs = [folder.parent for folder in self.folders]
        if not all((run / "run.json").is_file() for run in runs):
            base = read_settings(self.folders[0])["base_model_name_or_path"]
            given = ["--adapter", str(self.adapter), "--policy.path", base]
            return {"chat": ["firm", "chat", *given]}
        chat = ["firm", "chat", str(runs[0])]
        evaluate = ["firm", "evaluate", *map(str, runs)]
        if self.merged is not None:
            chat += ["--adapter", str(self.merged)]
            evaluate += ["--adapters", str(self.merged)]
        if self.front.measure == "accuracy on pairs":  # runs that have no prompts of their own
            evaluate += ["--prompts.source", "FILE"]
        return {"chat": chat, "evaluate": evaluate}


def choose(
    front: Front,
    folder: Path,
    *,
    target: str,
    require: str,
    confidence: float,
    merged: Path | None,
    run: Path | None,
) -> PickedModel:
    """Returns the model for a target trade-off, or the best that meets requirements.

    Args:
        front: The front.
        folder: Its folder, to which the adapters' paths are relative.
        target: Shares of the objectives, as text; empty without a target.
        require: Requirements, as text; empty without any.
        confidence: Confidence of the one-sided bounds that must meet the requirements.
        merged: Folder of the merged adapter; None to choose a single model.
        run: Conditioned run that the front belongs to, if any.

    Raises:
        ValueError: The target is not a preference over the objectives, no model meets the
            requirements, or an adapter is missing.
    """
    requirements = parse_requirements(require, front) if require else []
    shares = parse_shares(target, front.objectives) if target else None
    shares = shares or free_weights(front, requirements)
    is_merged = merged is not None
    around = _around(front, requirements, shares, confidence=confidence, is_merged=is_merged)
    preference, candidates = shares, front
    if requirements or front.is_conditioned:
        preference = mean_preference(around)
        candidates = sound(front).of_seed(around[0][0].seed)
    is_chosen = is_merged or bool(requirements)
    parts = around if is_chosen else [(nearest(candidates, preference), 1.0)]
    folders = [folder / point.adapter for point, _ in parts]
    for (point, _), own in zip(parts, folders, strict=True):
        check_there(point, own, folder)
    certificate = None
    if requirements:
        certificate = certify(front, parts, requirements, confidence=confidence)
    return PickedModel(
        front, shares, preference, parts, folders, merged, run, requirements, certificate
    )


def _around(
    front: Front,
    requirements: Sequence[Requirement],
    target: Sequence[float],
    *,
    confidence: float,
    is_merged: bool,
) -> list[tuple[Point, float]]:
    """Returns the models with shares that meet the requirements, or whose mixture is the target."""
    if requirements:
        return meeting(front, requirements, target, confidence=confidence, is_mixed=is_merged)
    if front.is_conditioned:
        return reaching(front, target)
    return neighbours(front, target) if is_merged else []


def _scale(preference: Sequence[float] | None) -> list[float]:
    shares = preference or ()
    return [share / sum(shares) for share in shares]


def merged_card(picked: PickedModel) -> ModelCard:
    """Returns the model card of a merged adapter: its components and expected rewards."""
    base_model = read_settings(picked.folders[0])["base_model_name_or_path"]
    parts = [
        [markdown_text(point.name), picked.in_words(point.preference), f"{share:.4f}"]
        for point, share in picked.parts
    ]
    front, seed = picked.front, picked.parts[0][0].seed
    strategy = markdown_text(front.strategy)
    if front.is_conditioned:
        origin = (
            f"the conditioned adapter of {strategy} (seed {seed}), folded at the\n"
            f"preference {picked.in_words(picked.preference)} as the mean of other folds."
        )
    else:
        origin = (
            f"the mean of {len(parts)} adapters trained with {strategy}\n"
            f"from the same start (seed {seed}) for other preferences."
        )
    text = f"""A LoRA adapter: {origin}

{markdown_table(["adapter", picked.made, "share"], parts)}

## Expected reward

{picked.evidence}

{markdown_table([picked.front.measure, "base", "expected"], picked.reward_rows)}"""
    return model_card(
        base_model,
        picked.in_words(picked.target),
        text,
        *tags_of(picked.folders[0]),
        "merge",
        has_tokenizer=bool(tokenizer_files(picked.folders[0])),
    )
