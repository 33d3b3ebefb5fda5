"""Works around processors that announce instructions and then fault at them."""

import os
import subprocess
import sys
from pathlib import Path

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def without_faulty_amx() -> dict[str, str]:
    """Returns variables that keep oneDNN from AMX where it ends the process; most often none.

    On some virtual machines every matrix product in bfloat16 dies of an illegal instruction. The
    variables have to be set before oneDNN is first used; what a user has set stays.
    """
    if {"ONEDNN_MAX_CPU_ISA", "PYTEST_XDIST_WORKER"} & os.environ.keys():  # has been decided
        return {}
    flags = Path("/proc/cpuinfo")
    if not flags.is_file() or "amx_bf16" not in flags.read_text(encoding="utf-8"):
        return {}
    is_faulty = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True).returncode < 0
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"} if is_faulty else {}
