"""Prints the commands that start the rollout servers of a run."""

import sys
from urllib.parse import urlsplit

from firm.alignment.rollout_config import VLLMServerConfig
from firm.jobs.alignment_config import AlignmentConfig
from firm.jobs.alignment_loading import with_fast_dtypes
from firm.jobs.fetch import fetch_policy
from firm.run.errors import UserError
from firm.run.shipped import with_shipped_paths


def server_commands(cfg: AlignmentConfig) -> list[str]:
    """Returns the command for each server in `rollout.engine.urls`, in order.

    Raises:
        UserError: The run's engine is another one.
    """
    engine = cfg.rollout.engine
    if not isinstance(engine, VLLMServerConfig):
        raise UserError(
            f"rollout.engine.name must be vllm_server, got {engine.name}; pass "
            "--rollout.engine.name vllm_server, with urls and a shared_folder."
        )
    policy = with_fast_dtypes(with_shipped_paths(cfg)).policy
    num_tokens = cfg.rollout.max_prompt_tokens + cfg.rollout.max_new_tokens
    return [
        engine.command(policy.path, policy.dtype, policy.lora.r, num_tokens, _port(url))
        for url in engine.urls
    ]


def _port(url: str) -> int:
    """Returns the port to which requests to an address go."""
    parts = urlsplit(url)
    return parts.port or {"http": 80, "https": 443}[parts.scheme]


def main(cfg: AlignmentConfig) -> None:
    """Prints a command per line, each for the machine of its address."""
    fetch_policy(cfg.policy.path)
    commands = server_commands(cfg)
    for command in commands:
        print(command)
    if any("--dtype float32" in command for command in commands):
        note = "on a GPU, vLLM's LoRA needs policy.dtype bfloat16 or float16, also of the run"
        print(f"note: {note}", file=sys.stderr)
