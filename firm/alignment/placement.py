"""Places a policy's modules on several devices of one process.

Inputs go to the first device; each placed module receives its inputs on its own, and the logits
return to the first. Adapter parameters stay beside the layers that they adapt.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import send_to_device
from transformers.modeling_layers import GradientCheckpointingLayer

from firm.alignment.policy import move_
from firm.alignment.policy_config import PolicyConfig
from firm.base.devices import accelerator_type, named_device, num_accelerators


def place_(policy: Any, config: PolicyConfig, device: torch.device) -> None:
    """Moves a policy to a device, or its modules to those of `config.device_map`.

    Call it before anything refers to the policy's parameters, which some backends replace.

    Raises:
        ValueError: When the map names a module or device that does not exist, leaves out a
            parameter, or separates modules that share one.
    """
    model = policy.get_base_model()
    devices = devices_by_module(model, config.device_map)
    if len(set(devices.values())) < 2:  # no hooks where one device has everything
        move_(policy, next(iter(devices.values()), device))
        return
    for name, own in devices.items():
        module = model.get_submodule(name)
        module.to(own)  # with all its submodules
        module.register_forward_pre_hook(partial(_receive, own), with_kwargs=True)
    for name, own in devices.items():
        if any(tensor.device != own for tensor in _tensors(model.get_submodule(name)).values()):
            raise ValueError(
                f"policy.device_map: {name} contains or shares a parameter of another device: name "
                "each module once, and give modules with tied weights the same device."
            )
    policy.placed_on = first = model.get_input_embeddings().weight.device
    model.register_forward_hook(partial(_return, first))


def is_placed(policy: Any) -> bool:
    """Returns whether a policy is on several devices."""
    return hasattr(policy, "placed_on")


def devices_by_module(
    model: Any, device_map: Mapping[str, str] | str | None
) -> dict[str, torch.device]:
    """Returns the device of each module that is placed as a whole; empty without a map.

    Args:
        model: The language model, with or without an adapter, which may be on the meta device.
        device_map: Devices by the modules' names; or "auto", which divides the layers evenly among
            all accelerators of this machine, and is no map if there are fewer than two.

    Raises:
        ValueError: As in `place_`.
    """
    if device_map is None:
        return {}
    names = (
        {name: _name(device) for name, device in device_map.items()}
        if isinstance(device_map, Mapping)
        else _even_map(model)
    )
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            examples = [each for each in modules if each.count(".") < 2 and each][:4]
            raise ValueError(
                f"policy.device_map: the policy has no module {name!r}: choose among its own, such "
                f"as {', '.join(examples)}."
            )
    for name in _tensors(model) if names else ():
        if not any(name.startswith(f"{placed}." if placed else "") for placed in names):
            raise ValueError(f"policy.device_map gives no device for {name}: add its module.")
    return names


def bytes_by_device(model: Any, devices: Mapping[str, torch.device]) -> dict[str, int]:
    """Returns the bytes of the frozen parameters by device; empty if none is given."""
    total: dict[str, int] = dict.fromkeys(map(str, devices.values()), 0)
    for name, parameter in model.named_parameters():
        if "lora_" not in name and devices:
            placed = next(each for each in devices if name.startswith(f"{each}." if each else ""))
            total[str(devices[placed])] += parameter.nbytes
    return total


def _name(device: str) -> torch.device:
    try:
        found = named_device(device)
    except ValueError as error:
        raise ValueError(f"policy.device_map: {error}") from error
    return torch.device(found.type, found.index or 0) if found.type != "cpu" else found


def _even_map(model: Any) -> dict[str, torch.device]:
    """Returns a map of consecutive layers, of similar size on each accelerator."""
    count, kind = num_accelerators(), accelerator_type()
    if count < 2:
        return {}
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] or [model]
    block = max(map(_num_bytes, blocks))
    share = _num_bytes(model) // count + block // 2  # rounds to the nearest layer
    # accelerate leaves the room of a block on the first device
    limits: dict[Any, Any] = {0: share + block, **dict.fromkeys(range(1, count - 1), share)}
    limits[count - 1] = 2 * _num_bytes(model)  # whatever remains
    placed = infer_auto_device_map(
        model, max_memory=limits, no_split_module_classes=list(model._no_split_modules or [])
    )
    return {name: torch.device(f"{kind}:{index}") for name, index in placed.items()}


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(module).values())


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _receive(device: torch.device, module: Any, args: Any, kwargs: Any) -> Any:
    return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=_KEPT)


def _return(device: torch.device, module: Any, args: Any, output: Any) -> Any:
    return send_to_device(output, device, skip_keys=_KEPT)


_KEPT = ["past_key_values"]
"""Arguments that stay on the devices of their layers."""
