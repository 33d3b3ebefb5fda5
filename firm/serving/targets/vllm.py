"""vLLM, which does not scale adapters: a PEFT folder per measured point."""

from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig

from firm.alignment.rollout_config import max_lora_rank
from firm.federation.client import Adapter
from firm.serving.export_target import ExportedRun
from firm.serving.plain import check_plain
from firm.serving.targets.peft import PeftTarget


class VllmTarget(PeftTarget):
    """PEFT folders of plain LoRA adapters, at the measured points of a front."""

    is_scaled = False

    def write_adapter(self, place: Path, adapter: Adapter, source: ExportedRun) -> None:
        """Writes the folder of an adapter that is plain; see `check_plain`."""
        check_plain(adapter, source.settings, "vLLM")
        super().write_adapter(place, adapter, source)

    def write_rest(self, folder: Path, source: ExportedRun, *, has_base: bool) -> str:
        """Writes the sampling of replies beside the adapters."""
        # vLLM would limit all requests to max_new_tokens
        settings = {**source.generation.to_diff_dict(), "max_new_tokens": None}
        GenerationConfig(**settings).save_pretrained(folder)
        return ""

    def command(
        self, folder: Path, base_model: str, places: Sequence[str], rank: int, *, is_front: bool
    ) -> list[str]:
        """Returns the command of vLLM's server."""
        modules = [f"{place or 'adapter'}={folder.resolve() / place}" for place in places]
        return [
            *("vllm", "serve", base_model, "--host", "127.0.0.1", "--enable-lora"),
            *("--generation-config", str(folder.resolve())),
            *("--max-loras", str(len(places)), "--max-lora-rank", str(max_lora_rank(rank))),
            *("--lora-modules", *modules),
        ]


TARGET = VllmTarget()
