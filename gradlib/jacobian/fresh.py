"""Fresh memory, which is slow to get: where possible on huge pages, or used again."""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

HUGE = 2**22
"""From how many bytes on a result is put on huge pages: fresh ones are slow to get.

With torch 2.13 on an Intel Xeon that gives huge pages to who asks for them, a product
of 78 MB was written to fresh ones in half the time that it took to others.
"""


KEPT = 2**24
"""How large a block is freed once so that later ones are kept, in bytes."""


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor with nothing written in it.

    Args:
        shape: Its shape.
        like: Where its kind, dtype and device come from.
    """
    made = like.detach().new_empty(shape)
    size = made.numel() * made.element_size()
    plain = type(made) is Tensor and made.device.type == "cpu"
    if size >= HUGE and plain and (advise := _advise()):
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = made.data_ptr() + size - start
        # It is advice: where it is not taken, nothing else changes.
        advise(start, length - length % mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return made


@cache
def keep_what_is_freed() -> None:
    """Have the C library keep freed memory, up to twice `KEPT`, for who asks next.

    glibc hands back to the system what is free beyond twice the largest block that it
    has mapped and freed. So in a process that has freed only small ones, tensors of
    some MiB are on fresh pages each time, which a Jacobian of that size may take twice
    as long for. Such a block is mapped here once, and nothing is written to it.
    """
    torch.empty(KEPT, dtype=torch.uint8, device="cpu")


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
