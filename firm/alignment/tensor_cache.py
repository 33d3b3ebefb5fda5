"""Tensors in the user's cache, which can be computed again and are never needed."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from firm.base.cache import cache_folder
from firm.base.inside import make_folder, replace_bytes

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


def cached_tensors(
    kind: str, digest: str, compute: Callable[[], Tensors], *, is_sound: Callable[[Tensors], bool]
) -> Tensors:
    """Returns cached tensors; computes and caches them if they are missing or damaged.

    A cache that cannot be used costs only time, so that it is a warning.

    Args:
        kind: Folder in the cache.
        digest: Hash of all that the tensors depend on.
        compute: Computes the tensors.
        is_sound: Whether cached tensors have the expected names, shapes and values.
    """
    try:
        file = cache_folder(kind) / f"{digest}.safetensors"
    except RuntimeError as error:  # there is no home folder
        _warn(kind, str(error))
        return compute()
    try:
        if is_sound(tensors := load_file(file)):  # another version may have written it
            return tensors
    except (OSError, SafetensorError):
        pass
    tensors = compute()
    try:
        make_folder(file.parent)
        replace_bytes(file, save({name: own.contiguous() for name, own in tensors.items()}))
    except OSError as error:
        _warn(str(file.parent), error.strerror or str(error))
    return tensors


@cache  # all clients of a run use the same folder
def _warn(folder: str, reason: str) -> None:
    logger.warning(
        "the cache %s cannot be used (%s), which only costs time; XDG_CACHE_HOME chooses another",
        folder,
        reason,
    )
