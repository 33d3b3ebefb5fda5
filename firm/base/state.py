"""State of a run, as checkpoints store it."""

from typing import Any

State = dict[str, Any]
"""Contents of a checkpoint: nested dicts and lists of tensors, numbers, strings, bools and None.
"""
