"""Configuration of the policy, which is read without torch."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from firm.alignment.adapters.conditioned import ConditioningConfig
from firm.alignment.adapters.lora import ADAPTERS, Lora, LoraSettings
from firm.alignment.prompts import PromptFormat
from firm.base.fields import NOT_IN_PAPER, Paper, configuration
from firm.base.registry import OneOf


@configuration
class PolicyConfig:
    """Language model to align, and its prompt format."""

    path: Annotated[
        str,
        Paper("A.1", ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "meta-llama/Llama-3.2-1B-Instruct")),
    ]
    """Folder, name on the Hugging Face hub, or GGUF file, whose quantized weights are read as
    `dtype`."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "auto"], NOT_IN_PAPER] = "float32"
    """Dtype of the frozen parameters; the adapter is float32. auto: bfloat16, or float32 on a CPU
    that multiplies it faster; the run's config.yaml records which, and a resumed run uses it
    again."""
    device: str = "auto"
    """Device of the policy and its training: "auto" takes the accelerator where there is one,
    and each of several processes another; or "cpu", a type that torch knows, such as "cuda", "mps",
    "xpu" or "npu", or one of several by its index, such as "cuda:1"."""
    device_map: Annotated[dict[str, str] | Literal["auto"] | None, NOT_IN_PAPER] = None
    """Devices of the modules of a policy that is larger than one device, such as
    {model.layers.0: "cuda:0", ...}; or auto, which divides the layers evenly among the accelerators
    of this machine. null: the whole policy is on `device`."""
    shard: Annotated[bool, NOT_IN_PAPER] = False
    """Divide the frozen parameters among the processes of a client (FSDP2): each process keeps its
    part, and every layer is gathered for each pass."""
    gradient_checkpointing: Annotated[bool, NOT_IN_PAPER] = False
    """Recompute activations in the backward pass instead of storing them: less memory,
    more time, the same gradients."""
    prompt: PromptFormat = field(default_factory=PromptFormat)
    """Format of prompts in the policy's input."""
    adapter: Annotated[str, OneOf(ADAPTERS), NOT_IN_PAPER] = "lora"
    """Kind of adapter, by its registered name (`firm.alignment.adapters`). lora: matrices A and B
    per layer. lora_xs: r² parameters per layer between fixed matrices derived from its weight
    (arXiv:2405.17604), whose mean over clients is exact; uses r and alpha of `lora`, but may need
    another learning rate."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Rank, scale and layers of the adapter."""
    conditioning: ConditioningConfig = field(default_factory=ConditioningConfig)
    """Conditioning of the adapter on a preference."""

    def adapter_kind(self, num_objectives: int = 1) -> Lora:
        """Returns the kind of the adapter with its settings.

        Raises:
            ValueError: When conditioning is configured for a single objective, or for a kind that
                is not linear.
        """
        kind = ADAPTERS[self.adapter](self.lora)
        return self.conditioning.condition(kind, num_objectives)


def is_gguf(path: str) -> bool:
    """Returns whether a path names a GGUF file."""
    return path.lower().endswith(".gguf")


def is_repo_name(name: str) -> bool:
    """Returns whether a name is one of a repository on the Hugging Face hub."""
    from huggingface_hub.errors import HFValidationError  # here, since settings are read without it
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_hub_name(name: str) -> bool:
    """Returns whether `name` is a model on the hub rather than a folder."""
    return is_repo_name(name) and not Path(name).exists()
