"""The memory of a result: whether there is room for it."""

import math
from typing import Any

import torch
from torch import Tensor

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.memory import room_on

IN_CACHE = 2**21
"""How many entries are worked on at a time, in all layers: most of them at different
times, so that what is worked on at once fits into a core's own cache.

On a core of an AMD EPYC half as many took a little longer for layers of 64 and of 256,
and about as long for others.
"""

MAPS_IN_CACHE = 5 * 2**17
"""The same of the largest tensor on the way back through maps.

The more at once, the faster convolutions are, up to where the C library hands memory
back after each part: fresh pages are slow.
"""

FILLING = 2**28
"""The same on other devices, which want much at once: an H100 gains up to here."""

SMALL = 2**22
"""Up to how many entries there is always room, unless somebody says otherwise.

To ask the system takes 40 µs, and they are a few hundredths of a GiB.
"""

SMALL_ON_GPU = 2**25
"""The same on other devices, which say so themselves where there is none."""


def samples_at_once(chain: Chain) -> int:
    """Return how many samples of a chain are worked on at a time."""
    samples, entries = chain.x.shape[0], _entries(chain)
    if samples * entries <= IN_CACHE:
        return samples
    most = in_caches(chain.x)
    if chain.maps.layers and chain.x.device.type == "cpu":
        most, entries = MAPS_IN_CACHE, chain.outs * chain.maps.widest
    parts = math.ceil(samples / max(1, most // entries))
    return math.ceil(samples / parts)  # alike: a smaller last one would be slower


def in_caches(like: Tensor) -> int:
    """Return how many entries are worked on at a time, by all of a device."""
    on_cpu = like.device.type == "cpu"
    return IN_CACHE * torch.get_num_threads() if on_cpu else FILLING


def has_room(chain: Chain, out: Any, max_bytes: int | None) -> bool:
    """Tell whether the result fits into memory, or into what is brought for it.

    Args:
        chain: What the Jacobian is of.
        out: What is brought; ``None`` if nothing is.
        max_bytes: What may be held at once; ``None`` for half of what is free.
    """
    if out is not None and not _is_good(out, chain):
        return False
    entries = 0 if out is not None else chain.x.numel() * chain.outs
    most = SMALL if chain.x.device.type == "cpu" else SMALL_ON_GPU
    if max_bytes is None and not chain.maps.layers:
        inside = chain.order.entries + chain.kept * chain.x.shape[0]
        if inside < most and entries < most:
            return True
    needs = bytes_of_parts(chain) + entries * chain.x.element_size()
    if max_bytes is None:
        small = most * chain.x.element_size()
        return needs <= small or needs <= room_on(chain.x.device)
    return type(max_bytes) is int and needs <= max_bytes


def bytes_of_parts(chain: Chain) -> int:
    """Return how many bytes the products take that are worked on at a time."""
    samples = min(chain.x.shape[0], samples_at_once(chain))
    return _entries(chain) * samples * chain.x.element_size()


def _entries(chain: Chain) -> int:
    """Return how many entries a sample takes, without those of the last product."""
    entries, maps = chain.order.each + chain.kept, chain.maps
    if not maps.layers:
        return entries
    # The vectors that go back stay while others come of them.
    return entries + maps.entries + chain.outs * (maps.outs + maps.live)


def _is_good(out: Any, chain: Chain) -> bool:
    """Tell whether what is brought for the result can be written to as it is."""
    x = chain.x
    if type(out) is not Tensor or out.is_nested:
        return False
    if out.shape != chain.shape or out.dtype != x.dtype:
        return False
    if out.device != x.device or out.requires_grad or out.is_inference():
        return False
    if out.layout != torch.strided:
        return False
    memory = out.untyped_storage().data_ptr()
    return out.is_contiguous() and all(
        it.untyped_storage().data_ptr() != memory for it in chain.tensors
    )
