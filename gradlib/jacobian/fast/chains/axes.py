"""The layers that operations along the axes of samples are, for a given shape."""

import math
from types import NoneType
from typing import Any, cast

from torch import nn

from gradlib.jacobian.fast.chains.functions import layer
from gradlib.jacobian.fast.chains.layers import SQUEEZED, UNSQUEEZED, Summed, Taken
from gradlib.jacobian.fast.chains.rebound import UnknownError
from gradlib.jacobian.fast.chains.shapes import Shape

VIEWED = nn.Flatten()
"""The layer of a flat view, which torch refuses in some layouts."""


def summed(shape: Shape, name: str, dim: Any, keepdim: bool = False) -> list[Any]:
    """Return the layers that a sum or mean is, over all entries or places of a sample.

    Args:
        shape: The shape of the tensor that is summed.
        name: ``"sum"`` or ``"mean"``.
        dim: The axes to sum over.
        keepdim: Whether they stay, with size 1.
    """
    if type(dim) not in (int, tuple, list):
        raise UnknownError("torch refuses it")
    given = (dim,) if type(dim) is int else cast(tuple[int, ...], dim)
    if type(keepdim) is not bool or not all(type(it) is int for it in given):
        raise UnknownError("torch refuses it")
    axes = sorted(range(len(shape))[it] for it in given)
    if len(shape) == 4 and axes == [2, 3] and name == "mean":
        flat = [] if keepdim else [layer(nn.Flatten)]
        return [layer(nn.AdaptiveAvgPool2d, 1), *flat]
    if len(shape) != 2 or axes != [1] or not shape[1]:
        raise UnknownError("it is over something else")
    return [Summed(shape[1], name == "mean"), *[SQUEEZED] * (not keepdim)]


def flattened(before: Shape, args: tuple[Any, ...]) -> bool:
    """Tell whether a view flattens all samples; if not, it must keep the shape."""
    is_one = len(args) == 1 and isinstance(args[0], tuple)
    after = cast(Shape, args[0] if is_one else args)
    if not all(type(it) is int for it in after):
        raise UnknownError("torch refuses it")
    known = -math.prod(after)
    if -1 in after and known > 0:
        rest = math.prod(before) // known
        after = tuple(rest if it == -1 else it for it in after)
    if after not in (before, flat := (before[0], math.prod(before[1:]))):
        raise UnknownError("samples are not kept together")
    return before != flat


def unsqueezed(shape: Shape, dim: object) -> list[Any]:
    """Return the layers that give a batch of numbers, ``(batch,)``, a second axis."""
    if len(shape) != 1 or type(dim) is not int or dim not in (1, -1):
        raise UnknownError("it is an axis of something else")
    return [UNSQUEEZED]


def taken(shape: Shape, key: Any) -> list[Any]:
    """Return the layers that indexing is: taking entries of vectors, or adding an axis.

    Args:
        shape: The shape of the tensor that is indexed.
        key: The index, as code has it in brackets.
    """
    if type(key) is not tuple:
        raise UnknownError("it takes samples")
    before, last = cast(tuple[Any, ...], key)
    if before is not ... and before != slice(None):
        raise UnknownError("it takes samples")
    if last is None:
        return unsqueezed(shape, -1)
    if len(shape) != 2 or not shape[1]:
        raise UnknownError("they are no vectors")
    count = shape[1]
    if type(last) is int:
        start = range(count)[last]
        return [*_entries(start, start + 1, count), SQUEEZED]
    if type(last) is not slice or not all(
        type(it) in (int, NoneType) for it in (last.start, last.stop, last.step)
    ):
        raise UnknownError("it takes something else")
    start, stop, step = last.indices(count)
    if step != 1:
        raise UnknownError("they are no neighbours")
    return _entries(start, stop, count)


def _entries(start: int, stop: int, count: int) -> list[Any]:
    if start >= stop:
        raise UnknownError("there are none")
    return [Taken(start, stop, count)]


def parted(shape: Shape, name: str, *args: Any, **kwargs: Any) -> list[list[Any]]:
    """Return the layers that each part of vectors is, as of ``chunk``.

    Args:
        shape: The shape of the tensor that is parted.
        name: ``"chunk"``, ``"split"`` or ``"unbind"``.
        args: The number or size of the parts, and the axis.
        kwargs: The axis, if given by name.
    """
    size, *rest = (1, *args) if name == "unbind" else args
    (dim,) = (*rest, *kwargs.values())
    if kwargs.keys() - {"dim"} or type(dim) is not int or dim not in (1, -1):
        raise UnknownError("it parts something else")
    if len(shape) != 2 or type(size) is not int or size < 1:
        raise UnknownError("they are no vectors, or of several sizes")
    count = shape[1]
    size = -(-count // size) if name == "chunk" else size
    ends = [(it, min(it + size, count)) for it in range(0, count, size)]
    numbers = [SQUEEZED] if name == "unbind" else []
    return [[Taken(*it, count, is_one_of_several=True), *numbers] for it in ends]
