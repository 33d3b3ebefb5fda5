"""Picks or merges a model for a target trade-off, from the front of a sweep or a run."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import ModelCard

from firm.base.preferences import FRONT_NAME, in_words, parse_shares
from firm.base.sanitize import legible
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
from firm.jobs.configs import PickConfig
from firm.jobs.model_card import markdown_table, markdown_text, model_card, tags_of
from firm.jobs.sources import front_file
from firm.run.errors import UserError
from firm.run.files import refuse_links
from firm.run.names import dated_folder
from firm.run.progress import print_table
from firm.run.sweep import SWEEP_NAME
from firm.serving.adapter_folders import check_there, read_settings, tokenizer_files, write_merged


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
            [own.requirement, f"{own.mean:.3f}", f"{own.bound:.3f}", str(own.num_prompts)]
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
        elif self.front.is_conditioned:
            nearby = (
                " This is the nearest measured preference; --merge writes the adapter at the exact "
                "one."
            )
        else:
            nearby = " It was trained for the nearest available preference."
        is_apart = self.front.has_validation
        if self.certificate is not None:
            is_apart = self.certificate.num_models == 1
        selected = (
            " It was selected by rewards on validation prompts."
            if is_apart
            else " It was selected on the same prompts, so expect a little less: runs with "
            "evaluation.num_validation_prompts above 0 select on others."
        )
        return f"Measured on {prompts} at the end of its run.{selected}{nearby}"

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
            shares = zip(self.front.objectives, self.preference, strict=True)
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
        return {"chat": chat, "evaluate": evaluate}


def pick(cfg: PickConfig) -> PickedModel:
    """Returns the model for a target trade-off, merged if configured.

    Raises:
        UserError: The front does not exist, the target is not a preference over its objectives, or
            adapters are missing or cannot be merged.
    """
    cfg = replace(cfg, front=front_file(cfg.front))
    run = cfg.front.parent if (cfg.front.parent / "run.json").is_file() else None
    if run is not None or (cfg.front.parent / SWEEP_NAME).is_file():
        refuse_links(cfg.front.parent)
    front = load_front(cfg.front)
    try:
        requirements = parse_requirements(cfg.require, front) if cfg.require else []
        target = parse_shares(cfg.target, front.objectives) if cfg.target else None
        target = target or free_weights(front, requirements)
        around = _around(cfg, front, requirements, target)
    except ValueError as error:
        raise UserError(str(error)) from error
    preference, candidates = target, front
    if requirements or front.is_conditioned:
        preference = mean_preference(around)
        candidates = sound(front).of_seed(around[0][0].seed)
    is_chosen = cfg.merge or bool(requirements)
    parts = around if is_chosen else [(nearest(candidates, preference), 1.0)]
    folders = [cfg.front.parent / point.adapter for point, _ in parts]
    for (point, _), folder in zip(parts, folders, strict=True):
        check_there(point, folder, cfg.front.parent)
    out = (cfg.out or dated_folder("merged")) if cfg.merge else None
    certificate = None
    if requirements:
        certificate = certify(front, parts, requirements, confidence=cfg.confidence)
    picked = PickedModel(
        front, target, preference, parts, folders, out, run, requirements, certificate
    )
    if out is not None:
        write_merged(out, folders, [share for _, share in parts], merged_card(picked))
    if certificate is not None:
        certificate.save(picked.adapter)
    return picked


def _around(
    cfg: PickConfig, front: Front, requirements: Sequence[Requirement], target: Sequence[float]
) -> list[tuple[Point, float]]:
    """Returns the models with shares that meet the requirements, or whose mixture is the target."""
    if requirements:
        return meeting(front, requirements, target, confidence=cfg.confidence, is_mixed=cfg.merge)
    if front.is_conditioned:
        return reaching(front, target)
    return neighbours(front, target) if cfg.merge else []


def conditioned_front(run: Path, command: str) -> Front:
    """Returns the front of a finished conditioned run.

    Args:
        run: The run's folder.
        command: Command that needs the front, for the message.

    Raises:
        UserError: The run has none.
    """
    if not (run / FRONT_NAME).is_file():
        raise UserError(
            f"{run} has no {FRONT_NAME}: {command} needs a finished run with "
            "policy.conditioning.kind preference, evaluated at two preferences or more."
        )
    return load_front(run / FRONT_NAME)


def load_front(path: Path) -> Front:
    """Loads a front from a file.

    Raises:
        UserError: The file is not a front.
    """
    try:
        return Front.load(path)
    except ValueError as error:
        raise UserError(f"front: {error}") from error


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

{markdown_table(["reward in [0, 1]", "base", "expected"], picked.reward_rows)}"""
    return model_card(
        base_model,
        picked.in_words(picked.target),
        text,
        *tags_of(picked.folders[0]),
        "merge",
        has_tokenizer=bool(tokenizer_files(picked.folders[0])),
    )


def main(cfg: PickConfig) -> Path:
    """Prints the model for the target preference; returns the adapter's folder."""
    picked = pick(cfg)
    if picked.requirements:
        print(f"require   {', '.join(map(str, picked.requirements))}")
        print(f"weights   {picked.in_words(picked.target)}")
    else:
        print(f"target    {picked.in_words(picked.target)}")
    if picked.front.is_conditioned:
        print(f"reached   at the preference {picked.in_words(picked.preference)}")
        if not picked.requirements:
            print(
                "          (a target is a proportion of the gains measured on the front, which "
                "come\n          closest to it at this preference)"
            )
    for point, share in picked.parts:
        part = f", share {share:.3f}" if cfg.merge else ""
        preference = picked.in_words(point.preference)
        print(f"model     {point.name}, {picked.made} {preference}{part}")
    print_table(
        "\nReward in [0, 1], mean ± standard error over prompts",
        ["", "base", "expected"],
        picked.reward_rows,
    )
    if picked.certificate is not None:
        print_table(
            f"Bounds with {picked.certificate.confidence:.0%} confidence",
            ["required", "mean", "bound", "prompts"],
            picked.requirement_rows,
        )
    print(picked.evidence)
    if picked.certificate is not None:
        print(f"certificate  {picked.certificate.describe()}")
    print(legible(f"adapter   {picked.adapter}"))
    for purpose, command in picked.commands().items():
        print(legible(f"{purpose:<10}{shlex.join(command)}"))
    return picked.adapter
