"""Folders of adapters: checks, copies and weighted means of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from firm.base.inside import whole_folder
from firm.federation.aggregation import weighted_mean
from firm.federation.client import Adapter
from firm.fronts.certificate import CERTIFICATE_NAME
from firm.fronts.front import Point
from firm.run.errors import UserError
from firm.run.files import file_errors

SETTINGS_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
TOKENIZER_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Suffixes of a tokenizer's files: vocabularies, settings and chat templates."""


def check_there(point: Point, folder: Path, below: Path) -> None:
    """Raises `UserError` if a point's adapter is missing, or is a link out of `below`."""
    if not folder.resolve().is_relative_to(below.resolve()):
        raise UserError(
            f"the adapter of {point.name} is a link out of {below}, to {folder.resolve()}; copy it "
            "beside the front if you trust it."
        )
    for name in (SETTINGS_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(
                f"the adapter of {point.name} is missing: there is no {folder / name}; restore it "
                "beside the front, or train this point again."
            )


def write_merged(
    out: Path, folders: Sequence[Path], shares: Sequence[float], card: ModelCard
) -> None:
    """Writes the weighted mean of adapters to a PEFT folder, atomically.

    Raises:
        UserError: `out` exists already, or the adapters are incompatible.
    """
    if out.exists():
        raise UserError(f"out: {out} exists; choose another --out.")
    adapters = [_read_adapter(folder) for folder in folders]
    settings = [read_settings(folder) for folder in folders]
    for folder, adapter, other in zip(folders, adapters, settings, strict=True):
        for key in sorted(settings[0].keys() | other.keys()):
            ours, theirs = settings[0].get(key), other.get(key)
            if _sort_lists(ours) != _sort_lists(theirs):
                raise UserError(
                    f"only adapters with equal settings can be merged; {key} is {ours!r} in "
                    f"{folders[0]} and {theirs!r} in {folder}."
                )
        if _shapes(adapter) != _shapes(adapters[0]):
            raise UserError(
                f"only adapters of equal shapes can be merged; the tensors in {folder} differ from "
                f"{folders[0]}."
            )
    merged = weighted_mean(adapters, shares)
    with (
        file_errors(f"the merged adapter {out}", again="merge again"),
        whole_folder(out) as draft,
    ):
        save_like(folders[0], draft, merged)
        card.save(draft / "README.md")


def save_like(folder: Path, draft: Path, adapter: Adapter) -> None:
    """Writes an adapter with the settings and the tokenizer of another one's folder."""
    draft.mkdir(parents=True, exist_ok=True)
    for file in (folder / SETTINGS_NAME, *tokenizer_files(folder)):
        shutil.copyfile(file, draft / file.name)
    save_file(adapter, draft / WEIGHTS_NAME, metadata={"format": "pt"})


def _read_adapter(folder: Path) -> Adapter:
    path = folder / WEIGHTS_NAME
    try:
        adapter = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}); restore the file.") from error
    for name, values in adapter.items():
        if not values.isfinite().all():
            raise UserError(
                f"{path} has values in {name} that are not finite; train this point again."
            )
    return adapter


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings in an adapter's folder, whose base model has a printable name.

    Raises:
        UserError: The file is malformed.
    """
    path = folder / SETTINGS_NAME
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        base = str(settings["base_model_name_or_path"])
        if not base.isprintable():
            raise ValueError(f"base_model_name_or_path must be a model's name, got {base[:80]!a}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is malformed ({error}); restore the file.") from error
    return {**settings, "base_model_name_or_path": base}


def _sort_lists(value: Any) -> Any:
    """Sorts lists, as peft writes sets of names in arbitrary order."""
    return sorted(map(str, value)) if isinstance(value, list) else value


def _shapes(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in adapter.items()}


def tokenizer_files(adapter: Path) -> list[Path]:
    """Returns the tokenizer files in an adapter's folder; empty if it has no tokenizer."""
    if not (adapter / "tokenizer_config.json").is_file():
        return []
    files = (file for file in adapter.iterdir() if file.is_file() and not file.is_symlink())
    others = (SETTINGS_NAME, CERTIFICATE_NAME)
    return [f for f in files if f.suffix in TOKENIZER_SUFFIXES and f.name not in others]
