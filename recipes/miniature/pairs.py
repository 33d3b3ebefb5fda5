"""Writes the ranked pairs that ship: replies to training prompts, ranked by their true scores.

python -m recipes.miniature.pairs --out firm/miniature/checkpoints
"""

import gzip
import json
from pathlib import Path

from firm.base.fields import PositiveInt, configuration
from firm.miniature.world import OBJECTIVES, Objective, World
from firm.run import run_cli
from recipes.miniature.replies import ReplyWriter

SEED = 7
"""Differs from the seeds of the pairs that the reward models learned from."""


@configuration
class PairsConfig:
    """The pairs to write."""

    out: Path
    """Folder for `pairs_helpful.jsonl.gz` and `pairs_harmless.jsonl.gz`."""
    num_pairs: PositiveInt = 3000
    """Pairs per objective."""


def main(cfg: PairsConfig) -> None:
    """Writes a file of pairs per objective."""
    for objective in OBJECTIVES:
        lines = [json.dumps(row) + "\n" for row in ranked_pairs(objective, cfg.num_pairs)]
        # no time in the header: equal pairs give equal files
        packed = gzip.compress("".join(lines).encode(), mtime=0)
        (cfg.out / f"pairs_{objective}.jsonl.gz").write_bytes(packed)


def ranked_pairs(objective: Objective, num: int) -> list[dict[str, str]]:
    """Returns pairs without an empty reply, {"prompt", "chosen", "rejected"}, labelled truly."""
    drawn = ReplyWriter(World.conflict()).preference_pairs(objective, 2 * num, SEED, noise=0.0)
    rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in drawn]
    return [row for row in rows if all(text.strip() for text in row.values())][:num]


if __name__ == "__main__":
    run_cli(main, PairsConfig, description=__doc__ or "")
