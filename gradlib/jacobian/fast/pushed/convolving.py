"""The JVPs of convolutions, pooling and upsampling."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.pushed.forth import Forth, as_samples, of_one, once
from gradlib.jacobian.fast.stacked.convolving import read
from gradlib.jacobian.fast.stacked.mixing import is_of_input_alone
from gradlib.jacobian.fast.way_back import way_back


def convolution(op: Operation) -> Forth | None:
    """A convolution, or a transposed one."""
    if not is_of_input_alone(op):
        return None
    push = _through(read(op, op.shapes[0][1:]), op.shape[1:])
    return of_one(once(as_samples(push)))


def _through(it: Convolution, size: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return the JVP of a convolution.

    Args:
        it: The convolution.
        size: The shape of a sample of its output.
    """
    if it.transposed and _is_way_back(it):
        return way_back(it.turned_back(size))
    return lambda t: torch.convolution(t, it.weight, None, *it[2:])


def _is_way_back(it: Convolution) -> bool:
    """Tell whether a transposed convolution is the backward of another.

    It is not where its output padding is as long as the stride: the other convolution
    could not have an input of that size.
    """
    moves = zip(it.output_padding, it.stride, strict=True)
    return all(more < stride for more, stride in moves)


def linear_kernel(kernel: Any, *names: str) -> Callable[[Operation], Forth]:
    """Return the rule of a linear operation, whose JVP is torch's own kernel.

    Args:
        kernel: torch's kernel.
        names: The names of the saved values that are its other arguments.
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
        picked = tangent.flatten(-2).gather(
            -1, places.expand(len(tangent), *places.shape)
        )
        return picked.view(len(tangent), *shape)

    return of_one(push)
