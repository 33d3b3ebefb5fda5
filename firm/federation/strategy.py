"""The settings and options common to all strategies, and the registry of strategies."""

from collections.abc import Callable
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from firm.base.fields import NOT_IN_PAPER, PositiveInt, configuration
from firm.base.registry import Registry
from firm.federation.option import Option
from firm.federation.options.privacy import PrivacyConfig
from firm.federation.options.robust.rule import RobustConfig
from firm.federation.options.secure.config import NUM_BYTES, MasksConfig, Secure
from firm.federation.options.uploads import UploadConfig
from firm.federation.round_config import RoundConfig


@configuration
class StrategyConfig(RoundConfig):
    """Settings and options common to all strategies."""

    lora_mean: Annotated[Literal["factors", "products"], NOT_IN_PAPER] = "factors"
    """Quantity averaged for a LoRA layer: its factors A and B separately, as in Algorithm 1 of
    FIRM, or their product B·A, whose mean is truncated to rank r."""
    robust: Annotated[RobustConfig, NOT_IN_PAPER] = field(default_factory=RobustConfig)
    """Robust aggregation, for federations in which some clients may be attackers."""
    privacy: Annotated[PrivacyConfig | None, NOT_IN_PAPER] = None
    """Client-level differential privacy; null disables it."""
    secure: Annotated[Secure | None, NOT_IN_PAPER] = None
    """Secure aggregation: sites mask their updates, so that the server learns only their mean; null
    disables it."""
    masks: Annotated[MasksConfig, NOT_IN_PAPER] = field(default_factory=MasksConfig)
    """Masks of secure aggregation."""
    upload: Annotated[UploadConfig | None, NOT_IN_PAPER] = None
    """Quantised uploads; null sends updates in the adapter's dtype."""
    ranks: Annotated[dict[str, PositiveInt], NOT_IN_PAPER] = field(default_factory=dict)
    """Ranks of individual clients by name, if fewer than the adapter's: such a client trains and
    sends only the first ranks of each LoRA layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure is None and self.masks != MasksConfig():
            raise ValueError(
                f"masks requires secure masks, got {self.masks} with secure null; set secure, or "
                "leave masks out."
            )

    @property
    def options(self) -> tuple[Option, ...]:
        """The enabled options, in the order in which they wrap a client's training."""
        options = list[Option]()
        if self.lora_mean == "products":
            from firm.federation.options.lora_mean import LoraProducts

            options.append(LoraProducts())
        if self.robust.rule != "none":
            options.append(self.robust)
        options += filter(None, [self.privacy, self.upload])
        if self.ranks:
            from firm.federation.options.ranks import Ranks

            options.append(Ranks(self.ranks))
        if self.secure:
            from firm.federation.options.secure.option import SecureSums

            options.append(SecureSums(self.masks, NUM_BYTES[self.aggregation]))
        return tuple(options)

    @classmethod
    def forms(cls) -> list[type["StrategyConfig"]]:
        """Returns the registered subclasses of this configuration, each with a unique ``name``."""
        return [form for _, form in sorted(CONFIGS.items()) if issubclass(form, cls)]


Strategy = Callable[..., tuple[Any, dict[str, Any]]]
"""One round of an algorithm: ``(state, clients, engine, cfg) -> (state, metrics)``.

The arguments are the server's state (never modified), the names of all clients in the order in
which their updates are summed, the engine that runs them and the strategy's configuration. Returns
the state after the round and the round's rows for the log. Raises ``RoundFailed`` if fewer than
``cfg.quorum`` clients finish.
"""

STRATEGIES: Registry[str, Strategy] = Registry("strategy")
"""Strategies by the ``name`` of their configuration."""
CONFIGS: Registry[str, type[StrategyConfig]] = Registry("strategy")
"""Configurations of all strategies, by name."""

Function = TypeVar("Function", bound=Strategy)
Config = TypeVar("Config", bound=type[StrategyConfig])


def shipped(config: Config) -> Config:
    """Registers a configuration whose strategy, in the module of its name, is imported later."""
    name = config.__dataclass_fields__["name"].default
    STRATEGIES.setdefault(name, f"firm.federation.strategies.{name}")  # type: ignore[arg-type]
    return CONFIGS.add(name, config)


def strategy(function: Function) -> Function:
    """Registers a strategy under the ``name`` of its configuration, the type of ``cfg``."""
    config = get_type_hints(function).get("cfg")
    if not (isinstance(config, type) and issubclass(config, StrategyConfig)):
        raise ValueError(f"{function.__name__} needs an argument cfg, a StrategyConfig.")
    name = config.__dataclass_fields__["name"].default
    CONFIGS.add(name, config)
    return STRATEGIES.add(name, function)
