"""The devices of this machine: their names, random generators and memory.

No other module asks torch for the devices of a particular vendor. All functions use
``torch.accelerator`` and ``torch.get_device_module``, and so support every type that torch knows:
CUDA and ROCm ("cuda"), Apple ("mps"), Intel ("xpu"), and backends from other packages, such as
"npu".
"""

import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed

PRODUCT_SIDE = 384
"""Rows and columns of a benchmarked product: large enough to tell dtypes apart, and small enough
not to delay a run where products are slow."""
SLOW_RATIO = 2.0
"""A dtype whose products take at least this many times as long as float32's triggers a note."""
_ACCELERATE_DEVICE = "ACCELERATE_TORCH_DEVICE"
"""Variable in which Accelerate reads a process's device."""


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in float64, or in float32 on Apple's devices, which have no float64."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


@contextmanager
def threads_restored() -> Iterator[None]:
    """Restores torch's number of CPU threads, since a process's next run chooses its own."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


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
    accelerator = accelerator_type()
    if name == "auto":
        return torch.device(accelerator or "cpu")
    known = ["cpu"]
    if accelerator is not None:
        indices = range(torch.accelerator.device_count())
        known += [accelerator, *(f"{accelerator}:{index}" for index in indices)]
    try:
        device = torch.device(name)
    except RuntimeError:  # torch knows dozens of device types, most of which are absent
        device = None
    if device is None or str(device) not in [*known, "cpu:0"]:
        raise ValueError(
            f"there is no device {name!r} here: choose 'auto' or one of {', '.join(known)}."
        )
    return device


def accelerator_type() -> str | None:
    """Returns the type of this machine's accelerators, such as "cuda"; None without any."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return accelerator and accelerator.type


def num_accelerators() -> int:
    """Returns the number of accelerators that torch sees."""
    return torch.accelerator.device_count() if accelerator_type() else 0


def process_group_backend() -> str:
    """Returns the communication backends of a process group, for the CPU and the accelerator."""
    kind = accelerator_type() or "cpu"
    own = torch.distributed.Backend.default_device_backend_map.get(kind, "gloo")
    return "gloo" if own == "gloo" else f"cpu:gloo,{kind}:{own}"


def communicates(device: torch.device) -> bool:
    """Returns whether processes exchange tensors on a device without copies on the CPU."""
    return device.type == "cpu" or device.type in process_group_backend()


@contextmanager
def accelerate_on(device: torch.device) -> Iterator[None]:
    """Makes Accelerate use this device within the context.

    Trainers move their models to Accelerate's device, and Accelerate knows only some vendors'.
    """
    before = os.environ.get(_ACCELERATE_DEVICE)
    if device.type != "cpu":
        os.environ[_ACCELERATE_DEVICE] = str(device)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_ACCELERATE_DEVICE] = before
        else:
            os.environ.pop(_ACCELERATE_DEVICE, None)


# --- Random generators ----------------------------------------------------------------------------


def generator_states() -> list[torch.Tensor]:
    """Returns the states of the accelerators' default generators, in order of their indices."""
    return [_generator_state(index) for index in range(_num_generators())]


def set_generator_states(states: Sequence[torch.Tensor]) -> None:
    """Restores states that ``generator_states`` returned."""
    for index, state in enumerate(states):
        _set_generator_state(index, state)


def fresh_generator_states(seed: int) -> list[torch.Tensor]:
    """Returns the states that the accelerators' generators have after seeding."""
    kind, indices = accelerator_type(), range(_num_generators())
    return [torch.Generator(f"{kind}:{i}").manual_seed(seed).get_state() for i in indices]


def has_generator_states() -> bool:
    """Returns whether the generators' states can be saved; without accelerators, they can."""
    return num_accelerators() == _num_generators()


def generator_note(device: torch.device) -> str | None:
    """Returns a line for the user of a run on a device whose generators cannot be saved."""
    if device.type == "cpu" or has_generator_states():
        return None
    return (
        f"torch cannot save the random generators of {device.type} devices: a resumed run draws "
        "other numbers than one that was not stopped, and runs with equal seeds may differ."
    )


def dtype_note(device: torch.device, dtype: torch.dtype, key: str) -> str | None:
    """Returns a line for the user of a run in a dtype that the CPU multiplies slowly.

    Args:
        device: Device of the model.
        dtype: Its data type.
        key: Key of the configuration that sets it.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return None
    ratio = product_seconds(dtype) / product_seconds(torch.float32)
    if ratio < SLOW_RATIO:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"products of {name} matrices take {ratio:.0f} times as long as float32 ones on this CPU: "
        f"set {key} to float32."
    )


def dtype_name(setting: str, device: str = "auto") -> str:
    """Returns the dtype of a setting: itself, or the faster one of a device for "auto"."""
    return fast_dtype(device) if setting == "auto" else setting


def fast_dtype(device: str = "auto") -> Literal["bfloat16", "float32"]:
    """Returns the dtype that a device multiplies faster; CPUs are benchmarked.

    Args:
        device: Name as in `named_device`. Accelerators multiply bfloat16 faster, and a device that
            is not here counts as one.
    """
    name = accelerator_type() or "cpu" if device == "auto" else device
    if name.partition(":")[0] != "cpu":
        return "bfloat16"
    is_faster = product_seconds(torch.bfloat16) < product_seconds(torch.float32)
    return "bfloat16" if is_faster else "float32"


def product_seconds(dtype: torch.dtype) -> float:
    """Benchmarks a product of small square matrices on the CPU; returns the shortest time.

    One thread computes it: several would wait for a processor on which other work runs.
    """
    matrix = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, dtype=dtype)
    seconds, num_threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(3):  # the first product initializes kernels
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(num_threads)
    return min(seconds)


def copy_of_generator(device: torch.device) -> torch.Generator:
    """Returns a copy of torch's default generator of a device.

    If the backend exposes no state, returns a new generator, seeded by the CPU's.
    """
    generator = torch.Generator(device)
    if device.type == "cpu":
        return generator.set_state(torch.get_rng_state())
    if not has_generator_states():
        return generator.manual_seed(int(torch.randint(2**62, ())))
    return generator.set_state(_generator_state(_index(device)))


def set_generator(generator: torch.Generator) -> None:
    """Copies a generator's state to torch's default generator of the same device."""
    if generator.device.type == "cpu":
        torch.set_rng_state(generator.get_state())
    elif has_generator_states():
        _set_generator_state(_index(generator.device), generator.get_state())


def _num_generators() -> int:
    kind = accelerator_type()
    has_states = kind is not None and hasattr(torch.get_device_module(kind), "get_rng_state")
    return num_accelerators() if has_states else 0


def _generator_state(index: int) -> torch.Tensor:
    kind = accelerator_type()
    module = torch.get_device_module(kind)
    return module.get_rng_state() if kind == "mps" else module.get_rng_state(index)


def _set_generator_state(index: int, state: torch.Tensor) -> None:
    kind = accelerator_type()
    module = torch.get_device_module(kind)
    if kind == "mps":  # Apple's has one device, and takes no index
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, index)


def _index(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index


# --- Measurements ---------------------------------------------------------------------------------


def device_title(device: torch.device) -> str | None:
    """Returns the name of an accelerator's model; None for the CPU or if the backend has none."""
    name = _function(device, "get_device_name")
    return None if name is None else str(name(device))


def prepare_attention(device: torch.device) -> None:
    """Keeps this process from kernels that give wrong gradients of attention on a device.

    Call it before a model is trained there. On NVIDIA's H100 and H200, torch 2.11 and later choose
    cuDNN's kernels for attention with a mask. In bfloat16 and float16 their gradient of the queries
    is NaN if the length is an odd multiple of 64 and the log-sum-exp of a row is below -88.7, which
    real models reach (pytorch/pytorch#196678). Other kernels of torch take their place.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def synchronize(device: torch.device) -> None:
    """Waits until a device has finished its work; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Returns the memory that torch's allocator holds back to the device."""
    if empty := _function(device, "empty_cache"):
        empty()


def reset_peak_bytes(device: torch.device) -> None:
    """Starts a new measurement of ``peak_bytes``."""
    if reset := _function(device, "reset_peak_memory_stats"):
        reset(device)


def peak_bytes(device: torch.device) -> int | None:
    """Returns the most bytes allocated on a device since ``reset_peak_bytes``.

    None for the CPU, and for backends that do not count.
    """
    peak = _function(device, "max_memory_allocated")
    return None if peak is None else peak(device)


def total_bytes(device: torch.device) -> int | None:
    """Returns the size of a device's memory; None for the CPU or if the backend does not say."""
    sizes = _function(device, "mem_get_info")
    return None if sizes is None else sizes(device)[1]


@contextmanager
def memory_advice(advice: str) -> Iterator[None]:
    """Shortens an out-of-memory error in the context to one line that ends with the advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that filled the memory
        size = str(error).split(". ")[:2]  # without torch's advice on its allocator
        raise torch.OutOfMemoryError(f"{'. '.join(size).rstrip('.')}; {advice}.") from None


def _function(device: torch.device, name: str) -> Any:
    """Returns a function of a device's backend; None for the CPU or if the backend has none."""
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device), name, None)
