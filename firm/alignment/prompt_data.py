"""Stage 1 of a round: where prompts come from, files, data sets and hubs, and which are used."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import datasets
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from firm.alignment.prompts import Prompt, as_prompt
from firm.federation.outside import first_line
from firm.fields import NOT_IN_PAPER, NonNegativeInt, Paper, configuration


@configuration
class PromptsConfig:
    """Where prompts come from and which of them are used."""

    source: Annotated[str | list[str], Paper("A.1", ("Anthropic/hh-rlhf",))] = "Anthropic/hh-rlhf"
    """A .json or .jsonl file (.gz too), a dataset's folder, a dataset on the Hugging Face hub, or a
    list of these. A colon separates a dataset from one of its folders,
    which names the prompts' kind: "Anthropic/hh-rlhf:harmless-base"."""
    split: str = "train"
    """Split of a dataset, such as "test[:50%]"; a file has none and is taken whole, or in part
    with a slice alone, such as "[:80%]" or "[100:200]"."""
    min_tokens: Annotated[NonNegativeInt, NOT_IN_PAPER] = 0
    """Shorter dialogues are left out, in tokens of the policy."""
    max_tokens: Annotated[NonNegativeInt | None, NOT_IN_PAPER] = None
    """Longer dialogues are left out, in tokens of the policy; by default they stay and are cut to
    fit."""

    def __post_init__(self) -> None:
        if (self.max_tokens or self.min_tokens) < self.min_tokens:
            raise ValueError(
                f"max_tokens must be at least min_tokens ({self.min_tokens}), got "
                f"{self.max_tokens}; widen the limits."
            )


def load_prompts(
    config: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    given: Iterable[Prompt] | None = None,
) -> list[Prompt]:
    r"""Returns the distinct prompts of one or more sources, in their order; or of those given.

    A row gives its field `prompt`, a text or chat turns with `role` and `content`; or where it has
    none, its `messages` up to the user's last one; or `chosen`, as turns likewise, or as a text up
    to and including its last `"\n\nAssistant:"`, which is how Anthropic/hh-rlhf comes. `kind` is
    optional; reward functions get further fields by keyword. Limits on tokens need the policy's
    tokenizer.

    Raises:
        ValueError: A source cannot be read, a row of it is malformed, or no prompt is left. The
            message names source and row, and never repeats the text.
    """
    sources = [config.source] if isinstance(config.source, str) else config.source
    rows = (prompt for source in sources for prompt in _read(source, config.split))
    rows = rows if given is None else given
    prompts = list({prompt.text: prompt for prompt in rows}.values())
    num_distinct, longest = len(prompts), config.max_tokens
    if config.min_tokens or longest is not None:
        if tokenizer is None:
            raise ValueError(
                f"min_tokens {config.min_tokens} and max_tokens {longest} need a tokenizer that "
                "counts: pass the policy's."
            )
        longest = float("inf") if longest is None else longest
        token_ids = tokenizer([prompt.text for prompt in prompts], verbose=False)["input_ids"]
        lengths = zip(prompts, map(len, token_ids), strict=True)
        prompts = [prompt for prompt, num in lengths if config.min_tokens <= num <= longest]
    if not num_distinct:
        raise ValueError(
            f"there is no prompt in {', '.join(sources)}, got an empty file or split: "
            "give a source that has some."
        )
    if not prompts:
        raise ValueError(
            f"no prompt is left of {num_distinct} in {', '.join(sources)}: "
            "give a source that has some, or widen min_tokens and max_tokens."
        )
    return prompts


def _read(source: str, split: str) -> Iterator[Prompt]:
    path = Path(source).expanduser()
    if path.is_file():
        rows = list(_read_file(path))
        yield from rows[_slice(split, len(rows))] if split.startswith("[") else rows
        return
    name, _, folder = (source, "", "") if path.is_dir() else source.partition(":")
    for number, row in enumerate(_open_dataset(name, folder, split), start=1):
        yield as_prompt(row, place=f"{source}, {split} row {number}", kind=folder)


def _slice(split: str, num_rows: int) -> slice:
    """Returns which rows of a file `[from:to]` stands for, as in splits of datasets."""
    try:
        (part,) = datasets.ReadInstruction.from_spec(f"rows{split}").to_absolute({"rows": num_rows})
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"split must be a slice such as [:80%] or [100:200], got {split!r}: correct it."
        ) from error
    return slice(part.from_, part.to)


def _read_file(path: Path) -> Iterator[Prompt]:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1] not in (".json", ".jsonl"):
        raise ValueError(f"{path} is not a .json or .jsonl file (.gz too): convert it to one.")
    is_whole = suffixes[-1] == ".json"
    open_text: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 1
    try:
        with open_text(path, "rt", encoding="utf-8") as file:
            if is_whole:
                rows = json.load(file)
                if not isinstance(rows, list):
                    raise ValueError(
                        f"{path} holds a JSON {type(rows).__name__}: give a list of objects, or "
                        "one object per line in a .jsonl file."
                    )
                for number, row in enumerate(rows, start=1):
                    yield as_prompt(row, place=f"{path}, row {number}")
            else:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield as_prompt(json.loads(line), place=f"{path}, line {number}")
    except json.JSONDecodeError as error:
        line = error.lineno if is_whole else number
        raise ValueError(
            f"{path}, line {line}: not valid JSON ({error.msg} at column {error.colno}): repair it."
        ) from None
    except RecursionError:
        place = f"{path}" if is_whole else f"{path}, line {number}"
        raise ValueError(f"{place}: JSON that is nested too deeply: repair it.") from None
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): give UTF-8 text, plain or in a whole "
            "gzip file."
        ) from None


def _open_dataset(name: str, folder: str, split: str) -> Any:
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(name)
            if isinstance(dataset, datasets.Dataset):
                return dataset
            if split not in dataset:
                raise ValueError(f"it has no split {split!r}, only {', '.join(map(str, dataset))}")
            return dataset[split]
        return datasets.load_dataset(name, data_dir=folder or None, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = first_line(error)
        raise ValueError(
            f"no prompts at {name}: it is no file, and no dataset could be loaded ({reason}): "
            "give the path of a .jsonl file or a folder, or the name of a dataset within reach."
        ) from None
