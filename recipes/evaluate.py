"""Adapters against their base model: rewards, KL, length and replies, side by side.

    python recipes/evaluate.py --runs '[runs/a, runs/b]'                 # as the first run measures
    python recipes/evaluate.py --runs '[runs/a]' --prompts.source my.jsonl
    python recipes/evaluate.py --adapters '[x/adapter, y/adapter]' --policy.path FOLDER \
        --rewards '{helpful: {path: FOLDER}}' --prompts.source my.jsonl

An evaluation is a directory: evaluation.html, figures.csv, samples.csv and config.yaml. With the
prompts and the seed of a run it repeats the figures of that run's held-out test.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("evaluate", description=__doc__ or "")
