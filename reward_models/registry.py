"""Which reward models there are, by name, and how a config chooses one."""

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from reward_models.sequence_classifier import (
    CallFormat,
    SequenceClassifierReward,
    load_sequence_classifier,
)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class RewardModelConfig:
    """One objective's reward model."""

    name: str = "sequence_classifier"
    """"sequence_classifier" for a Hugging Face checkpoint, or the name of a registered function
    ("brevity" and "positivity" ship)."""
    path: str = ""
    """The checkpoint: a folder, or a name on the Hugging Face hub."""
    format: CallFormat = "hh_pair"
    """How a sequence classifier reads a reply. "hh_pair": dialogue and reply as a pair, spelt as
    the Ray2333 models were trained; "plain": both as one text; "response": the reply alone."""
    append_eos: bool = False
    """Ends every text with EOS, as TRL trains its reward models. Leave it off for a checkpoint
    whose pad token is its EOS: there the score was read from the token before."""
    max_length: int | None = None
    """Longest input in tokens; longer ones lose their beginning. By default what the model has
    positions for."""
    batch_size: int = 32
    """Replies that are scored at once; bounds memory, changes no score."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters."""
    device: str = "auto"
    """"auto" takes the accelerator when there is one, else the CPU."""
    file: str = ""
    """A Python file whose functions join the registry by the decorator `reward_model`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of a registered function, such as brevity's `half_words`."""
    normalization: Literal["sigmoid", "minmax", "none"] = "sigmoid"
    """How raw scores become rewards in [0, 1], with figures frozen on replies of the base model.
    "sigmoid" of the standardised score; "minmax" between its 5 % and 95 % quantiles; "none" leaves
    the score as it is. Not in the paper."""

    def __post_init__(self) -> None:
        is_classifier = self.name == "sequence_classifier"
        if is_classifier and not self.path:
            raise ValueError(
                "a reward model 'sequence_classifier' needs `path`, got none: give a checkpoint's "
                "folder or hub name, or the `name` of a registered function."
            )
        if is_classifier and self.options:
            raise ValueError(
                f"`options` are a function's arguments, got {', '.join(self.options)} for a "
                "'sequence_classifier': remove them."
            )
        if self.batch_size < 1 or (self.max_length is not None and self.max_length < 1):
            raise ValueError(
                "a reward model's batch_size and max_length must be at least 1, got "
                f"{self.batch_size} and {self.max_length}."
            )


def _sequence_classifier(config: RewardModelConfig, objective: str) -> SequenceClassifierReward:
    model, tokenizer = load_sequence_classifier(
        config.path, dtype=config.dtype, device=config.device
    )
    return SequenceClassifierReward(
        model,
        tokenizer,
        name=objective,
        format=config.format,
        append_eos=config.append_eos,
        max_length=config.max_length,
        batch_size=config.batch_size,
    )


@dataclass(frozen=True)
class FunctionReward:
    """A registered function as the reward model of one objective."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]

    def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> Any:
        """What the function returns, by keyword, so that it may leave `prompts` to `**kwargs`."""
        return self.function(prompts=prompts, completions=completions, **self.options, **kwargs)


REWARD_MODELS: dict[str, Callable[[RewardModelConfig, str], Any]] = {
    "sequence_classifier": _sequence_classifier
}
"""Builder of a reward model, from its config and the objective's name."""


def reward_model(name: str) -> Callable[[Function], Function]:
    """Registers a function with TRL's reward-function signature under a name; it stays as it is.

    Raises:
        ValueError: The name is taken, or the function cannot be called like a reward function.
    """

    def register(function: Function) -> Function:
        if name in REWARD_MODELS:
            raise ValueError(f"there is a reward model {name!r} already: choose another name.")
        _check_call(name, function, {})
        REWARD_MODELS[name] = partial(_function, function)
        return function

    return register


def _function(
    function: Callable[..., Any], config: RewardModelConfig, objective: str
) -> FunctionReward:
    _check_call(config.name, function, config.options)
    return FunctionReward(objective, function, dict(config.options))


def _check_call(name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(prompts=[], completions=[], **options)
    except TypeError as error:
        raise ValueError(
            f"the reward function {name!r} cannot be called with prompts, completions"
            f"{''.join(f', {option}' for option in options)} ({error}): "
            f"its signature is {signature}."
        ) from None


def load_reward_model(config: RewardModelConfig, objective: str) -> Any:
    """The reward model of an objective: a callable with TRL's signature and a `name`.

    Raises:
        ValueError: No such name, file or checkpoint, or one that does not fit its settings.
    """
    if config.file:
        _import_file(config.file)
    if config.name not in REWARD_MODELS:
        near = difflib.get_close_matches(config.name, REWARD_MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(REWARD_MODELS)};"
        raise ValueError(
            f"objective {objective!r} has no reward model {config.name!r}: {hint} "
            "a function of your own needs `file` and the decorator."
        )
    try:
        return REWARD_MODELS[config.name](config, objective)
    except ValueError as error:
        raise ValueError(f"reward model of {objective!r}: {error}") from error


def _import_file(file: str) -> None:
    """Runs a Python file once in this process."""
    path = Path(file).expanduser().resolve()
    module_name = f"reward_models_of_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"no Python file of reward functions at {file}: correct `file`.")
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(
            f"the reward functions in {file} cannot be imported ({type(error).__name__}: {error}): "
            "repair the file."
        ) from error
