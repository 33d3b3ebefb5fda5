"""The accelerator of this folder's tests: the pretend one, or a real one by FIRM_ACCELERATOR.

The pretend one is built here, and registered as torch's device type "pretend".
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = os.environ.get("FIRM_ACCELERATOR", "pretend")
"""Type of the accelerator, as torch has it."""
IS_PRETEND = NAME == "pretend"
SOURCE = Path(__file__).parent / "device.cpp"
CACHE = Path(__file__).parents[2] / "build/pretend"
COMPILER = os.environ.get("CXX", "g++")


def accelerator() -> Any:
    """Returns torch's module of the accelerator, such as `torch.cuda`."""
    return torch.get_device_module(NAME)


def second() -> str:
    """Returns the second device; the first on a machine with one."""
    return f"{NAME}:{min(1, accelerator().device_count() - 1)}"


@contextmanager
def limited_memory(room: int, device: str = f"{NAME}:0") -> Iterator[None]:
    """Gives a device so many bytes more than are allocated on it.

    A real one counts segments, of two million bytes and more.
    """
    own = accelerator()
    if IS_PRETEND:
        own.limit_memory(own.memory_allocated(device) + room, device)
    else:
        own.empty_cache()
        total = own.mem_get_info(device)[1]
        own.set_per_process_memory_fraction((own.memory_reserved(device) + room) / total, device)
    try:
        yield
    finally:
        if IS_PRETEND:
            own.limit_memory(2**62, device)
        else:
            own.set_per_process_memory_fraction(1.0, device)


def missing() -> str | None:
    """Returns why the accelerator cannot be built here, or None."""
    if sys.platform != "linux":
        return f"the pretend accelerator is built on Linux alone, this is {sys.platform}"
    if shutil.which(COMPILER) is None:
        return f"the pretend accelerator needs a C++ compiler, and there is no {COMPILER}"
    return None


def build() -> Path:
    """Returns the shared library, built where source, torch or compiler are new (20 seconds).

    Raises:
        RuntimeError: The compiler refuses the source.
    """
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    command = [COMPILER, *flags, *includes, str(SOURCE), *libraries, "-lc10", "-ltorch_cpu"]
    options = [COMPILER, *flags, *includes, *libraries]  # wherever the source is
    what = "\n".join([SOURCE.read_text(), torch.__version__, *options])
    path = CACHE / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the suite's other workers wait for the first
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{COMPILER} cannot build {SOURCE}:\n{done.stderr[-4000:]}")
            unfinished.rename(path)
    return path


def register() -> None:
    """Makes torch have two devices "pretend:0" and "pretend:1"; in this process, for good."""
    if hasattr(torch, "pretend"):
        return
    torch.ops.load_library(build())
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.ops.pretend.current_device() if index is None else index


def _module() -> types.ModuleType:
    own = torch.ops.pretend
    module: Any = types.ModuleType("torch.pretend")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 2,
        "current_device": own.current_device,
        "set_device": lambda device: own.set_device(_index(device)),
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=None: own.get_rng_state(_index(device)),
        "set_rng_state": lambda state, device=None: own.set_rng_state(state, _index(device)),
        "manual_seed": lambda seed: own.manual_seed(seed, _index()),
        "manual_seed_all": lambda seed: [own.manual_seed(seed, index) for index in (0, 1)],
        "memory_allocated": lambda device=None: own.memory_allocated(_index(device)),
        "max_memory_allocated": lambda device=None: own.max_memory_allocated(_index(device)),
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(_index(device)),
        "limit_memory": lambda limit, device: own.limit_memory(_index(device), limit),
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "pretend accelerator",
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(functions)
    return module
