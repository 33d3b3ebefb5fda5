"""Records of a plan: sizes, bytes, memory, work and placement."""

from collections import defaultdict
from dataclasses import dataclass

from firm.alignment.hyperparameters import Hyperparameter
from firm.jobs.inspection import Inspection


@dataclass(frozen=True)
class PlanTable:
    """A table for `firm.run.print_table`: title, headings and rows of text."""

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
    layers_by_module: dict[str, int]
    """Layers that have an adapter, by the same names."""
    adapter_bytes: int
    bytes_down: int
    """To a client in a round, as the engine counts, over all that the strategy asks it."""
    bytes_up: int
    """From a client in a round, if it serves all objectives."""
    uploads: int
    """What the server holds at once of what came up in a round."""


@dataclass(frozen=True)
class Memory:
    """Estimated bytes in one process."""

    learner: int
    """Of one client: critic and optimizer moments, live and saved, and its adapter if stacked."""
    jacobian: int
    """The M gradients of the clients at work, and their running sums where a minibatch is taken in
    parts."""
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
    """Size and device of a reward model."""

    source: str
    num_parameters: int | None
    """None where it is no local classifier."""
    num_bytes: int
    device: str
    """As configured."""


@dataclass(frozen=True)
class Passes:
    """Passes of one kind in the process with the most clients, if all of them participate."""

    clients: int
    """Whose rows are in a pass."""
    rows: int
    """In a pass, at most."""
    count: int
    """Passes of a round."""


@dataclass(frozen=True)
class Work:
    """Amount of work in a run."""

    optimizer_steps: int
    """Per client and round, if it serves all objectives."""
    solves: int
    """Systems of weights, per client and round; 0 where clients find none themselves."""
    server_solves: int
    """Systems of weights that the server solves, per round."""
    clients_per_round: int
    rounds: int
    prompts_per_client: tuple[int, int] | None
    """Training prompts of the client that has fewest and of the one that has most; None where the
    data are not on this machine."""
    training_replies: int
    """Sampled in all, without the batches of FedCMOO's communication two_sample."""
    evaluation_replies: int
    """The same, at most: the data may hold fewer prompts."""
    calibration_replies: int
    """The same, at most."""
    scored_replies: int
    """Replies times scores, at most."""
    updates: Passes
    """Forward passes with gradients, in a process and round."""
    rollouts: Passes
    """Chunks of replies that are sampled, in a process and round."""


@dataclass(frozen=True)
class Placement:
    """Clients and models of one process, and their devices."""

    clients: list[str]
    policy: str
    rewards: dict[str, str]
    """Device by objective, metric or GROUP/OBJECTIVE; functions have none."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run; figures that require an unknown model are None."""

    policy_path: str
    dtype: str
    gradient_checkpointing: bool
    inspection: Inspection | None
    policy: PolicyFigures | None
    memory: Memory | None
    rewards: dict[str, RewardFigures]
    work: Work
    places: list[Placement]
    hyperparameters: list[Hyperparameter]
    notes: list[str]
    """What is left out, and how to have it included."""

    def memory_by_device(self) -> dict[str, int]:
        """Returns the peak bytes by device, summed over its processes."""
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
        total["cpu"] += self.policy.uploads + adapter  # on the server
        return dict(total)
