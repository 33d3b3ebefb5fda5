"""Lookup of this machine's devices by name."""

import torch


def named_device(name: str) -> torch.device:
    """Returns the device of this machine with the given name.

    Args:
        name: "auto" for the accelerator if there is one and the CPU otherwise, "cpu", a type of
            accelerator such as "cuda", or a single accelerator by its index, such as "cuda:1".

    Returns:
        The device; without an index it is the one that this process currently uses.

    Raises:
        ValueError: This machine has no such device.
    """
    available = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if available else None
    if name == "auto":
        return accelerator or torch.device("cpu")
    known = ["cpu"]
    if accelerator is not None:
        count = torch.accelerator.device_count()
        known += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows dozens of device types, most of which are absent
        device = None
    if device is None or str(device) not in [*known, "cpu:0"]:
        raise ValueError(
            f"there is no device {name!r} here: choose 'auto' or one of {', '.join(known)}."
        )
    return device
