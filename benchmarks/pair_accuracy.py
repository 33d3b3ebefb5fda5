"""Held-out pair accuracy of the reward models that ship with the miniature world.

    python benchmarks/pair_accuracy.py

Pairs are free of noise; "test" asks in phrasings, "test_acts" for acts, that nobody trained on. The
two models of helpfulness see the same pairs: they agree where both prefer the same reply.
"""

import torch

from benchmarks.measure import quiet
from firm.miniature import World, checkpoint_path
from firm.miniature.world import Objective, Split
from firm.run import print_table
from recipes.miniature.replies import ReplyWriter
from reward_models import RewardModelConfig, load_reward_model

NUM_PAIRS = 4000
MODELS: dict[str, Objective] = {
    "helpful": "helpful",
    "helpful_other": "helpful",
    "harmless": "harmless",
}
"""Reward model -> the objective that it judges."""
SPLITS: tuple[Split, ...] = ("test", "test_acts")


def main() -> None:
    """Prints one row per reward model and split, and one per split for the agreement of two."""
    quiet()
    is_right = {(name, split): verdicts(name, split) for name in MODELS for split in SPLITS}
    rows = [[f"{name}, {split}", *share(right)] for (name, split), right in is_right.items()]
    for split in SPLITS:
        agree = is_right["helpful", split] == is_right["helpful_other", split]
        rows.append([f"helpful = helpful_other, {split}", *share(agree)])
    print_table("Pair accuracy", ["", "pairs", "share", "standard error"], rows)


def verdicts(name: str, split: Split) -> torch.Tensor:
    """Returns whether a shipped reward model prefers the chosen reply of each pair, shape [n]."""
    config = RewardModelConfig(
        path=str(checkpoint_path(name)),
        format="plain",
        append_eos=name != "helpful_other",  # the encoder's tokenizer appends its own
        batch_size=128,
    )
    reward = load_reward_model(config, name)
    pairs = ReplyWriter(World.conflict()).preference_pairs(
        MODELS[name], NUM_PAIRS, 0, 0.0, split=split
    )
    prompts = [pair["prompt"] for pair in pairs]
    chosen, rejected = (
        torch.tensor(reward(prompts=prompts, completions=[pair[side] for pair in pairs]))
        for side in ("chosen", "rejected")
    )
    return chosen > rejected


def share(holds: torch.Tensor) -> tuple[int, float, float]:
    """Returns the number of cases, the share of those that hold, and its standard error."""
    p = holds.double().mean().item()
    return len(holds), p, (p * (1 - p) / len(holds)) ** 0.5


if __name__ == "__main__":
    main()
