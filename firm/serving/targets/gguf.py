"""llama.cpp: a GGUF file per objective, whose scaled sum is the front, and the base model."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import transformers
from peft import LoraConfig
from transformers import PretrainedConfig

from firm.alignment.policy import is_gguf, load_base_model
from firm.federation.client import Adapter
from firm.serving.export_target import ExportedRun, ExportTarget
from firm.serving.gguf_base import TensorLayout, finish, import_gguf, write_base
from firm.serving.plain import PREFIX, check_plain

BASE_NAME = "base.gguf"
"""File of the base model in an export."""


def write_adapter(
    file: Path, adapter: Adapter, settings: LoraConfig, config: PretrainedConfig, *, name: str
) -> None:
    """Writes a plain LoRA adapter as a GGUF file, in float32.

    Args:
        file: File to write.
        adapter: The adapter by PEFT's names, such as `base_model.model.[...].lora_A.weight`.
        settings: Settings in PEFT's folder.
        config: Configuration of the base model.
        name: Name of the adapter in the file's metadata.

    Raises:
        ValueError: When the architecture is not supported, or the adapter is not plain; see
            `check_plain`.
    """
    check_plain(adapter, settings, "llama.cpp")
    gguf, layout = import_gguf(), TensorLayout(config)
    writer = gguf.GGUFWriter(str(file), layout.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(name)
    # llama.cpp scales by alpha / r
    alpha = settings.lora_alpha * (settings.r**0.5 if settings.use_rslora else 1)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for own, values in adapter.items():
        layer, _, factor = own.removesuffix(".weight").rpartition(".lora_")
        weight = f"{layer.removeprefix(PREFIX)}.weight"
        ordered = layout.rows(weight, values) if factor == "B" else values
        writer.add_tensor(
            f"{layout.name(weight)}.lora_{factor.lower()}", ordered.float().contiguous().numpy()
        )
    finish(writer)


class GgufTarget(ExportTarget):
    """GGUF files of plain LoRA adapters and of the base model."""

    suffix = ".lora.gguf"
    single_file = "adapter.gguf"

    def write_adapter(self, place: Path, adapter: Adapter, source: ExportedRun) -> None:
        """Writes a plain adapter as a GGUF file."""
        write_adapter(place, adapter, source.settings, source.architecture, name=place.name)

    def write_rest(self, folder: Path, source: ExportedRun, *, has_base: bool) -> str:
        """Writes the base model as a GGUF file."""
        if not has_base:
            return ""
        file, path = folder / BASE_NAME, source.policy.path
        if is_gguf(path):
            shutil.copyfile(Path(path).expanduser(), file)
        else:
            transformers.utils.logging.disable_progress_bar()
            write_base(file, load_base_model(source.policy), source.tokenizer(), source.end_ids)
        return BASE_NAME

    def command(
        self, folder: Path, base_model: str, places: Sequence[str], rank: int, *, is_front: bool
    ) -> list[str]:
        """Returns the command of `firm serve`, or of llama.cpp's server for a single adapter."""
        if is_front:
            return ["firm", "serve", "--export", str(folder)]
        base = folder.resolve() / BASE_NAME
        if not base.exists():
            return []
        files = ("--model", str(base), "--lora", str(folder.resolve() / self.single_file))
        return ["llama-server", *files]


TARGET = GgufTarget()
