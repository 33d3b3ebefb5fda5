"""A sampler of preferences of another package: shares of the corners in quarters."""

import torch

from firm.alignment.adapters import preference_sampler


@preference_sampler("lattice")
def lattice(config, count, corners):
    """Returns preferences whose shares are multiples of 1/4, each drawn as four equal votes."""
    votes = torch.randint(len(corners), (count, 4))
    shares = torch.nn.functional.one_hot(votes, len(corners)).double().mean(1)
    return shares @ corners
