"""What the benchmarks share: a quiet start on one thread, and calls that are timed in turns."""

import time
from collections.abc import Callable, Mapping

import torch
import transformers


def quiet() -> None:
    """Sets one thread of torch, and hides the bars and warnings of transformers."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def interleaved(
    methods: Mapping[str, Callable[[], object]], *, repeats: int
) -> dict[str, list[float]]:
    """Returns the CPU seconds of every call of each method, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, method in methods.items():
            start = time.process_time()
            method()
            seconds[name].append(time.process_time() - start)
    return seconds
