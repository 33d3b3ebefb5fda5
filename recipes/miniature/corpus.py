"""Training and held-out data of small models, generated or read from preference files."""

from collections.abc import Iterable
from dataclasses import dataclass

from firm.miniature.world import OBJECTIVES, SPLITS, Objective, Split, World
from recipes.miniature.preferences import Preference, dialogue_texts, split_preferences
from recipes.miniature.replies import ReplyWriter


@dataclass(frozen=True)
class Corpus:
    """Texts, pairs and prompts by split; models may be trained only on the split "train"."""

    texts: dict[str, list[str]]
    """Documents by split, "train" and "test"; prompt and reply are one text."""
    pairs: dict[str, dict[str, list[Preference]]]
    """Pairs by kind and split: "train" and the held-out splits."""
    prompts: dict[str, list[dict[str, str]]]
    """Distinct prompts with their kinds, {"prompt", "kind"}, by split."""


def generated_corpus(
    world: World, *, num_texts: int, num_pairs: int, num_held_out: int, noise: float, seed: int
) -> Corpus:
    """Returns demonstrations and pairs of a generated world. Equal seeds give equal corpora.

    Args:
        world: The generated world.
        num_texts: Number of training demonstrations.
        num_pairs: Number of training pairs per objective.
        num_held_out: Number of pairs per objective and held-out split, and of held-out texts before
            texts that are also in the training data are removed.
        noise: Temperature of the training labels; held-out labels have no noise.
        seed: Seed of all random numbers.
    """
    writer = ReplyWriter(world)
    rows = writer.demonstrations(num_texts, seed) + writer.demonstrations(num_held_out, seed + 1)
    documents = [row["prompt"] + row["completion"] for row in rows]
    train = documents[:num_texts]
    known = set(train)
    held_out = [text for text in documents[num_texts:] if text not in known]

    def pairs(kind: Objective, split: Split) -> list[Preference]:
        num, temperature = (num_pairs, noise) if split == "train" else (num_held_out, 0.0)
        rows = writer.preference_pairs(kind, num, seed, temperature, split=split)
        return [Preference(**row) for row in rows]

    return Corpus(
        texts={"train": train, "test": held_out},
        pairs={kind: {split: pairs(kind, split) for split in SPLITS} for kind in OBJECTIVES},
        prompts={
            split: [{"prompt": p.text, "kind": p.kind} for p in world.prompts(split)]
            for split in SPLITS
        },
    )


def preference_corpus(pairs: Iterable[Preference]) -> Corpus:
    """Returns dialogues and pairs of preference files, split by the first human turn.

    Raises:
        ValueError: A kind has no pair to learn from or none to test on.
    """
    pairs_by_split = split_preferences(pairs)
    kinds = sorted({pair.kind for split in pairs_by_split.values() for pair in split})
    by_kind = {
        kind: {
            split: [pair for pair in rows if pair.kind == kind]
            for split, rows in pairs_by_split.items()
        }
        for kind in kinds
    }
    for kind, split in ((kind, split) for kind in kinds for split in ("train", "test")):
        if not by_kind[kind][split]:
            raise ValueError(
                f"kind '{kind}' has no pair in the {split} split; give more pairs "
                "(80 % are for training, 5 % for validation, 15 % for the test)."
            )
    return Corpus(
        texts={
            split: [text for pair in pairs_by_split[split] for text in dialogue_texts(pair)]
            for split in ("train", "test")
        },
        pairs=by_kind,
        prompts={
            split: [
                {"prompt": prompt, "kind": kind}
                for prompt, kind in dict.fromkeys((pair.prompt, pair.kind) for pair in rows)
            ]
            for split, rows in pairs_by_split.items()
        },
    )
