"""Short dialogues about cabs, and their like in tokens, for the tiny policies of the tests."""

import torch

from firm.alignment.prompts import prompt_of

PROMPTS = [prompt_of(f"\n\nHuman: {a}{b} cab\n\nAssistant:") for a in "abcde" for b in "fghij"]
TOKENS = torch.tensor([[0, 4, 9, 7, 5], [4, 8, 6, 10, 4], [0, 0, 5, 5, 9]])
