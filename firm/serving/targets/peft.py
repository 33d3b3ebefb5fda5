"""PEFT: a folder per objective, whose scaled sum is the front."""

from pathlib import Path

from firm.federation.client import Adapter
from firm.serving.adapter_folders import save_like
from firm.serving.export_target import ExportedRun, ExportTarget


class PeftTarget(ExportTarget):
    """PEFT folders of adapters."""

    has_card = True
    has_sampling = True

    def write_adapter(self, place: Path, adapter: Adapter, source: ExportedRun) -> None:
        """Writes the folder of an adapter, with its tokenizer and sampling."""
        save_like(source.adapter, place, adapter)
        source.generation.save_pretrained(place)


TARGET = PeftTarget()
