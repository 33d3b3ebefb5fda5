"""Random tensors that a seed decides."""

import torch


def new_generator(seed: int = 0) -> torch.Generator:
    """Returns a generator of its own."""
    return torch.Generator().manual_seed(seed)


def draw_rows(num_objectives: int, num_parameters: int, seed: int = 0) -> torch.Tensor:
    """Returns a Jacobian of standard normal float32 numbers, shape [M, d]."""
    return torch.randn(num_objectives, num_parameters, generator=new_generator(seed))


def draw_normal(seed: int, *shape: int) -> torch.Tensor:
    """Returns standard normal float64 numbers."""
    return torch.randn(shape, generator=new_generator(seed), dtype=torch.float64)


def draw_mask(seed: int, num_replies: int, num_tokens: int, *, least: int = 1) -> torch.Tensor:
    """Returns the mask of replies of random lengths, `least` tokens each, shape [B, T]."""
    lengths = torch.randint(least, num_tokens + 1, (num_replies, 1), generator=new_generator(seed))
    return torch.arange(num_tokens) < lengths
