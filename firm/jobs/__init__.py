"""Whole jobs as functions of one configuration, with typed results.

- `alignment.align`: one run; `interface.align`, which is `firm.align`, takes objects too
- `study.study`: several settings of a run, each with several seeds
- `sweep.sweep`: a run for every preference, and the fronts
- `compare.compare`: adapters beside their base model
- `pick.pick`: the model of a front for a wanted preference
- `workspace.save_workspace`: the main figures of a run's page in W&B
- `fmoo.run_classic`: classic algorithms side by side

`loop.train` is the training loop of all of them, `points.run_points` runs several at a time. Import
from the modules: what a job does not need, it does not load.
"""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL's PPO is taken where there is one
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
