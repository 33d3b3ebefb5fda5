"""What a run would do, from its configuration and the models' `config.json` alone.

Models are built without storage, so sizes are those of the real ones; memory is counted on passes
without content (`firm.alignment.memory`). It stays an estimate; `LEFT_OUT` says of what.
"""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from firm.alignment.estimators import EstimatorConfig
from firm.alignment.hyperparameters import Hyperparameter, hyperparameters
from firm.alignment.memory import scoring_memory, update_memory, with_fake_parameters
from firm.alignment.policy import PolicyConfig, adapter_parameters, add_adapter
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
from firm.federation.messages import Answer, Request
from firm.federation.serialization import pack
from firm.federation.sharing import (
    CorrectionRequest,
    GramCorrection,
    JacobianRequest,
    JacobianShare,
)
from firm.federation.strategies import STRATEGIES
from firm.federation.strategy import StrategyConfig
from firm.federation.training import LocalTraining, ObjectiveTraining, ObjectiveUpdates
from firm.gradients import COMPRESSORS, message_to_dict

EVALUATION_BATCH = 64
"""Replies that `firm.alignment.evaluate` samples at once."""

STATES_PER_CLIENT = 3
"""A client's learner: live, after the last accepted round, and after the pending one."""

LEFT_OUT = (
    "Memory is an estimate, for prompts and replies of full length. Left out: the reward models' "
    "activations, the libraries and drivers themselves (0.5 to 1 GB), workspaces, what the "
    "allocator holds back (on a CPU up to one and a half times as much again), and texts."
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
    """To a client in a round, as the engine counts, over all that the strategy asks it."""
    bytes_up: int
    """From a client in a round, if it serves all objectives."""
    uploads: int
    """What the server holds at once of what came up in a round."""


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
    """Per client and round, if it serves all objectives."""
    solves: int
    """Systems of weights, per client and round; 0 where clients find none themselves."""
    server_solves: int
    """Systems of weights that the server solves, per round."""
    clients_per_round: int
    rounds: int
    training_replies: int
    """Sampled in all, without the batches of FedCMOO's communication two_sample."""
    evaluation_replies: int
    """The same, at most: the data may hold fewer prompts."""
    calibration_replies: int
    """The same, at most."""
    num_objectives: int
    num_metrics: int
    num_group_rewards: int = 0
    """Further reward models of groups of clients, calibrated beside the others."""

    @property
    def scored_replies(self) -> int:
        """Replies times scores."""
        others = self.num_objectives + self.num_metrics
        judges = self.num_objectives + self.num_group_rewards
        return (
            self.num_objectives * self.training_replies
            + judges * self.calibration_replies
            + others * self.evaluation_replies
        )


@dataclass(frozen=True)
class Place:
    """What one process hosts, and where."""

    clients: list[str]
    policy: str
    rewards: dict[str, str]
    """Device by objective, metric or GROUP/OBJECTIVE; functions have none."""


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
        total["cpu"] += self.policy.uploads + adapter  # the server's
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
            (
                "weights solved in all",
                f"{work.rounds * (visits * work.solves + work.server_solves):,}",
            ),
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


class _Group(Protocol):
    """What a plan reads of clients that differ from the others."""

    @property
    def rewards(self) -> Mapping[str, _Reward]: ...


class _Run(Protocol):
    """What a plan reads of a run's configuration."""

    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def rewards(self) -> Mapping[str, _Reward]: ...
    @property
    def groups(self) -> Mapping[str, _Group]: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def estimator(self) -> EstimatorConfig: ...
    @property
    def strategy(self) -> StrategyConfig: ...
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
    policy, memory, listener = None, None, _listen(cfg, clients)
    architecture = _architecture(cfg.policy.path, "--policy.path", notes)
    if architecture is not None:
        model = _policy_without_storage(architecture, cfg.policy)
        listener = _listen(cfg, clients, adapter_parameters(model))
        policy = _policy_figures(model, listener)
        try:
            memory = _memory(architecture, policy, cfg, listener, processes.per_client)
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
        **{
            f"groups.{group}.rewards.{name}": (f"{group}/{name}", reward)
            for group, others in cfg.groups.items()
            for name, reward in others.rewards.items()
        },
    }
    rewards = {
        name: _reward_figures(reward, f"--{key}.path", notes)
        for key, (name, reward) in sources.items()
    }
    if cfg.strategy.num_local_epochs is not None:
        notes.append(
            "strategy.num_local_epochs: how many local steps an epoch has follows from a client's "
            "prompts, which are not read; steps, replies and uploaded metrics are those of one."
        )
    return Plan(
        policy_path=cfg.policy.path,
        dtype=cfg.policy.dtype,
        gradient_checkpointing=cfg.policy.gradient_checkpointing,
        policy=policy,
        memory=memory,
        rewards=rewards,
        work=_work(cfg, len(clients), listener),
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


def _policy_figures(model: Any, listener: "_Listener") -> PolicyFigures:
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
    return PolicyFigures(
        num_parameters=sum(p.numel() for p in frozen),
        bytes_by_dtype=dict(bytes_by_dtype),
        num_trainable=sum(p.numel() for p in trainable.values()),
        trainable_by_module=dict(by_module),
        adapter_bytes=adapter_bytes,
        bytes_down=listener.bytes_down // listener.num_clients,
        bytes_up=listener.bytes_up // listener.num_clients,
        uploads=listener.uploads,
    )


_TOLD_PARAMETERS = 1_000_000
"""Columns of the Jacobian that a planned client compresses; the others' bytes follow by proportion,
which holds but for the rounding of ranks."""

_WHOLE_PARAMETERS = 1_000
"""Columns of one that travels whole, where proportion is exact."""


class _Listener:
    """An engine that counts what a strategy sends and gets; its clients fail to train.

    Their messages hold adapters without entries and Jacobians of few columns. What these lack of
    the real ones is added to the counts.

    Args:
        cfg: The run's configuration.
        adapter: The adapter's parameters, of which sizes alone count.
    """

    def __init__(self, cfg: _Run, adapter: Mapping[str, torch.Tensor]) -> None:
        self._cfg = cfg
        self.adapter = {name: torch.empty(0) for name in adapter}
        self._adapter_bytes = sum(parameter.nbytes for parameter in adapter.values())
        num_parameters = sum(parameter.numel() for parameter in adapter.values())
        is_whole = getattr(cfg.strategy, "compressor", "none") == "none"
        most = _WHOLE_PARAMETERS if is_whole else _TOLD_PARAMETERS
        self._told = min(num_parameters, most) or most
        self._scale = num_parameters / self._told
        self.bytes_down = self.bytes_up = self.uploads = 0
        self.num_clients = 0
        """Clients that train."""
        self.num_trainings = 1
        """Trainings of each in a round."""
        self.solves_by_clients = self.solves_on_server = self.takes_whole_batches = False

    def map(self, request: Request, clients: Sequence[str]) -> tuple[list[Reply], list[Failure]]:
        m = len(self._cfg.rewards)
        content, num_adapters = None, 0
        if isinstance(request, CorrectionRequest):
            content = GramCorrection(own_gram=torch.eye(m), correction=torch.eye(m))
        elif isinstance(request, JacobianRequest):
            self.takes_whole_batches = self.solves_on_server = True
            content = self._jacobian(request)
        elif isinstance(request, LocalTraining):
            self.num_clients, num_adapters = len(clients), 1
            self.solves_by_clients = request.weighting != "fixed"
            self.takes_whole_batches |= self.solves_by_clients and request.solve_per == "batch"
        else:
            self.num_clients, self.num_trainings = len(clients), m
            self.solves_on_server, num_adapters = True, m
        sent = content or self._trained(request, clients[0])
        up = len(pack(sent)) + num_adapters * self._adapter_bytes
        up += self._missing(content) if isinstance(content, JacobianShare) else 0
        down = len(pack(request.of(clients[0]))) + self._adapter_bytes
        down += self._missing(getattr(request, "broadcast", None))
        self.bytes_down += len(clients) * down
        self.bytes_up += len(clients) * up
        self.uploads = max(self.uploads, len(clients) * up)
        if content is None:
            return [], [Failure(name, "only planned") for name in clients]
        return [Reply(name, content, 0, 0) for name in clients], []

    def _jacobian(self, request: JacobianRequest) -> JacobianShare:
        """What a client tells of its gradients, with a Jacobian of few columns."""
        generator = torch.Generator().manual_seed(0)
        m = len(self._cfg.rewards)
        share = JacobianShare(
            served=list(range(m)), start_losses=[1 / 3] * m if request.share_losses else None
        )
        rows = torch.randn(m, self._told, generator=generator)
        if request.compressor is None:
            return replace(share, jacobian=rows)
        compressor: Any = COMPRESSORS[request.compressor]
        message = compressor(int(request.budget * self._told)).compress(
            rows, generator=generator, shared_seed=request.seed
        )
        return replace(share, message=message_to_dict(message))

    def _trained(self, request: Request, client: str) -> Answer:
        """A reply to a training, with an adapter without entries."""
        m, digits = len(self._cfg.rewards), 1 / 3  # 18 digits, as most figures have
        by_objective = dict.fromkeys(self._cfg.rewards, digits)
        # 7 figures by objective, 30 others: near enough, as the solves and the adapter are exact
        figures = {
            **{f"figure of objectives {i}": by_objective for i in range(7)},
            **{f"figure {i:04d}": digits for i in range(30)},
        }
        if isinstance(request, ObjectiveTraining):
            each = {**figures, "weights": [[1.0] * m] * _passes(self._cfg)}
            return ObjectiveUpdates(
                updates=dict.fromkeys(self._cfg.rewards, self.adapter),
                num_examples=1000,
                num_shared=1,
                metrics={"by_objective": dict.fromkeys(self._cfg.rewards, each)},
            )
        solve = {
            "weights": [digits] * m,
            "gradient_norms": [digits] * m,
            "cosines": [[digits] * m] * m,
            "beta_effect": digits,
        }
        metrics = {
            **{key: [value] * _solves(self._cfg) for key, value in solve.items()},
            **figures,
            **({"gram": [[digits] * m] * m} if self._cfg.strategy.share_gram else {}),
        }
        return Update(client, self.adapter, 1000, metrics)

    def _missing(self, content: Any) -> int:
        """Bytes of the columns that messages on the Jacobian leave out."""
        return round((self._scale - 1) * _tensor_bytes(content))

    def client_states(self, accepted: Mapping[str, int]) -> State:
        return {}

    def restore_client_states(self, states: State) -> None: ...

    def close(self) -> None: ...


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, JacobianShare):
        content = vars(content)
    entries = content.values() if isinstance(content, dict) else ()
    return sum(_tensor_bytes(entry) for entry in entries)


def _listen(
    cfg: _Run, clients: Sequence[str], adapter: Mapping[str, torch.Tensor] | None = None
) -> _Listener:
    """What a strategy's round asks of clients and has them send."""
    listener = _Listener(cfg, adapter or {})
    state = ServerState(listener.adapter, objectives=tuple(cfg.rewards), seed=0)
    with suppress(RoundFailed):
        STRATEGIES[cfg.strategy.name](state, clients, listener, cfg.strategy)  # type: ignore[attr-defined]  # every strategy's configuration has a name
    assert listener.num_clients
    return listener


def _passes(cfg: _Run) -> int:
    """Optimizer steps of one local training."""
    num_minibatches = cfg.estimator.batch_size // cfg.estimator.minibatch_size
    return cfg.strategy.num_local_steps * cfg.estimator.num_epochs * num_minibatches


def _solves(cfg: _Run) -> int:
    """Systems of weights of one local training."""
    per_batch = getattr(cfg.strategy, "solve_per", "minibatch") == "batch"
    return cfg.strategy.num_local_steps if per_batch else _passes(cfg)


def _work(cfg: _Run, num_clients: int, listener: _Listener) -> Work:
    evaluation = cfg.evaluation
    clients_per_round = min(cfg.strategy.clients_per_round or num_clients, num_clients)
    # the base model and the final one on both sets, every round's on the validation set
    prompts = 2 * evaluation.num_test_prompts
    prompts += (cfg.rounds + 1) * evaluation.num_validation_prompts
    # all trainings of a client start from one state, so that they have their first batch in common
    batches = listener.num_trainings * (cfg.strategy.num_local_steps - 1) + 1
    return Work(
        optimizer_steps=listener.num_trainings * _passes(cfg),
        solves=_solves(cfg) if listener.solves_by_clients else 0,
        server_solves=int(listener.solves_on_server),
        clients_per_round=clients_per_round,
        rounds=cfg.rounds,
        training_replies=cfg.rounds * clients_per_round * batches * cfg.estimator.batch_size,
        evaluation_replies=prompts * evaluation.num_samples,
        calibration_replies=evaluation.num_calibration_prompts,
        num_objectives=len(cfg.rewards),
        num_metrics=len(evaluation.metrics),
        num_group_rewards=sum(len(group.rewards) for group in cfg.groups.values()),
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
    architecture: PretrainedConfig,
    policy: PolicyFigures,
    cfg: _Run,
    listener: _Listener,
    per_client: int,
) -> Memory:
    """What one process needs, by passes of fake models of the policy's shape."""
    num_objectives = len(cfg.rewards)
    is_whole = listener.takes_whole_batches
    num_rows = cfg.estimator.batch_size if is_whole else cfg.estimator.minibatch_size
    own_rows = math.ceil(num_rows / per_client)
    part = min(cfg.estimator.micro_batch_size or own_rows, own_rows)
    calibration, evaluation = cfg.evaluation.num_calibration_prompts, EVALUATION_BATCH
    replies = max(cfg.estimator.batch_size, calibration, evaluation)
    rows = min(cfg.rollout.forward_batch_size, replies)
    update, saved = {}, {}
    for checkpointing in (False, True):
        changed = dataclasses.replace(cfg.policy, gradient_checkpointing=checkpointing)
        model = _policy_without_storage(architecture, changed)
        with FakeTensorMode() as mode:
            with_fake_parameters(model)
            saved[checkpointing], update[checkpointing] = update_memory(
                model, cfg.estimator, cfg.rollout, num_rows=part, num_objectives=num_objectives
            )
    model.eval()
    with mode, torch.no_grad():
        one_token = model(input_ids=torch.ones(rows, 1, dtype=torch.long), use_cache=True)
        layers = one_token.past_key_values.layers
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        scoring = scoring_memory(model, cfg.rollout, num_rows=rows)
    vocabulary = one_token.logits.size(-1)
    num_tokens = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    return Memory(
        learner=STATES_PER_CLIENT * _learner_bytes(architecture, policy, cfg),
        jacobian=(1 + (part < own_rows)) * num_objectives * policy.num_trainable * 4,
        update=update,
        saved=saved,
        cache=cache * num_tokens,
        scores=2 * rows * cfg.rollout.max_new_tokens * vocabulary * 4,  # transformers': float32
        scoring=scoring,
    )


def _learner_bytes(architecture: PretrainedConfig, policy: PolicyFigures, cfg: _Run) -> int:
    """Critics and optimizer moments of one client, once."""
    with torch.device("meta"):
        model = _policy_without_storage(architecture, cfg.policy)
        module = cfg.estimator.new_critic(model, len(cfg.rewards))
    critic = sum(parameter.nbytes for parameter in module.parameters()) if module else 0
    moments = 2 * policy.adapter_bytes if cfg.estimator.actor_optimizer == "adam" else 0
    learner = 3 * critic + moments  # the critic has Adam
    requests = cfg.strategy.requests(tuple(cfg.rewards))  # type: ignore[attr-defined]  # every strategy's configuration has them
    if ObjectiveTraining in requests:
        return len(cfg.rewards) * learner + critic  # of the common learner, which takes no step
    return learner


def _size(num_bytes: int) -> str:
    """Bytes in the largest unit of 1000 that leaves a number above 1."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if units[0] != "B" else f"{num_bytes} B"


def _text(value: Any) -> str:
    """A value as a YAML file would have it, without quotes that it can do without."""
    return value if value and isinstance(value, str) else json.dumps(value, default=str)
