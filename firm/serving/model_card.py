"""Writes an adapter's model card: description, training and scores."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from firm.alignment.fetching import MODELS, SOURCE_NAME
from firm.alignment.policy_config import is_gguf, is_hub_name
from firm.base.sanitize import printable
from firm.run.shipped import path_in_package, with_shipped_paths

CARD_NAME = "README.md"
"""File with the model card, in an adapter's folder."""
_TAGS = ["firm", "lora", "multi-objective", "federated"]
"""Tags of every adapter."""


@dataclass(frozen=True)
class BaseModel:
    """An adapter's base model, as a card names it."""

    name: str
    """Name, as Markdown; without the path of a local folder."""
    repo: str | None = None
    """Repository on the Hugging Face hub."""
    revision: str = ""
    """Commit of the repository whose weights the adapter was trained on; empty if unknown."""
    note: str = ""
    """Another origin of the weights, as Markdown."""

    @property
    def in_words(self) -> str:
        """The name with the revision or the origin."""
        more = f"revision {self.revision}" if self.revision else self.note
        return ", ".join(filter(None, (self.name, more)))


def base_of(path: str) -> BaseModel:
    """Returns the base model at a policy's path: a folder, a GGUF file or a name on the hub."""
    if is_hub_name(path):
        cached = try_to_load_from_cache(path, "config.json")  # .../snapshots/REVISION/config.json
        return BaseModel(path, path, Path(cached).parent.name if isinstance(cached, str) else "")
    folder = Path(with_shipped_paths(path))
    origin: Any = {}
    with suppress(OSError, ValueError):
        origin = json.loads((folder / SOURCE_NAME).read_text(encoding="utf-8"))
    if isinstance(origin, dict) and (model := MODELS.get(str(origin.get("model")))):
        repo, revision = model.repo, printable(str(origin.get("revision", "")))
        note = f"the weights of {markdown_text(str(origin.get('from')))}"
        return BaseModel(repo, repo, revision, note)
    if snapshot := re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$", str(folder)):
        owner, name, revision = snapshot.groups()
        return BaseModel(f"{owner}/{name}", f"{owner}/{name}", revision)
    return BaseModel(model_name(path))


def tags_of(adapter: Path) -> list[str]:
    """Returns the tags on the card in an adapter's folder, other than those of every adapter."""
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = (adapter / CARD_NAME).read_text(encoding="utf-8")
    header = text.removeprefix("---\n").partition("\n---")[0]
    return [tag for tag in re.findall(r"^- ([a-z0-9-]+)$", header, re.M) if tag not in _TAGS]


def model_card(
    base_model: str, aim: str, text: str, *tags: str, has_tokenizer: bool = True
) -> ModelCard:
    """Returns an adapter's model card, which ends with usage instructions.

    Args:
        base_model: Folder, GGUF file or hub name of the adapter's base model.
        aim: Target of the alignment.
        text: Description and scores, as Markdown.
        tags: Tags in addition to those of every FIRM adapter, such as the estimator's.
        has_tokenizer: Whether the adapter's folder also contains the tokenizer.
    """
    base = base_of(base_model)
    header = ModelCardData(
        base_model=base.repo,  # None for a folder, which the hub rejects
        library_name="peft",
        tags=list(dict.fromkeys([*_TAGS, *tags])),
    )
    place, needed = json.dumps("path/of/the/base/model"), ""
    if base.repo and (base.revision or not base.note):
        revision = f", revision={json.dumps(base.revision)}" if base.revision else ""
        place = json.dumps(base.repo) + revision
    elif (inside := path_in_package(base_model)) is not None:
        place = f'files("firm") / {json.dumps(inside)}'
        needed = "from importlib.resources import files\n\n"
    if is_gguf(base_model):
        place += f", gguf_file={json.dumps(Path(base_model).name)}"
    return ModelCard(f"""---
{header.to_yaml()}
---

# {base.name}, aligned to {aim}

Base model: {base.in_words}.

{text}

Rewards measure preferences, of people or of models that learned them, not truth or safety.

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
