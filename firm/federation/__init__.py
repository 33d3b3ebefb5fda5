"""Federation: the client protocol, engines that run clients, and strategies, one per paper.

A strategy is one round of a paper's algorithm and reads from top to bottom; an engine runs the
clients; a client keeps its data and its state. All three are independent of the data modality.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.base.errors import ProcessLost, RoundFailed
    from firm.base.randomness import RandomStream, derive_seed
    from firm.base.state import State
    from firm.federation.client import Adapter, Batch, Client, Failure, Gradients, Reply
    from firm.federation.diagnostics import beta_alarm, failure_alarms
    from firm.federation.engines import Engine, LocalEngine, Processes, ProcessesEngine, Team
    from firm.federation.messages import Update
    from firm.federation.partition import dirichlet_partition, iid_partition
    from firm.federation.server import ServerState
    from firm.federation.strategies import STRATEGIES
    from firm.federation.training import local_training

__all__ = [
    "STRATEGIES",
    "Adapter",
    "Batch",
    "Client",
    "Engine",
    "Failure",
    "Gradients",
    "LocalEngine",
    "ProcessLost",
    "Processes",
    "ProcessesEngine",
    "RandomStream",
    "Reply",
    "RoundFailed",
    "ServerState",
    "State",
    "Team",
    "Update",
    "beta_alarm",
    "derive_seed",
    "dirichlet_partition",
    "failure_alarms",
    "iid_partition",
    "local_training",
]

__getattr__, __dir__ = lazy(__name__)
