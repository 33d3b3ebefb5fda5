"""Exports a conditioned run for serving: its whole front, or its adapter at one preference."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import transformers
from annotated_types import Gt, Lt
from huggingface_hub import ModelCard

from firm.alignment.adapter_files import read_adapter, read_settings
from firm.alignment.generation import RolloutConfig
from firm.alignment.policy import (
    PolicyConfig,
    checkpoint_errors,
    is_gguf,
    load_base_model,
    load_tokenizer,
    read_architecture,
)
from firm.federation.outside import legible
from firm.fields import configuration
from firm.fronts.front import FRONT_NAME, Front
from firm.fronts.preferences import in_words, preference_folder
from firm.jobs.fetch import fetch_policy
from firm.jobs.finished_runs import adapter_folder
from firm.jobs.model_card import markdown_text, model_card
from firm.jobs.pick import conditioned_front, save_like, tokenizer_files
from firm.run.errors import UserError
from firm.run.files import whole_folder
from firm.run.names import check_slugs, dated_folder, slug
from firm.run.shipped import with_shipped_paths
from firm.serving.front import TRADE_OFFS, ServedFront
from firm.serving.gguf_adapters import write_adapter
from firm.serving.gguf_base import HH_TEMPLATE, plain_template, write_base

BASE_NAME = "base.gguf"
"""GGUF file of the base model in an export."""


@configuration
class ExportConfig:
    """An export; settings of `run` are the defaults, followed by the defaults below."""

    run: Path | None = None
    """Finished conditioned run with a front.json; provides adapter, policy and rollout."""
    to: Literal["peft", "gguf", "vllm"] = "peft"
    """Engine: peft for PEFT folders whose scaled sum is the front, gguf for the same as files of
    llama.cpp with the base model, or vllm, which does not scale adapters, for a folder per measured
    point."""
    preference: list[float] | None = None
    """Export only the adapter at this preference: shares of the objectives, in order."""
    target: str = ""
    """Export only the adapter at this target; see `firm pick`."""
    require: str = ""
    """Export only the best adapter that meets requirements; see `firm pick`."""
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95
    """Confidence of the one-sided bounds that must meet `require`."""
    has_base: bool = True
    """With gguf, write the base model too. Turn it off to serve another GGUF file of it, such as a
    quantized one."""
    out: Path | None = None
    """Folder to write, which must not exist; default: runs/RUN-TO-TIME."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model, read only for gguf."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies, the default of requests to an export for gguf."""

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError("export needs a conditioned run with a front: firm export runs/mine.")
        given = [key for key in TRADE_OFFS if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"pass one of preference, target and require, got {', '.join(given)}.")

    @property
    def is_folded(self) -> bool:
        """True if a single preference is exported."""
        return any(getattr(self, key) for key in TRADE_OFFS)


@dataclass(frozen=True)
class Exported:
    """An export."""

    folder: Path
    base_model: str
    preferences: dict[str, list[float]]
    """Preference of each adapter, by its folder or file in the export; "" is the folder itself."""
    rank: int
    """Rank of the adapters."""


def export(cfg: ExportConfig) -> Exported:
    """Exports a run's front, or its adapter at a preference.

    Raises:
        UserError: The run has no front, the preference cannot be served, the base model cannot be
            written, or the folder exists.
        ModuleNotFoundError: The package gguf is needed and not installed.
    """
    run = cfg.run or Path()
    out = cfg.out or dated_folder(f"{slug(run.resolve().name)}-{cfg.to}")
    if out.exists():
        raise UserError(f"out: {out} exists; choose another --out.")
    fetch_policy(cfg.policy.path)
    front, adapter = conditioned_front(run, "export"), adapter_folder(run)
    try:
        settings = read_settings(adapter)
        served = _record(cfg, front, adapter)
        preferences = _preferences(cfg, served)
        with whole_folder(out) as draft:
            if cfg.to == "gguf":
                served = _add_base(cfg, served, adapter, draft)
            for place, preference in preferences.items():
                values = read_adapter(adapter, preference)
                if cfg.to == "gguf":
                    config = _architecture(cfg)
                    write_adapter(draft / place, values, settings, config, name=place)
                else:
                    save_like(adapter, draft / place, values)
                    _card(cfg, front, preference, adapter).save(draft / place / "README.md")
            if cfg.to == "vllm" and not cfg.is_folded:
                points = zip(front.points, preferences, strict=True)
                points = tuple(replace(point, adapter=place) for point, place in points)
                replace(front, points=points).save(draft / FRONT_NAME)
            elif not cfg.is_folded:
                served.save(draft)
    except ValueError as error:
        raise UserError(str(error)) from error
    return Exported(out, cfg.policy.path, preferences, settings.r)


def _preferences(cfg: ExportConfig, served: ServedFront) -> dict[str, list[float]]:
    """Returns the preference of each adapter to write, by its folder or file."""
    front = served.front
    if cfg.is_folded:
        request = {key: getattr(cfg, key) or None for key in TRADE_OFFS}
        chosen = served.preference(**request, confidence=cfg.confidence)
        return {"adapter.gguf" if cfg.to == "gguf" else "": chosen}
    if cfg.to == "vllm":
        rows = front.preferences().tolist()
        return {preference_folder(row): row for row in rows}
    alone = [[float(one == name) for one in front.objectives] for name in front.objectives]
    return dict(zip(served.adapters.values(), alone, strict=True))


def _record(cfg: ExportConfig, front: Front, adapter: Path) -> ServedFront:
    """Returns the record of the whole front, without the base model's file."""
    check_slugs(front.objectives, "objectives")
    suffix = ".lora.gguf" if cfg.to == "gguf" else ""  # no objective is called as the base model
    request: dict[str, Any] = {
        "temperature": cfg.rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,  # as in training, which samples from all tokens
    }
    given, template = cfg.policy.prompt, ""
    tokenizer = load_tokenizer(
        with_shipped_paths(cfg.policy), adapter if tokenizer_files(adapter) else None
    )
    kind = given.kind_for(tokenizer)
    if kind == "chat":
        options = {"date_string": given.date_string, **given.template_options}
        request["chat_template_kwargs"] = options
    else:
        template = HH_TEMPLATE if kind == "hh" else plain_template(given.template)
    stop = cfg.rollout.stop_strings
    if stop := given.stop_strings(tokenizer) if stop is None else stop:
        request["stop"] = stop
    return ServedFront(
        base_model=cfg.policy.path,
        base_file="",
        adapters={name: f"{slug(name)}{suffix}" for name in front.objectives},
        front=front,
        system_prompt=given.system_prompt if kind == "chat" else "",
        chat_template=template,
        request=request,
    )


def _architecture(cfg: ExportConfig) -> Any:
    path = with_shipped_paths(cfg.policy).path
    with checkpoint_errors("language model", path):
        return read_architecture(path)


def _add_base(cfg: ExportConfig, served: ServedFront, adapter: Path, draft: Path) -> ServedFront:
    """Writes the base model as a GGUF file, if needed; returns the record with its name."""
    if not cfg.has_base:
        return served
    policy = with_shipped_paths(cfg.policy)
    if is_gguf(policy.path):
        shutil.copyfile(Path(policy.path).expanduser(), draft / BASE_NAME)
    else:
        transformers.utils.logging.disable_progress_bar()
        tokenizer = load_tokenizer(policy, adapter if tokenizer_files(adapter) else None)
        write_base(draft / BASE_NAME, load_base_model(policy), tokenizer)
    return replace(served, base_file=BASE_NAME)


def _card(cfg: ExportConfig, front: Front, preference: Sequence[float], adapter: Path) -> ModelCard:
    aim = in_words(front.objectives, preference)
    strategy = markdown_text(front.strategy)
    text = (
        f"A LoRA adapter: the conditioned adapter of {strategy}, folded at the preference\n{aim}."
    )
    has_tokenizer = bool(tokenizer_files(adapter))
    return model_card(cfg.policy.path, aim, text, "front", has_tokenizer=has_tokenizer)


def main(cfg: ExportConfig) -> Path:
    """Exports, and prints the adapters with their preferences and a command to serve them."""
    done = export(cfg)
    objectives = conditioned_front(cfg.run or Path(), "export").objectives
    for place, preference in done.preferences.items():
        print(legible(f"adapter   {done.folder / place}, at {in_words(objectives, preference)}"))
    if command := _command(cfg, done):
        print(legible(f"serve     {shlex.join(command)}"))
    return done.folder


def _command(cfg: ExportConfig, done: Exported) -> list[str]:
    """Returns the command that serves an export; [] if there is none."""
    folder = done.folder.resolve()
    if cfg.to == "gguf" and not cfg.is_folded:
        return ["firm", "serve", "--export", str(done.folder)]
    if cfg.to != "vllm":
        return []
    rank = max(8, 1 << (done.rank - 1).bit_length())  # vLLM takes powers of two from 8
    names = {place or "adapter": folder / place for place in done.preferences}
    modules = [f"{name}={place}" for name, place in names.items()]
    base = str(with_shipped_paths(done.base_model))
    return [
        *("vllm", "serve", base, "--host", "127.0.0.1", "--enable-lora"),
        *("--max-lora-rank", str(rank), "--lora-modules", *modules),
    ]
