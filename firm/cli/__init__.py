"""Commands: `cli` of each parses its configuration, `main` calls one job and prints the result."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL's PPO is taken where there is one
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
