"""The policy that every client aligns: a causal language model with one LoRA adapter slot."""

import copy
import io
import logging
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from firm.alignment.adapters.forward import adapt_
from firm.alignment.adapters.lora import adapted_modules
from firm.alignment.adapters.target_modules import (
    adapted_layers,
    check_layers,
    excluded_modules,
    usual_names,
)
from firm.alignment.policy_config import PolicyConfig, is_gguf
from firm.alignment.prompts import check_template
from firm.base.devices import dtype_name, named_device
from firm.base.extras import install_command
from firm.base.randomness import RandomStream
from firm.base.sanitize import first_line
from firm.federation.client import Adapter

CHECKPOINT_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
    SafetensorError,
    StrictDataclassError,
    struct.error,  # of a truncated GGUF file
)
"""Exceptions that transformers and its dependencies raise for invalid checkpoints."""


def take_device(name: str, *, num_processes: int = 1) -> torch.device:
    """Sets the device that libraries use in this process; call it before they are loaded.

    Args:
        name: Value of `policy.device`. Has an effect only with an index; each of several processes
            already has its own accelerator.
        num_processes: Number of processes of the run.

    Returns:
        The device, with its index if it is an accelerator.

    Raises:
        ValueError: When the device does not exist, or several processes would share it.
    """
    try:
        device = named_device(name)
    except ValueError as error:
        raise ValueError(f"policy.device: {error}") from error
    if device.type == "cpu":
        return device
    if device.index is None:
        return torch.device(device.type, torch.accelerator.current_device_index())
    if num_processes > 1:
        raise ValueError(
            f"policy.device must be auto or {device.type} with {num_processes} processes, each of "
            f"which uses a different device, got {name!r}."
        )
    torch.accelerator.set_device_index(device.index)
    return device


def read_tokenizer(path: str, *, key: str = "policy.path: ") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a checkpoint, unchanged.

    Raises:
        ValueError: When there is no tokenizer at the path; begins with the key.
    """
    with checkpoint_errors("tokenizer", path, key=key):
        return AutoTokenizer.from_pretrained(**checkpoint_source(path))


def read_architecture(path: str) -> PretrainedConfig:
    """Returns the configuration of a checkpoint's model; see `checkpoint_errors` for messages."""
    config = AutoConfig.from_pretrained(**checkpoint_source(path))
    vars(config).pop("quantization_config", None)
    return config


def read_generation_config(path: str, config: PretrainedConfig) -> GenerationConfig:
    """Returns the generation settings of a checkpoint, or those in its model's configuration.

    Args:
        path: A folder, a hub name or a GGUF file.
        config: The model's configuration.
    """
    try:
        if not is_gguf(path):
            return GenerationConfig.from_pretrained(path)
    except OSError:  # optional file: the model's configuration then has the end tokens
        pass
    return GenerationConfig.from_model_config(config)


def checkpoint_source(path: str) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` for a folder, a hub name or a GGUF file.

    Raises:
        ModuleNotFoundError: When reading a GGUF file needs the package gguf.
    """
    if not is_gguf(path):
        return {"pretrained_model_name_or_path": path}
    if find_spec("gguf") is None:
        raise ModuleNotFoundError(
            f"reading {path} needs the package gguf, which is not installed: "
            f"{install_command('real')}.",
            name="gguf",
        )
    file = Path(path).expanduser()
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def load_tokenizer(
    config: PolicyConfig, given: PreTrainedTokenizerBase | Path | None = None
) -> PreTrainedTokenizerBase:
    """Returns the policy's tokenizer, with padding on the left.

    A given tokenizer is copied, or loaded from a given folder; by default the tokenizer at the
    policy's path is loaded. If it lacks a pad token, an existing token is used: masks are computed
    from lengths, so any token works, whereas a new token would have no embedding if it occurs in a
    text.

    Raises:
        ValueError: When there is no tokenizer at the policy's path, or the prompt format needs a
            chat template that is missing or broken.
    """
    if given is None or isinstance(given, Path):
        tokenizer = read_tokenizer(str(given or config.path))
    else:
        tokenizer = copy.deepcopy(given)
    if config.prompt.kind_for(tokenizer) == "chat":
        check_template(tokenizer)
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        others = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.convert_ids_to_tokens(0))
        tokenizer.pad_token = next(token for token in others if token is not None)
    return tokenizer


def check_context(
    config: PolicyConfig,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    model: PreTrainedModel | None = None,
) -> None:
    """Checks that the longest prompt and reply fit into the policy's context.

    Uses the configuration of the given model, or of the model at the policy's path.

    Raises:
        ValueError: When they do not fit, or the model's configuration cannot be read.
    """
    with checkpoint_errors("language model", config.path):
        own = model.config if model else read_architecture(config.path)
    limit = getattr(own.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max_prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"rollout.max_prompt_tokens and max_new_tokens must together fit into the {limit} "
            f"positions of {config.path}, got {max_prompt_tokens} + {max_new_tokens}: lower one of "
            "them."
        )


def check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, what: str) -> None:
    """Checks that the model has an embedding for every token except padding.

    `what` is the tokenizer's name for messages.

    Raises:
        ValueError: When the tokenizer has more tokens.
    """
    num_rows = model.get_input_embeddings().weight.shape[0]
    ids = tokenizer.get_vocab().values()
    largest = max(token_id for token_id in ids if token_id != tokenizer.pad_token_id)
    if largest >= num_rows:
        raise ValueError(
            f"{what} has ids up to {largest}, but the model's embedding has {num_rows} rows: use "
            "the model's own tokenizer, or resize its embedding."
        )


def load_base_model(config: PolicyConfig) -> PreTrainedModel:
    """Returns the language model without an adapter.

    Raises:
        ValueError: When the folder does not exist, the hub cannot be reached, or the checkpoint is
            not a complete language model.
    """
    with checkpoint_errors("language model", config.path):
        dtype = getattr(torch, dtype_name(config.dtype, config.device))
        model, report = _read_model(AutoModelForCausalLM, config.path, dtype)
    if report["missing_keys"]:  # transformers would initialise them randomly
        raise ValueError(
            f"policy.path: {config.path} is not a complete language model, "
            f"{sorted(report['missing_keys'])[0]} is missing: choose another checkpoint."
        )
    return model


def _read_model(kind: Any, path: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Returns the model at a path, and the loading report of transformers."""
    if not is_gguf(path):
        return kind.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,  # a pickle can execute code when loaded
            output_loading_info=True,
        )
    source = checkpoint_source(path)  # before GgufConfig, which needs the package too
    from transformers import GgufConfig

    dense = GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
        read = kind.from_pretrained(**source, dtype=dtype, quantization_config=dense)
    # rebuilt, since transformers refuses to save a model that was read from a GGUF file
    config, state = copy.deepcopy(read.config), read.state_dict()
    vars(config).pop("quantization_config", None)
    config.architectures = [type(read).__name__]
    model, report = type(read).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    model.generation_config = read.generation_config
    model.name_or_path = path
    return model, report


def is_stored_at(path: str, model: PreTrainedModel) -> bool:
    """Returns whether the model's weights equal those of the checkpoint at a path.

    Loads the checkpoint on the CPU in the model's dtype, in addition to the model.
    """
    try:
        stored, _ = _read_model(type(model), path, model.dtype)
    except CHECKPOINT_ERRORS:
        return False
    own, theirs = model.state_dict(), stored.state_dict()
    return own.keys() == theirs.keys() and all(
        torch.equal(tensor.cpu(), theirs[name].to(tensor.dtype)) for name, tensor in own.items()
    )


@contextmanager
def checkpoint_errors(what: str, path: str, *, key: str = "policy.path: ") -> Iterator[None]:
    """Replaces the long messages of transformers by one line with a remedy.

    It begins with the setting that has the path.
    """
    try:
        yield
    except CHECKPOINT_ERRORS as error:
        reason = first_line(error).rstrip(".: ")
        place, remedy = (
            f"the folder {path}",
            "a folder with a complete checkpoint, model and tokenizer",
        )
        if is_gguf(path):
            place = f"the GGUF file {path}"
            remedy = "a complete file of an architecture that transformers reads, or a folder"
        elif not Path(path).expanduser().is_dir():
            raise ValueError(
                f"{key}there is no folder {path}, and no such {what} could be loaded from the "
                f"Hugging Face hub ({reason}): choose the folder of a local checkpoint."
            ) from error
        raise ValueError(
            f"{key}no {what} could be loaded from {place} ({reason}): choose {remedy}."
        ) from error


def load_policy(
    config: PolicyConfig,
    *,
    stream: RandomStream,
    num_objectives: int = 1,
    given: PreTrainedModel | None = None,
) -> PeftModel:
    """Returns the frozen base model with a new adapter, which has no effect yet (B = 0).

    The stream draws the adapter's initial A matrices. `num_objectives` matters for conditioned
    adapters only. The base model is `given` (see `borrowed`), or is loaded.

    Raises:
        ValueError: As in `load_base_model` and `add_adapter`.
    """
    model = given or load_base_model(config)
    with stream:
        return add_adapter(model, config, num_objectives=num_objectives)


def add_adapter(model: Any, config: PolicyConfig, *, num_objectives: int = 1) -> PeftModel:
    """Returns a frozen language model with a new adapter, in evaluation mode.

    The adapter is initialised from the global generators.

    Raises:
        ValueError: When `target_modules` match no layer or one that cannot be adapted, the rank
            exceeds the size of every layer, or conditioning is configured for a single objective.
    """
    lora, kind = config.lora, config.adapter_kind(num_objectives)
    names = list(lora.target_modules or usual_names(model))
    layers: dict[str, Any] = adapted_layers(model, names, config.path)
    sizes = [size for layer in layers.values() for size in layer.weight.shape]
    if lora.r > max(sizes):  # before allocating matrices of that size
        raise ValueError(
            f"policy.lora.r must be at most {max(sizes)}, the largest side of the adapted matrices "
            f"of {config.path}, got {lora.r}."
        )
    with without_needless_warnings():
        if config.gradient_checkpointing:
            _checkpoint_activations_(model)
        settings = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float works
            lora_dropout=lora.dropout,
            target_modules=names,
            exclude_modules=excluded_modules(model, names),
            fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in layers.values()),
            **kind.peft_options(),
        )
        try:
            policy: Any = get_peft_model(model, settings)
            check_layers(settings)
        except ValueError as error:
            raise ValueError(
                f"policy.lora.target_modules: {sorted(names)} cannot get an adapter in "
                f"{config.path} ({first_line(error).rstrip('.')}): name attention layers, or set "
                "it to null."
            ) from error
    base = Path(config.path)  # absolute, since an adapter may be loaded from any directory
    name = str(base.resolve()) if base.exists() else config.path
    policy.peft_config["default"].base_model_name_or_path = name
    adapt_(policy, kind)
    return policy.eval()


def move_(model: torch.nn.Module, device: torch.device) -> None:
    """Moves a model to a device.

    Some backends replace parameters on the way: modules that share one, as a head that is tied to
    the embedding, would have a copy each.
    """
    places = [
        (part._parameters, name, parameter)
        for part in model.modules()
        for name, parameter in part._parameters.items()
    ]
    model.to(device)  # may make new parameters
    moved: dict[torch.nn.Parameter | None, torch.nn.Parameter | None] = {}
    for parameters, name, parameter in places:
        parameters[name] = moved.setdefault(parameter, parameters[name])


@contextmanager
def borrowed(model: PreTrainedModel | None) -> Iterator[None]:
    """Restores a model given by the user at the end: removes adapters, resets modes and dropout.

    The model stays on its current device.
    """
    if model is None:
        yield
        return
    # by name, as some backends replace parameters when the model moves there
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    dropouts = [(m, m.p) for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    modes = [(module, module.training, _checkpointing(module)) for module in model.modules()]
    try:
        yield
    finally:
        for name, layer in adapted_modules(model).items():
            model.set_submodule(name, layer.get_base_layer())
        vars(model).pop("peft_config", None)  # PEFT would take it for an adapted model
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags[name])
        for dropout, probability in dropouts:
            dropout.p = probability
        for module, is_training, checkpointing in modes:
            module.training = is_training
            for name in _checkpointing(module):
                delattr(module, name)
            vars(module).update(checkpointing)


def _checkpointing(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that gradient checkpointing sets."""
    return {name: value for name, value in vars(module).items() if "gradient_checkpoint" in name}


@contextmanager
def without_needless_warnings() -> Iterator[None]:
    """Silences warnings of transformers and PEFT that users cannot act on.

    peft, TRL and `load_policy` use names that transformers 6 will remove, which the upper bound in
    pyproject.toml excludes; a process group does not imply data-parallel training here; and PEFT
    corrects `fan_in_fan_out` itself for layers with transposed weights.
    """
    logger = logging.getLogger("transformers.training_args")

    def is_actionable(record: logging.LogRecord) -> bool:
        return "process group is initialized" not in record.getMessage()

    logger.addFilter(is_actionable)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
            yield
    finally:
        logger.removeFilter(is_actionable)


def adapter_parameters(policy: Any) -> dict[str, torch.nn.Parameter]:
    """Returns the trainable parameters of the active adapter, by their names in a PEFT file."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    }


def set_mode(policy: Any, *, is_training: bool) -> None:
    """Switches the adapter's dropout on or off; the base model stays in evaluation mode.

    Evaluation mode disables the base model's dropout however it is implemented (as a module, a
    function, an attribute of attention, dropped layers), and all other training noise, so that a
    policy that has not been updated reproduces the probabilities of its samples. If the policy is
    already in the requested mode, the walk over its modules, which takes milliseconds, is skipped.
    """
    if policy.training == is_training:
        return
    policy.eval()
    policy.training = is_training  # only the wrapper's flag; it has no dropout
    for module in policy.modules() if is_training else ():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()
        elif isinstance(module, GradientCheckpointingLayer):
            module.training = module.gradient_checkpointing


def _checkpoint_activations_(model: Any) -> None:
    """Enables gradient checkpointing with layers in evaluation mode.

    Transformers checkpoints layers in training mode only, but some layers use the same flag for
    their dropout.
    """

    def recompute(layer: Any, own: Callable, forward: Callable, *args: Any) -> Any:
        def in_evaluation_mode(*args: Any) -> Any:
            layer.training = False
            try:
                return forward(*args)
            finally:
                layer.training = True

        return own(in_evaluation_mode, *args)

    # reentrant checkpointing computes no gradients if its inputs require none
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            settings: Any = layer
            own = settings._gradient_checkpointing_func
            settings._gradient_checkpointing_func = partial(recompute, layer, own)


def copy_adapter(parameters: dict[str, torch.nn.Parameter]) -> Adapter:
    """Returns a detached copy of the parameters on the CPU, in their order."""
    return {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}


def check_fits(
    adapter: Adapter, slot: Mapping[str, torch.Tensor], *, problem: str, remedy: str
) -> None:
    """Raises ``ValueError`` unless an adapter has the names and shapes of its slot."""
    if odd := sorted(adapter.keys() ^ slot.keys()):
        raise ValueError(
            f"{problem}: {len(odd)} names exist on one side only, such as {odd[0]!r}: {remedy}"
        )
    for name, values in slot.items():
        if adapter[name].shape != values.shape:
            raise ValueError(
                f"{problem}: {name} has shape {list(adapter[name].shape)}, expected "
                f"{list(values.shape)}: {remedy}"
            )


@torch.no_grad()
def load_adapter_(parameters: dict[str, torch.nn.Parameter], adapter: Adapter) -> None:
    """Copies an adapter into the live parameters; optimizers stay bound to them.

    Raises:
        ValueError: When names or shapes do not match this model.
    """
    remedy = "use the rank, target modules and base model that it was trained with."
    check_fits(adapter, parameters, problem="the adapter does not fit the policy", remedy=remedy)
    for name, parameter in parameters.items():
        parameter.copy_(adapter[name])
