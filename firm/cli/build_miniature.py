"""Builds a policy and its reward models, and prints how good they are."""

from functools import partial
from typing import Any

from firm.jobs.miniature import BuildConfig, build
from firm.run import print_table, run_cli


def main(cfg: BuildConfig) -> dict[str, Any]:
    """Builds what is asked for and prints the figures; returns what `build.json` holds."""
    report = build(cfg)
    if policy := report.get("policy"):
        print(
            f"policy: {policy['num_parameters']:,} parameters, {policy['tokens_seen']:,} tokens "
            f"seen, {policy['bits_per_byte']:.3f} bits per byte held out"
        )
    rows = [
        [f"{kind}, {split}", scores["model"]["num_pairs"], *map(_accuracy, scores.values())]
        for kind, figures in report["reward_models"].items()
        for split, scores in figures.items()
        if isinstance(scores, dict)
    ]
    print_table("Pair accuracy", ["", "pairs", "model", "length", "bag of words"], rows)
    times = [f"{stage} {s['wall']:.0f} ({s['cpu']:.0f})" for stage, s in report["seconds"].items()]
    print(f"seconds (of the processor): {', '.join(times)}")
    return report


def _accuracy(score: dict[str, float]) -> str:
    return f"{score['accuracy']:.3f} ± {score['standard_error']:.3f}"


cli = partial(run_cli, main, BuildConfig)
