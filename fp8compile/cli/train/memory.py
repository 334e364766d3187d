"""Peak memory of a training."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

__all__ = ["peak_memory", "reset_peak_memory"]

PROC = Path("/proc/self")


def reset_peak_memory(device: torch.device) -> bool:
    """Start to watch for a new peak.

    Args:
        device: Where the training runs.

    Returns:
        Whether the device's or the system's mark could be reset; it cannot outside Linux.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        (PROC / "clear_refs").write_text("5")  # proc(5): resets the peak of the resident set
    except OSError:
        return False
    return True


def peak_memory(device: torch.device) -> int:
    """Return the peak since the last reset, or since the process started.

    Args:
        device: Where the training runs.

    Returns:
        Bytes: of tensors on a GPU; of the whole process, PyTorch and all, on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (PROC / "status").exists():
        for line in (PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) differs there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
