"""Pushes a run's adapter, with tokenizer and model card, to the Hugging Face hub."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from firm.alignment.policy_config import is_repo_name
from firm.base.fields import configuration
from firm.base.sanitize import first_line, printable

logger = logging.getLogger(__name__)


@configuration
class HubConfig:
    """Upload of the result to the Hugging Face hub when the run ends."""

    repo: str = ""
    """Repository for the adapter, NAME or USER/NAME; it is created if absent. A conditioned run's
    page goes with it, which shows held-out prompts with replies unless
    `evaluation.num_shown_samples` is 0. By default nothing leaves this machine."""
    private: bool = True
    """Make a new repository private."""

    def __post_init__(self) -> None:
        if self.repo and not is_repo_name(self.repo):
            raise ValueError(
                "repo must be NAME or USER/NAME, of at most 96 letters, digits and single '-', '_' "
                f"or '.' between them, and must not end in .git, got {self.repo!a}."
            )


def push(cfg: HubConfig, adapter: Path, run: Path, names: Sequence[str] = ()) -> None:
    """Uploads an adapter's folder and the named files of its run, and logs their address.

    The run is complete without it, so a failure is only a warning, with the command to push later.
    """
    from huggingface_hub import HfApi

    uploads = [(adapter, [])] + ([(run, list(names))] if names else [])
    try:
        api = HfApi(library_name="firm-align")
        place = api.create_repo(cfg.repo, private=cfg.private, exist_ok=True)
        for folder, own in uploads:
            api.upload_folder(
                repo_id=place.repo_id,
                folder_path=folder,
                allow_patterns=own or None,
                commit_message=f"Upload {', '.join(own) or 'the adapter'}",
            )
    except Exception as error:  # no token, network or permission: the run is still complete
        logger.warning(
            "the adapter was not pushed to %s (%s); push it later with: %s",
            cfg.repo,
            printable(f"{type(error).__name__}: {first_line(error)}".rstrip(".")),
            printable(" && ".join(_command(cfg, *upload) for upload in uploads), max_length=5_000),
        )
    else:
        logger.warning("the adapter is at %s", place)


def _command(cfg: HubConfig, folder: Path, names: Sequence[str]) -> str:
    """Returns the shell command that uploads a folder, or the named files in it."""
    files = [word for name in names for word in ("--include", name)]
    is_private = ["--private"] if cfg.private else []
    return shlex.join(["hf", "upload", cfg.repo, str(folder), ".", *files, *is_private])
