"""What an engine takes of a run: the base class of the targets in `firm.serving.targets`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import GenerationConfig, PretrainedConfig

from firm.alignment.policy import PolicyConfig, load_tokenizer
from firm.base.preferences import FRONT_NAME
from firm.federation.client import Adapter
from firm.serving.adapter_folders import tokenizer_files
from firm.serving.front import ServedFront


@dataclass(frozen=True)
class ExportedRun:
    """A finished run's parts of an export."""

    adapter: Path
    """Folder of its adapter."""
    settings: LoraConfig
    """Settings in that folder."""
    policy: PolicyConfig
    """Its base model."""
    architecture: PretrainedConfig
    """Architecture of the base model."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling of replies as in training."""
    end_ids: Sequence[int] = ()
    """Tokens at which replies ended in training."""

    def tokenizer(self) -> Any:
        """Returns the policy's tokenizer, from the adapter's folder if it is there."""
        own = self.adapter if tokenizer_files(self.adapter) else None
        return load_tokenizer(self.policy, own)


class ExportTarget:
    """An engine that serves exports; subclasses say what differs."""

    suffix = ""
    """Suffix of an objective's adapter; no objective has the base model's name."""
    single_file = ""
    """File of a single adapter; empty if it is the export's folder itself."""
    is_scaled = True
    """Whether the engine scales one adapter per objective, or needs one per measured point."""
    has_card = False
    """Whether adapters are folders, which have a model card."""
    has_sampling = False
    """Whether exports of single adapters keep the sampling of replies."""
    verb = "serve"
    """Purpose of the command that comes next."""

    def write_adapter(self, place: Path, adapter: Adapter, source: ExportedRun) -> None:
        """Writes an adapter to a folder or file.

        Raises:
            ValueError: The engine does not support it.
        """
        raise NotImplementedError

    def write_rest(self, folder: Path, source: ExportedRun, *, has_base: bool) -> str:
        """Writes what the engine needs besides adapters; returns the base model's file, if any.

        Args:
            folder: Folder of the export.
            source: The run's parts.
            has_base: Whether to write the base model, if the engine has its own format.
        """
        return ""

    def write_front(self, folder: Path, served: ServedFront, places: Sequence[str]) -> None:
        """Writes the front's record: its scales or, without them, its points with their adapters.

        Args:
            folder: Folder of the export.
            served: The front.
            places: Folder or file of each adapter in it.
        """
        if self.is_scaled:
            served.save(folder)
            return
        front = served.front
        points = [replace(p, adapter=place) for p, place in zip(front.points, places, strict=True)]
        replace(front, points=tuple(points)).save(folder / FRONT_NAME)

    def command(
        self, folder: Path, base_model: str, places: Sequence[str], rank: int, *, is_front: bool
    ) -> list[str]:
        """Returns the command that comes after the export; empty if there is none.

        Args:
            folder: Folder of the export.
            base_model: The base model.
            places: Folder or file of each adapter in the folder.
            rank: Rank of the adapters.
            is_front: Whether it is the front of a conditioned run, not a single adapter.
        """
        return []
