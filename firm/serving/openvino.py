"""An exported front in OpenVINO GenAI: all adapters in one pipeline, scaled for each call."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from firm.serving.front import ServedFront

BASE_FOLDER = "base"
"""Folder of the base model in an export, as the command that `firm export` prints writes it."""


class OpenVINOEngine:
    """Generates with OpenVINO GenAI, in this process, one call at a time.

    Args:
        folder: Folder of `firm export --to openvino`.
        base: Folder of the base model in OpenVINO's format; by default `base` in the export.
        device: OpenVINO's name of the device.
        properties: Properties of OpenVINO, such as INFERENCE_PRECISION_HINT="f32".

    Raises:
        ValueError: When a file is missing.
        ModuleNotFoundError: When openvino_genai is not installed.
    """

    def __init__(
        self, folder: str | Path, base: str | Path = "", *, device: str = "CPU", **properties: Any
    ) -> None:
        try:
            self._genai: Any = import_module("openvino_genai")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "OpenVINO GenAI is not installed: pip install openvino-genai.",
                name="openvino_genai",
            ) from None
        self.served = ServedFront.load(folder)
        model = Path(base or Path(folder) / BASE_FOLDER)
        if not (model / "openvino_model.xml").is_file():
            raise ValueError(
                f"there is no OpenVINO model in {model}: run the command that `firm export` "
                "printed, or pass the folder of the base model."
            )
        places = {name: Path(folder) / place for name, place in self.served.adapters.items()}
        if missing := [str(p) for p in places.values() if p.suffix != ".safetensors"]:
            raise ValueError(f"{missing[0]} is no adapter of OpenVINO: export with --to openvino.")
        self._adapters = [(name, self._genai.Adapter(str(p))) for name, p in places.items()]
        self.pipeline: Any = self._genai.LLMPipeline(
            str(model),
            device,
            adapters=self._adapter_config(self.served.scales()),
            # the other backend's cache of prompts ignores scales, as of 2026.4
            ATTENTION_BACKEND="SDPA",
            **properties,
        )
        if self.served.chat_template:
            self.pipeline.get_tokenizer().set_chat_template(self.served.chat_template)

    def generate(self, prompt: Any, scales: Mapping[str, float], **options: Any) -> Any:
        """Returns the pipeline's result for a prompt at the scales of `ServedFront.scales`.

        Args:
            prompt: Text, texts, tokens or a history, as `LLMPipeline.generate` takes them.
            scales: Scale of each objective's adapter.
            options: Fields of `openvino_genai.GenerationConfig`; by default a reply ends at the
                tokens at which it ended in training.
        """
        if self.served.end_ids:
            options.setdefault("stop_token_ids", set(self.served.end_ids))
        return self.pipeline.generate(prompt, adapters=self._adapter_config(scales), **options)

    def _adapter_config(self, scales: Mapping[str, float]) -> Any:
        # OpenVINO GenAI 2026.4 keeps all scales if the last adapter's is unchanged, unless the
        # adapters' order has changed
        self._adapters.reverse()
        pairs = [(adapter, scales[name]) for name, adapter in self._adapters]
        return self._genai.AdapterConfig(pairs)
