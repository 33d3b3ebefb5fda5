"""Complete jobs, each a function from one configuration to a typed result.

- `alignment.align`: one run; `interface.align`, exported as `firm.align`, also accepts objects
- `study.study`: a run with several settings and several seeds each
- `sweep.sweep`: a run for each preference, and the resulting fronts
- `compare.compare`: a comparison of adapters with their base model
- `pick.pick`: the model on a front for a target preference
- `export.export`: the front of a conditioned run for other engines; `serve.endpoint` serves it
- `workspace.save_workspace`: the main figures of a run's page in W&B
- `fmoo.run_classic`: classic algorithms side by side

All training uses `loop.train`; `points.run_points` executes several runs at a time. Import from the
modules, so that a job loads only the dependencies that it needs.
"""

import os

# Before the first import of TRL and tokenizers, which read these variables only once
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # PPO is an experimental part of TRL
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns and may deadlock after a fork
