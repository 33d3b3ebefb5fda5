"""Exports a run for serving: the whole front of a conditioned one, or one adapter."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from firm.alignment.adapter_files import has_preferences, read_adapter
from firm.base.inside import whole_folder
from firm.base.preferences import in_words, preference_folder
from firm.base.sanitize import legible
from firm.fronts.certificate import Certificate
from firm.jobs.configs import ExportConfig
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import adapter_folder
from firm.jobs.pick import conditioned_front
from firm.run.errors import UserError
from firm.run.files import file_errors
from firm.run.names import dated_folder, slug
from firm.run.shipped import with_shipped_paths
from firm.serving.export_target import ExportTarget
from firm.serving.exporting import asked_of_requests, front_record, read_source, write_card
from firm.serving.front import ServedFront, passing_certificate, stated_preference
from firm.serving.targets import target


@dataclass(frozen=True)
class Exported:
    """An export."""

    folder: Path
    base_model: str
    preferences: dict[str, list[float] | None]
    """Preference of each adapter, by its folder or file in the export; "" is the folder itself.
    None for the adapter of an ordinary run."""
    rank: int
    """Rank of the adapters."""
    certificate: Certificate | None = None
    """Certificate of the adapter, which passes; None without requirements."""
    asked: tuple[str, ...] = ()
    """What requests must bring, in words, unless `firm serve` adds it."""

    @property
    def is_conditioned(self) -> bool:
        """True if every adapter has a preference."""
        return None not in self.preferences.values()


def export(cfg: ExportConfig) -> Exported:
    """Exports the front of a conditioned run, its adapter at a preference, or a run's only adapter.

    Raises:
        UserError: A conditioned run has no front, an ordinary one is asked for a preference, the
            preference cannot be served, the base model cannot be written, or the folder exists.
        ModuleNotFoundError: The package gguf is needed and not installed.
    """
    run = cfg.run or Path()
    out = cfg.out or dated_folder(f"{slug(run.resolve().name)}-{cfg.to}")
    if out.exists():
        raise UserError(f"out: {out} exists; choose another --out.")
    fetch_policy(cfg.policy.path)
    adapter = adapter_folder(run)
    front = conditioned_front(run, "export") if has_preferences(adapter) else None
    if front is None and cfg.trade_offs:
        raise UserError(
            f"{run} has one trade-off, not one for each preference: omit preference, target and "
            "require."
        )
    engine = target(cfg.to)
    try:
        source = read_source(with_shipped_paths(cfg.policy), cfg.rollout, adapter)
        served = front and front_record(cfg.policy, cfg.rollout, front, source, engine)
        certificate = None
        if front and cfg.require:
            certificate = passing_certificate(front, cfg.require, confidence=cfg.confidence)
        preferences = _preferences(cfg, served, certificate, engine)
        with (
            file_errors(f"the export {out}", again="export again"),
            whole_folder(out) as draft,
        ):
            for place, preference in preferences.items():
                values = read_adapter(adapter, preference)
                engine.write_adapter(draft / place, values, source)
                if engine.has_card:
                    write_card(cfg.policy.path, front, preference, adapter, draft / place)
            if certificate is not None:
                certificate.save(draft)
            base_file = engine.write_rest(draft, source, has_base=cfg.has_base)
            if served is not None and not cfg.trade_offs:
                served = replace(served, base_file=base_file)
                engine.write_front(draft, served, list(preferences))
        asked = tuple(asked_of_requests(cfg.policy, cfg.rollout, source, engine))
    except ValueError as error:
        raise UserError(str(error)) from error
    return Exported(out, cfg.policy.path, preferences, source.settings.r, certificate, asked)


def _preferences(
    cfg: ExportConfig,
    served: ServedFront | None,
    certificate: Certificate | None,
    engine: ExportTarget,
) -> dict[str, list[float] | None]:
    """Returns the preference of each adapter to write, by its folder or file."""
    if served is None:
        return {engine.single_file: None}
    front = served.front
    if certificate is not None:
        return {engine.single_file: [certificate.preference[name] for name in front.objectives]}
    if cfg.trade_offs:
        target = cfg.target or None
        return {engine.single_file: stated_preference(front, cfg.preference, target=target)}
    if not engine.is_scaled:
        rows = front.preferences().tolist()
        return {preference_folder(row): row for row in rows}
    corners = [[float(one == name) for one in front.objectives] for name in front.objectives]
    return dict(zip(served.adapters.values(), corners, strict=True))


def main(cfg: ExportConfig) -> Path:
    """Exports, and prints the adapters with their preferences and the command that comes next."""
    done = export(cfg)
    objectives: Sequence[str] = ()
    if done.is_conditioned:
        objectives = conditioned_front(cfg.run or Path(), "export").objectives
    for place, preference in done.preferences.items():
        at = "" if preference is None else f", at {in_words(objectives, preference)}"
        print(legible(f"adapter   {done.folder / place}{at}"))
    if done.certificate is not None:
        print(f"certificate  {done.certificate.describe()}")
    engine = target(cfg.to)
    is_front = done.is_conditioned and not cfg.trade_offs
    command = engine.command(
        done.folder,
        str(with_shipped_paths(done.base_model)),
        list(done.preferences),
        done.rank,
        is_front=is_front,
    )
    if done.asked and not (is_front and command[:1] in ([], ["firm"])):  # `firm serve` brings it
        asked = ", and ".join(done.asked)
        print(legible(f"note      replies are as in training if requests bring {asked}"))
    if command:
        print(legible(f"{engine.verb:9} {shlex.join(command)}"))
    return done.folder
