"""Writes an adapter's model card: description, training and scores."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from firm.alignment.policy_config import is_gguf
from firm.base.sanitize import printable
from firm.jobs.hub import is_hub_name
from firm.run.shipped import path_in_package


def model_card(
    base_model: str, aim: str, text: str, *tags: str, has_tokenizer: bool = True
) -> ModelCard:
    """Returns an adapter's model card, which ends with usage instructions.

    Args:
        base_model: Folder, GGUF file or hub name of the adapter's base model.
        aim: Target of the alignment.
        text: Description and scores, as Markdown.
        tags: Tags in addition to those of every FIRM adapter.
        has_tokenizer: Whether the adapter's folder also contains the tokenizer.
    """
    header = ModelCardData(
        base_model=base_model if is_hub_name(base_model) else None,  # the hub rejects a folder
        library_name="peft",
        tags=["firm", "ppo", "lora", "multi-objective", "federated", *tags],
    )
    place, needed = json.dumps("path/of/the/base/model"), ""
    if is_hub_name(base_model):
        place = json.dumps(base_model)
    elif (inside := path_in_package(base_model)) is not None:
        place = f'files("firm") / {json.dumps(inside)}'
        needed = "from importlib.resources import files\n\n"
    if is_gguf(base_model):
        place += f", gguf_file={json.dumps(Path(base_model).name)}"
    return ModelCard(f"""---
{header.to_yaml()}
---

# {model_name(base_model)}, aligned to {aim}

{text}

Learned rewards measure the preferences of reward models, not truth or safety.

## Use

```python
{needed}from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({place})
model = PeftModel.from_pretrained(base, "path/of/this/folder")
tokenizer = AutoTokenizer.from_pretrained({'"path/of/this/folder"' if has_tokenizer else place})
```
""")


def model_name(path: str) -> str:
    """Returns a model's name for a card, as Markdown; for a local folder, without its path.

    >>> model_name("Qwen/Qwen2.5-0.5B"), model_name("/home/me/models/*policy*")
    ('Qwen/Qwen2.5-0.5B', '\\\\*policy\\\\*')
    >>> model_name("firm/miniature/checkpoints/policy")
    'miniature/checkpoints/policy of firm-align'
    """
    if is_hub_name(path):
        return path
    if (inside := path_in_package(path)) is not None:
        return f"{inside} of firm-align"
    return markdown_text(printable(Path(path).name, max_length=100))


def markdown_text(text: str) -> str:
    """Escapes a text as one line of Markdown that renders verbatim.

    >>> markdown_text("a|b <i>")
    'a\\\\|b \\\\<i\\\\>'
    """
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", printable(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table.

    Raises:
        ValueError: A row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"a row must have {len(header)} cells like the header, got {len(row)}."
            )
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])
