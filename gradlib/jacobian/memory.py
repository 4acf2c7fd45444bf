"""How much memory is free, and how much a backward pass takes."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.private.modes import graph_is_captured

SHARE = 0.5
"""Of the free memory, what a Jacobian may take unless it is told."""

MEMORY, FIRST = Path("/proc/meminfo"), 256
"""Where Linux says what is free, and how many bytes reach there: it is on line 3."""


UNKNOWN = 2**32
"""How many bytes are taken to be free where the system does not say."""


def room_on(device: torch.device) -> int:
    """Return how many bytes a Jacobian may take on a device, unless it is told."""
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
        # One call: memory_reserved() sorts all there is to know, each time it is asked.
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
        # What the files that were read last take can be had, too.
        return 1024 * int(text.partition(b"MemAvailable:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError):
        return 0


def _free_elsewhere() -> int:
    """Return what is free, or what there is in all, or `UNKNOWN`."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS has only the second
        if name in names and (pages := os.sysconf(name)) > 0:
            return pages * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch could not get the memory it asked for, on any device."""
    no_more_on_cpu = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError) or no_more_on_cpu in str(error)


@kept_for_each
def bytes_of_graph(drawing: Drawing) -> int:
    """Return how many bytes the graph of a backward pass keeps, at most.

    Each of its operations may keep what it was given, as a product does of which both
    factors require grad.
    """
    return sum(form.bytes for form in drawing.forms.values())


@kept_for_each
def bytes_of_pass(drawing: Drawing) -> int:
    """Return how many bytes of gradients one backward pass holds at its height.

    It goes through the graph as autograd does, the node made last first and only where
    there is a way to what is differentiated for, and counts what waits at the nodes it
    has not come to.
    """
    led, forms = drawing.led, drawing.forms
    come = set(drawing.roots)
    held: dict[int, int] = defaultdict(int)
    for spot in come:
        held[spot[0]] += forms[spot].bytes
    height = total = sum(held.values())
    for node in drawing.order:
        if not led[node]:
            continue
        given = more = 0
        for spot in set(led[node]):
            size = forms[spot].bytes
            given += size
            # What has come to an end waits for nothing.
            if spot not in come and led[spot[0]]:
                come.add(spot)
                held[spot[0]] += size
                more += size
        # An operation has what came in and what goes out at the same time.
        height = max(height, total + given)
        total += more - held[node]
    return height
