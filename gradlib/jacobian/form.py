"""What a gradient looks like that flows through an edge of a graph."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from gradlib.edges import Edge
from gradlib.errors import NoSuchWayError
from gradlib.private.nodes import forms_at


class Form(NamedTuple):
    """The shape of a gradient, its dtype and device, and how many bytes it takes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int


def form_at(edge: Edge) -> Form:
    """Return what flows through an edge. It is made anew whenever it is asked."""
    node, number = edge
    found = forms_at(node)[number]
    return form(tuple(found.shape), found.dtype, found.device)


@lru_cache(maxsize=1024)  # most are like one before
def form(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Form:
    """Return what a gradient of that shape, dtype and device looks like.

    Raises:
        NoSuchWayError: It is nested, and has no such shape.
    """
    try:
        sizes = tuple(map(int, shape))
    except AttributeError as error:  # a size of the jagged layout is no number
        raise NoSuchWayError(NESTED) from error
    return Form(sizes, dtype, device, math.prod(sizes) * dtype.itemsize)


NESTED = (
    "fn computes with nested tensors, whose rows differ in size. Pad them before, with "
    "torch.nested.to_padded_tensor, and let fn compute with a mask."
)
"""What is said of what has no shape of its own."""
