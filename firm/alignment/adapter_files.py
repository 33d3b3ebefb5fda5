"""Saves and loads adapters as PEFT folders; several can be loaded into one base model."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils.save_and_load import load_peft_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from firm.alignment.adapters.conditioned import fold, is_conditioned
from firm.alignment.adapters.forward import forward_of
from firm.alignment.placement import place_
from firm.alignment.policy import (
    check_fits,
    load_base_model,
    take_device,
    without_needless_warnings,
)
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.self_check import check_passes
from firm.base.json_text import json_text
from firm.federation.client import Adapter

_WEIGHTS = "adapter_model.safetensors"
_CONDITIONED = "conditioned.safetensors"
"""File with the B_j of a conditioned adapter, next to the PEFT adapter for equal shares."""
_FROM_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Prefixes of `init_lora_weights` that modify the base model, so that the adapter fits no other."""

_MAX_PATTERN, _MAX_PATTERNS = 1000, 1000
"""Limits of patterns that select layers: their characters and their number."""
_MAX_REPETITIONS, _MAX_GROUPS, _MAX_ALTERNATIVES = 2, 2, 16
"""Limits of what a pattern may hold."""

Reference = Callable[[], AbstractContextManager[Any]]
"""Opens a context inside which a model is the base model."""


def load_adapters(
    config: PolicyConfig,
    folders: Sequence[Path],
    *,
    check_base: bool = True,
    preference: Sequence[float] | None = None,
) -> PeftModel:
    """Returns the base model with the adapters of N PEFT folders, in evaluation mode.

    Each adapter has the rank and target modules stated in its folder; `select_adapter` selects one
    by its index in `folders`. The model is on the accelerator if there is one. `check_base` rejects
    adapters of another base model. With a preference, all adapters must be conditioned, and are
    folded at it.

    Raises:
        ValueError: When the base model does not exist, the hub cannot be reached, a folder has no
            PEFT adapter or one that does not fit the base model, or as in `check_passes`.
    """
    settings = [read_settings(folder) for folder in folders]  # before the base is loaded
    for folder, lora in zip(folders, settings, strict=True):
        base = lora.base_model_name_or_path or ""
        is_same = base == config.path or Path(base).resolve() == Path(config.path).resolve()
        if check_base and not is_same:
            raise ValueError(
                f"the adapter in {folder} was made for the base model {base!r}, got {config.path}: "
                "use that one, or set check_base to False if both are the same model."
            )
    model = load_base_model(config)
    policy: Any = None
    for index, (folder, lora) in enumerate(zip(folders, settings, strict=True)):
        name = _slot_name(index)
        try:
            # created on the meta device, and filled after the file's shapes have been checked
            with without_needless_warnings():
                if policy is None:
                    policy = PeftModel(model, lora, adapter_name=name, low_cpu_mem_usage=True)
                else:
                    policy.add_adapter(name, lora, low_cpu_mem_usage=True)
        except (ValueError, TypeError, AttributeError, RuntimeError, re.error) as error:
            # raised by peft if no layer matches the target modules, or a setting is invalid
            raise ValueError(
                f"the adapter in {folder} does not fit {config.path} ({error}): "
                "use the base model that it was made for."
            ) from error
        fill_adapter_(policy, folder, config.path, name=name, preference=preference)
    place_(policy, config, take_device(config.device))
    policy.eval()
    check_passes(policy, config.path)
    return policy


def read_settings(folder: Path) -> LoraConfig:
    """Returns the settings of the adapter in a PEFT folder.

    Raises:
        ValueError: When there is none, it is malformed, or it changes the base model.
    """
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"there is no adapter in {folder}: choose a folder with adapter_config.json and "
            "adapter_model.safetensors, or a finished run."
        )
    try:
        settings = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{folder}/adapter_config.json is malformed ({reason}): restore the file."
        ) from error
    if not isinstance(settings, LoraConfig):
        raise ValueError(
            f"the adapter in {folder} has a {type(settings).__name__}, expected a LoraConfig: use "
            "a LoRA adapter."
        )
    start = settings.init_lora_weights
    if settings.layer_replication or (isinstance(start, str) and start.startswith(_FROM_THE_BASE)):
        raise ValueError(
            f"the adapter in {folder} changes the base model, by layer_replication "
            f"{settings.layer_replication} or init_lora_weights {start!r}: use one that leaves it "
            "unchanged."
        )
    _check_ranks(folder, settings)
    _check_patterns(folder, settings)
    settings.inference_mode, settings.init_lora_weights = True, False  # the file fills the slot
    return settings


def check_settings(folder: Path, policy: PeftModel, base: str) -> None:
    """Checks that a PEFT folder's adapter was trained with the settings of a policy's slot.

    `fill_adapter_` compares only tensor shapes, which do not depend on the scale.

    Args:
        folder: The adapter's folder.
        policy: Policy with a single adapter slot, which has the required settings.
        base: Path of the policy's base model. A folder of the same name elsewhere is accepted.

    Raises:
        ValueError: When the folder has no adapter, or its base model, rank, scale or target modules
            differ.
    """
    settings, own = read_settings(folder), policy.peft_config["default"]
    assert isinstance(own, LoraConfig)
    made_for = settings.base_model_name_or_path or ""
    if Path(made_for).name != Path(base).name:
        raise ValueError(
            f"the adapter in {folder} was made for the base model {made_for!r}, got {base}: use "
            "that one, or correct its adapter_config.json if it is the same model."
        )
    names = [_plain_names(each.target_modules) for each in (settings, own)]
    for key, theirs, ours in (
        ("r", settings.r, own.r),
        ("target_modules", *(names if all(names) else (None, None))),
        ("alpha / r", _scale(settings), _scale(own)),
        ("alpha per layer", settings.alpha_pattern or {}, own.alpha_pattern or {}),
    ):
        if theirs != ours:
            raise ValueError(
                f"the adapter in {folder} does not fit policy.lora: its {key} is {theirs}, got "
                f"{ours}: use the settings that it was trained with."
            )


def _plain_names(target_modules: Any) -> list[str] | None:
    """Returns target modules as sorted names; None for patterns and paths, which are ambiguous."""
    is_plain = not isinstance(target_modules, str) and not any("." in n for n in target_modules)
    return sorted(target_modules) if is_plain else None


def _scale(settings: LoraConfig) -> float:
    """Returns the factor alpha / r (or alpha / √r) of an adapter's update."""
    return settings.lora_alpha / (settings.r**0.5 if settings.use_rslora else settings.r)


def _check_ranks(folder: Path, settings: LoraConfig) -> None:
    """Raises `ValueError` if settings state a rank that no tensor of the file can have."""
    with _reading(folder), safe_open(folder / _WEIGHTS, "pt") as file:  # only the head is read
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    largest = max((size for shape in shapes for size in shape), default=0)
    patterns = settings.rank_pattern or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{folder}/adapter_config.json: rank_pattern must be an object.")
    for rank in (settings.r, *patterns.values()):
        if not isinstance(rank, int) or not 1 <= rank <= largest:
            raise ValueError(
                f"the adapter in {folder} states the rank {rank!r}, but the largest size of its "
                f"tensors is {largest}: restore adapter_config.json and {_WEIGHTS} together."
            )


def _check_patterns(folder: Path, settings: LoraConfig) -> None:
    """Raises `ValueError` if a pattern of layers could take long to match; PEFT matches them all.

    Backtracking takes time that grows with the number of ways in which a name can match: with the
    length of the name to the power of the number of repetitions, times the alternatives. So there
    are few of both, and no group is repeated.
    """
    names = ("target_modules", "exclude_modules")
    for key in (*names, "rank_pattern", "alpha_pattern", "layers_pattern"):
        value = getattr(settings, key) or ()
        patterns = [value] if isinstance(value, str) else list(value)
        is_matched = isinstance(value, str) or key not in names  # names in a list are compared
        for pattern in patterns if is_matched else ():
            if not (isinstance(pattern, str) and _is_quick(pattern)):
                shown = pattern if len(str(pattern)) <= 60 else f"{str(pattern)[:60]}[...]"
                raise ValueError(
                    f"{folder}/adapter_config.json: {key} has the pattern {shown!r}, which is "
                    "broken or could take too long to match: use names of layers, or a pattern "
                    "with at most two repetitions such as '.*' and two groups such as '(q|v)_proj'."
                )
        if len(patterns) > _MAX_PATTERNS:
            raise ValueError(
                f"{folder}/adapter_config.json: {key} must have at most {_MAX_PATTERNS} entries, "
                f"got {len(patterns)}."
            )


def _is_quick(pattern: str) -> bool:
    """Returns whether matching a pattern takes a time that is proportional to a small number.

    >>> patterns = ("q_proj", r".*\\.\\d+\\.(q|v)_proj", r"vision\\..*|audio\\..*", "(a*)*b")
    >>> [_is_quick(pattern) for pattern in patterns]
    [True, True, True, False]
    """
    if len(pattern) > _MAX_PATTERN:
        return False
    ways = re.split(r"\|(?![^()]*\))", pattern)
    if len(ways) > 1:  # tried one after the other, such as parts of a model that are left out
        return len(ways) <= _MAX_ALTERNATIVES and all(map(_is_quick, ways))
    part, group = r"(?:[\w\-/.]|\\[.dw])(?:[*+]\??)?", r"\((?:\?:)?[\w.|\-]+\)"
    return (
        len(re.findall(r"[*+]", pattern)) <= _MAX_REPETITIONS
        and pattern.count("(") <= _MAX_GROUPS
        and pattern.count("|") <= _MAX_ALTERNATIVES
        and re.fullmatch(rf"\^?(?:{part}|{group})*\$?", pattern) is not None
    )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    if not (folder / _WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {_WEIGHTS}: save the adapter again.")
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder}/{_WEIGHTS} cannot be read ({error}): restore the file."
        ) from error


def save_adapter(policy: Any, folder: Path) -> None:
    """Writes a policy's adapter as a PEFT folder.

    A conditioned adapter is saved at equal shares, with an additional file from which
    `fill_adapter_` folds it at any other preference.
    """
    state = lora_state(policy)
    gated = {
        name.replace(".default.", "."): state.pop(name).contiguous()
        for name in list(state)
        if is_conditioned(name)
    }
    save_state(policy, folder, state)
    if gated:
        save_file(gated, folder / _CONDITIONED)  # beside the file that every PEFT tool reads


def lora_state(
    policy: Any, adapter: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Returns the policy's adapter as an ordinary LoRA adapter, by PEFT's names of its slot.

    With an adapter, its trained parameters replace those of the slot.
    """
    state: dict[str, torch.Tensor] = {
        name: values for name, values in policy.state_dict().items() if "lora_" in name
    }
    for name in state:
        own = name.replace(".default.", ".")
        if adapter is not None and own in adapter:
            state[name] = adapter[own]
    return forward_of(policy).kind.as_lora(policy, state)


def save_folded(policy: Any, folder: Path, preference: Sequence[float]) -> None:
    """Writes a conditioned policy's adapter at a preference, as an ordinary PEFT folder."""
    save_state(policy, folder, fold(lora_state(policy), preference))


def save_state(policy: Any, folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Writes an ordinary LoRA adapter with the settings of a policy's as a PEFT folder."""
    policy.save_pretrained(str(folder), state_dict=dict(state), save_embedding_layers=False)
    # PEFT's model card is an empty template that reveals the base model's local path
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(settings["target_modules"], list):
        # PEFT stores them in a set, whose order differs between processes
        settings["target_modules"].sort()
        file.write_text(json_text(settings, indent=2, sort_keys=True), encoding="utf-8")


def has_preferences(folder: Path) -> bool:
    """Returns whether the adapter in a PEFT folder is conditioned, with every trade-off in it."""
    return (folder / _CONDITIONED).is_file()


def read_adapter(folder: Path, preference: Sequence[float] | None = None) -> Adapter:
    """Returns the adapter in a PEFT folder; a conditioned one is folded at the preference.

    Without a preference, a conditioned adapter is read as saved, at equal shares.

    Raises:
        ValueError: When the folder has no adapter, or it cannot be folded at the preference.
    """
    with _reading(folder):
        adapter = load_peft_weights(str(folder), device="cpu")
        if preference is not None and has_preferences(folder):
            adapter |= load_file(folder / _CONDITIONED)
    if preference is None:
        return adapter
    if not any(map(is_conditioned, adapter)):
        raise ValueError(
            f"the adapter in {folder} has no {_CONDITIONED}, hence only one trade-off: train "
            "with policy.conditioning.kind preference, or omit the preference."
        )
    return fold(adapter, preference)


def fill_adapter_(
    policy: PeftModel,
    folder: Path,
    base: str,
    *,
    name: str = "default",
    preference: Sequence[float] | None = None,
) -> None:
    """Fills the slot `name` from a PEFT folder; all tensors must match.

    A conditioned adapter is folded at the preference; without a preference it is read as saved, at
    equal shares.

    Raises:
        ValueError: When the folder has no adapter, one of another model or with non-finite values,
            or the adapter cannot be folded at the preference.
    """
    adapter = read_adapter(folder, preference)
    slot = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False)
    problem = f"the adapter in {folder} does not fit {base}"
    adapter = _without_base(policy, adapter, problem)
    adapter = forward_of(policy).kind.from_lora(policy, adapter, problem)
    check_fits(adapter, slot, problem=problem, remedy="use the base model that it was made for.")
    for key, values in slot.items():
        adapter[key] = adapter[key].to(values.dtype)
        if not adapter[key].isfinite().all():
            raise ValueError(
                f"the adapter in {folder} has non-finite values in {key}: use an adapter of a run "
                "that did not diverge."
            )
    # slots on the meta device are assigned the tensors instead of copying them
    has_no_memory = any(values.is_meta for values in slot.values())
    set_peft_model_state_dict(policy, adapter, adapter_name=name, low_cpu_mem_usage=has_no_memory)


def _without_base(policy: Any, adapter: Adapter, problem: str) -> Adapter:
    """Drops base-model weights from an adapter; PEFT saves them with the adapter of a head.

    Raises:
        ValueError: When such a weight differs from the base model's; the message starts with
            `problem`.
    """
    own: Adapter = policy.state_dict()  # with the base model's parameters
    copies = {name for name in adapter if ".base_layer." in name and name in own}
    for name in copies:
        if adapter[name].shape != own[name].shape or not torch.equal(
            adapter[name].to(own[name]), own[name]
        ):
            raise ValueError(
                f"{problem}: {name} differs from the base model's: use an adapter that leaves the "
                "base model unchanged."
            )
    return {name: values for name, values in adapter.items() if name not in copies}


def refold_adapter_(
    policy: PeftModel, index: int, folder: Path, base: str, preference: Sequence[float]
) -> None:
    """Folds a conditioned adapter loaded by `load_adapters` at another preference.

    Args:
        policy: The model.
        index: Index of the adapter in the folders of `load_adapters`.
        folder: The adapter's folder.
        base: Name of the base model for messages.
        preference: Shares of the M objectives.

    Raises:
        ValueError: When the folder has no conditioned adapter, or its objectives differ.
    """
    fill_adapter_(policy, folder, base, name=_slot_name(index), preference=preference)


def _slot_name(index: int) -> str:
    """Returns a name that occurs in no other name of the model, since peft matches substrings."""
    return f"adapter_{index:04d}"


@contextmanager
def select_adapter(policy: PeftModel, index: int | None) -> Iterator[Reference]:
    """Selects an adapter by its index, or the base model with None; yields its `reference`."""
    if index is None:
        with policy.disable_adapter():
            yield nullcontext
    else:
        policy.set_adapter(_slot_name(index), inference_mode=True)
        yield policy.disable_adapter
