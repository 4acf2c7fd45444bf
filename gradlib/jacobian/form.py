"""The shape, dtype and device of the gradient at an edge of a graph."""

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
    """Return the form of the gradient at an edge; torch makes it anew each time."""
    node, number = edge
    meta = forms_at(node)[number]
    return form(tuple(meta.shape), meta.dtype, meta.device)


@lru_cache(maxsize=1024)  # most forms repeat
def form(
    shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> Form:
    """Return the form of a gradient of that shape, if it has one, dtype and device.

    Raises:
        NoSuchWayError: The tensor is nested, so its shape is not made of integers.
    """
    if shape is None:
        raise NoSuchWayError(NESTED)
    try:
        sizes = tuple(map(int, shape))
    except AttributeError as error:  # a jagged size is no integer
        raise NoSuchWayError(NESTED) from error
    return Form(sizes, dtype, device, math.prod(sizes) * dtype.itemsize)


NESTED = (
    "fn computes with nested tensors, whose rows differ in size. Pad them before, with "
    "torch.nested.to_padded_tensor, and let fn compute with a mask."
)
"""The message for nested tensors."""
