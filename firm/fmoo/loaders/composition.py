"""Combines two images into one sample, for the papers' two-objective data sets."""

import numpy as np

from firm.base.randomness import derive_seed


def draw_pairs(
    num_left: int, num_right: int, pairs_per_image: int, *, seed: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairing of left and right images, as two index arrays of equal length.

    Every left image is in ``pairs_per_image`` pairs. Right images are in random order, with counts
    that differ by at most one. Splits of different names get different pairs from the same seed.
    """
    generator = np.random.default_rng(derive_seed(seed, "pairs", name))
    left = np.tile(np.arange(num_left), pairs_per_image)
    if not num_left:
        return left, left
    if not num_right:
        raise ValueError(
            f"the {name} split has {num_left} first images but no second ones to pair them with: "
            "add some."
        )
    passes = -(-len(left) // num_right)
    right = np.concatenate([generator.permutation(num_right) for _ in range(passes)])
    return left, right[: len(left)]


def paste_corners(
    left: np.ndarray, right: np.ndarray, *, offset: int, canvas: int, size: int
) -> np.ndarray:
    """Combines a top-left and a bottom-right image by taking the brighter pixel.

    The construction of Sener and Koltun (2018), arXiv:1810.04650, which the FedCMOO paper follows
    (Appendix D.1): 28 x 28 digits at (0, 0) and (6, 6) of a 36 x 36 canvas, resized to 28 x 28 with
    nearest-neighbour interpolation.

    Args:
        left: Top left images, uint8 [N, C, H, H].
        right: Bottom right images, uint8 [N, C, H, H].
        offset: Row and column at which the right image starts.
        canvas: Side of the canvas, at least H + offset.
        size: Side of the resized result, at most ``canvas``.
    """
    num, channels, side, _ = left.shape
    pasted = np.zeros((num, channels, canvas, canvas), dtype=np.uint8)
    pasted[:, :, :side, :side] = left
    corner = pasted[:, :, offset : offset + side, offset : offset + side]
    np.maximum(corner, right, out=corner)
    picked = np.arange(size) * canvas // size
    return np.ascontiguousarray(pasted[:, :, picked][:, :, :, picked])


def paste_centre(background: np.ndarray, digits: np.ndarray, *, opacity: float) -> np.ndarray:
    """Overlays the centre of colour images with a digit, in all channels.

    CIFAR10+FMNIST of the FedCMOO paper (Appendix D.1: "placed in the center of all channels").
    Non-zero pixels of the digit [N, 1, h, h] cover the background [N, C, H, H] with an opacity from
    0 (invisible) to 1, which the paper does not state.
    """
    start = (background.shape[2] - digits.shape[2]) // 2
    stop = start + digits.shape[2]
    pasted = background.copy()
    window = pasted[:, :, start:stop, start:stop]
    mixed = window * np.float32(1 - opacity) + digits * np.float32(opacity)
    pasted[:, :, start:stop, start:stop] = np.where(digits > 0, np.rint(mixed), window)
    return pasted
