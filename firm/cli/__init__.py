"""Commands: each parses its configuration, calls one job and prints what came of it."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL's PPO is pinned, and we know why
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
