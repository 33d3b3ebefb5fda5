"""One training per objective: the clients' part of FMGDA and FSMGDA.

Yang et al. (2023), arXiv:2310.09866.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, ValidationInfo

from firm.base.quantities import Quantity, register
from firm.base.schema import ByObjective
from firm.federation.client import Client
from firm.federation.messages import Answer, Count, Examples, Request, Sizes, Steps
from firm.federation.schema import Invalid, Metrics, Parameters, Reading, context, read
from firm.federation.sharing import shared_columns
from firm.federation.tasks import task
from firm.federation.training import LocalTraining, served_objectives, train_on_sum


@dataclass(frozen=True)
class ObjectiveUpdates(Answer):
    """One update per objective that a client serves."""

    updates: ByObjective[Parameters]
    """θ_{s,c} by objective; at least one."""
    num_examples: Examples
    """Size of the client's shard."""
    num_shared: Count
    """Number of parameters shared by all objectives, which come first."""
    metrics: Metrics
    """Metrics, with those of each training under "by_objective"."""

    def check(self, reading: Reading) -> None:
        """Raises ``Invalid`` if there are no updates, or more shared parameters than parameters."""
        size = reading.num_parameters
        if not self.updates:
            raise Invalid(f"updates must have at least one of {', '.join(reading.objectives)}")
        if not 0 < self.num_shared <= size:
            raise Invalid(f"num_shared must be from 1 to {size}, got {self.num_shared}")


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraining(Request):
    """Requests one update per objective, each trained independently from the server's adapter."""

    task: ClassVar[str] = "objective_training"
    answer: ClassVar[type[Answer]] = ObjectiveUpdates

    num_local_steps: Steps
    """Local steps K of each training."""
    num_local_epochs: Steps | None = None
    """Local epochs E of each training, instead of K."""

    @property
    def num_trainings(self) -> int:
        """Returns M, one training per objective."""
        return len(self.objectives)

    def example(self, client: str, sizes: Sizes) -> Answer:
        """Returns an update for each objective; see ``Request``."""
        weights = [[1.0] * len(self.objectives)] * sizes.num_passes
        each = {**sizes.metrics, "weights": weights}
        return ObjectiveUpdates(
            updates=dict.fromkeys(self.objectives, self.adapter),
            num_examples=1000,
            num_shared=1,
            metrics={"by_objective": dict.fromkeys(self.objectives, each)},
        )


def _own_metrics(value: Any, info: ValidationInfo) -> dict[str, Any]:
    if isinstance(value, dict) and "by_objective" in value:
        raise Invalid(" must not contain by_objective again")
    return read(Metrics, value, "", context(info))


OwnMetrics = Annotated[dict[str, Any], PlainValidator(_own_metrics)]
"""Metrics of one training among several, which cannot be nested further."""

register(Quantity("by_objective", type=ByObjective[OwnMetrics]))


@task(ObjectiveTraining)
def objective_training(client: Client, request: ObjectiveTraining) -> ObjectiveUpdates:
    """Returns one update per served objective, each trained independently from θ_t.

    All objectives are trained on the same batches: the sample ξ_i^{t,k} of FSMGDA has no objective
    index. Each objective has its own optimizer state between rounds (``Client.alone``). The next
    round continues the random numbers of one of the trainings, which is selected by the
    objectives' names, so that the order of the objectives has no effect.
    """
    start = client.state()
    served = [client.objectives[objective] for objective in served_objectives(client)]
    updates, metrics = {}, {}
    for name in sorted(served):
        client.alone(name, start)
        client.load(request.adapter, request.round)
        weights = [float(other == name) for other in client.objectives]
        alone = LocalTraining(
            **vars(request), weighting="fixed", weighting_options={"weights": weights}
        )
        metrics[name] = train_on_sum(client, alone)
        updates[name] = client.adapter()
    return ObjectiveUpdates(
        updates={name: updates[name] for name in served},
        num_examples=client.num_examples,
        num_shared=shared_columns(client, request.adapter).stop,
        metrics={
            **_own_losses(metrics),
            "by_objective": {name: metrics[name] for name in served},
            "num_steps": sum(each["num_steps"] for each in metrics.values()),
        },
    )


def _own_losses(metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns each objective's losses in its own training, if the metrics have losses by name."""
    losses = {
        name: each["losses"][name]
        for name, each in metrics.items()
        if isinstance(each.get("losses"), dict)
    }
    return {"losses": losses} if losses else {}
