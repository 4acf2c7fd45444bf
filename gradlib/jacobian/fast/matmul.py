"""Vectors times a matrix that all of them share, by the faster of two libraries.

torch multiplies float32 matrices on a CPU with MKL, where it was built with it. oneDNN,
which it has for convolutions, does the same: on AMD processors in half the time, on
Intel's in the same. So both are timed once, when the first product comes that is large
enough for it to matter.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.private import grad_is_enabled, onednn_is_enabled, onednn_linear

LARGE = 2**21
"""From how many multiply-adds on it is worth a choice: oneDNN takes 10 µs to begin."""

NARROW = 8
"""Up to how many columns of the matrix, or rows, oneDNN gains nothing."""

GAIN = 0.8
"""At most so much of MKL's time oneDNN must take: then chance decides nothing."""


def multiplied(v: Tensor, matrix: Tensor) -> Tensor:
    """Return ``v @ matrix``.

    Args:
        v: Vectors, ``(..., ins)``.
        matrix: ``(ins, outs)``, laid out in either way.
    """
    if prefers_onednn(v, matrix):
        return onednn_linear(v, matrix.mT)
    return v @ matrix


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what ``torch.nn.functional.linear`` does.

    Args:
        x: Vectors, ``(..., ins)``.
        weight: The matrix, ``(outs, ins)``.
        bias: What is added, ``(outs,)``.
    """
    if prefers_onednn(x, weight.mT):
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def prefers_onednn(v: Tensor, matrix: Tensor) -> bool:
    """Tell whether oneDNN multiplies vectors by a matrix faster."""
    if matrix.dim() != 2 or v.numel() * matrix.shape[1] < LARGE:
        return False
    return (
        min(matrix.shape) > NARROW
        and v.dtype is torch.float32 is matrix.dtype
        and v.device.type == "cpu"
        and v.is_contiguous()
        and not grad_is_enabled()  # it has no derivative
        and onednn_is_enabled()
        and _onednn_is_faster(torch.get_num_threads())
    )


@cache
def _onednn_is_faster(threads: int) -> bool:
    """Tell which library is faster here, from a product of some size."""
    del threads  # each number of them is a case of its own
    v, matrix = torch.ones(2, 256, 256, dtype=torch.float32, device="cpu").unbind()
    ways = (lambda: v @ matrix, lambda: onednn_linear(v, matrix.mT))
    times: list[list[float]] = [[], []]
    for _ in range(6):
        for way, taken in zip(ways, times, strict=True):
            taken.append(_seconds(way))
    mkl, onednn = (min(taken[1:]) for taken in times)
    return onednn < GAIN * mkl


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before
