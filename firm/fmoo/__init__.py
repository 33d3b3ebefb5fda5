"""Federated multi-objective learning on images, tables, text and molecules.

`data` loads the papers' data sets as `TaskData`, inputs in memory with one target per objective;
`models` builds their networks from `modules`, with a shared encoder and one head per objective;
`workspace` holds the model that clients share, `client` implements the federation's client on it;
`attacks` inflates losses. The papers' measures are in `firm.fronts.measures`. The algorithms are
the federation's strategies, the same as for language models.

All of them train any PyTorch model on any data. A client's data are a torch data set of samples,
each an input with M targets. A loss takes a batch of outputs and targets of one objective. The
model is any module that returns a list of M outputs, one for each loss; with a `MultiTaskModel` the
algorithms know which parameters all objectives share:

    >>> import torch
    >>> from torch import nn
    >>> from torch.utils.data import TensorDataset
    >>> from firm.federation import LocalEngine, ServerState
    >>> from firm.fmoo import LocalConfig, MultiTaskModel, SupervisedClient, TaskData, Workspace
    >>> from firm.fmoo import loss
    >>> from firm.federation.strategies.fedcmoo import FedCmooConfig, fedcmoo
    >>> @loss("huber")
    ... def huber(outputs, targets):
    ...     return nn.functional.huber_loss(outputs[:, 0], targets)
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(2, 60, 6)
    >>> y = torch.stack([(x[..., 0] > 0).float(), x[..., 1] - x[..., 2]], dim=-1)
    >>> clinics = {"north": TensorDataset(x[0], y[0]), "south": TensorDataset(x[1], y[1])}
    >>> data = TaskData.of_clients(clinics, losses={"readmitted": "binary", "days": "huber"})
    >>> body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
    >>> net = MultiTaskModel(body, [nn.Linear(16, 1), nn.Linear(16, 1)])
    >>> workspace = Workspace(net, data, LocalConfig(lr=0.3, batch_size=16))
    >>> shards = data.indices_by_client()
    >>> clients = [SupervisedClient(name, workspace, shards[name], seed=0) for name in shards]
    >>> engine, cfg = LocalEngine(clients), FedCmooConfig(num_local_steps=5)
    >>> state = ServerState(clients[0].adapter(), data.objectives, seed=0)
    >>> for _ in range(20):
    ...     state, rows = fedcmoo(state, list(shards), engine, cfg)
    >>> workspace.load(state.adapter)
    >>> bool((workspace.evaluate(data).losses < 0.2).all())
    True

`state.adapter` holds the trained parameters by name, `rows` the log of the round. To use your own
data sets, losses and models in a study, with resumable runs, tables and a report, register them
with the decorators `dataset`, `loss` and `model` in a file listed under `plugins`, and run `firm
classic` or `firm.jobs.fmoo.run_classic`.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.fmoo.client import SupervisedClient
    from firm.fmoo.config import DatasetConfig, LocalConfig, LossAttackConfig, ModelConfig
    from firm.fmoo.data import Splits, TaskData, dataset, load_data
    from firm.fmoo.models import build_model, model, num_parameters
    from firm.fmoo.modules import Dropout, MultiTaskModel
    from firm.fmoo.task_data import loss
    from firm.fmoo.workspace import ObjectiveMetrics, Workspace

__all__ = [
    "DatasetConfig",
    "Dropout",
    "LocalConfig",
    "LossAttackConfig",
    "ModelConfig",
    "MultiTaskModel",
    "ObjectiveMetrics",
    "Splits",
    "SupervisedClient",
    "TaskData",
    "Workspace",
    "build_model",
    "dataset",
    "load_data",
    "loss",
    "model",
    "num_parameters",
]

__getattr__, __dir__ = lazy(__name__)
