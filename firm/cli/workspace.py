"""Saves a workspace in W&B and prints where it is."""

from functools import partial

from firm.jobs.workspace import WorkspaceConfig, save_workspace
from firm.run import run_cli


def main(cfg: WorkspaceConfig) -> None:
    """Saves the workspace that the configuration asks for."""
    print(f"workspace {save_workspace(cfg)}")


cli = partial(run_cli, main, WorkspaceConfig)
