"""How much memory is free, and how much a backward pass takes."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import Node

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.graph import Graph
from gradlib.private import graph_is_captured, sequence_number
from gradlib.vjp.connection import place_of

SHARE = 0.5
"""Of the free memory, what a Jacobian may take unless it is told."""

MEMORY, FIRST = Path("/proc/meminfo"), 256
"""Where Linux says what is free, and how many bytes reach there: it is on line 3."""


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
    try:
        with MEMORY.open("rb", buffering=0) as file:
            text = file.read(FIRST)
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # What the files that were read last take can be had, too.
    return 1024 * int(text.partition(b"MemAvailable:")[2].split(maxsplit=1)[0])


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch could not get the memory it asked for, on any device."""
    no_more_on_cpu = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError) or no_more_on_cpu in str(error)


def bytes_of_pass(graph: Graph) -> int:
    """Return how many bytes of gradients one backward pass holds at its height.

    It goes through the graph as autograd does, the node made last first and only where
    there is a way to what is differentiated for, and counts what waits at the nodes it
    has not come to.
    """
    way, forms = graph.way, graph.forms
    come = {place_of(root) for root in graph.roots}
    held: dict[Node, int] = defaultdict(int)
    for place in come:
        held[place[0]] += forms[place].bytes
    height = total = sum(held.values())
    inner = [node for node, places in way.items() if places]
    for node in sorted(inner, key=sequence_number, reverse=True):
        places = way[node]
        given = more = 0
        for place in places if len(places) == 1 else set(places):
            size = forms[place].bytes
            given += size
            # What has come to an end waits for nothing.
            if place not in come and way[place[0]]:
                come.add(place)
                held[place[0]] += size
                more += size
        # An operation has what came in and what goes out at the same time.
        height = max(height, total + given)
        total += more - held[node]
    return height
