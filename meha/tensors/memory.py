"""How much memory is left."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available(device: torch.device | None = None) -> int | None:
    """Return the bytes of memory that can still be used, on a GPU, on the machine or in a container; None if unknown."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device is not None and device.type != "cpu":
        return None
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    except (OSError, ValueError, StopIteration):  # not Linux: all memory is the best that is known
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        limits.append(max(0, limit - used))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return min(limits, default=None)
