"""Memory for results: fresh pages are slow, so huge ones are used, or freed memory."""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

HUGE = 2**22
"""From how many bytes on a result is put on huge pages.

With torch 2.13 on an Intel Xeon that gives huge pages on request, a product of 78 MB
was written to fresh huge pages in half the time that it took with others.
"""


KEPT = 2**24
"""How many bytes are allocated and freed once, so that freed memory is kept later."""


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a tensor without values.

    Args:
        shape: Its shape.
        like: The tensor whose class, dtype and device it has.
    """
    made = like.detach().new_empty(shape)
    size = made.numel() * made.element_size()
    plain = type(made) is Tensor and made.device.type == "cpu"
    if size >= HUGE and plain and (advise := _advise()):
        start = -(-made.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = made.data_ptr() + size - start
        # It is advice: a system that ignores it changes nothing else.
        advise(start, length - length % mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return made


@cache
def keep_what_is_freed() -> None:
    """Have the C library keep freed memory, up to twice `KEPT`, for later tensors.

    glibc returns to the system what is free beyond twice the largest block that it has
    mapped and freed. In a process that has freed only small blocks, tensors of some MiB
    are on fresh pages each time, and a Jacobian of that size may take twice as long. So
    a block of that size is mapped and freed here once, without writing to it.
    """
    torch.empty(KEPT, dtype=torch.uint8, device="cpu")


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
