"""Exports a run for serving: the whole front of a conditioned one, or one adapter."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firm.alignment.adapter_files import has_preferences, read_adapter, read_settings
from firm.alignment.generation import end_token_ids, generation_settings
from firm.alignment.policy import checkpoint_errors, read_architecture, read_generation_config
from firm.base.inside import whole_folder
from firm.base.preferences import in_words, preference_folder
from firm.base.sanitize import legible
from firm.fronts.certificate import Certificate
from firm.fronts.front import Front
from firm.jobs.configs import ExportConfig
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import adapter_folder
from firm.jobs.model_card import CARD_NAME, markdown_text, model_card, tags_of
from firm.jobs.pick import conditioned_front
from firm.run.errors import UserError
from firm.run.files import file_errors
from firm.run.names import check_slugs, dated_folder, slug
from firm.run.shipped import with_shipped_paths
from firm.serving.adapter_folders import tokenizer_files
from firm.serving.chat_templates import HH_TEMPLATE, plain_template
from firm.serving.export_target import Source, Target
from firm.serving.front import ServedFront, passing_certificate
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
    if front is None and cfg.is_folded:
        raise UserError(
            f"{run} has one trade-off, not one for each preference: omit preference, target and "
            "require."
        )
    engine = target(cfg.to)
    try:
        source = _source(cfg, adapter)
        served = front and _record(cfg, front, source, engine)
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
                    _write_card(cfg, front, preference, adapter, draft / place)
            if certificate is not None:
                certificate.save(draft)
            base_file = engine.write_rest(draft, source, has_base=cfg.has_base)
            if served is not None and not cfg.is_folded:
                served = replace(served, base_file=base_file)
                engine.write_front(draft, served, list(preferences))
    except ValueError as error:
        raise UserError(str(error)) from error
    return Exported(out, cfg.policy.path, preferences, source.settings.r, certificate)


def _source(cfg: ExportConfig, adapter: Path) -> Source:
    policy = with_shipped_paths(cfg.policy)
    with checkpoint_errors("language model", policy.path):
        architecture = read_architecture(policy.path)
    own = read_generation_config(policy.path, architecture)
    source = Source(adapter, read_settings(adapter), policy, architecture)
    end_ids = end_token_ids(source.tokenizer(), cfg.rollout, own)
    generation = generation_settings(end_ids, cfg.rollout)
    return replace(source, end_ids=end_ids, generation=generation)


def _preferences(
    cfg: ExportConfig, served: ServedFront | None, certificate: Certificate | None, engine: Target
) -> dict[str, list[float] | None]:
    """Returns the preference of each adapter to write, by its folder or file."""
    if served is None:
        return {engine.single_file: None}
    front = served.front
    if certificate is not None:
        return {engine.single_file: [certificate.preference[name] for name in front.objectives]}
    if cfg.is_folded:
        return {engine.single_file: served.preference(cfg.preference, target=cfg.target or None)}
    if not engine.is_scaled:
        rows = front.preferences().tolist()
        return {preference_folder(row): row for row in rows}
    corners = [[float(one == name) for one in front.objectives] for name in front.objectives]
    return dict(zip(served.adapters.values(), corners, strict=True))


def _record(cfg: ExportConfig, front: Front, source: Source, engine: Target) -> ServedFront:
    """Returns the record of the whole front, without the base model's file."""
    check_slugs(front.objectives, "objectives")
    request: dict[str, Any] = {
        "temperature": cfg.rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,  # as in training, which samples from all tokens
    }
    given, template = cfg.policy.prompt, ""
    tokenizer = source.tokenizer()
    kind = given.kind_for(tokenizer)
    if kind == "chat":
        options = {"date_string": given.date_string, **given.template_options}
        request["chat_template_kwargs"] = options
    else:
        template = HH_TEMPLATE if kind == "hh" else plain_template(given.template)
    # those that `firm pick` has certified
    chosen = sorted((source.adapter.parent / "front").glob("*/"))
    stop = cfg.rollout.stop_strings
    if stop := given.stop_strings(tokenizer) if stop is None else stop:
        request["stop"] = stop
    return ServedFront(
        base_model=cfg.policy.path,
        base_file="",
        adapters={name: f"{slug(name)}{engine.suffix}" for name in front.objectives},
        front=front,
        system_prompt=given.system_prompt if kind == "chat" else "",
        chat_template=template,
        end_ids=tuple(source.end_ids),
        certificates=tuple(found for folder in chosen if (found := Certificate.load(folder))),
        request=request,
    )


def _write_card(
    cfg: ExportConfig,
    front: Front | None,
    preference: Sequence[float] | None,
    adapter: Path,
    folder: Path,
) -> None:
    """Writes the model card of a folded adapter, or copies that of a run's only adapter."""
    if front is None or preference is None:
        if (card := adapter / CARD_NAME).is_file():
            shutil.copyfile(card, folder / CARD_NAME)
        return
    aim = in_words(front.objectives, preference)
    strategy = markdown_text(front.strategy)
    text = (
        f"A LoRA adapter: the conditioned adapter of {strategy}, folded at the preference\n{aim}."
    )
    has_tokenizer = bool(tokenizer_files(adapter))
    tags = [*tags_of(adapter), "front"]
    card = model_card(cfg.policy.path, aim, text, *tags, has_tokenizer=has_tokenizer)
    card.save(folder / CARD_NAME)


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
    command = engine.command(
        done.folder,
        str(with_shipped_paths(done.base_model)),
        list(done.preferences),
        done.rank,
        is_front=done.is_conditioned and not cfg.is_folded,
    )
    if command:
        print(legible(f"{engine.verb:9} {shlex.join(command)}"))
    return done.folder
