"""The way forward through convolutions, pools and what makes images larger."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.pushed.forth import Forth, as_samples, of_one, once
from gradlib.jacobian.fast.stacked.convolving import Convolution, read, way_back


def convolution(op: Operation) -> Forth | None:
    """A convolution, or a transposed one."""
    if set(op.shapes) != {0}:
        return None
    push = _through(read(op, op.shapes[0][1:]), op.shape[1:])
    return of_one(once(as_samples(push)))


def _through(it: Convolution, size: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return the way through a convolution, to outputs of a size."""
    if it.transposed and _is_way_back(it):
        return way_back(it.turned_back(size))
    return lambda t: torch.convolution(t, it.weight, None, *it[2:])


def _is_way_back(it: Convolution) -> bool:
    """Tell whether a transposed convolution goes forward as another goes back.

    One that puts as many places at the far edge as its strides are long has more places
    than another may begin with.
    """
    moves = zip(it.output_padding, it.stride, strict=True)
    return all(more < stride for more, stride in moves)


def linear_kernel(kernel: Any, *names: str) -> Callable[[Operation], Forth]:
    """Return the rule of an operation that is linear, and does not look at places.

    Args:
        kernel: torch's.
        names: What the node has saved of what it takes.
    """

    def rule(op: Operation) -> Forth:
        rest = [op.saved(name) for name in names]
        return of_one(as_samples(lambda t: kernel(t, *rest)))

    return rule


def largest(op: Operation) -> Forth:
    """The largest entry of each window of an image."""
    places = op.saved("result1").flatten(-2)
    shape = op.shape

    def push(tangent: Tensor) -> Tensor:
        found = tangent.flatten(-2).gather(
            -1, places.expand(len(tangent), *places.shape)
        )
        return found.view(len(tangent), *shape)

    return of_one(push)
