"""Records of a plan: sizes, bytes, memory, work and placement."""

from collections import Counter
from dataclasses import dataclass

from firm.alignment.inspection import Inspection
from firm.jobs.alignment_config import AlignmentConfig


@dataclass(frozen=True)
class PolicyFigures:
    """Sizes of the policy and of its adapter."""

    num_parameters: int
    """Number of frozen parameters."""
    bytes_by_dtype: dict[str, int]
    """Bytes of the frozen parameters by dtype, and of "buffers"."""
    part_bytes: int
    """Bytes of the frozen parameters that a process keeps: its part, if they are sharded."""
    gathered_bytes: int
    """Bytes of frozen parameters that a pass gathers at a time; 0 unless they are sharded."""
    num_trainable: int
    layers_by_module: dict[str, int]
    """Number of layers with an adapter, by the last part of a module's name, such as "q_proj"."""
    adapter_bytes: int
    bytes_down: int
    """Bytes to a client per round, over all requests of the strategy, as counted by engines."""
    bytes_up: int
    """Bytes from a client per round, if it trains all objectives."""
    uploads: int
    """Bytes of a round's uploads that the server holds at a time."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes in one process."""

    training: int
    """Critic and optimizer moments of a client in training, live and after the last accepted round;
    and its adapter if stacked."""
    waiting: int
    """Live learner, new state and initial state of another client of the round, and its adapter if
    stacked. States of earlier rounds are on the disk."""
    num_training: int
    """Number of clients in training at a time."""
    jacobian: int
    """The M gradients of the clients in training, and running sums over micro-batches, if any."""
    update: int
    """Peak of forward and backward pass in addition to parameters and Jacobian."""
    saved: int
    """The part of `update` saved for the backward pass."""
    values: int
    """Peak of the pass of the critic over a batch, if any, and of the advantages."""
    cache: int
    """Keys and values of a rollout."""
    rollout: int
    """Peak of a rollout in training, including the passes that compute log-probabilities."""
    evaluation: int
    """The same in evaluations and calibration."""
    engine: int
    """A rollout engine's own copy of the policy, with its cache and adapters; 0 without one."""
    engine_devices: tuple[str, ...] = ()
    """Devices of that copy, if they are not the policy's; each has an equal part."""


@dataclass(frozen=True)
class RewardFigures:
    """Size and device of a reward model."""

    source: str
    num_parameters: int | None
    """None unless it is a classifier whose config.json can be read."""
    num_bytes: int
    device: str
    """Device as configured."""
    base: str = ""
    """Base model and dtype of an adapter; adapters of one base share its weights on a device."""
    base_bytes: int = 0
    """Bytes of that base, which are not in `num_bytes`."""


@dataclass(frozen=True)
class Passes:
    """Passes of one kind in the process with the most clients, if all of them participate."""

    clients: int
    """Number of clients whose rows share a pass."""
    rows: int
    """Maximum rows of a pass."""
    count: int
    """Number of passes per round."""


@dataclass(frozen=True)
class Work:
    """Amount of work in a run."""

    optimizer_steps: int
    """Optimizer steps per client and round, if it trains all objectives."""
    solves: int
    """Solves for weights per client and round; 0 if clients do not solve."""
    server_solves: int
    """Solves for weights by the server per round."""
    clients_per_round: int
    rounds: int
    prompts_per_client: tuple[int, int] | None
    """Minimum and maximum training prompts of a client; None if not on this machine."""
    training_replies: int
    """Replies sampled in training, excluding the batches of FedCMOO's communication two_sample."""
    evaluation_replies: int
    """Replies sampled in evaluations, of prompts on this machine as many as there are."""
    calibration_replies: int
    """Maximum number of replies sampled for calibration."""
    evaluation_rows: int
    """Maximum number of replies or pairs in evaluations and calibration."""
    validation: tuple[int, int]
    """Number of validation prompts, or pairs of an objective, and how often they are evaluated."""
    test: tuple[int, int]
    """The same of test prompts."""
    scored_replies: int
    """Maximum number of scores computed."""
    updates: Passes
    """Forward passes with gradients, per process and round."""
    rollouts: Passes
    """Batches of sampled replies, per process and round."""


@dataclass(frozen=True)
class Seconds:
    """Estimated time on this machine, for rows of maximum length."""

    sampling: float
    """Replies of a round, their log-probabilities and their advantages."""
    updates: float
    """Gradients of a round."""
    evaluation: float
    """All evaluations, and calibration."""
    rounds: int

    @property
    def round(self) -> float:
        """Sampling and updates of a round."""
        return self.sampling + self.updates

    @property
    def total(self) -> float:
        """All rounds, evaluations and calibration."""
        return self.rounds * self.round + self.evaluation


@dataclass(frozen=True)
class Placement:
    """Clients and models of one process, and their devices."""

    clients: list[str]
    policy: str
    policy_bytes: dict[str, int]
    """Bytes of the frozen parameters by device, if they are divided by `policy.device_map`."""
    rewards: dict[str, str]
    """Device by objective, metric or GROUP/OBJECTIVE; functions have none."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run; figures that depend on an unknown model are None."""

    cfg: AlignmentConfig
    inspection: Inspection | None
    policy: PolicyFigures | None
    memory: Memory | None
    seconds: Seconds | None
    rewards: dict[str, RewardFigures]
    work: Work
    places: list[Placement]
    notes: list[str]
    """Figures that are omitted, and how to include them."""

    def memory_by_device(self) -> dict[str, int]:
        """Returns the peak bytes by device, summed over its processes."""
        total: Counter[str] = Counter()
        for place in self.places:
            bases: dict[tuple[str, str], int] = {}
            for name, device in place.rewards.items():
                reward = self.rewards[name]
                total[device] += reward.num_bytes
                bases[reward.base, device] = reward.base_bytes
            for (_, device), size in bases.items():
                total[device] += size
            if self.policy and self.memory:
                total.update(self._policy_memory(place, self.policy, self.memory))
        if self.policy and self.memory:
            total["cpu"] += self.policy.uploads + self.policy.adapter_bytes  # on the server
        return {device: size for device, size in total.items() if size}

    def _policy_memory(
        self, place: Placement, policy: PolicyFigures, memory: Memory
    ) -> Counter[str]:
        """Returns the peak bytes of a process without its reward models, by device."""
        total = Counter(place.policy_bytes or {place.policy: policy.part_bytes})
        num_clients = min(len(place.clients), self.work.clients_per_round)
        num_training = min(num_clients, memory.num_training)
        num_waiting = num_clients - num_training
        step = max(memory.jacobian + memory.update, memory.values, memory.rollout)
        learners = num_training * memory.training + num_waiting * memory.waiting
        evaluation = num_clients * memory.waiting + memory.evaluation
        total[place.policy] += policy.gathered_bytes + policy.bytes_by_dtype["buffers"]
        total[place.policy] += policy.adapter_bytes + max(learners + step, evaluation)
        devices = memory.engine_devices or (place.policy,)
        total.update(dict.fromkeys(devices, memory.engine // len(devices)))
        return total
