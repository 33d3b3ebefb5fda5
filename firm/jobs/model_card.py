"""The card of an adapter: what it is, how it was made, and what it scored."""

import json
from collections.abc import Sequence

from huggingface_hub import ModelCard, ModelCardData

from firm.jobs.hub import is_hub_name


def model_card(base_model: str, aim: str, text: str, *tags: str) -> ModelCard:
    """Returns an adapter's card, which ends with how to use it.

    Args:
        base_model: Folder or hub name of the model that the adapter belongs to.
        aim: What it was aligned to.
        text: What it is and what it scored, as Markdown.
        tags: Beside those that every adapter of FIRM's has.
    """
    header = ModelCardData(
        base_model=base_model if is_hub_name(base_model) else None,  # the hub refuses a folder
        library_name="peft",
        tags=["firm", "ppo", "lora", "multi-objective", "federated", *tags],
    )
    return ModelCard(f"""---
{header.to_yaml()}
---

# {base_model}, aligned to {aim}

{text}

The learned rewards say what the reward models prefer, not what is true or safe.

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base_model)})
model = PeftModel.from_pretrained(base, "path/of/this/folder")
```
""")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table in Markdown.

    Raises:
        ValueError: A row has more or fewer cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row must have {len(header)} cells as the header, got {len(row)}.")
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])
