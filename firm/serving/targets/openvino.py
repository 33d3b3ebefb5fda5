"""OpenVINO GenAI: a safetensors file per objective, whose scaled sum is the front."""

from collections.abc import Sequence
from pathlib import Path

from peft import LoraConfig
from safetensors.torch import save_file

from firm.federation.client import Adapter
from firm.serving.export_target import ExportedRun, ExportTarget
from firm.serving.openvino import BASE_FOLDER
from firm.serving.plain import check_plain


def write_adapter(file: Path, adapter: Adapter, settings: LoraConfig) -> None:
    """Writes a plain LoRA adapter as a safetensors file whose own scale is 1.

    OpenVINO GenAI reads no settings, so α / r is part of the matrices B.

    Raises:
        ValueError: When the adapter is not plain; see `check_plain`.
    """
    check_plain(adapter, settings, "OpenVINO GenAI")
    scale = settings.lora_alpha / (settings.r**0.5 if settings.use_rslora else settings.r)
    scaled = {
        name: (scale * values if ".lora_B." in name else values).contiguous()
        for name, values in adapter.items()
    }
    save_file(scaled, file, metadata={"format": "pt"})


class OpenVINOTarget(ExportTarget):
    """Safetensors files of plain LoRA adapters; `optimum-cli` converts the base model."""

    suffix = ".safetensors"
    single_file = "adapter.safetensors"
    verb = "convert"

    def write_adapter(self, place: Path, adapter: Adapter, source: ExportedRun) -> None:
        """Writes a plain adapter as a safetensors file."""
        write_adapter(place, adapter, source.settings)

    def command(
        self, folder: Path, base_model: str, places: Sequence[str], rank: int, *, is_front: bool
    ) -> list[str]:
        """Returns the command that converts the base model."""
        # optimum-intel pins transformers, so it is not called from here
        task = ("--model", base_model, "--task", "text-generation-with-past")
        base = str(folder.resolve() / BASE_FOLDER)
        return ["optimum-cli", "export", "openvino", *task, base]


TARGET = OpenVINOTarget()
