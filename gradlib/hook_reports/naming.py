"""Naming a gradient by its value: which known gradient it is, and in which form."""

from collections.abc import Collection, Iterator, Mapping
from itertools import permutations, product
from math import inf
from typing import TypeAlias

import torch
from torch import Tensor

from gradlib.plain_tensors import is_inexact
from gradlib.shapes import broadcasts

MOST_DIMENSIONS = 5  # up to so many, every order of the dimensions is tried

MOST_AT_FIRST = 4096
"""At most so many entries of two tensors are compared before all are."""

TINY = torch.finfo(torch.float64).tiny

Forms: TypeAlias = Iterator[tuple[str, Tensor, Tensor]]
"""Forms of one kind in which a gradient may be a known one: the words for each, and the
two tensors that are close if it is."""


def name_by_value(
    grad: Tensor,
    noise: Mapping[str, float],
    *groups: Mapping[str, Tensor],
    whole: Collection[str] = (),
) -> str | None:
    """Name a gradient by the known gradient it is equal to.

    Args:
        grad: A gradient of any shape.
        noise: By the same names, how far two computations of a known gradient differed,
            relative to its largest entry; 0 where there is no entry.
        groups: Known gradients, by the names of their tensors. Where several fit
            equally well, an earlier group goes before a later one.
        whole: The names of known gradients that are no sums of what the module
            computes: those of its outputs. A gradient that sums up to one of these does
            so by chance, or by a mean's weights.

    Returns:
        ``"gradient of weight, transposed"``, with every name that fits equally well;
        ``None`` where none does. A simple form goes before a far-fetched one. Within a
        form, equality to the last bit goes before equality up to rounding, and that
        before a difference no larger than between two computations.
    """
    for form, level in product(FORMS, range(3)):
        for known in groups:
            found = [
                f"{name}{said}"
                for name, value in known.items()
                if form is not _not_yet_summed or name not in whole
                for said in _fitting(form(grad, value), level, noise.get(name, 0.0))
            ]
            if found:
                return "gradient of " + " and of ".join(found)
    return None


def _fitting(forms: Forms, level: int, noise: float) -> Iterator[str]:
    """Yield the words of the first form in which two tensors are close, if any."""
    for said, a, b in forms:
        if _are_close(_tolerances(a, b, noise)[level], a, b):
            yield said
            return


def _as_it_is(grad: Tensor, known: Tensor) -> Forms:
    if grad.shape == known.shape:
        yield "", grad, known


def _permuted(grad: Tensor, known: Tensor) -> Forms:
    if not 2 <= grad.ndim == known.ndim <= MOST_DIMENSIONS:
        return
    for order in permutations(range(known.ndim)):
        turned = known.permute(order)
        said = ", transposed" if known.ndim == 2 else f", permuted by {order}"
        if turned.shape == grad.shape:
            yield said, grad, turned


def _reshaped(grad: Tensor, known: Tensor) -> Forms:
    if grad.numel() == known.numel():
        yield ", reshaped", grad, known.reshape(grad.shape)


def _expanded(grad: Tensor, known: Tensor) -> Forms:
    if broadcasts(known.shape, grad.shape):
        yield ", expanded", grad, known.expand(grad.shape)


def _summed(grad: Tensor, known: Tensor) -> Forms:
    if broadcasts(grad.shape, known.shape):
        yield ", summed", grad, known.sum_to_size(grad.shape)


def _not_yet_summed(grad: Tensor, known: Tensor) -> Forms:
    if broadcasts(known.shape, grad.shape):
        yield ", before it is summed", grad.sum_to_size(known.shape), known


FORMS = (_as_it_is, _permuted, _reshaped, _expanded, _summed, _not_yet_summed)


def _tolerances(a: Tensor, b: Tensor, noise: float) -> tuple[float, float, float]:
    """Return how far two tensors may differ: not at all, by rounding, or by noise.

    Rounding is that of another order of summation. Dtypes narrower than float32 are
    summed in float32.
    """
    rounding = 4 * min(_eps(a, b), torch.finfo(torch.float32).eps)
    return 0.0, rounding, max(rounding, 8 * noise)


def _are_close(tolerance: float, a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one shape are close, relative to the largest entry.

    A few entries are compared first.
    """
    eps = _eps(a, b)
    # Each entry of a dtype narrower than float32 is then rounded once.
    rtol = eps if tolerance and eps > torch.finfo(torch.float32).eps else 0.0
    atol = tolerance * max(_largest(a), _largest(b)) if tolerance else 0.0
    few = _few_of(a)
    pairs = [(a, b)] if few is a else [(few, _few_of(b)), (a, b)]
    return all(
        torch.allclose(*_alike(x, y), rtol=rtol, atol=atol, equal_nan=True)
        for x, y in pairs
    )


def _few_of(tensor: Tensor) -> Tensor:
    """Return a part of a tensor from its middle, as borders often are zeros."""
    while tensor.ndim and tensor.numel() > MOST_AT_FIRST:
        tensor = tensor[len(tensor) // 2]
    return tensor


def apart(a: Tensor, b: Tensor) -> float:
    """Return how far two tensors differ, relative to the largest entry."""
    if a.shape != b.shape:
        return inf
    x, y = _alike(a, b)
    return _largest(x - y) / max(_largest(x), _largest(y), TINY)


def _eps(a: Tensor, b: Tensor) -> float:
    """Return the eps of the coarser dtype."""
    return max(torch.finfo(t.dtype).eps if is_inexact(t.dtype) else 0.0 for t in (a, b))


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, y = _computable(a), _computable(b)
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(x.device, dtype)


def _computable(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that torch can compute with, so not of eight bits."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _largest(tensor: Tensor) -> float:
    tensor = _computable(tensor)
    finite = torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))
    return finite.abs().max().item() if tensor.numel() else 0.0
