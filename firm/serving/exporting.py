"""Parts of an export: what it takes of a run, the record of a front, and the model cards."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firm.alignment.adapter_files import read_settings
from firm.alignment.generation import end_token_ids, generation_settings
from firm.alignment.policy import checkpoint_errors, read_architecture, read_generation_config
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.rollout_config import RolloutConfig
from firm.base.preferences import in_words
from firm.fronts.certificate import Certificate
from firm.fronts.front import Front
from firm.run.names import check_slugs, slug
from firm.serving.adapter_folders import tokenizer_files
from firm.serving.chat_templates import HH_TEMPLATE, plain_template
from firm.serving.export_target import ExportedRun, ExportTarget
from firm.serving.front import ServedFront
from firm.serving.model_card import CARD_NAME, markdown_text, model_card, tags_of


def read_source(policy: PolicyConfig, rollout: RolloutConfig, adapter: Path) -> ExportedRun:
    """Returns a run's parts of an export: the adapter in a folder and the policy that it is for.

    Raises:
        ValueError: The base model's architecture or tokenizer cannot be read.
    """
    with checkpoint_errors("language model", policy.path):
        architecture = read_architecture(policy.path)
    own = read_generation_config(policy.path, architecture)
    source = ExportedRun(adapter, read_settings(adapter), policy, architecture)
    end_ids = end_token_ids(source.tokenizer(), rollout, own)
    generation = generation_settings(end_ids, rollout)
    return replace(source, end_ids=end_ids, generation=generation)


def front_record(
    policy: PolicyConfig,
    rollout: RolloutConfig,
    front: Front,
    source: ExportedRun,
    engine: ExportTarget,
) -> ServedFront:
    """Returns the record of the whole front, without the base model's file."""
    check_slugs(front.objectives, "objectives")
    request: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,  # as in training, which samples from all tokens
    }
    given, template = policy.prompt, ""
    tokenizer = source.tokenizer()
    kind = given.kind_for(tokenizer)
    if kind == "chat":
        options = {"date_string": given.date_string, **given.template_options}
        request["chat_template_kwargs"] = options
    else:
        template = HH_TEMPLATE if kind == "hh" else plain_template(given.template)
    # those that `firm pick` has certified
    chosen = sorted((source.adapter.parent / "front").glob("*/"))
    stop = rollout.stop_strings
    if stop := given.stop_strings(tokenizer) if stop is None else stop:
        request["stop"] = stop
    return ServedFront(
        base_model=policy.path,
        base_file="",
        adapters={name: f"{slug(name)}{engine.suffix}" for name in front.objectives},
        front=front,
        system_prompt=given.system_prompt if kind == "chat" else "",
        chat_template=template,
        end_ids=tuple(source.end_ids),
        certificates=tuple(found for folder in chosen if (found := Certificate.load(folder))),
        request=request,
    )


def asked_of_requests(
    policy: PolicyConfig, rollout: RolloutConfig, source: ExportedRun, engine: ExportTarget
) -> list[str]:
    """Returns what requests to another server must bring, in words, for replies as in training.

    Other servers format messages by the base model's own chat template, and end replies at tokens.
    """
    given, tokenizer = policy.prompt, source.tokenizer()
    kind, asked = given.kind_for(tokenizer), []
    if kind == "hh":
        asked.append("prompts in HH-RLHF's form, as completions")
    elif kind == "plain":
        asked.append(f"prompts in the form {given.template!r}, as completions")
    elif given.system_prompt:
        asked.append(f"the system message {given.system_prompt!r}")
    options = dict(given.template_options)
    if "date_string" in str(tokenizer.chat_template):  # which would print the current date
        options = {"date_string": given.date_string, **options}
    if kind == "chat" and options:
        asked.append(f"chat_template_kwargs {options}")
    stop = rollout.stop_strings
    if stop := given.stop_strings(tokenizer) if stop is None else stop:
        asked.append(f"stop {stop}")
    if not engine.has_sampling:
        asked.append(f"temperature {rollout.temperature:g}, top_k 0, top_p 1, min_p 0")
    return asked


def write_card(
    base_model: str,
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
    card = model_card(base_model, aim, text, *tags, has_tokenizer=has_tokenizer)
    card.save(folder / CARD_NAME)
