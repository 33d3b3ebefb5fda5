"""LoRA adapters as GGUF files for llama.cpp."""

from contextlib import closing
from pathlib import Path

from peft import LoraConfig
from transformers import PretrainedConfig

from firm.federation.client import Adapter
from firm.serving.gguf_layout import import_gguf, layout_of
from firm.serving.plain import PREFIX, check_plain


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
    gguf, layout = import_gguf(), layout_of(config)
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
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
