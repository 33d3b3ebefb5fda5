"""The pairs that ship are those that the recipe writes."""

import gzip
import json

from firm.miniature.world import OBJECTIVES, World
from recipes.miniature.pairs import PairsConfig, main, ranked_pairs
from tests.smoke import ROOT

SHIPPED = ROOT / "firm/miniature/checkpoints"


def test_the_shipped_pairs_are_written_again(tmp_path):
    main(PairsConfig(out=tmp_path))
    for objective in OBJECTIVES:
        name = f"pairs_{objective}.jsonl.gz"
        again, shipped = (
            gzip.decompress((folder / name).read_bytes()) for folder in (tmp_path, SHIPPED)
        )
        assert again == shipped, objective


def test_the_chosen_reply_is_truly_better_and_no_prompt_is_held_out():
    world = World.conflict()
    held_out = {each.text for split in ("validation", "test") for each in world.prompts(split)}
    rows = ranked_pairs("harmless", 200)
    prompts = [row["prompt"] for row in rows]
    chosen, rejected = ([row[key] for row in rows] for key in ("chosen", "rejected"))
    better = zip(
        world.true_harmless(prompts, chosen), world.true_harmless(prompts, rejected), strict=True
    )
    assert all(first > second for first, second in better)
    assert not held_out.intersection(prompts)
    assert json.dumps(rows)
