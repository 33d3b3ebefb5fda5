"""Configurations of the jobs around a run, which are read without the jobs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt

from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompt_data import PromptsConfig
from firm.alignment.rollout_config import RolloutConfig
from firm.base.fields import (
    BoundedInt,
    Hint,
    NonNegativeInt,
    NumTokens,
    NumWorkers,
    Port,
    PositiveFloat,
    PositiveInt,
    Seed,
    configuration,
)
from firm.base.preferences import TRADE_OFFS
from firm.base.sanitize import check_name, check_score_name
from firm.run.names import check_slugs
from firm.run.resuming import Resume, check_out
from firm.serving.targets import TargetName
from reward_models.config import RewardModelConfig


@configuration
class InitConfig:
    """Contents of a new configuration; on a terminal, missing values are prompted for."""

    policy: str = ""
    """Language model: a folder, a name on the Hugging Face hub, or a GGUF file."""
    rewards: dict[str, str] = field(default_factory=dict)
    """Reward models by objective, such as {helpful: models/helpful, brief: brevity, right:
    rewards.py:right}: a classifier's folder or hub name, a built-in function, or a function in a
    Python file."""
    prompts: str = ""
    """Training prompts: a .json or .jsonl file, or a data set."""
    test_prompts: str = ""
    """Held-out prompts; default: a tenth of a file for each use, a fifth of fewer than 200 prompts,
    drawn at random, or the split "test" of a data set."""
    pairs: dict[str, str] = field(default_factory=dict)
    """Ranked pairs by objective, in place of rewards and prompts, such as {helpful: helpful.jsonl,
    brief: brief.jsonl}: files, or data sets, whose rows have `prompt`, `chosen` and `rejected`."""
    full: bool = False
    """Write a long run: PPO with a critic, eight clients and replies of 128 tokens, or all pairs.
    By default lengths and rounds are chosen so that the run ends in about ten minutes here."""
    out: Path = Path("own.yaml")
    """File to write."""


@configuration
class FetchConfig:
    """Place of a fetched model."""

    to: Path | None = None
    """Folder to write; default: `models/smollm2` in the cache, `$XDG_CACHE_HOME/firm` or
    `~/.cache/firm`, where `firm/models/smollm2` as a policy's path finds it."""


@configuration
class PointsConfig:
    """Runs in one folder, of a common base and several seeds."""

    name: str = "points"
    """Prefix of the default folder."""
    out: Path | None = None
    """Folder of the runs; default: runs/NAME-TIME."""
    resume: Resume = False
    """Continue unfinished runs: `firm resume FOLDER` uses the configuration saved in that folder,
    `--out FOLDER --resume` the given one; auto starts in an empty folder if there is nothing yet.
    Python files named only in the folder need `--allow_code`, since the folder may be from someone
    else."""
    plan: bool = False
    """Print the runs and the plan of the first one, and exit."""
    base: Path = Path("configs/miniature.yaml")
    """Common configuration of the runs."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys to override in all runs, with their values, such as {rounds: 8}."""
    seeds: list[Seed] = field(default_factory=lambda: [0])
    """Seeds of the runs. All runs are calibrated with the first seed, so that their rewards can be
    compared."""
    num_workers: NumWorkers = 1
    """Number of runs executed concurrently, in separate processes."""

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        check_out(self.resume, self.out)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more distinct numbers, got {self.seeds}.")


@dataclass(frozen=True)
class SettingConfig:
    """A setting to compare."""

    base: Path | None = None
    """Configuration of the setting's runs; null: the study's base."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys to override, with their values, such as {strategy.beta: 0}; they take precedence over
    the study's overrides."""


@configuration
class StudyConfig(PointsConfig):
    """A study; all settings run with the first seed before the second seed starts."""

    settings: dict[str, SettingConfig] = field(kw_only=True)
    """Settings to compare, by name."""
    name: str = "study"
    seeds: list[Seed] = field(default_factory=lambda: [0, 1, 2])
    figures: dict[str, list[str]] = field(default_factory=dict)
    """Settings drawn together, by the prefix of the files' names; {}: all settings together."""
    half_life: PositiveFloat | None = None
    """Half-life in rounds of the running average of the curves in figures/; null: no averaging."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.settings:
            raise ValueError("settings must have at least one entry, got none.")
        for name, labels in self.figures.items():
            for label in (label for label in labels if label not in self.settings):
                raise ValueError(
                    f"figures.{name} has the unknown setting {label!r}; choose from "
                    f"{', '.join(self.settings)}."
                )
        check_slugs(self.settings, "settings")
        check_slugs(self.figures, "figures")


@dataclass(frozen=True)
class MethodConfig:
    """A method to reach trade-offs."""

    kind: Literal["train", "soup", "ties", "dare_linear", "dare_ties", "front"] = "train"
    """train: one training per preference; soup: one training per objective, and weighted means of
    their adapters (Rewarded Soups, arXiv:2306.04488); ties, dare_linear and dare_ties: the same,
    merged by these methods; front: one training of a policy conditioned
    on the preference, whose adapters are compared at equal shares, folded at each preference."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys to override, with their values, such as {strategy.beta: 0}; they take precedence over
    the sweep's overrides."""


@configuration
class SweepConfig(PointsConfig):
    """A sweep over preferences."""

    name: str = "sweep"
    methods: dict[str, MethodConfig] = field(default_factory=lambda: {"FIRM": MethodConfig()})
    """Methods to compare, by name."""
    preferences: list[list[float]] = field(default_factory=list)
    """Preferences, in the order of the run's objectives or by name, such as
    `helpful=0.7,harmless=0.3 helpful=0.3,harmless=0.7`; scaled to sum 1."""
    resolution: Annotated[
        int | None, Interval(ge=1, le=100), Hint("give preferences for a finer choice")
    ] = None
    """Use the grid of all vectors of multiples of 1/resolution, including the corners, if
    preferences are not given; null: 4."""
    reference: list[float] | None = None
    """Reference point of the hypervolume: a reward in [0, 1] of each objective, or an accuracy on
    pairs, in order or by name, below those of every model; null: zeros. It is saved with the
    front."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.methods:
            raise ValueError("methods must have at least one entry, got none.")
        if self.preferences and self.resolution is not None:
            raise ValueError("preferences and resolution exclude each other, got both.")
        check_slugs(self.methods, "methods")


@configuration
class SpeakersConfig:
    """Base model, and sampling and scoring of replies."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model; adapters have their own `lora` settings."""
    check_base: bool = True
    """Refuse adapters whose base model is not policy.path. Turn it off if the same model was moved;
    names and shapes of all tensors are checked anyway."""
    rewards: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Reward models by objective; may be empty."""
    allow_code: bool = False
    """Run the Python files of rewards that are named in a run's folder. Review them first if the
    folder is from someone else."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies."""
    seed: Seed = 0
    """Seed of the sampling; a model's replies do not depend on the other models."""
    num_threads: Annotated[NumWorkers | None, Hint("null leaves it to torch")] = None
    """CPU threads; null: torch's default."""

    def __post_init__(self) -> None:
        if not self.policy.path:
            raise ValueError(
                "policy.path must not be empty; pass the base model, or a finished run."
            )


@configuration
class TradeOffConfig:
    """A trade-off of a conditioned run; at most one of preference, target and requirements."""

    preference: list[float] | None = None
    """Shares of the objectives, in order or by name, such as `helpful=0.7,harmless=0.3`, at which a
    conditioned adapter is taken; null: equal shares in a chat, the whole front in an export."""
    target: str = ""
    """Where to end up on a conditioned run's front, instead of `preference`; see `firm pick`."""
    require: str = ""
    """Requirements that the best preference must meet, instead of `preference`; see `firm pick`."""
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95
    """Confidence of the one-sided bounds that must meet `require`."""

    def __post_init__(self) -> None:
        if len(self.trade_offs) > 1:
            given = ", ".join(self.trade_offs)
            raise ValueError(f"pass one of preference, target and require, got {given}.")

    @property
    def trade_offs(self) -> list[str]:
        """The given ones of the keys that state a trade-off."""
        return [key for key in TRADE_OFFS if getattr(self, key)]


@configuration
class CompareConfig(SpeakersConfig):
    """A comparison; settings of the first run are the defaults, then the defaults below."""

    runs: list[Path] = field(default_factory=list)
    """Finished runs to compare. The first one provides policy, rewards and their calibrations,
    rollout, test prompts and seed."""
    adapters: list[Path] = field(default_factory=list)
    """Further adapters: PEFT folders, or run directories to take only the adapter from."""
    metrics: dict[str, RewardModelConfig] = field(default_factory=dict)
    """Further scores to report, by name."""
    calibrated: bool = True
    """Also report rewards in [0, 1]; runs with different calibrations are then refused."""
    prompts: PromptsConfig = field(default_factory=lambda: PromptsConfig(split=None))
    """Held-out prompts; split null: a whole file, or the second half of a dataset's split
    "test"."""
    held_out: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """Share of `prompts` that the run held out for testing (`data.hold_out`), which is used alone;
    0: all are used."""
    held_out_seed: Seed = 0
    """Seed by which they were drawn."""
    num_prompts: Annotated[PositiveInt, Ge(2), Hint("a standard error needs two")] = 256
    """Rows of prompts to use, from the first."""
    num_samples: BoundedInt = 2
    """Replies sampled per row."""
    num_shown_samples: NonNegativeInt = 12
    """Prompts to save with their replies; 0: no texts on the terminal or in files."""
    out: Path | None = None
    """Directory of the results; default: runs/evaluation-TIME."""

    def __post_init__(self) -> None:
        if not (self.runs or self.adapters):
            raise ValueError(
                "nothing to evaluate: pass --runs '[runs/mine]', or --adapters with --policy.path."
            )
        super().__post_init__()
        for name in (*self.rewards, *self.metrics):
            check_score_name(name, "the name of a score")
        if shared := sorted(self.rewards.keys() & self.metrics.keys()):
            raise ValueError(f"rewards and metrics both have {shared[0]!r}; rename one.")


@configuration
class ChatConfig(TradeOffConfig, SpeakersConfig):
    """A chat; settings of `run` are the defaults, followed by the defaults below."""

    run: Path | None = None
    """Finished run that provides adapter, policy, rewards, rollout and seed."""
    adapter: Path | None = None
    """PEFT folder, or run directory to take only the adapter from; default: the run's adapter."""
    show_rewards: bool = True
    """Load the reward models and show the scores, except of models that need further data
    fields."""

    def __post_init__(self) -> None:
        if not (self.run or self.adapter):
            raise ValueError(
                "chat needs a model: pass --run runs/mine, or --adapter with --policy.path."
            )
        super().__post_init__()
        if self.run is None and (self.target or self.require):
            raise ValueError(
                f"{self.trade_offs[0]} needs the front of a run: pass --run runs/mine."
            )
        SpeakersConfig.__post_init__(self)


@configuration
class ExploreConfig(SpeakersConfig):
    """An interactive page of a run; the run's settings are the defaults."""

    run: Path | None = None
    """Finished conditioned run with a front.json; provides adapter, policy, rewards, rollout and
    seed."""
    show_rewards: bool = True
    """Load the reward models and show the scores of replies."""
    port: Annotated[Port | None, Hint("null takes a free one")] = None
    """Port of the page, which only this machine can open; null: the first free one from 7860."""

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError("explore needs a conditioned run with a front: pass --run runs/mine.")
        super().__post_init__()


@configuration
class PickConfig:
    """A target trade-off on a front."""

    front: Path
    """Conditioned run, folder of a sweep with one front, or METHOD.front.json in it, with the
    adapters' folders beside it."""
    target: str = ""
    """Where to end up on the front, as comma-separated name=share pairs of all objectives; scaled
    to sum 1. For separately trained models, it is the preference they were trained for. For a
    conditioned adapter, it is the proportion of the objectives' gains, each relative to its range
    on the front; the preference that reaches it is computed. With `require`, the weights of the
    rewards to maximise instead."""
    require: str = ""
    """Requirements on rewards in [0, 1], kl or other scores, such as "harmless>=0.6, kl<=3". Among
    the models whose bounds on validation prompts meet all of them, the one with the largest rewards
    of the objectives without a requirement is chosen, or with the largest weighted by `target`.
    Bounds on test prompts then certify it, in certificate.json beside the adapter."""
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95
    """Confidence of the one-sided bounds that must meet `require`."""
    merge: bool = False
    """Merge the adapters around the target, instead of choosing the nearest one; for a conditioned
    adapter, fold it at the preference."""
    out: Path | None = None
    """Folder of the merged adapter, which must not exist; default: runs/merged-TIME."""

    def __post_init__(self) -> None:
        if not self.target and not self.require:
            raise ValueError(
                "target or require is missing: pass a target, such as --target a=0.7,b=0.3, or "
                "requirements, such as --require 'a>=0.6'."
            )
        if self.out is not None and not self.merge:
            raise ValueError(
                f"out needs merge, since only merged adapters are written, got {self.out}; add "
                "--merge or remove --out."
            )


@configuration
class ExportConfig(TradeOffConfig):
    """An export; settings of `run` are the defaults, followed by the defaults below."""

    run: Path | None = None
    """Finished run, which provides adapter, policy and rollout; a conditioned one must have a
    front.json."""
    to: TargetName = "peft"
    """Engine: peft for PEFT folders whose scaled sum is the front, gguf for the same as files of
    llama.cpp with the base model, openvino for the same as files of OpenVINO GenAI, or vllm, which
    does not scale adapters, for a folder per measured point."""
    has_base: bool = True
    """With gguf, write the base model too. Turn it off to serve another GGUF file of it, such as a
    quantized one."""
    out: Path | None = None
    """Folder to write, which must not exist; default: runs/RUN-TO-TIME."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model; its weights are read only for gguf."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies, the default of requests to an export for gguf."""

    def __post_init__(self) -> None:
        if self.run is None:
            raise ValueError("export needs a finished run: firm export runs/mine.")
        super().__post_init__()


@configuration
class ServeConfig:
    """An endpoint; settings of `run` are the defaults, followed by the defaults below."""

    run: Path | None = None
    """Finished conditioned run, which is exported into a temporary folder."""
    export: Path | None = None
    """Folder of `firm export --to gguf`, instead of a run."""
    base: Path | None = None
    """GGUF file of the base model, such as a quantized one; by default the run's own model."""
    name: str = ""
    """Name of the model in requests; by default that of the base model."""
    host: str = "127.0.0.1"
    """Address to bind; others than this machine's own need `api_key_file`."""
    port: Port = 8080
    """Port."""
    api_key_file: Path | None = None
    """File with the key that requests must carry as bearer token; it is not passed on the command
    line, which other users of this machine can see."""
    num_slots: NumWorkers = 4
    """Number of requests that are answered at once."""
    max_waiting: Annotated[int, Interval(ge=0, le=10_000)] = 64
    """Number of requests that wait for a slot; others get status 429."""
    context: NumTokens = 2048
    """Maximum length of a prompt with its reply in tokens."""
    num_threads: Annotated[NumWorkers | None, Hint("null takes one per core")] = None
    """CPU threads; null: one per core."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(path=""))
    """Base model of the run."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of replies, the default of requests."""

    def __post_init__(self) -> None:
        if (self.run is None) == (self.export is None):
            raise ValueError("serve needs a model: firm serve runs/mine, or --export FOLDER.")
        if self.export and (self.policy, self.rollout) != (PolicyConfig(path=""), RolloutConfig()):
            raise ValueError(
                "policy and rollout are settings of a run that is exported, and an export has its "
                "own: pass them to firm export, or sampling with each request."
            )
        if served_name(self.name) != self.name:
            raise ValueError(
                "name must have no blanks and no @, which comes before a trade-off, got "
                f"{self.name!r}: try {served_name(self.name)!r}."
            )


@configuration
class ReportConfig:
    """A page as a single file, or a study's values in the terminal."""

    run: Path
    """Run, sweep or study whose report.html, or comparison.html of a classic study, is rewritten as
    one file that needs no network."""
    rounds: list[NonNegativeInt] = field(default_factory=list)
    """Evaluated rounds of a study, whose values are printed instead."""
    against: str | None = None
    """Setting of a study; the others' differences from it, paired by seed, are printed instead."""


@configuration
class WorkspaceConfig:
    """A workspace in W&B."""

    run: Path
    """Run with at least one round, or folder of a sweep or of a study of language models. Its logs
    determine the panels; only the names of series are sent."""
    entity: str | None = None
    """W&B user or team; null: the run's, or the owner of the API key."""
    project: str | None = None
    """W&B project; null: the run's."""
    name: str = "FIRM"
    """Name of the workspace; saving again creates another workspace."""


def served_name(name: str) -> str:
    """Returns a name that requests can state, which is the same if it is one."""
    return "".join("-" if c in "@ " or not c.isprintable() else c for c in name)
