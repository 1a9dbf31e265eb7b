"""The most memory that a piece of work holds at once.

On a GPU its allocator says so. On a CPU the operating system does (Linux): the process gives back what earlier work
left behind, its high-water mark is set down to what it holds now, and is read again afterwards. Both numbers count
everything that stands in memory meanwhile, so they compare pieces of work within one process and no further.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

PROCESS = Path("/proc/self")


def peak_gib(work: Callable[[], object], device: torch.device) -> float | None:
    """GiB at the highest point of `work`, or None where the system does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) / 2**30
    known = _set_down()
    work()
    return _high_water() if known else None


def _set_down() -> bool:
    """Forget how much this process once held; whether that was possible."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what was freed until told
    if trim is not None:
        trim(0)
    try:
        (PROCESS / "clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


def _high_water() -> float:
    lines = (PROCESS / "status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kib / 2**20
