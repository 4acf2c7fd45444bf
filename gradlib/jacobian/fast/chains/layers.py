"""What a line of layers is made of, besides torch's own modules."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.pointwise import Pointwise

SQUEEZED, UNSQUEEZED = object(), object()
"""The layers that remove a last axis of one entry, and that add one."""

IDLE = (nn.Identity, nn.Dropout, nn.AlphaDropout)
"""Layers that return their input, unless they drop some of it in training."""

SOFTMAXES = (nn.Softmax, nn.LogSoftmax)
"""Layers that mix the entries of a sample: a chain may end with one."""


class Layer(NamedTuple):
    """A layer of a chain that is not linear.

    Attributes:
        module: The module, or the number that an operation takes, or ``None``.
        pointwise: The elementwise layer it is; ``None`` where it has a step of its own.
    """

    module: Any
    pointwise: Pointwise | None


Parameters: TypeAlias = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer."""


class Linear(NamedTuple):
    """The parameters of a linear layer: ``(outs, ins)`` and ``(outs,)``.

    Where code multiplies by a tensor from outside, this is the layer itself.
    """

    weight: Tensor
    bias: Tensor | None


class Joined(NamedTuple):
    """Two ways from one tensor that are combined: a residual block, or a gate.

    Attributes:
        ways: The layers of each way; an empty one gives the tensor itself.
        by: The operation that combines them: ``"add"``, ``"sub"``, ``"mul"``,
            ``"div"``.
        inplace: Whether that overwrites the output of the first way.
    """

    ways: tuple[list[Any], list[Any]]
    by: str
    inplace: bool


class Summed(NamedTuple):
    """The sum of all entries of a vector, as a vector of one entry.

    Attributes:
        of: How many entries the vector has.
        averages: Whether to take the mean.
    """

    of: int
    averages: bool


class Taken(NamedTuple):
    """Neighbouring entries of vectors.

    Attributes:
        start: The number of the first entry.
        stop: The number of the one after the last.
        of: How many entries the vectors have.
        is_one_of_several: Whether the same call took others too: then torch refuses to
            overwrite them.
    """

    start: int
    stop: int
    of: int
    is_one_of_several: bool = False


class Woven(NamedTuple):
    """Ways from one vector that part and meet in more ways than those of a `Joined`.

    Attributes:
        stages: The stages, in the order of the forward pass.
    """

    stages: list["Stage"]


class Stage(NamedTuple):
    """A stage of a `Woven`: layers after one stage, or several stages combined.

    Attributes:
        layers: The layers, where it has one input.
        by: The operation that combines several, as in a `Joined`, or ``"cat"``, one
            behind the other; ``""`` for layers.
        given: The numbers of the stages it gets, from 1; 0 is the input.
    """

    layers: list[Any]
    by: str
    given: tuple[int, ...]


def every(layers: Sequence[Any]) -> Sequence[Any]:
    """Return all layers of a line, those inside `Joined` and `Woven` included."""
    if {Joined, Woven}.isdisjoint(map(type, layers)):
        return layers
    single: list[Any] = []
    for layer in layers:
        if type(layer) is Joined:
            for way in layer.ways:
                single += every(way)
        elif type(layer) is Woven:
            for stage in layer.stages:
                single += every(stage.layers)
        else:
            single.append(layer)
    return single
