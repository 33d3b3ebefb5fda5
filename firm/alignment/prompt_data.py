"""Stage 1 of a local step: reads prompts from files, datasets and the hub, and filters them."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from firm.alignment.prompts import AUTO, Prompt, PromptFormat, as_prompt, reader_of, token_ids
from firm.base.fields import NOT_IN_PAPER, NonNegativeInt, Paper, configuration
from firm.base.sanitize import first_line

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

MAX_PACKING, FREE_BYTES = 100, 16 * 2**20
"""Largest ratio of a text's size to that of its gzip file, which is 3 to 20 for data sets, and the
size up to which any ratio is allowed."""
NUM_JUDGED = 1000
"""Rows of each split used to detect the reader."""


@configuration
class PromptsConfig:
    """Source of prompts, and filters on them."""

    source: Annotated[str | list[str], Paper("A.1", ("Anthropic/hh-rlhf",))] = "Anthropic/hh-rlhf"
    """A .json or .jsonl file (optionally .gz), a dataset's folder, a dataset on the Hugging Face
    hub, or a list of these. A colon selects a folder of a dataset, which also names the kind of the
    prompts: "Anthropic/hh-rlhf:harmless-base"."""
    split: str | None = "train"
    """Split, or slices of splits, such as "test[:50%]", "[90%:]" and "train[:10%]+train[90%:]". A
    file and a single saved dataset have one split, "train", to which a bare slice applies. null
    uses them whole, and the default split of other datasets: train, or half of test."""
    min_tokens: Annotated[NonNegativeInt, NOT_IN_PAPER] = 0
    """Minimum length of a prompt in tokens of the policy; shorter prompts are dropped."""
    max_tokens: Annotated[NonNegativeInt | None, NOT_IN_PAPER] = None
    """Maximum length of a prompt in tokens of the policy; longer prompts are dropped. By default
    they are kept and truncated."""
    reader: Literal["auto", "text", "hh"] = "auto"
    """Parsing of texts: "text" uses them unchanged; "hh" parses HH-RLHF's form into messages;
    "auto" selects hh if most of the first texts in the source's splits have that form. Does not
    apply to chat messages."""
    drop_duplicates: Annotated[bool, NOT_IN_PAPER] = False
    """Drop rows that equal an earlier row in the prompt and in all further fields, replies in the
    data among them. Rows that only share the prompt are kept."""

    def __post_init__(self) -> None:
        if self.split is not None:
            _summands(self.split)
        if (self.max_tokens or self.min_tokens) < self.min_tokens:
            raise ValueError(
                f"max_tokens must be at least min_tokens ({self.min_tokens}), got "
                f"{self.max_tokens}; widen the limits."
            )


def load_prompts(
    config: PromptsConfig,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    given: Iterable[Prompt] | None = None,
    prompt_format: PromptFormat = AUTO,
    default_split: str = "train",
    on_note: Callable[[str], None] | None = None,
) -> list[Prompt]:
    r"""Returns one prompt for each row of one or more sources, in order; or the given prompts.

    A row's prompt is its field `prompt`, a text or chat messages with `role` and `content`; or else
    its `messages` without the assistant's final ones; or else `chosen`, likewise as messages, or as
    a text: up to and including the last `"\n\nAssistant:"` in HH-RLHF's form, as in
    Anthropic/hh-rlhf, and otherwise its common prefix with `rejected`. `tools` and
    `chat_template_kwargs` are passed to the chat template. `kind` is optional; reward functions
    receive further fields as keyword arguments, None where a row lacks one. Limits on tokens
    require the policy's tokenizer. If the configuration's split is null, `default_split` is used
    for datasets with named splits. `on_note` receives a message about dropped rows.

    Raises:
        ValueError: When a source cannot be read, a row is malformed, or no prompt is left. The
            message names source and row, but never quotes the text.
    """
    sources = [config.source] if isinstance(config.source, str) else config.source
    if given is None:
        read = partial(read_prompts, reader=config.reader, default_split=default_split)
        given = (prompt for source in sources for prompt in read(source, config.split))
    prompts = list(given)
    if config.drop_duplicates:
        prompts = _without_duplicates(prompts, on_note)
    num_rows, longest = len(prompts), config.max_tokens
    if config.min_tokens or longest is not None:
        if tokenizer is None:
            raise ValueError(
                f"min_tokens {config.min_tokens} and max_tokens {longest} require a tokenizer: "
                "pass the policy's."
            )
        longest = float("inf") if longest is None else longest
        rows_of_ids = token_ids(prompts, tokenizer, prompt_format)
        lengths = zip(prompts, map(len, rows_of_ids), strict=True)
        prompts = [prompt for prompt, num in lengths if config.min_tokens <= num <= longest]
        if on_note and len(prompts) < num_rows:
            limits = f"min_tokens {config.min_tokens}, max_tokens {config.max_tokens}"
            on_note(f"{num_rows - len(prompts)} of {num_rows} rows are dropped ({limits}).")
    if not num_rows:
        raise ValueError(
            f"there is no prompt in {', '.join(sources)}, got an empty file or split: "
            "choose another source."
        )
    if not prompts:
        raise ValueError(
            f"no prompt is left of {num_rows} in {', '.join(sources)}: "
            "choose another source, or widen min_tokens and max_tokens."
        )
    # a batch may have no row with a column of others
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return [
        prompt
        if len(prompt.columns) == len(columns)
        else replace(prompt, columns={**columns, **prompt.columns})
        for prompt in prompts
    ]


def _without_duplicates(
    prompts: Sequence[Prompt], on_note: Callable[[str], None] | None
) -> list[Prompt]:
    distinct: dict[str, Prompt] = {}
    for prompt in prompts:
        content = [prompt.given, prompt.kind, prompt.columns]
        distinct.setdefault(json.dumps(content, sort_keys=True, default=repr), prompt)
    if on_note and (num_repeats := len(prompts) - len(distinct)):
        on_note(
            f"{num_repeats} of {len(prompts)} rows repeat the prompt and all fields of another, "
            "and are dropped."
        )
    return list(distinct.values())


def overlap_notes(
    training: Iterable[Prompt], held_out: Mapping[str, Sequence[Prompt]]
) -> list[str]:
    """Returns a warning for each set of held-out prompts that overlaps with the training prompts.

    Args:
        training: The clients' training prompts.
        held_out: Held-out prompts by name, which is also their key below `data`.
    """
    known = {prompt.transcript for prompt in training}  # exactly equal ones
    known_words = {loose_text(text) for text in known}
    notes = []
    for use, prompts in held_out.items():
        texts = {prompt.transcript for prompt in prompts}
        num_same = len(texts & known)
        num_alike = sum(loose_text(text) in known_words for text in texts) - num_same
        if num_same + num_alike:
            alike = f" ({num_alike} of them up to white space)" if num_alike else ""
            notes.append(
                f"{num_same + num_alike} of {len(texts)} {use} prompts are also in the training "
                f"data{alike}, so that metrics on them may be better than on new prompts: remove "
                f"them from data.train or data.{use}."
            )
    return notes


def loose_text(text: str) -> str:
    """Normalises white space, so that texts that differ only in it become equal."""
    return " ".join(text.split())


def read_prompts(
    source: str | Path | Iterable[Any],
    split: str | None = "train",
    *,
    reader: Literal["auto", "text", "hh"] = "auto",
    default_split: str = "train",
    name: str = "the prompts",
) -> list[Prompt]:
    """Returns one prompt for each row of a source's split, in the order of the rows.

    Args:
        source: A file, folder or name on the hub, as in `PromptsConfig`, or rows in memory: a
            `datasets.Dataset`, a `datasets.DatasetDict`, or texts and mappings.
        split: Split as in `PromptsConfig`.
        reader: Parsing of texts, as in `PromptsConfig`.
        default_split: Split to read if `split` is None and the source has named splits.
        name: Name of rows in memory for error messages.

    Raises:
        ValueError: When the source cannot be read or has no such split, or a row is malformed.
    """
    kind = ""
    if isinstance(source, str | Path):
        name, path = str(source), Path(source).expanduser()
        place, _, kind = (str(path), "", "") if path.exists() else name.partition(":")
        opened = _read_file(path) if path.is_file() else _open_dataset(place, kind)
        tables = opened if isinstance(opened, _Table) else _in_memory(opened, name)
    else:
        tables = _in_memory(source, name)
    if isinstance(tables, _Table):
        tables, default_split = {"train": tables}, "train"
    rows = [
        placed
        for key, indices in _ranges(default_split if split is None else split, tables, name)
        for placed in tables[key].part(indices)
    ]
    # decided per source, so that all its splits and slices are parsed the same way
    first = (row for table in tables.values() for row in table.rows_of(range(NUM_JUDGED)))
    how = reader_of(first) if reader == "auto" else reader
    return [as_prompt(row, place=place, kind=kind, reader=how) for place, row in rows]


@dataclass(frozen=True)
class _Table:
    """The rows of one split, and their name in error messages."""

    rows: "Sequence[Any] | datasets.Dataset"
    prefix: str
    numbers: Sequence[int] | None = None
    """Line number of each row, from 1; by default its position."""

    def rows_of(self, indices: range) -> Iterable[Any]:
        """Returns the rows at these indices, as far as they exist."""
        if isinstance(self.rows, Sequence):
            return self.rows[indices.start : indices.stop]
        # a dataset iterates much faster than it indexes
        return self.rows.select(range(indices.start, min(indices.stop, len(self.rows))))

    def part(self, indices: range) -> Iterable[tuple[str, Any]]:
        """Yields the names and rows at these indices."""
        rows = self.rows_of(indices)
        numbers = self.numbers or range(1, len(self.rows) + 1)
        for row, number in zip(rows, numbers[indices.start : indices.stop], strict=True):
            yield f"{self.prefix} {number}", row


_Tables = Mapping[str, _Table]


def _in_memory(source: Any, name: str) -> _Table | _Tables:
    """Converts rows in memory to a table, or tables by split."""
    import datasets  # takes a second, and files need it only for slices

    if isinstance(source, datasets.DatasetDict):
        return {str(key): _Table(rows, f"{name}, {key} row") for key, rows in source.items()}
    if isinstance(source, Mapping) or hasattr(source, "columns"):
        raise ValueError(
            f"{name} must be a list of texts or rows, or a dataset, got {type(source).__name__}: "
            "pass a list, or datasets.Dataset.from_dict(columns) or .from_pandas(frame)."
        )
    if not isinstance(source, datasets.Dataset):
        source = [{"prompt": row} if isinstance(row, str) else row for row in source]
    return _Table(source, f"{name}, row")


def _summands(split: str, only: str = "train") -> list[str]:
    """Parses a sum of splits and slices; a bare slice belongs to the split `only`.

    Raises:
        ValueError: When the split is malformed.
    """
    summands = [part.strip() for part in split.split("+")]
    summands = [f"{only}{part}" if part.startswith("[") else part for part in summands]
    for part in summands:
        if re.fullmatch(r"[\w.-]+", part):
            continue  # a whole split; its name may have characters that slices do not allow
        import datasets

        try:
            datasets.ReadInstruction.from_spec(part)
        except (ValueError, AssertionError) as error:
            raise ValueError(
                "split must be a split or slices, such as train, test[:50%] or [100:200], got "
                f"{split!r} ({first_line(error)}): correct it."
            ) from None
    return summands


def _ranges(split: str, tables: _Tables, source: str) -> list[tuple[str, range]]:
    """Returns the tables and row ranges of a split.

    Raises:
        ValueError: When the split is malformed or does not exist.
    """
    only = next(iter(tables)) if len(tables) == 1 else "train"
    sizes = {name: len(table.rows) for name, table in tables.items()}
    ranges = []
    for part in _summands(split, only):
        name = part.partition("[")[0]
        if name not in tables:
            known, first = ", ".join(map(repr, tables)), next(iter(tables), "train")
            raise ValueError(
                f"{source} has no split {name!r}, only {known}: choose one, or a slice such as "
                f"'{first}[:80%]'."
            )
        if part == name:
            ranges.append((name, range(sizes[name])))
            continue
        import datasets

        (found,) = datasets.ReadInstruction.from_spec(part).to_absolute(sizes)
        ranges.append((name, range(found.from_, max(found.from_, found.to))))
    return ranges


class _Unpacked(io.RawIOBase):
    """Content of a gzip file, which a small file can make as large as it likes.

    Raises:
        ValueError: On reading, when the content is much larger than texts of the file's size are.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, gzip.open(path)  # noqa: SIM115  # closed by `close`
        self._rest = max(FREE_BYTES, MAX_PACKING * path.stat().st_size)  # bytes that may still come

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer)
        self._rest -= size
        if self._rest < 0:
            raise ValueError(
                f"{self._path} unpacks to more than {MAX_PACKING} times its size, which texts do "
                "not: unpack it yourself if you trust it, and pass the unpacked file."
            )
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_file(path: Path) -> _Table:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1] not in (".json", ".jsonl"):
        raise ValueError(f"{path} is not a .json or .jsonl file (.gz too): convert it to one.")
    is_whole = suffixes[-1] == ".json"
    number, lines = 1, []
    try:
        is_packed = path.suffix == ".gz"
        content = io.BufferedReader(_Unpacked(path)) if is_packed else path.open("rb")
        with io.TextIOWrapper(content, encoding="utf-8-sig") as file:
            if is_whole:
                rows = json.load(file)
                if not isinstance(rows, list):
                    raise ValueError(
                        f"{path} contains a JSON {type(rows).__name__}: use a list of objects, or "
                        "one object per line in a .jsonl file."
                    )
                return _Table(rows, f"{path}, row")
            for number, line in enumerate(file, start=1):
                if line.strip():
                    lines.append((number, json.loads(line.rstrip("\r\n"))))
            return _Table([row for _, row in lines], f"{path}, line", [n for n, _ in lines])
    except json.JSONDecodeError as error:
        line = error.lineno if is_whole else number
        raise ValueError(
            f"{path}, line {line}: not valid JSON ({error.msg} at column {error.colno}): repair it."
        ) from None
    except RecursionError:
        place = f"{path}" if is_whole else f"{path}, line {number}"
        raise ValueError(f"{place}: the JSON is nested too deeply: repair it.") from None
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): it must be UTF-8 text, plain or in a "
            "complete gzip file."
        ) from None


def _open_dataset(name: str, folder: str) -> "datasets.Dataset | datasets.DatasetDict":
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(name)
        return datasets.load_dataset(name, data_dir=folder or None)
    except (OSError, ValueError, LookupError, RuntimeError, DatasetsError) as error:
        reason = first_line(error)
        raise ValueError(
            f"no prompts at {name}: it is not a file, and no dataset could be loaded ({reason}): "
            "use the path of a .jsonl file or a folder, or the name of an available dataset."
        ) from None
