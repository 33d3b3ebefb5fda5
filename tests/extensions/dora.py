"""A kind of adapter of another package: DoRA, which PEFT's own layers compute."""

from typing import Any, ClassVar

from firm.alignment.adapters import Lora, register_adapter


@register_adapter
class Dora(Lora):
    """DoRA, Liu et al. (2024), arXiv:2402.09353: LoRA changes directions, a vector the lengths."""

    name: ClassVar[str] = "dora"
    has_factors: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False  # the lengths divide by the norm of W + B A

    def peft_options(self) -> dict[str, Any]:
        """Returns the option that makes PEFT's layers DoRA's."""
        return {"use_dora": True}
