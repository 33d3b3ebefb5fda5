"""Configuration, directory, checkpoints, tracking and progress of a run.

A configuration is a frozen dataclass filled from YAML and the command line (`run_cli`, `parse`). A
`Run` is a directory that stays consistent if the process is killed at any moment; a `Sweep` is a
folder of runs. `Tracker` forwards metrics to W&B if enabled, and `Progress` displays the progress.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.run.command_line import parse, run_cli
    from firm.run.config import compose, to_dict, to_yaml
    from firm.run.directory import Run
    from firm.run.errors import UserError, exit_on_user_error
    from firm.run.names import dated_folder
    from firm.run.progress import Progress, print_table
    from firm.run.resuming import continued_later, run_to_resume
    from firm.run.sweep import Sweep
    from firm.run.tracking import Tracker, TrackingConfig

__all__ = [
    "Progress",
    "Run",
    "Sweep",
    "Tracker",
    "TrackingConfig",
    "UserError",
    "compose",
    "continued_later",
    "dated_folder",
    "exit_on_user_error",
    "parse",
    "print_table",
    "run_cli",
    "run_to_resume",
    "to_dict",
    "to_yaml",
]

__getattr__, __dir__ = lazy(__name__)
