"""Settings of a site: what may leave it, and how often."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from annotated_types import Interval

from firm.base.fields import LARGEST, Hint, PositiveFloat, PositiveInt, configuration
from firm.base.quantities import of_clients
from firm.base.registry import OneOf, did_you_mean
from firm.federation.options.secure.config import FEWEST
from firm.federation.options.secure.config import TASKS as SECURE_TASKS
from firm.federation.tasks import TASKS
from firm.run.rows import load_quantities


@configuration
class Budget:
    """Limits beyond which a site answers no more requests, even if the run continues."""

    max_answers: PositiveInt | None = None
    """Maximum number of answers per client and task, over all runs of the kit; null: no limit."""
    max_epsilon: Annotated[
        PositiveFloat | None, Hint("null allows the ε of twice the agreed rounds")
    ] = None
    """Maximum ε that a client's messages may spend, if clients add noise; null: the ε of twice the
    agreed rounds."""


@configuration
class SitePolicy:
    """Limits on the data that leaves a site in addition to the adapter, and on the answers."""

    metrics: tuple[str, ...] | None = None
    """Names of the metrics that may leave the site. They are statistics of a batch or minibatch,
    never of a single reply. null: all metrics registered as such; an empty list: none."""
    tasks: tuple[Annotated[str, OneOf(TASKS)], ...] = ("local_training", *SECURE_TASKS)
    """Tasks that the server may request. The answers of other tasks (Jacobians, several updates)
    reveal more of the data than an adapter does; without local_training, updates leave the site
    only under a mask."""
    least_in_mean: Annotated[int, Interval(ge=FEWEST, le=LARGEST)] = FEWEST
    """Minimum number of updates in a sum that the site helps to open, with secure aggregation."""
    repeats: bool = False
    """Help to open the sum of a repeated round with other clients, on other batches. The two sums
    then reveal the difference between the clients, as far as the updates of the others are alike;
    otherwise the round waits for the same clients."""
    reasons: bool = False
    """Send the server the full reason why a client failed. An error may quote the prompt or reply
    that caused it; otherwise the server receives only the type of error and the system's error
    number, and the rest stays in the site's log."""
    budget: Budget = field(default_factory=Budget)
    """Limits on the number of answers and on their ε."""

    def __post_init__(self) -> None:
        if self.metrics is None:
            return
        load_quantities({"policy": {}})
        known = of_clients()
        if unknown := [name for name in self.metrics if name not in known]:
            near = did_you_mean(unknown[0], known)
            raise ValueError(
                f"metrics must be among {', '.join(sorted(known))}, got {unknown}{near}"
            )

    def released(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Filters a client's metrics by the names that may leave the site."""
        names = self.metrics
        if names is None:
            names = tuple(name for name, each in of_clients().items() if each.may_leave)
        released = {name: value for name, value in metrics.items() if name in names}
        if released and "clipped" in metrics:  # by which the server knows figures with noise
            if "update_norm" not in metrics:
                released["clipped"] = metrics["clipped"]
            elif "update_norm" not in released:
                released.pop("clipped", None)
        if by_objective := released.get("by_objective"):
            own = {objective: self.released(each) for objective, each in by_objective.items()}
            released["by_objective"] = own
        return released
