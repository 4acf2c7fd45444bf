"""How much memory is free, and whether it ran out."""

import os
from pathlib import Path
from typing import Any

import torch

from gradlib.errors import JacobianArgumentError
from gradlib.private.modes import graph_is_captured

SHARE = 0.5
"""Which part of the free memory a Jacobian may take where `max_bytes` is not given."""

MEMORY, FIRST = Path("/proc/meminfo"), 256
"""Where Linux says what is free, and how many bytes to read: it is on line 3."""

UNKNOWN = 2**32
"""How many bytes are taken to be free where the system does not tell."""


def room_on(device: torch.device) -> int:
    """Return how many bytes a Jacobian may take where `max_bytes` is not given."""
    return int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Return how many bytes are free on a device."""
    if device.type == "cuda":
        if graph_is_captured():
            raise JacobianArgumentError(
                "max_bytes must be given while a CUDA graph is captured: how much "
                "memory is free cannot be asked for meanwhile. Pass a number of bytes."
            )
        free, _ = torch.cuda.mem_get_info(device)
        # One call: memory_reserved() sorts all statistics each time.
        stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
        reserved, allocated = (
            stats[it]["all"]["current"] if stats else 0
            for it in ("reserved_bytes", "allocated_bytes")
        )
        return free + reserved - allocated
    return _free_on_linux() or _free_elsewhere()


def _free_on_linux() -> int:
    try:
        with MEMORY.open("rb", buffering=0) as file:
            text = file.read(FIRST)
        # Free memory and what cached files take, which can be had too.
        return 1024 * int(text.partition(b"MemAvailable:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return 0


def _free_elsewhere() -> int:
    """Return the bytes that are free, or else those in all, or else `UNKNOWN`."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS has only the second
        if name in names and (pages := os.sysconf(name)) > 0:
            return pages * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch could not get the memory it asked for, on any device."""
    no_more_on_cpu = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError) or no_more_on_cpu in str(error)
