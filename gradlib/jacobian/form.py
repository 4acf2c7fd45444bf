"""What a gradient looks like that comes in at a place of a graph."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from gradlib.private import forms_at
from gradlib.vjp.connection import Place


class Form(NamedTuple):
    """The shape of a gradient, its dtype and device, and how many bytes it takes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int


def form_at(place: Place) -> Form:
    """Return what comes in at a place. It is made anew whenever it is asked."""
    node, number = place
    found = forms_at(node)[number]
    return form(tuple(found.shape), found.dtype, found.device)


@lru_cache(maxsize=1024)  # most are like one before
def form(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Form:
    """Return what a gradient of that shape, dtype and device looks like."""
    return Form(
        tuple(map(int, shape)), dtype, device, math.prod(shape) * dtype.itemsize
    )
