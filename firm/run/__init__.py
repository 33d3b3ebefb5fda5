"""Configuration, directory, checkpoints, tracking and progress of a run.

A configuration is a frozen dataclass filled from YAML and the command line (`run_cli`, `parse`). A
`Run` is a directory that stays consistent if the process is killed at any moment; a `Sweep` is a
folder of runs. `Tracker` forwards metrics to W&B if enabled, and `Progress` displays the progress.
"""

from typing import TYPE_CHECKING

from firm.base.lazy import lazy

if TYPE_CHECKING:
    from firm.run.checkpoint import OtherFormat, load_state, save_state
    from firm.run.command_line import parse, run_cli
    from firm.run.config import compose, to_dict, to_yaml
    from firm.run.differences import leaves
    from firm.run.directory import CheckpointConfig, Run
    from firm.run.errors import UserError, exit_on_user_error
    from firm.run.files import make_private_folder
    from firm.run.names import check_folder_name, check_slugs, dated_folder, slug
    from firm.run.progress import Progress, print_table
    from firm.run.resuming import Resume, continued_later, run_to_resume, study_to_resume
    from firm.run.sweep import Outcome, Sweep, summarise
    from firm.run.tracking import Tracker, TrackingConfig
    from firm.run.yaml_text import read_yaml

__all__ = [
    "CheckpointConfig",
    "OtherFormat",
    "Outcome",
    "Progress",
    "Resume",
    "Run",
    "Sweep",
    "Tracker",
    "TrackingConfig",
    "UserError",
    "check_folder_name",
    "check_slugs",
    "compose",
    "continued_later",
    "dated_folder",
    "exit_on_user_error",
    "leaves",
    "load_state",
    "make_private_folder",
    "parse",
    "print_table",
    "read_yaml",
    "run_cli",
    "run_to_resume",
    "save_state",
    "slug",
    "study_to_resume",
    "summarise",
    "to_dict",
    "to_yaml",
]

__getattr__, __dir__ = lazy(__name__)
