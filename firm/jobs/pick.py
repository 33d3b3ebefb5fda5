"""Picks or merges a model for a target trade-off, from the front of a sweep or a run."""

import shlex
from pathlib import Path

from firm.base.preferences import FRONT_NAME
from firm.base.sanitize import legible
from firm.fronts.front import Front
from firm.jobs.configs import PickConfig
from firm.jobs.sources import front_file
from firm.run.errors import UserError
from firm.run.files import refuse_links
from firm.run.names import dated_folder
from firm.run.progress import print_table
from firm.run.sweep import SWEEP_NAME
from firm.serving.adapter_folders import write_merged
from firm.serving.picking import PickedModel, choose, merged_card


def pick(cfg: PickConfig) -> PickedModel:
    """Returns the model for a target trade-off, merged if configured.

    Raises:
        UserError: The front does not exist, the target is not a preference over its objectives, or
            adapters are missing or cannot be merged.
    """
    file = front_file(cfg.front)
    folder = file.parent
    run = folder if (folder / "run.json").is_file() else None
    if run is not None or (folder / SWEEP_NAME).is_file():
        refuse_links(folder)
    merged = (cfg.out or dated_folder("merged")) if cfg.merge else None
    options = {"target": cfg.target, "require": cfg.require, "confidence": cfg.confidence}
    front = load_front(file)
    try:
        picked = choose(front, folder, **options, merged=merged, run=run)
    except ValueError as error:
        raise UserError(str(error)) from error
    if merged is not None:
        shares = [share for _, share in picked.parts]
        write_merged(merged, picked.folders, shares, merged_card(picked))
    if picked.certificate is not None:
        picked.certificate.save(picked.adapter)
    return picked


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
        f"\n{picked.front.measure.capitalize()}, mean ± standard error over prompts",
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
