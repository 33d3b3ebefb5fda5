"""The registry of reward models by name, and their selection by a config."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from firm.base.comparisons import Comparison
from firm.base.extras import install_command
from firm.base.registry import Registry, did_you_mean
from firm.base.user_code import ENDS, describe_error, import_file, user_code
from reward_models.config import RewardModelConfig
from reward_models.golden import check_golden_scores

Function = TypeVar("Function", bound=Callable[..., Any])

ENTRY_POINT_GROUP = "firm.reward_models"
"""Installed packages offer reward functions in this group of entry points: the key is the reward's
name, the value the function, or a module that registers it."""

_OWN_ARGUMENTS = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""TRL's keyword arguments, passed to every reward function in addition to columns and options."""

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that accept any remaining arguments."""


def _sequence_classifier(config: RewardModelConfig, objective: str) -> Any:
    if config.url:
        from reward_models.served_classifier import load_served_classifier

        return load_served_classifier(config, objective)
    from firm.base.devices import dtype_name  # imports torch, unlike the names
    from reward_models.sequence_classifier import (
        SequenceClassifierReward,
        adapter_name,
        load_sequence_classifier,
        settings_of,
    )

    assert not isinstance(config.output, str)  # RewardModelConfig has refused it
    model, tokenizer = load_sequence_classifier(
        config.path,
        output=config.output,
        dtype=dtype_name(config.dtype, config.device),
        device=config.device,
    )
    return SequenceClassifierReward(
        model,
        tokenizer,
        adapter=adapter_name(config.path),
        **settings_of(config, objective),
    )


@dataclass(frozen=True)
class FunctionReward:
    """A registered function as the reward model of one objective."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    output: str | None = None
    """Name of the returned list to use; None: the list named after the objective."""

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> Any:
        """Calls the function with keyword arguments for the data fields in its signature.

        Raises:
            TypeError: It needs a field that the data do not have.
        """
        given = {**columns, **self.options, "prompts": prompts, "completions": completions}
        if missing := sorted(self.needs - given.keys()):
            fields = ", ".join(sorted(columns.keys() - {*_OWN_ARGUMENTS})) or "none"
            raise TypeError(
                f"its parameter {missing[0]} is no option and no field of the data (further "
                f"fields: {fields}): add the field, or give the parameter a default"
            )
        return self.function(**{name: value for name, value in given.items() if self._takes(name)})

    @property
    def needs(self) -> set[str]:
        """Parameters that options or fields of the data must fill."""
        own = {*_OWN_ARGUMENTS, *self.options}
        return {
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in _REST
        } - own

    @property
    def reads_prompts(self) -> bool:
        """Whether the function receives `Prompt` objects; see `RewardFn`."""
        return getattr(self.function, "reads_prompts", False)

    @property
    def truncated(self) -> list[bool] | None:
        """Whether the function truncated each of its latest inputs; None if it does not tell."""
        return getattr(self.function, "truncated", None)

    @property
    def source(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Function and options; objectives that share them are served by one call."""
        return self.function, self.options

    def of(self, name: str, output: Any) -> "FunctionReward":
        """Returns the same function as the reward model of another objective."""
        return replace(self, name=name, output=output)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    def _takes(self, name: str) -> bool:
        kinds = {parameter.kind for parameter in self._parameters.values()}
        has_rest = inspect.Parameter.VAR_KEYWORD in kinds and name != self._bound_parameter
        return name in self._parameters or has_rest

    @cached_property
    def _bound_parameter(self) -> str | None:
        """Name of a method's bound parameter, to which no field can be passed."""
        method = getattr(self.function, "__func__", None) or type(self.function).__call__
        if inspect.isfunction(self.function) or not inspect.isfunction(method):
            return None
        return next(iter(inspect.signature(method).parameters), None)


REWARD_MODELS: Registry[str, Callable[[RewardModelConfig, str], Any]] = Registry(
    "reward model",
    {
        "sequence_classifier": _sequence_classifier,
        "brevity": "reward_models.scripted",
        "length": "reward_models.scripted",
        "matches": "reward_models.scripted",
        "positivity": "reward_models.scripted",
        "politeness": "reward_models.scripted",
        "true_helpful": "reward_models.miniature",
        "true_harmless": "reward_models.miniature",
        "parse": "reward_models.miniature",
        "llm_judge": "reward_models.judge",
        "sentiment": "reward_models.language",
        "reading_ease": "reward_models.language",
        "vocabulary": "reward_models.language",
    },
)
"""Builders of reward models by name, each called with the config and the objective's name."""


def reward_model(name: str, *, needs: str | None = None) -> Callable[[Function], Function]:
    """Registers a function with TRL's reward-function signature under a name, unchanged.

    A class of callables may be registered instead: `options` are the arguments of its constructor,
    and objectives with equal settings share an instance. `needs` is a module that the function
    imports when it is called; loading the reward model is refused without it.

    Raises:
        ValueError: The name is taken, or the object cannot be called like a reward function.
    """

    def register(function: Function) -> Function:
        kind: Any = function
        if isinstance(kind, type):
            _check_call(name, kind.__call__, {}, bound=(None,))
        else:
            _check_call(name, kind, {})
        return REWARD_MODELS.add(name, function, entry=partial(_function, function, needs))

    return register


def _function(
    function: Callable[..., Any], needs: str | None, config: RewardModelConfig, objective: str
) -> FunctionReward:
    assert not isinstance(config.output, int)  # RewardModelConfig has refused it
    if needs is not None and find_spec(needs) is None:
        remedy = install_command("real") if _is_shipped(function) else "install it"
        raise ValueError(
            f"{config.name!r} needs the package {needs}, which is not installed: {remedy}."
        )
    if not isinstance(function, type):
        reward = as_reward(objective, function, name=config.name, options=config.options)
        is_classifier = not isinstance(reward, FunctionReward)  # one that a file has built
        return reward if is_classifier else replace(reward, output=config.output)
    try:
        inspect.signature(function).bind(**config.options)
    except TypeError as error:
        raise ValueError(
            f"{config.name!r} cannot be built with the options "
            f"{', '.join(config.options) or 'none'} ({error}): its settings are "
            f"{inspect.signature(function)}."
        ) from None
    with user_code(f"the constructor of {config.name!r}", "correct it, or its options"):
        instance = function(**config.options)
    return FunctionReward(objective, instance, {}, config.output)


TRAINED_KEYS = ("format", "append_eos", "max_length", "dtype")
"""Settings with which a classifier scores as it did after training; another dtype does not."""


def reward_settings(text: str) -> dict[str, str]:
    """Returns the settings of the reward model that a text denotes.

    A text with a "/", or the name of a folder, is a sequence classifier's path or hub name;
    "FILE.py:NAME" is a function in a file; anything else names a registered function.

    >>> reward_settings("rewards.py:right")
    {'name': 'right', 'file': 'rewards.py'}
    """
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        return {"name": function, "file": file}
    return {"path": text} if "/" in text or Path(text).is_dir() else {"name": text}


def as_reward(
    objective: str,
    function: Callable[..., Any],
    *,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a function with TRL's signature as the reward model of an objective.

    Args:
        objective: The reward model's name.
        function: Function to call; a `SequenceClassifierReward` is returned unchanged.
        name: Name in messages; the objective by default.
        options: Further arguments.

    Raises:
        ValueError: It cannot be called like a reward function.
    """
    if hasattr(function, "append_eos"):  # a sequence classifier, whose import takes seconds
        return function
    options = dict(options or {})
    _check_call(name or objective, function, options)
    return FunctionReward(objective, function, options, getattr(function, "output", None))


def _check_call(
    name: str, function: Callable[..., Any], options: dict[str, Any], *, bound: tuple[Any, ...] = ()
) -> None:
    """Checks that a reward function can be called; `bound` are arguments that it will have."""
    signature = inspect.signature(function)
    if _is_shipped(function):
        _check_options(name, signature, options)
    known = signature.parameters
    has_rest = any(own.kind is own.VAR_KEYWORD for own in known.values())
    given = [own for own in ("prompts", "completions") if own in known or has_rest]
    try:
        if not given and "completion_ids" not in known:
            raise TypeError("it has no parameter 'completions'")
        signature.bind_partial(*bound, **dict.fromkeys(given), **options)
    except TypeError as error:
        raise ValueError(
            f"the reward function {name!r} cannot be called with prompts, completions"
            f"{''.join(f', {option}' for option in options)} ({error}): "
            f"its signature is {signature}."
        ) from None


def _is_shipped(function: Callable[..., Any]) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] in ("firm", "reward_models")


def _check_options(name: str, signature: inspect.Signature, options: dict[str, Any]) -> None:
    """Refuses options that a shipped function has no parameters for and would ignore."""
    known = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind not in _REST and parameter.name not in _OWN_ARGUMENTS
    ]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known).removeprefix("; ")
            hint = f"it has {', '.join(known) or 'none'}." if hint == "." else hint
            raise ValueError(f"the reward function {name!r} has no option {option!r}: {hint}")


def load_reward_models(configs: Mapping[str, RewardModelConfig]) -> dict[str, Any]:
    """Returns the reward models of several objectives, by the same keys.

    Reward models that differ only in `output`, conditions, `golden` and `normalization` share one
    function, or the weights of one classifier.

    Raises:
        ValueError: As `load_reward_model`.
    """
    loaded: dict[str, Any] = {}
    for key, owner in owners(configs).items():
        loaded[key] = load_reward_model(configs[key], key, like=loaded.get(owner))
    return loaded


def owners(configs: Mapping[str, RewardModelConfig]) -> dict[str, str]:
    """Returns the first reward model that has the function or weights of each, often itself."""
    found: dict[str, str] = {}
    for key, config in configs.items():
        same = (other for other in found if _source(configs[other]) == _source(config))
        found[key] = next(same, key)
    return found


def _source(config: RewardModelConfig) -> RewardModelConfig:
    """Returns the settings that determine a function, or a classifier and its inputs."""
    needs_label = config.name == "sequence_classifier" and config.output is not None
    output = 0 if needs_label else None
    defaults: dict[str, Any] = {"golden": [], "normalization": "sigmoid"}
    return replace(config, output=output, only_if="", otherwise=None, **defaults)


def load_reward_model(config: RewardModelConfig, objective: str, *, like: Any = None) -> Any:
    """Returns the reward model of an objective: a callable with TRL's signature and a `name`.

    Args:
        config: Its settings.
        objective: The objective's name.
        like: Loaded reward model of a config with the same `_source`, to share its weights.

    Raises:
        ValueError: No such name, file or checkpoint, one that does not fit its settings, or one
            that misses a golden score.
    """
    try:
        if config.file:
            _import_file(config.file, config.name)
        if config.name not in REWARD_MODELS:
            _import_installed(config.name)
        if hasattr(like, "of"):
            reward = like.of(objective, config.output)
        else:
            reward = REWARD_MODELS[config.name](config, objective)
        check_golden_scores(reward, config.golden)
    except ValueError as error:
        raise ValueError(f"reward model of {objective!r}: {error}") from error
    return with_condition(reward, config)


def given_reward(function: Callable[..., Any], config: RewardModelConfig, objective: str) -> Any:
    """Returns a function that a program passes as the reward model of an objective.

    Args:
        function: The function, or a loaded `SequenceClassifierReward`.
        config: Its settings; a classifier takes no options.
        objective: The objective's name.

    Raises:
        ValueError: The function does not fit its settings, or misses a golden score.
    """
    try:
        if config.options and hasattr(function, "append_eos"):
            raise ValueError(
                f"`options` are a function's arguments, got {', '.join(config.options)} for a "
                "sequence classifier: remove them."
            )
        reward = as_reward(objective, function, options=config.options)
        if config.output is not None:
            reward = reward.of(objective, config.output)
        check_golden_scores(reward, config.golden)
    except ValueError as error:
        raise ValueError(f"reward model of {objective!r}: {error}") from error
    return with_condition(reward, config)


class Conditional:
    """A reward model whose score counts in training only where that of another passes.

    The trainer, which has all scores, applies `condition` and `otherwise`; other attributes are the
    reward model's.
    """

    def __init__(self, reward: Any, config: RewardModelConfig) -> None:
        self.reward = reward
        self.condition = Comparison.parse(config.only_if, "only_if")
        self.otherwise = config.otherwise

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Returns the unconditional scores."""
        return self.reward(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "reward":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.reward, name)


def with_condition(reward: Any, config: RewardModelConfig) -> Any:
    """Returns a reward model with the condition in its settings, if there is one."""
    return Conditional(reward, config) if config.only_if else reward


def _import_file(file: str, name: str) -> None:
    """Runs a Python file once in this process, and registers its function of a name.

    It is registered unless the file does so, with the decorator.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"no Python file of reward functions at {file}: correct `file`.")
    with _importing(f"the file of reward functions {file}", "repair it"):
        module = import_file(path)
    own, entry = vars(module).get(name), REWARD_MODELS.get(name)
    known = entry.args[0] if isinstance(entry, partial) else None
    is_registered = known is own or getattr(known, "__module__", "") == module.__name__
    if callable(own) and not is_registered:  # also an imported function, or a partial one
        reward_model(name)(own)
    if name not in REWARD_MODELS:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"{file} has no function {name!r}{did_you_mean(name, known)}")


def check_name(name: str) -> None:
    """Raises a ``ValueError`` with the nearest name where no reward model has a name.

    Nothing is imported for it.
    """
    offers = entry_points(group=ENTRY_POINT_GROUP)
    if name not in REWARD_MODELS and name not in offers.names:
        known = sorted({*REWARD_MODELS, *offers.names})
        hint = did_you_mean(name, known).removeprefix("; ")
        hint = f"known: {', '.join(known)};" if hint == "." else hint
        own = "a function of your own needs `file`."
        if ".py" in name:
            own = "a function of a file is `file: FILE.py` and `name: FUNCTION`, or in short "
            own += "FILE.py:FUNCTION for `firm init`."
        raise ValueError(f"there is no reward model {name!r}: {hint} {own}")


def _import_installed(name: str) -> None:
    """Registers a name that an installed package offers."""
    check_name(name)
    offers = entry_points(group=ENTRY_POINT_GROUP)
    packages = [offer.dist.name if offer.dist else "?" for offer in offers if offer.name == name]
    if len(packages) > 1:
        raise ValueError(
            f"several installed packages offer the reward model {name!r} ({', '.join(packages)}): "
            "uninstall all but one."
        )
    (offer,) = offers.select(name=name)
    what = f"the reward model {name!r} of the installed package {packages[0]}"
    with _importing(what, "repair or update the package"):
        function = offer.load()
        if name not in REWARD_MODELS:
            if not callable(function):
                raise TypeError(f"{offer.value} is no function, and registers none of the name")
            reward_model(name)(function)


@contextmanager
def _importing(what: str, remedy: str) -> Iterator[None]:
    """Raises ``ValueError`` if an import fails, and undoes its registrations.

    Otherwise a retry would find the name taken.
    """
    before = dict(REWARD_MODELS)
    try:
        yield
    except BaseException as error:  # whatever another's module raises
        REWARD_MODELS.clear()
        REWARD_MODELS.update(before)
        if isinstance(error, ENDS):
            raise
        reason = describe_error(error)
        raise ValueError(f"{what} cannot be imported ({reason}): {remedy}.") from error
