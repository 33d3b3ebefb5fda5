"""Finished adapters, which need no trainer: several in one base model, of which one speaks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.save_and_load import load_peft_weights
from safetensors import SafetensorError

from firm.alignment.policy import PolicyConfig, load_base_model, without_needless_warnings

Reference = Callable[[], AbstractContextManager[Any]]
"""Opens a context inside which a model is the base model."""


def load_adapters(
    config: PolicyConfig, folders: Sequence[Path], *, check_base: bool = True
) -> PeftModel:
    """The base model with the adapters of N PEFT folders, in evaluation mode.

    Each adapter has the rank and the target modules that its own folder states; `select_adapter`
    chooses one by its place in `folders`. The model is on the accelerator when there is one.

    Args:
        config: The base model; its `lora` is not looked at.
        folders: At least one PEFT folder.
        check_base: Whether an adapter that names another base model is refused.

    Raises:
        ValueError: There is no such base model, the hub cannot be reached, or a folder holds no
            PEFT adapter, or one that does not fit the base model.
    """
    settings = [_adapter_settings(folder) for folder in folders]  # before the base is loaded
    for folder, lora in zip(folders, settings, strict=True):
        base = lora.base_model_name_or_path or ""
        if check_base and not _is_same_place(base, config.path):
            raise ValueError(
                f"the adapter in {folder} was made for the base model {base!r}, got {config.path}: "
                "use that one, or turn check_base off if it is the same model in another place."
            )
    model = load_base_model(config)
    policy: Any = None
    for index, (folder, lora) in enumerate(zip(folders, settings, strict=True)):
        name = _slot_name(index)
        try:
            with without_needless_warnings():
                if policy is None:
                    policy = PeftModel(model, lora, adapter_name=name)
                else:
                    policy.add_adapter(name, lora)
        except ValueError as error:  # peft's, when no layer is called like the target modules
            raise ValueError(
                f"the adapter in {folder} does not fit {config.path} ({error}): "
                "use the base model that it was made for."
            ) from error
        fill_adapter_(policy, folder, config.path, name=name)
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator if accelerator and torch.accelerator.is_available() else "cpu"
    return policy.to(device).eval()


def _adapter_settings(folder: Path) -> PeftConfig:
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"there is no adapter in {folder}: give a folder with adapter_config.json and "
            "adapter_model.safetensors, or a finished run."
        )
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder}/adapter_config.json is malformed ({error}): restore the file."
        ) from error
    settings.inference_mode = True
    return settings


def _is_same_place(base: str, other: str) -> bool:
    """Whether two folders or names on the hub are the same."""
    return base == other or Path(base).resolve() == Path(other).resolve()


def fill_adapter_(policy: PeftModel, folder: Path, base: str, *, name: str = "default") -> None:
    """Fills an adapter slot from a PEFT folder whose every tensor must fit it.

    Args:
        policy: The model with the slot.
        folder: The PEFT folder.
        base: What messages call the base model.
        name: The slot.

    Raises:
        ValueError: The folder holds no adapter, or another model's.
    """
    if not (folder / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder} has no adapter_model.safetensors: save the adapter again.")
    try:
        adapter = load_peft_weights(str(folder), device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder}/adapter_model.safetensors cannot be read ({error}): restore the file."
        ) from error
    slot = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False)
    remedy = "use the base model that it was made for."
    if odd := sorted(adapter.keys() ^ slot.keys()):
        raise ValueError(
            f"the adapter in {folder} does not fit {base}: {len(odd)} names stand on one side "
            f"only, such as {odd[0]!r}: {remedy}"
        )
    for key, values in slot.items():
        if adapter[key].shape != values.shape:
            raise ValueError(
                f"the adapter in {folder} does not fit {base}: {key} has shape "
                f"{list(adapter[key].shape)}, expected {list(values.shape)}: {remedy}"
            )
    set_peft_model_state_dict(policy, adapter, adapter_name=name)


def _slot_name(index: int) -> str:
    """A name that is part of no other name in the model: peft looks for it anywhere in them."""
    return f"adapter_{index:04d}"


@contextmanager
def select_adapter(policy: PeftModel, index: int | None) -> Iterator[Reference]:
    """Inside, `policy` speaks with its adapter of that index, or as the base model under None.

    Gives the `reference` that `sample_replies` takes.
    """
    if index is None:
        with policy.disable_adapter():
            yield nullcontext
    else:
        policy.set_adapter(_slot_name(index), inference_mode=True)
        yield policy.disable_adapter
