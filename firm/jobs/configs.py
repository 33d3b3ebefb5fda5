"""Where the configurations are that come with the project."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
"""Their folder."""
