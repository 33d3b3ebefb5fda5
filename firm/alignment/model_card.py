"""The card of a finished adapter: what it is, how it was made, and what it scored."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from firm.alignment.evaluation import Comparison


def write_model_card(
    folder: Path,
    *,
    base_model: str,
    objectives: Sequence[str],
    comparison: Sequence[Comparison],
    facts: Mapping[str, Any],
) -> None:
    """Writes README.md into an adapter's folder.

    Args:
        folder: A PEFT folder, as `save_pretrained` leaves it.
        base_model: Folder or hub name of the model that the adapter belongs to.
        objectives: Names of the objectives.
        comparison: Figures of base and aligned model on the same held-out prompts.
        facts: What else a reader should know, name to value (rounds, clients, seed, ...).
    """
    header = ModelCardData(
        base_model=base_model,
        library_name="peft",
        tags=["firm", "ppo", "lora", "multi-objective", "federated"],
    )
    rows = ["| " + " | ".join(row.cells()) + " |" for row in comparison]
    text = f"""---
{header.to_yaml()}
---

# {base_model}, aligned to {", ".join(objectives)}

A LoRA adapter trained with FIRM: federated PPO with one policy gradient per objective, a
regularised MGDA problem inside every client, and FedAvg of the adapters.

## Figures on held-out prompts

Mean ± standard error over prompts; the change is paired by prompt. Scores are raw.

| | base | aligned | change | z |
|---|---|---|---|---|
{chr(10).join(rows)}

## How it was made

| | |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in facts.items())}

The learned rewards say what the reward models prefer, not what is true or safe.

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base_model)})
model = PeftModel.from_pretrained(base, "path/of/this/folder")
```
"""
    ModelCard(text).save(folder / "README.md")
