"""Vectors times a matrix that all of them share, by the faster of two libraries.

torch multiplies float32 matrices on a CPU with MKL, where it was built with it. oneDNN,
which it has for convolutions, does the same: on the newest of AMD's processors in half
the time, on the ones before in nine tenths of it, on Intel's in the same. So both are
timed once, when the first product or chain comes that is no small one.
"""

import time
from collections.abc import Callable, Set
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.private.modes import grad_is_enabled
from gradlib.private.passes import gradients_are_batched
from gradlib.private.products import onednn_is_enabled, onednn_linear

# torch's own, whatever somebody has put there since.
_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

LARGE = 2**21
"""From how many multiply-adds on it is worth a choice: oneDNN takes 10 µs to begin."""

NARROW = 8
"""Up to how many columns of the matrix, or rows, oneDNN gains nothing."""

DONE_TO_ENTRIES = {"tanh": 100}
"""What oneDNN does to each entry of a product, while it is there: how many
multiply-adds take as long as torch does for it, on a core of an AMD EPYC.

What comes of it says how to go back. It is as exact as torch's; oneDNN's ReLU makes
zeros of NaN, and its sigmoid of what is tiny.
"""

GAIN = 0.8
"""At most so much of MKL's time oneDNN must take: then chance decides nothing."""


TURNED = 2**8
"""Up to how many entries of a sample are put in order before they are multiplied.

Where they lie by columns torch multiplies sample by sample, and that takes some time to
begin for each.
"""


def multiplied(v: Tensor, matrix: Tensor, into: Tensor | None = None) -> Tensor:
    """Return ``v @ matrix``.

    Args:
        v: Vectors, ``(..., ins)``.
        matrix: ``(ins, outs)``, laid out in either way; or one for each sample.
        into: Where to write it, contiguous, if it can be written there at once.
    """
    if v.dim() > matrix.dim() and v.numel() <= TURNED * v.shape[0]:
        v = v.contiguous()
    if prefers_onednn(v, matrix):
        return _by_onednn(v, matrix.mT, None)
    return _by_torch(v, matrix, into)


def _by_torch(v: Tensor, matrix: Tensor, into: Tensor | None) -> Tensor:
    if into is None:
        return v @ matrix
    if v.dim() < 3 or matrix.dim() > 2:
        return torch.matmul(v, matrix, out=into)
    torch.mm(v.flatten(0, -2), matrix, out=into.flatten(0, -2))
    return into


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what ``torch.nn.functional.linear`` does.

    Args:
        x: Vectors, ``(..., ins)``.
        weight: The matrix, ``(outs, ins)``.
        bias: What is added, ``(outs,)``.
    """
    by_onednn = prefers_onednn(x, weight.mT)
    return (_by_onednn if by_onednn else _linear)(x, weight, bias)


def linear_then(
    x: Tensor, weight: Tensor, bias: Tensor | None, then: str
) -> tuple[Tensor, bool]:
    """Return what a linear layer gives, and whether what follows has been done to it.

    Args:
        x: Vectors, ``(..., ins)``.
        weight: The matrix, ``(outs, ins)``.
        bias: What is added, ``(outs,)``.
        then: What follows, by the name of torch's function.
    """
    if (
        then in DONE_TO_ENTRIES
        and prefers_onednn(x, weight.mT, then)
        and not grad_is_enabled()
    ):
        return onednn_linear(x, weight, _in_a_row(bias), then), True
    return linear(x, weight, bias), False


class Library(NamedTuple):
    """Who multiplies.

    Attributes:
        linear_then: As the function of that name does it.
        multiplied: As the function of that name does it.
    """

    linear_then: Callable[[Tensor, Tensor, Tensor | None, str], tuple[Tensor, bool]]
    multiplied: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _linear_alone(
    x: Tensor, weight: Tensor, bias: Tensor | None, _then: str
) -> tuple[Tensor, bool]:
    return _linear(x, weight, bias), False


TORCH = Library(_linear_alone, _by_torch)
"""torch alone: nobody asks before each product which one is faster."""


def library_for(like: Tensor, follow: Set[str]) -> Library:
    """Return who multiplies tensors of a kind: torch, or the faster one each time.

    Args:
        like: One of them.
        follow: What follows linear layers, by the names of torch's functions.
    """
    asked = "none", *(follow & DONE_TO_ENTRIES.keys())
    is_open = any(_may_be_faster(like, then) for then in asked)
    return Library(linear_then, multiplied) if is_open else TORCH


def prefers_onednn(v: Tensor, matrix: Tensor, then: str = "none") -> bool:
    """Tell whether oneDNN multiplies vectors by a matrix faster.

    Args:
        v: Vectors, ``(..., ins)``.
        matrix: ``(ins, outs)``.
        then: What is done to each entry of the product, one of `DONE_TO_ENTRIES`.
    """
    more = DONE_TO_ENTRIES.get(then, 0)
    if v.numel() * matrix.size(-1) * (1 + more) < LARGE:
        return False  # it is a small one
    if not _may_be_faster(v, then):
        return False
    if matrix.dim() != 2 or not (more or min(matrix.shape) > NARROW):
        return False
    ins, outs = matrix.shape
    return (
        v.numel() // max(1, ins) * outs * (ins + more) >= LARGE
        and matrix.dtype is torch.float32
        and (v.dim() == 2 or v.is_contiguous())
        # Of others some overlap, which it refuses.
        and (matrix.is_contiguous() or matrix.mT.is_contiguous())
    )


def _may_be_faster(like: Tensor, then: str) -> bool:
    """Tell whether oneDNN is the faster library here, for any of such tensors."""
    return (
        like.dtype is torch.float32
        and like.is_cpu
        and onednn_is_enabled()
        and not gradients_are_batched()  # which would come to it one by one
        and _onednn_is_faster(torch.get_num_threads(), then)
    )


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = (x, weight, bias)
    if grad_is_enabled() and any(it is not None and it.requires_grad for it in given):
        return cast(Any, _Linear).apply(*given)
    return onednn_linear(x, weight, _in_a_row(bias))


def _in_a_row(bias: Tensor | None) -> Tensor | None:
    """Return a bias whose entries are neighbours: oneDNN takes them as if they were."""
    return None if bias is None else bias.contiguous()


class _Linear(torch.autograd.Function):
    """A linear layer by oneDNN, which has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, _in_a_row(bias))

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
    """Tell which library is faster here, from a product of some size."""
    del threads  # each number of them is a case of its own
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
