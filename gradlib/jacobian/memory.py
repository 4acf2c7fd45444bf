"""How much memory is free, and how much a backward pass takes."""

import math
import os
from pathlib import Path
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from gradlib.jacobian.graph import Graph
from gradlib.jacobian.nodes import on_the_way, starts_of
from gradlib.private import forms_at, sequence_number
from gradlib.vjp.connection import Place, place_of

SHARE = 0.5
"""Of the free memory, what a Jacobian may take unless it is told."""


def room_on(device: torch.device) -> int:
    """Return how many bytes a Jacobian may take on a device, unless it is told."""
    return int(SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Return how many bytes are free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # What the files that were read last take can be had, too.
    (available,) = [it for it in lines if it.startswith("MemAvailable:")]
    return 1024 * int(available.split()[1])


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
    ends = {place_of(point)[0] for point in graph.points}
    on_way = on_the_way(starts_of(graph), ends)
    waiting: dict[Place, int] = {}
    for root in graph.roots:
        place = place_of(root)
        waiting[place] = _size_at(place)
    height = held = sum(waiting.values())
    while waiting:
        node = max(waiting, key=_order)[0]
        taken = [place for place in waiting if place[0] is node]
        given = {
            cast(Place, place): _size_at(cast(Place, place))
            for place in node.next_functions
            if place[0] in on_way
        }
        # An operation has what came in and what goes out at the same time.
        height = max(height, held + sum(given.values()))
        held -= sum(waiting.pop(place) for place in taken)
        for place, size in given.items():
            if place not in waiting:
                waiting[place] = size
                held += size
    return height


def _order(place: Place) -> int:
    node: Node = place[0]
    return sequence_number(node)


def _size_at(place: Place) -> int:
    forms = forms_at(place[0])
    if forms is None:  # torch 2.4 does not tell: then the ends alone count
        return 0
    form: Any = forms[place[1]]
    return math.prod(map(int, form.shape)) * form.dtype.itemsize
