"""What a run would do, from its configuration and the models' `config.json` alone.

Models are built without storage, so sizes are those of the real ones; memory is counted on passes
without content (`firm.alignment.memory`). It stays an estimate; `LEFT_OUT` says of what.
"""

import copy
import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from firm.alignment.hyperparameters import Hyperparameter, hyperparameters
from firm.alignment.memory import LiveBytes, response_logprobs, update_memory, with_fake_parameters
from firm.alignment.policy import PolicyConfig, adapter_parameters, add_adapter
from firm.alignment.ppo import PPOConfig
from firm.alignment.rollout import RolloutConfig
from firm.federation import (
    Failure,
    Processes,
    Reply,
    RoundFailed,
    ServerState,
    State,
    Update,
)
from firm.federation.serialization import pack
from firm.federation.server import RoundConfig
from firm.federation.strategies import STRATEGIES

EVALUATION_BATCH = 64
"""Replies that `firm.alignment.evaluate` samples at once."""

STATES_PER_CLIENT = 3
"""A client's learner: live, after the last accepted round, and after the pending one."""

LEFT_OUT = (
    "Memory is an estimate, for prompts and replies of full length. Left out: the reward models' "
    "activations, the libraries and drivers themselves (0.5 to 1 GB), workspaces, what the "
    "allocator holds back (on a CPU up to one and a half times as much again), texts, and the "
    "activations of a critic that is a network."
)


@dataclass(frozen=True)
class Table:
    """A title, headings, and rows of texts: what `firm.run.print_table` takes."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class PolicyFigures:
    """Sizes of the policy and of its adapter."""

    num_parameters: int
    """Frozen ones."""
    bytes_by_dtype: dict[str, int]
    """Of the frozen parameters; "buffers" are an entry of their own."""
    num_trainable: int
    trainable_by_module: dict[str, int]
    """By the last part of a module's name, such as "q_proj"."""
    adapter_bytes: int
    bytes_down: int
    """To a client in a round, as the engine counts."""
    bytes_up: int
    """From a client in a round."""


@dataclass(frozen=True)
class Memory:
    """Bytes in one process, an estimate."""

    learner: int
    """Of one client: critic and optimizer moments, live and saved."""
    jacobian: int
    """The M gradients, and their running sum where a minibatch is taken in parts."""
    update: dict[bool, int]
    """Peak of a forward and backward pass beyond parameters and Jacobian, by gradient
    checkpointing."""
    saved: dict[bool, int]
    """What of that the forward pass leaves for the backward pass."""
    cache: int
    """Keys and values of a rollout."""
    scores: int
    """Logits that a rollout keeps, and the tensor [B, T, V] that they are stacked to."""
    scoring: int
    """Peak of a pass that gives a whole rollout's log-probabilities."""


@dataclass(frozen=True)
class RewardFigures:
    """One reward model."""

    source: str
    num_parameters: int | None
    """None where it is no local classifier."""
    num_bytes: int
    device: str
    """As configured."""


@dataclass(frozen=True)
class Work:
    """How much is done."""

    optimizer_steps: int
    """Per client and round."""
    solves: int
    """Systems of weights, per client and round."""
    clients_per_round: int
    rounds: int
    training_replies: int
    """Sampled in all."""
    evaluation_replies: int
    """The same, at most: the data may hold fewer prompts."""
    calibration_replies: int
    """The same, at most."""
    num_objectives: int
    num_metrics: int

    @property
    def scored_replies(self) -> int:
        """Replies times scores."""
        others = self.num_objectives + self.num_metrics
        return (
            self.num_objectives * (self.training_replies + self.calibration_replies)
            + others * self.evaluation_replies
        )


@dataclass(frozen=True)
class Place:
    """What one process hosts, and where."""

    clients: list[str]
    policy: str
    rewards: dict[str, str]
    """Device by objective or metric; functions have none."""


@dataclass(frozen=True)
class Plan:
    """What would run; figures that need an unknown model are None."""

    policy_path: str
    dtype: str
    gradient_checkpointing: bool
    policy: PolicyFigures | None
    memory: Memory | None
    rewards: dict[str, RewardFigures]
    work: Work
    places: list[Place]
    hyperparameters: list[Hyperparameter]
    notes: list[str]
    """What could not be told, and how to have it told."""

    def memory_by_device(self) -> dict[str, int]:
        """Bytes on each device at the worst moment, summed over its processes."""
        total: dict[str, int] = defaultdict(int)
        for place in self.places:
            for name, device in place.rewards.items():
                total[device] += self.rewards[name].num_bytes
        if self.policy is None or self.memory is None:
            return {device: size for device, size in total.items() if size}
        memory, adapter = self.memory, self.policy.adapter_bytes
        update = memory.jacobian + memory.update[self.gradient_checkpointing]
        rollout = max(memory.cache + memory.scores, memory.scoring)
        for place in self.places:
            total[place.policy] += (
                sum(self.policy.bytes_by_dtype.values())
                + adapter
                + len(place.clients) * memory.learner
                + max(update, rollout)
            )
        total["cpu"] += (self.work.clients_per_round + 1) * adapter  # the server's
        return dict(total)

    def tables(self) -> list[Table]:
        """Everything, for a person."""
        return [
            self._model_table(),
            self._work_table(),
            self._placement_table(),
            *self._memory_tables(),
            *self._hyperparameter_tables(),
        ]

    def _model_table(self) -> Table:
        rows = [("policy", self.policy_path)]
        if figures := self.policy:
            num_all = figures.num_parameters + figures.num_trainable
            rows += [
                ("parameters", f"{figures.num_parameters:,} in {self.dtype}"),
                (
                    "trainable",
                    f"{figures.num_trainable:,} in float32, "
                    f"{100 * figures.num_trainable / num_all:.2g} % of all",
                ),
                *(
                    (f"  {name}", f"{count:,}")
                    for name, count in figures.trainable_by_module.items()
                ),
                ("adapter", f"{_size(figures.adapter_bytes)} ({figures.adapter_bytes:,} bytes)"),
                ("down, per client and round", _size(figures.bytes_down)),
                ("up, per client and round", _size(figures.bytes_up)),
                ("both, in all", _size(self._traffic(figures))),
            ]
        for name, reward in self.rewards.items():
            count = reward.num_parameters
            size = "" if count is None else f", {count:,} parameters, {_size(reward.num_bytes)}"
            rows.append((f"reward {name}", reward.source + size))
        return Table("What would run", ("", ""), rows)

    def _traffic(self, figures: PolicyFigures) -> int:
        num_visits = self.work.rounds * self.work.clients_per_round
        return num_visits * (figures.bytes_down + figures.bytes_up)

    def _work_table(self) -> Table:
        work = self.work
        visits = work.clients_per_round
        rows = [
            ("rounds", f"{work.rounds:,}"),
            ("clients per round", f"{visits:,}"),
            ("optimizer steps per client and round", f"{work.optimizer_steps:,}"),
            ("optimizer steps per round", f"{visits * work.optimizer_steps:,}"),
            ("optimizer steps in all", f"{work.rounds * visits * work.optimizer_steps:,}"),
            ("weights solved in all", f"{work.rounds * visits * work.solves:,}"),
            ("replies sampled in training", f"{work.training_replies:,}"),
            ("replies sampled in evaluations", f"at most {work.evaluation_replies:,}"),
            ("replies sampled for calibration", f"at most {work.calibration_replies:,}"),
            ("reward calls, one per reply and score", f"at most {work.scored_replies:,}"),
        ]
        return Table("Work", ("", ""), rows)

    def _placement_table(self) -> Table:
        names = [name for name, reward in self.rewards.items() if reward.device]
        rows = [
            (
                str(rank),
                " ".join(place.clients) or "-",
                place.policy,
                *(place.rewards[name] for name in names),
            )
            for rank, place in enumerate(self.places)
        ]
        header = ("process", "clients", "policy", *(f"reward {name}" for name in names))
        return Table(f"Placement, {len(rows)} process{'es' * (len(rows) > 1)}", header, rows)

    def _memory_tables(self) -> Iterator[Table]:
        if self.policy and (memory := self.memory):
            used = {self.gradient_checkpointing: ", as configured"}
            rows = [
                *(
                    (f"policy, {dtype}", _size(size))
                    for dtype, size in self.policy.bytes_by_dtype.items()
                ),
                ("adapter", _size(self.policy.adapter_bytes)),
                ("per client: critic, moments, saved states", _size(memory.learner)),
                ("Jacobian [M, d]", _size(memory.jacobian)),
            ]
            for is_on, peak in memory.update.items():
                how = f"{'with' if is_on else 'without'} gradient checkpointing"
                saved = _size(memory.saved[is_on])
                rows += [
                    (f"update {how}{used.get(is_on, '')}", _size(peak)),
                    ("  of which kept for the backward pass", saved),
                ]
            rows += [
                ("rollout: keys and values", _size(memory.cache)),
                ("rollout: logits of the reply", _size(memory.scores)),
                ("log-probabilities of a rollout", _size(memory.scoring)),
            ]
            yield Table("Memory of a process", ("", "bytes"), rows)
        by_device = sorted(self.memory_by_device().items())
        if rows := [(name, _size(size)) for name, size in by_device if size]:
            yield Table("Memory by device, at the worst moment", ("", "bytes"), rows)

    def _hyperparameter_tables(self) -> Iterator[Table]:
        papers = [h for h in self.hyperparameters if h.source]
        yield Table(
            "Given by the paper",
            ("key", "value", "paper", "where", "equal"),
            [
                (
                    h.path,
                    _text(h.value),
                    _text(h.paper_value),
                    h.source,
                    "yes" if h.is_papers else "no",
                )
                for h in papers
            ],
        )
        yield Table(
            "Not in the paper",
            ("key", "value"),
            [(h.path, _text(h.value)) for h in self.hyperparameters if not h.source],
        )


# --- From a configuration to a plan ---------------------------------------------------------------


class _Reward(Protocol):
    """What a plan reads of a reward model's configuration."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def output(self) -> int | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


class _Evaluation(Protocol):
    """What a plan reads of how much is measured."""

    @property
    def num_calibration_prompts(self) -> int: ...
    @property
    def num_validation_prompts(self) -> int: ...
    @property
    def num_test_prompts(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, _Reward]: ...


class _Run(Protocol):
    """What a plan reads of a run's configuration."""

    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def rewards(self) -> Mapping[str, _Reward]: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def ppo(self) -> PPOConfig: ...
    @property
    def strategy(self) -> RoundConfig: ...
    @property
    def evaluation(self) -> _Evaluation: ...
    @property
    def rounds(self) -> int: ...


def make_plan(cfg: _Run, clients: Sequence[str], processes: Processes) -> Plan:
    """What a run of this configuration would do; no weight and no data are read.

    Args:
        cfg: The run's configuration, a dataclass.
        clients: Names of all clients.
        processes: Those that the run would have; they need not be connected.

    Raises:
        ValueError: No layer of the policy is called like one of the target modules.
    """
    notes: list[str] = []
    policy, memory = None, None
    architecture = _architecture(cfg.policy.path, "--policy.path", notes)
    if architecture is not None:
        model = _policy_without_storage(architecture, cfg.policy)
        policy = _policy_figures(model, cfg, clients)
        try:
            memory = _memory(architecture, policy, cfg, processes.per_client)
        except (RuntimeError, AttributeError) as error:  # what depends on the tensors' content
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            notes.append(
                f"{cfg.policy.path}: no estimate of its memory without weights ({reason})."
            )
    sources = {
        **{f"rewards.{name}": (name, reward) for name, reward in cfg.rewards.items()},
        **{
            f"evaluation.metrics.{name}": (name, reward)
            for name, reward in cfg.evaluation.metrics.items()
        },
    }
    rewards = {
        name: _reward_figures(reward, f"--{key}.path", notes)
        for key, (name, reward) in sources.items()
    }
    return Plan(
        policy_path=cfg.policy.path,
        dtype=cfg.policy.dtype,
        gradient_checkpointing=cfg.policy.gradient_checkpointing,
        policy=policy,
        memory=memory,
        rewards=rewards,
        work=_work(cfg, len(clients)),
        places=[
            _place(rank, clients, processes, rewards, cfg.policy.device)
            for rank in range(processes.size)
        ],
        hyperparameters=list(hyperparameters(cfg)),
        notes=[*notes, LEFT_OUT],
    )


def _architecture(path: str, key: str, notes: list[str]) -> PretrainedConfig | None:
    """A model's configuration; without one, a note that says what to do."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        notes.append(
            f"{path}: no config.json could be read, so what depends on this model is not shown "
            f"({reason}). That file alone is needed: put it into a folder and give {key} FOLDER."
        )
        return None


def _policy_without_storage(architecture: PretrainedConfig, config: PolicyConfig) -> Any:
    """The policy as `load_policy` makes it, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.dtype))
        return add_adapter(model, config)


def _policy_figures(model: Any, cfg: _Run, clients: Sequence[str]) -> PolicyFigures:
    trainable = adapter_parameters(model)
    by_module: Counter[str] = Counter()
    for name, parameter in trainable.items():
        by_module[name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1]] += parameter.numel()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    bytes_by_dtype: Counter[str] = Counter()
    for parameter in frozen:
        bytes_by_dtype[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    bytes_by_dtype["buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    adapter_bytes = sum(parameter.nbytes for parameter in trainable.values())
    down, up = _messages(cfg, clients, list(trainable))
    return PolicyFigures(
        num_parameters=sum(p.numel() for p in frozen),
        bytes_by_dtype=dict(bytes_by_dtype),
        num_trainable=sum(p.numel() for p in trainable.values()),
        trainable_by_module=dict(by_module),
        adapter_bytes=adapter_bytes,
        bytes_down=len(pack(down)) + adapter_bytes,
        bytes_up=len(pack(up)) + adapter_bytes,
    )


class _Listener:
    """An engine that notes what a strategy sends first, and on which every client fails."""

    payload: State | None = None

    def map(
        self, task: str, clients: Sequence[str], payload: State
    ) -> tuple[list[Reply], list[Failure]]:
        self.payload = self.payload or payload
        return [], [Failure(name, "only planned") for name in clients]

    def client_states(self, accepted: Mapping[str, int]) -> State:
        return {}

    def restore_client_states(self, states: State) -> None: ...

    def close(self) -> None: ...


def _messages(cfg: _Run, clients: Sequence[str], names: Sequence[str]) -> tuple[State, Update]:
    """What goes to a client and what comes back in a round, with tensors of no entry."""
    adapter = {name: torch.empty(0) for name in names}
    state = ServerState(adapter, objectives=tuple(cfg.rewards), seed=0)
    listener = _Listener()
    with suppress(RoundFailed):
        STRATEGIES[cfg.strategy.name](state, clients, listener, cfg.strategy)  # type: ignore[attr-defined]  # every strategy's configuration has a name
    assert listener.payload is not None
    m, digits = len(cfg.rewards), 1 / 3  # 18 digits, as most figures have
    by_objective = dict.fromkeys(cfg.rewards, digits)
    solve = {
        "weights": [digits] * m,
        "gradient_norms": [digits] * m,
        "cosines": [[digits] * m] * m,
        "beta_effect": digits,
    }
    metrics = {
        **{key: [value] * _solves(cfg) for key, value in solve.items()},
        # 7 figures by objective, 30 others: near enough, as the solves and the adapter are exact
        **{f"figure of objectives {i}": by_objective for i in range(7)},
        **{f"figure {i:04d}": digits for i in range(30)},
        **({"gram": [[digits] * m] * m} if cfg.strategy.share_gram else {}),
    }
    return {**listener.payload, "accepted": 0}, Update(clients[0], adapter, 1000, metrics)


def _optimizer_steps(cfg: _Run) -> int:
    """Per client and round."""
    num_minibatches = cfg.ppo.batch_size // cfg.ppo.minibatch_size
    return cfg.strategy.num_local_steps * cfg.ppo.num_epochs * num_minibatches


def _solves(cfg: _Run) -> int:
    """Systems of weights per client and round."""
    per_batch = getattr(cfg.strategy, "solve_per", "minibatch") == "batch"
    return cfg.strategy.num_local_steps if per_batch else _optimizer_steps(cfg)


def _work(cfg: _Run, num_clients: int) -> Work:
    evaluation = cfg.evaluation
    clients_per_round = min(cfg.strategy.clients_per_round or num_clients, num_clients)
    # the base model and the final one on both sets, every round's on the validation set
    prompts = 2 * evaluation.num_test_prompts
    prompts += (cfg.rounds + 1) * evaluation.num_validation_prompts
    steps = cfg.rounds * clients_per_round * cfg.strategy.num_local_steps
    return Work(
        optimizer_steps=_optimizer_steps(cfg),
        solves=_solves(cfg),
        clients_per_round=clients_per_round,
        rounds=cfg.rounds,
        training_replies=steps * cfg.ppo.batch_size,
        evaluation_replies=prompts * evaluation.num_samples,
        calibration_replies=evaluation.num_calibration_prompts,
        num_objectives=len(cfg.rewards),
        num_metrics=len(evaluation.metrics),
    )


def _reward_figures(reward: _Reward, key: str, notes: list[str]) -> RewardFigures:
    if reward.name != "sequence_classifier":
        return RewardFigures(f"the function {reward.name}", None, 0, "")
    architecture = _architecture(reward.path, key, notes)
    if architecture is None:
        return RewardFigures(reward.path, None, 0, reward.device)
    if reward.output is None:
        architecture.num_labels = 1
    dtype = getattr(torch, reward.dtype)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(architecture, dtype=dtype)
    return RewardFigures(
        reward.path,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_bytes=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        device=reward.device,
    )


def _place(
    rank: int,
    clients: Sequence[str],
    processes: Processes,
    rewards: Mapping[str, RewardFigures],
    device: str,
) -> Place:
    """Where a process has its models, if all processes are on this machine."""
    accelerator, own = torch.accelerator.current_accelerator(), device
    if device == "auto":
        own = "cpu"
        if accelerator is not None and torch.accelerator.is_available():
            own = f"{accelerator.type}:{rank % torch.accelerator.device_count()}"
    return Place(
        clients=processes.hosted_by(rank, clients),
        policy=own,
        rewards={
            name: own if reward.device in ("auto", own.partition(":")[0]) else reward.device
            for name, reward in rewards.items()
            if reward.device
        },
    )


# --- Memory ---------------------------------------------------------------------------------------


def _memory(
    architecture: PretrainedConfig, policy: PolicyFigures, cfg: _Run, per_client: int
) -> Memory:
    """What one process needs, by passes of fake models of the policy's shape."""
    num_objectives = len(cfg.rewards)
    own_rows = math.ceil(cfg.ppo.minibatch_size / per_client)
    part = min(cfg.ppo.micro_batch_size or own_rows, own_rows)
    calibration, evaluation = cfg.evaluation.num_calibration_prompts, EVALUATION_BATCH
    rows = min(cfg.rollout.forward_batch_size, max(cfg.ppo.batch_size, calibration, evaluation))
    update, saved = {}, {}
    for checkpointing in (False, True):
        changed = dataclasses.replace(cfg.policy, gradient_checkpointing=checkpointing)
        model = _policy_without_storage(architecture, changed)
        with FakeTensorMode() as mode:
            with_fake_parameters(model)
            saved[checkpointing], update[checkpointing] = update_memory(
                model, part, num_objectives, cfg.rollout, cfg.ppo.clip_range
            )
    model.eval()
    with mode, torch.no_grad():
        one_token = model(input_ids=torch.ones(rows, 1, dtype=torch.long), use_cache=True)
        layers = one_token.past_key_values.layers
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        with LiveBytes(model) as live:
            response_logprobs(model, rows, cfg.rollout)
    vocabulary = one_token.logits.size(-1)
    num_tokens = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    return Memory(
        learner=STATES_PER_CLIENT * _learner_bytes(architecture, policy, cfg),
        jacobian=(1 + (part < own_rows)) * num_objectives * policy.num_trainable * 4,
        update=update,
        saved=saved,
        cache=cache * num_tokens,
        scores=2 * rows * cfg.rollout.max_new_tokens * vocabulary * 4,  # transformers': float32
        scoring=live.peak,
    )


def _learner_bytes(architecture: PretrainedConfig, policy: PolicyFigures, cfg: _Run) -> int:
    """Critic and optimizer moments of one client, once."""
    if cfg.ppo.critic == "heads":
        critic = len(cfg.rewards) * (architecture.get_text_config().hidden_size + 1) * 4
    else:
        labelled = copy.deepcopy(architecture)
        labelled.num_labels = len(cfg.rewards)
        dtype = getattr(torch, cfg.policy.dtype)
        with torch.device("meta"):
            network = AutoModelForSequenceClassification.from_config(labelled, dtype=dtype)
        critic = sum(parameter.nbytes for parameter in network.parameters())
    moments = 2 * policy.adapter_bytes if cfg.ppo.actor_optimizer == "adam" else 0
    return 3 * critic + moments  # the critic has Adam


def _size(num_bytes: int) -> str:
    """Bytes in the largest unit of 1000 that leaves a number above 1."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if units[0] != "B" else f"{num_bytes} B"


def _text(value: Any) -> str:
    """A value as a YAML file would have it, without quotes that it can do without."""
    return value if value and isinstance(value, str) else json.dumps(value, default=str)
