"""Serves the front of a conditioned run at any preference, by engines that know plain LoRA.

A conditioned adapter is linear in the preference, so that it is the sum of M ordinary LoRA
adapters, one per objective, whose scales are the shares of the preference. `front` is the record
`front.json` of an export, which turns a preference, a target or requirements into scales,
`targets` has a file per engine that writes exports for it, `peft_scales` sets the scales in a model
of PEFT and `openvino` in OpenVINO GenAI, and `endpoint` answers OpenAI's chat requests with
llama.cpp, at the preference that they state.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.serving.front import ServedFront
    from firm.serving.openvino import OpenVINOEngine
    from firm.serving.peft_scales import load_served, set_scales_

# imported when first used
__all__ = ["OpenVINOEngine", "ServedFront", "load_served", "set_scales_"]

__getattr__, __dir__ = lazy(__name__)
