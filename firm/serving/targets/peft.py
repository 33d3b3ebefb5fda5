"""PEFT: a folder per objective, whose scaled sum is the front."""

from pathlib import Path

from firm.federation.client import Adapter
from firm.serving.adapter_folders import save_like
from firm.serving.export_target import Source, Target


class PeftTarget(Target):
    """PEFT folders of adapters."""

    has_card = True

    def write_adapter(self, place: Path, adapter: Adapter, source: Source) -> None:
        """Writes the folder of an adapter, with its tokenizer and sampling."""
        save_like(source.adapter, place, adapter)
        source.generation.save_pretrained(place)


TARGET = PeftTarget()
