"""Builds a policy and its reward models from scratch: tokenizer, SFT, one classifier per objective.

python recipes/build_miniature.py --out runs/miniature
python recipes/build_miniature.py --out runs/miniature --only "[helpful_other]"
python recipes/build_miniature.py --config configs/build_hh.yaml --out runs/hh \\
    --preferences "[helpful.jsonl.gz, harmless.jsonl.gz]"

The first takes the generated world's corpus, the third preference files (JSON lines with the
fields `prompt`, `chosen`, `rejected`, `kind`; one reward model per kind). Writes the checkpoint
folders `policy` and one per objective, the prompts of every split, and `build.json`. The generated
world has a second model of helpfulness, `helpful_other`: an encoder with a tokenizer, texts and
pairs of its own, which the second command builds alone.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("build_miniature", description=__doc__ or "")
