"""The classic wing: federated multi-objective learning on images, tables, text and molecules.

`data` loads the papers' data sets as `TaskData`, inputs in memory with one target per objective;
`models` builds their networks of `modules`, one encoder that all objectives share and one head for
each; `workspace` holds a model that clients take turns on, `client` is the federation's client over
it; `attacks` inflates losses, `metrics` are the papers' own. The algorithms are strategies of the
federation, the same as for language models.
"""

from firm.fmoo.attacks import AttackConfig
from firm.fmoo.client import SupervisedClient
from firm.fmoo.data import DataConfig, Splits, TaskData, load_data
from firm.fmoo.models import ModelConfig, build_model, num_parameters
from firm.fmoo.workspace import LocalConfig, Scores, Workspace

__all__ = [
    "AttackConfig",
    "DataConfig",
    "LocalConfig",
    "ModelConfig",
    "Scores",
    "Splits",
    "SupervisedClient",
    "TaskData",
    "Workspace",
    "build_model",
    "load_data",
    "num_parameters",
]
