"""Picks or merges a model for a wanted trade-off, from the front that a sweep left."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from firm.federation import Adapter
from firm.federation.aggregation import weighted_mean
from firm.fronts import Expectation, Front, Point
from firm.run import UserError

SETTINGS_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True)
class ServeConfig:
    """One wish."""

    front: Path
    """A METHOD.front.json of a sweep; the adapters' folders lie beside it."""
    want: str
    """The wanted preference, as name=share of every objective with commas between; scaled to sum
    1."""
    merge: bool = False
    """Merge the adapters around the wish, instead of naming the nearest one."""
    out: Path | None = None
    """Folder of the merged adapter, which must not exist; by default runs/merged-TIME."""

    def __post_init__(self) -> None:
        if self.out is not None and not self.merge:
            raise ValueError(
                f"out is where a merged adapter goes, got {self.out} without merge: add --merge or "
                "leave it out."
            )


def load_front(path: Path) -> Front:
    """Returns the front in a file.

    Raises:
        UserError: There is none; of a folder, the message names those in it.
    """
    if path.is_dir():
        found = ", ".join(sorted(str(file) for file in path.glob("*.front.json")))
        raise UserError(
            f"front: {path} is a folder; give a file"
            f"{f', such as {found}' if found else ' of a finished sweep, METHOD.front.json'}."
        )
    try:
        return Front.load(path)
    except FileNotFoundError:
        raise UserError(
            f"front: there is no file {path}; give the METHOD.front.json of a finished sweep."
        ) from None
    except ValueError as error:
        raise UserError(f"front: {error}") from error


def parse_want(text: str, objectives: Sequence[str]) -> list[float]:
    """Returns the shares in a text such as "b=0.3,a=0.7", in the order of the objectives.

    Raises:
        UserError: A pair is malformed, an objective is missing, unknown or named twice, or the
            shares are no preference.

    >>> parse_want("harmless=1, helpful=3", ["helpful", "harmless"])
    [3.0, 1.0]
    """
    known, shares = ", ".join(objectives), {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise UserError(f"want must be pairs name=share of {known}, got {pair.strip()!r}.")
        if name not in objectives:
            raise UserError(f"want names the objective {name!r}; the front has {known}.")
        if name in shares:
            raise UserError(f"want names {name} twice, got {text!r}; give each share once.")
        try:
            shares[name] = float(value)
        except ValueError:
            shares[name] = math.nan
        if not 0 <= shares[name] < math.inf:
            raise UserError(
                f"want: the share of {name} must be a number of 0 or more, got {value!r}."
            )
    if missing := [name for name in objectives if name not in shares]:
        raise UserError(
            f"want has no share for {', '.join(missing)}, got {text!r}; write {missing[0]}=0 to "
            "ask for none of it."
        )
    if sum(shares.values()) <= 0:
        raise UserError(f"want must have a share above 0, got {text!r}.")
    return [shares[name] for name in objectives]


def check_there(point: Point, folder: Path, below: Path) -> None:
    """Raises `UserError` where a point's adapter is gone, or a link leads away from the front."""
    if not folder.resolve().is_relative_to(below.resolve()):
        raise UserError(
            f"the adapter of {point.name} is a link that leads out of {below}, to "
            f"{folder.resolve()}; copy it beside the front if you trust it."
        )
    for name in (SETTINGS_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(
                f"the adapter of {point.name} is gone: there is no {folder / name}; restore it "
                "beside the front, or train that point again."
            )


def write_merged(
    out: Path, folders: Sequence[Path], shares: Sequence[float], card: ModelCard
) -> None:
    """Writes the mean of some adapters as a PEFT folder, as a whole or not at all.

    Raises:
        UserError: There is something at `out`, or the adapters do not fit each other.
    """
    if out.exists():
        raise UserError(f"out: {out} exists; choose another --out.")
    adapters = [_read_adapter(folder) for folder in folders]
    settings = [_read_settings(folder) for folder in folders]
    for folder, adapter, other in zip(folders, adapters, settings, strict=True):
        for key in sorted(settings[0].keys() | other.keys()):
            ours, theirs = settings[0].get(key), other.get(key)
            if _unordered(ours) != _unordered(theirs):
                raise UserError(
                    f"adapters of one kind can be merged; {key} is {ours!r} in {folders[0]} and "
                    f"{theirs!r} in {folder}."
                )
        if _shapes(adapter) != _shapes(adapters[0]):
            raise UserError(
                f"adapters of one shape can be merged; the tensors in {folder} are not those in "
                f"{folders[0]}."
            )
    merged = weighted_mean(adapters, shares)
    place = out.resolve()
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    shutil.copyfile(folders[0] / SETTINGS_NAME, draft / SETTINGS_NAME)
    save_file(merged, draft / WEIGHTS_NAME, metadata={"format": "pt"})
    card.save(draft / "README.md")
    draft.rename(place)


def _read_adapter(folder: Path) -> Adapter:
    try:
        adapter = load_file(folder / WEIGHTS_NAME)
    except SafetensorError as error:
        raise UserError(
            f"{folder / WEIGHTS_NAME} cannot be read ({error}); restore the file."
        ) from error
    for name, values in adapter.items():
        if not values.isfinite().all():
            raise UserError(
                f"{folder / WEIGHTS_NAME} has numbers in {name} that are not finite; train that "
                "point again."
            )
    return adapter


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / SETTINGS_NAME).read_text(encoding="utf-8"))
        base = str(settings["base_model_name_or_path"])
        if not base.isprintable():
            raise ValueError(f"base_model_name_or_path {base[:80]!a} is no name of a model")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{folder / SETTINGS_NAME} is malformed ({error}); restore the file."
        ) from error
    return {**settings, "base_model_name_or_path": base}


def _unordered(value: Any) -> Any:
    """The value without the order of lists: peft writes sets of names in any."""
    return sorted(map(str, value)) if isinstance(value, list) else value


def _shapes(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in adapter.items()}


def in_words(front: Front, preference: Sequence[float] | None) -> str:
    """Returns a preference with its objectives' names, scaled to sum 1."""
    shares = preference or ()
    pairs = zip(front.objectives, shares, strict=True)
    return ", ".join(f"{name} {share / sum(shares):.3f}" for name, share in pairs)


def reward_rows(front: Front, expected: Expectation) -> list[list[str]]:
    """Returns the objectives' rows: name, base model's reward, expected reward."""
    return [
        [name, f"{front.base[name]:.3f}", f"{reward:.3f} ± {expected.errors[name]:.3f}"]
        for name, reward in expected.rewards.items()
    ]


def how_known(front: Front, want: Sequence[float], chosen: Sequence[tuple[Point, float]]) -> str:
    """Returns where the expected rewards come from, in a sentence or two."""
    prompts = f"{front.num_prompts} held-out prompts"
    if len(chosen) > 1:
        return (
            f"Interpolated between figures on {prompts}, not measured: a merged model need not "
            "earn what lies between."
        )
    point = chosen[0][0]
    shares = [share / sum(want) for share in want]
    trained = [share / sum(point.preference or (1.0,)) for share in point.preference or ()]
    is_exact = all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(shares, trained, strict=True))
    nearby = "" if is_exact else " It was trained for another preference, the nearest there is."
    return f"Measured on {prompts} at the end of its run.{nearby}"


def commands(folders: Sequence[Path], merged: Path | None) -> dict[str, list[str]]:
    """Returns the commands that talk to the model and that measure it, by what they do.

    Without the runs that the adapters come from nothing says what to measure.
    """
    runs = [folder.parent for folder in folders]
    chat = ["python", "recipes/chat.py"]
    if not all((run / "run.json").is_file() for run in runs):  # adapters without their runs
        base = _read_settings(folders[0])["base_model_name_or_path"]
        return {"chat": [*chat, "--adapter", str(merged or folders[0]), "--policy.path", base]}
    chat += ["--run", str(runs[0])]
    evaluate = ["python", "recipes/evaluate.py", "--runs", json.dumps(list(map(str, runs)))]
    if merged is not None:
        chat += ["--adapter", str(merged)]
        evaluate += ["--adapters", json.dumps([str(merged)])]
    return {"chat": chat, "evaluate": evaluate}


def model_card(
    front: Front,
    want: Sequence[float],
    chosen: Sequence[tuple[Point, float]],
    expected: Expectation,
    folders: Sequence[Path],
) -> ModelCard:
    """Returns the card of a merged adapter: what it is made of, and what it should earn."""
    base_model = _read_settings(folders[0])["base_model_name_or_path"]
    header = ModelCardData(
        base_model=base_model,
        library_name="peft",
        tags=["firm", "ppo", "lora", "multi-objective", "federated", "merge"],
    )
    parts = [
        [point.name, in_words(front, point.preference), f"{share:.4f}"] for point, share in chosen
    ]
    return ModelCard(f"""---
{header.to_yaml()}
---

# {base_model}, aligned to {in_words(front, want)}

A LoRA adapter: the mean of {len(chosen)} adapters that {front.strategy} trained from the same start
(seed {chosen[0][0].seed}) for other preferences.

| adapter | trained for | share |
|---|---|---|
{_markdown(parts)}

## Expected reward

{how_known(front, want, chosen)}

| reward in [0, 1] | base | expected |
|---|---|---|
{_markdown(reward_rows(front, expected))}

The learned rewards say what the reward models prefer, not what is true or safe.

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({json.dumps(base_model)})
model = PeftModel.from_pretrained(base, "path/of/this/folder")
```
""")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
