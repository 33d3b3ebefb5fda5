"""Configuration of the training of a reward model, which is read without it."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from firm.base.fields import BoundedInt, Hint, NumWorkers, PositiveFloat, Seed, configuration
from firm.base.sanitize import check_name
from reward_models.config import CallFormat


@configuration
class RewardConfig:
    """A reward model to train: pairs, base model and optimisation."""

    pairs: str | list[str] = ""
    """Ranked pairs: a .json or .jsonl file (optionally .gz), a dataset's folder, a dataset on the
    Hugging Face hub, or a list of these. Rows have `prompt`, `chosen` and `rejected` in any form of
    TRL's."""
    split: str | None = None
    """Split of the source, such as "train[:50%]"; null: a whole file, or the split "train"."""
    ranked_by: str = ""
    """Field with the index of the preferred reply, for rows with `response_0` and `response_1`,
    such as "safer_response_id" in PKU-SafeRLHF."""
    base: str = ""
    """Model to start from: a folder, or a name on the Hugging Face hub."""
    name: str = "reward"
    """Name of the objective that the model judges."""
    format: CallFormat | Literal["auto"] = "auto"
    """Input format, as for reward models; "auto": the base's chat template if it has one,
    otherwise plain."""
    held_out: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    """Share of the prompts whose pairs are held out for the report."""
    max_held_out: BoundedInt = 500
    """Maximum number of held-out prompts."""
    max_length: Annotated[int, Interval(ge=4, le=10_000_000)] = 512
    """Maximum length of prompt and reply in tokens; longer texts are truncated at the start."""
    rank: BoundedInt = 16
    """Rank of the LoRA adapter on all linear layers."""
    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate of AdamW, reached after 5 % of the steps; it then falls linearly."""
    num_epochs: BoundedInt = 1
    """Passes over the training pairs."""
    batch_size: BoundedInt = 16
    """Pairs per step of the optimizer."""
    micro_batch_size: BoundedInt = 4
    """Pairs per forward pass; limits memory and does not affect results."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the frozen base; "auto": bfloat16 where this machine multiplies it fast."""
    device: str = "auto"
    """Device, such as "cpu" or "cuda:1"; "auto" takes an accelerator if there is one."""
    num_threads: Annotated[NumWorkers | None, Hint("null leaves it to torch")] = None
    """Number of CPU threads."""
    seed: Seed = 0
    """Seed of the head, the adapter, the held-out prompts and the order of the pairs."""
    others: dict[str, str] = field(default_factory=dict)
    """Reward models to compare with on the held-out pairs, by name: a folder, a hub name, or a
    function, as for `firm init`."""
    out: Path | None = None
    """New folder of the adapter and its report; default: runs/reward-TIME."""

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ValueError("pairs is missing: pass --pairs FILE.")
        if not self.base:
            raise ValueError("base is missing: pass --base FOLDER_OR_HUB_NAME.")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size ({self.micro_batch_size}), got "
                f"{self.batch_size}."
            )
        check_name(self.name, "name: the name of an objective")
        if self.name in self.others:
            raise ValueError(f"others must not have the model's own name, got {self.name!r}.")
