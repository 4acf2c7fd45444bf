"""Products of vectors and a matrix, by the faster of MKL and oneDNN.

torch multiplies float32 matrices on a CPU with MKL, where it was built with it. oneDNN,
which torch has for convolutions, can do so too: on AMD's newest processors in half the
time, on the ones before in nine tenths of it, on Intel's in the same. So both are timed
once, at the first product or chain that is not small.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.private.modes import grad_is_enabled
from gradlib.private.passes import gradients_are_batched
from gradlib.private.products import onednn_is_enabled, onednn_linear

# torch's own, also where F.linear is replaced later.
_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

LARGE = 2**21
"""From how many multiply-adds on oneDNN may be faster: it takes 10 µs to start."""

NARROW = 8
"""With at most this many rows or columns of the matrix, oneDNN gains nothing."""

DONE_TO_ENTRIES = {"tanh": 100}
"""Activations that oneDNN applies to a product, each with how many multiply-adds take
as long as torch does for an entry, on a core of an AMD EPYC.

Their slopes follow from their outputs, and they are as exact as torch's. Not so
oneDNN's ReLU, which makes zeros of NaN, and its sigmoid, which makes zeros of tiny
numbers.
"""

GAIN = 0.8
"""oneDNN must take at most this part of MKL's time, so that noise decides nothing."""


TURNED = 2**8
"""With at most this many entries per sample, vectors are made contiguous first.

Where they lie by columns torch multiplies sample by sample, and each takes time to
start.
"""


def multiplied(v: Tensor, matrix: Tensor, into: Tensor | None = None) -> Tensor:
    """Return ``v @ matrix``.

    Args:
        v: Vectors, ``(..., ins)``.
        matrix: ``(ins, outs)``, laid out in either way; or one for each sample.
        into: A contiguous tensor that the product may be written to.
    """
    if v.dim() > matrix.dim() and v.numel() <= TURNED * v.shape[0]:
        v = v.contiguous()
    if _is_small(v, matrix.size(-1)) or not prefers_onednn(v, matrix):
        return _by_torch(v, matrix, into)
    return _by_onednn(v, matrix.mT, None)


def _by_torch(v: Tensor, matrix: Tensor, into: Tensor | None = None) -> Tensor:
    if into is None:
        return v @ matrix
    if v.dim() < 3 or matrix.dim() > 2:
        return torch.matmul(v, matrix, out=into)
    torch.mm(v.flatten(0, -2), matrix, out=into.flatten(0, -2))
    return into


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of ``torch.nn.functional.linear``, ``(..., outs)``.

    Args:
        x: Vectors, ``(..., ins)``.
        weight: The matrix, ``(outs, ins)``.
        bias: The bias, ``(outs,)``.
    """
    if _is_small(x, weight.size(0)) or not prefers_onednn(x, weight.mT):
        return _linear(x, weight, bias)
    return _by_onednn(x, weight, bias)


def linear_then(
    x: Tensor, weight: Tensor, bias: Tensor | None, then: str
) -> tuple[Tensor, bool]:
    """Return a linear layer's output, and whether the activation is applied already.

    Args:
        x: Vectors, ``(..., ins)``.
        weight: The matrix, ``(outs, ins)``.
        bias: The bias, ``(outs,)``.
        then: The activation that follows, by the name of torch's function.
    """
    if (
        then in DONE_TO_ENTRIES
        and prefers_onednn(x, weight.mT, then)
        and not grad_is_enabled()
    ):
        return onednn_linear(x, weight, bias, then), True
    return linear(x, weight, bias), False


class Library(NamedTuple):
    """The functions that multiply: torch's alone, or those that choose a library.

    Attributes:
        linear_then: A function like `linear_then`.
        multiplied: A function like `multiplied`.
    """

    linear_then: Callable[[Tensor, Tensor, Tensor | None, str], tuple[Tensor, bool]]
    multiplied: Callable[[Tensor, Tensor], Tensor]


def _linear_alone(
    x: Tensor, weight: Tensor, bias: Tensor | None, _then: str
) -> tuple[Tensor, bool]:
    return _linear(x, weight, bias), False


TORCH = Library(_linear_alone, _by_torch)
"""torch alone, without asking before each product which library is faster."""

FASTER = Library(linear_then, multiplied)
"""The faster library for each product."""


def prefers_onednn(v: Tensor, matrix: Tensor, then: str = "none") -> bool:
    """Tell whether oneDNN multiplies vectors by a matrix faster.

    Args:
        v: Vectors, ``(..., ins)``.
        matrix: ``(ins, outs)``.
        then: The activation applied to the product, one of `DONE_TO_ENTRIES`.
    """
    more = DONE_TO_ENTRIES.get(then, 0)
    if _is_small(v, matrix.size(-1), more) or not _may_be_faster(v, then):
        return False
    if matrix.dim() != 2 or not (more or min(matrix.shape) > NARROW):
        return False
    ins, outs = matrix.shape
    return (
        v.numel() // max(1, ins) * outs * (ins + more) >= LARGE
        and (v.dim() == 2 or v.is_contiguous())
        # Other layouts may overlap, which oneDNN refuses.
        and (matrix.is_contiguous() or matrix.mT.is_contiguous())
    )


def _is_small(v: Tensor, outs: int, more: int = 0) -> bool:
    """Tell whether a product surely takes less than `LARGE` multiply-adds."""
    return v.numel() * outs * (1 + more) < LARGE


def _may_be_faster(like: Tensor, then: str) -> bool:
    """Tell whether oneDNN is the faster library here, for any of such tensors."""
    return (
        like.dtype is torch.float32
        and like.is_cpu
        and onednn_is_enabled()
        and not gradients_are_batched()  # it would get them one by one
        and _onednn_is_faster(torch.get_num_threads(), then)
    )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = (x, weight, bias)
    if grad_is_enabled() and any(it is not None and it.requires_grad for it in given):
        return cast(Any, _Linear).apply(*given)
    return onednn_linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """A linear layer by oneDNN, whose product has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        flat = grad.reshape(-1, grad.shape[-1])
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            multiplied(grad, weight) if to_x else None,
            multiplied(flat.mT, x.reshape(-1, x.shape[-1])) if to_weight else None,
            flat.sum(0) if to_bias else None,
        )


@cache
def _onednn_is_faster(threads: int, then: str) -> bool:
    """Tell whether oneDNN is faster here, by timing a product."""
    del threads  # only the key of the cache
    v, matrix = torch.ones(2, 256, 256, dtype=torch.float32, device="cpu").unbind()

    def by_mkl() -> Tensor:
        product = v @ matrix
        return product if then == "none" else getattr(torch, then)(product)

    def by_onednn() -> Tensor:
        return onednn_linear(v, matrix.mT, None, then)

    times: list[list[float]] = [[], []]
    for _ in range(6):
        for way, taken in zip((by_mkl, by_onednn), times, strict=True):
            taken.append(_seconds(way))
    mkl, onednn = (min(taken[1:]) for taken in times)
    return onednn < GAIN * mkl


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before
