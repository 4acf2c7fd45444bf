"""What a chain's result takes: whether it fits, samples at a time, and the plan."""

import math
from typing import Any

import torch
from torch import Tensor

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.memory import room_on
from gradlib.jacobian.plan import JacobianPlan

IN_CACHE = 2**21
"""How many entries of all layers are computed in one part. Most are in use at different
times, so that those in use at once fit into a core's own cache.

On a core of an AMD EPYC half as many took a little longer for layers of 64 and of 256,
and about as long for others.
"""

MAPS_IN_CACHE = 5 * 2**17
"""How many entries the largest tensor has in one part, going back through maps.

Convolutions are the faster the more there are, until the C library returns memory to
the system after each part: fresh pages are slow.
"""

FILLING = 2**28
"""The same as `IN_CACHE` on other devices: an H100 gains up to here."""

SMALL = 2**22
"""Fewer entries are taken to have room, unless `max_bytes` is given.

Asking the system takes 40 µs, and these are a few hundredths of a GiB.
"""

SMALL_ON_GPU = 2**25
"""The same on other devices, which raise themselves where memory runs out."""


def samples_at_once(chain: Chain) -> int:
    """Return how many samples of a chain are computed in one part."""
    samples, entries = chain.x.shape[0], chain.entries
    if samples * entries <= IN_CACHE:
        return samples
    most = in_caches(chain.x)
    if chain.maps.layers and chain.x.device.type == "cpu":
        most, entries = MAPS_IN_CACHE, chain.outs * chain.maps.widest
    parts = math.ceil(samples / max(1, most // entries))
    # All parts alike: a small last one would be slower.
    return math.ceil(samples / parts)


def in_caches(like: Tensor) -> int:
    """Return how many entries are computed in one part, on a whole device."""
    on_cpu = like.device.type == "cpu"
    return IN_CACHE * torch.get_num_threads() if on_cpu else FILLING


def has_room(chain: Chain, out: Any, max_bytes: int | None) -> bool:
    """Tell whether there is room for the result and all products, or `out` is right.

    Args:
        chain: The chain.
        out: The tensor to write to; ``None`` for new memory.
        max_bytes: How many bytes may be held at once; ``None`` for half of those free.
    """
    if out is not None and not _is_good(out, chain):
        return False
    entries = 0 if out is not None else chain.x.numel() * chain.outs
    most = SMALL if chain.x.device.type == "cpu" else SMALL_ON_GPU
    if max_bytes is None and chain.entries * chain.x.shape[0] + entries <= most:
        return True
    needs = bytes_of_parts(chain) + entries * chain.x.element_size()
    if max_bytes is None:
        small = most * chain.x.element_size()
        return needs <= small or needs <= room_on(chain.x.device)
    return type(max_bytes) is int and needs <= max_bytes


def bytes_of_parts(chain: Chain) -> int:
    """Return how many bytes the products of one part take."""
    samples = min(chain.x.shape[0], samples_at_once(chain))
    return chain.entries * samples * chain.x.element_size()


def planned(plan: JacobianPlan, chain: Chain) -> JacobianPlan:
    """Return the plan that multiplies the Jacobians of a chain's layers.

    Args:
        plan: How the Jacobian would be computed otherwise.
        chain: The chain.
    """
    return plan.shortened(
        "chain",
        "the Jacobian of each of its layers is known",
        f"products in the order {chain.order.text()}",
        chain.multiply_adds,
        bytes_of_parts(chain),
    )


def _is_good(out: Any, chain: Chain) -> bool:
    """Tell whether the result can be written to `out` directly."""
    x = chain.x
    if type(out) is not Tensor or out.is_nested or out.layout != torch.strided:
        return False
    if (out.shape, out.dtype, out.device) != (chain.shape, x.dtype, x.device):
        return False
    if out.requires_grad or out.is_inference() or not out.is_contiguous():
        return False
    memory = out.untyped_storage().data_ptr()
    return all(it.untyped_storage().data_ptr() != memory for it in chain.tensors)
