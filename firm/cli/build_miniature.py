"""Builds a policy and its reward models, and prints how good they are."""

from functools import partial
from typing import Any

from firm.jobs.miniature import BuildConfig, build
from firm.run import run_cli


def main(cfg: BuildConfig) -> dict[str, Any]:
    """Builds what is asked for and prints the figures; returns what `build.json` holds."""
    report = build(cfg)
    print(table(report))
    return report


def table(report: dict[str, Any]) -> str:
    """Returns the figures of `build.json` for a reader."""
    policy, seconds = report.get("policy"), report["seconds"]
    lines = [f"{'pair accuracy':26} {'pairs':>6} {'model':>14} {'length':>14} {'bag of words':>14}"]
    if policy:
        lines.insert(
            0,
            f"policy: {policy['num_parameters']:,} parameters, {policy['tokens_seen']:,} tokens "
            f"seen, {policy['bits_per_byte']:.3f} bits per byte held out",
        )
    for kind, figures in report["reward_models"].items():
        for split, scores in figures.items():
            if isinstance(scores, dict):
                shares = "".join(
                    f" {s['accuracy']:.3f} ± {s['standard_error']:.3f}".rjust(15)
                    for s in scores.values()
                )
                lines.append(f"{kind + ', ' + split:26} {scores['model']['num_pairs']:6}{shares}")
    times = ", ".join(f"{stage} {s['wall']:.0f} ({s['cpu']:.0f})" for stage, s in seconds.items())
    lines.append(f"seconds (of the processor): {times}")
    return "\n".join(lines)


cli = partial(run_cli, main, BuildConfig)
