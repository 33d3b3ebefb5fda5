"""Held-out pair accuracy of the reward models that ship with the miniature world.

    python benchmarks/pair_accuracy.py

Pairs are free of noise; "test" asks in phrasings, "test_acts" for acts, that nobody trained on.
"""

import torch
import transformers

from firm.miniature import World, checkpoint_path
from firm.run import print_table
from reward_models import RewardModelConfig, load_reward_model

NUM_PAIRS = 4000
OBJECTIVES = ("helpful", "harmless")
SPLITS = ("test", "test_acts")


def main() -> None:
    """Prints one row per reward model and split."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    world, rows = World.conflict(), []
    for objective in OBJECTIVES:
        config = RewardModelConfig(
            path=str(checkpoint_path(objective)), format="plain", append_eos=True, batch_size=128
        )
        reward = load_reward_model(config, objective)
        for split in SPLITS:
            pairs = world.preference_pairs(objective, NUM_PAIRS, 0, 0.0, split=split)
            prompts = [pair["prompt"] for pair in pairs]
            chosen, rejected = (
                torch.tensor(reward(prompts=prompts, completions=[pair[side] for pair in pairs]))
                for side in ("chosen", "rejected")
            )
            accuracy = (chosen > rejected).double().mean().item()
            error = (accuracy * (1 - accuracy) / NUM_PAIRS) ** 0.5
            rows.append([f"{objective}, {split}", NUM_PAIRS, accuracy, error])
    print_table("Pair accuracy", ["", "pairs", "accuracy", "standard error"], rows)


if __name__ == "__main__":
    main()
