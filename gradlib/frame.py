"""A call that has begun and not yet returned, and what it was given."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor, nn

from gradlib.graph import Edge, GraphEdge
from gradlib.trace import CallTrace, Place
from gradlib.views import Region, base_of


@dataclass(slots=True)
class Input:
    """A tensor a call was given, as it was then."""

    tensor: Tensor
    places: list[int]  # among the flat inputs
    edge: Edge | None  # where its gradient goes; None for a leaf
    version: int
    # The same for what it is a view of: if it is overwritten, its gradient goes there.
    base_edge: Edge | None = None
    region: Region | None = None

    def overwritten(self) -> bool:
        """Tell whether the tensor was overwritten since."""
        return self.tensor._version != self.version


@dataclass(slots=True)
class Frame:
    """A call that has begun and not yet returned."""

    call: CallTrace
    module: nn.Module
    own: dict[str, nn.Parameter]  # the module's own parameters
    python: FrameType | None  # in which torch runs the call
    handled: BaseException | None  # what an `except` around the call was handling
    inputs: list[Input] = field(default_factory=list[Input])
    # autograd's sequence number when it began; with gradients disabled it makes no node
    since: int = sys.maxsize
    inner: list[GraphEdge] = field(default_factory=list[GraphEdge])
    """The edges that lead out of the calls inside."""


def input_of(tensor: Tensor, place: int) -> Input:
    """Return what must be known of an input before the call changes it."""
    given = Input(tensor, [place], edge_of(tensor), tensor._version)
    if found := base_of(tensor):
        base, given.region = found
        given.base_edge = edge_of(base)
    return given


def edge_of(tensor: Tensor) -> Edge | None:
    """Return where the gradient of `tensor` goes; ``None`` for a leaf."""
    return (tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else None


def places_of(frame: Frame, edge: GraphEdge) -> Iterator[Place]:
    """Tell which inputs and parameters of a call the gradient on an edge belongs to."""
    if edge.leaf is not None:
        for own, parameter in frame.own.items():
            if parameter is edge.leaf:
                yield Place("param_shares", [own], dtype=parameter.dtype)
    for given in frame.inputs:
        if given.tensor is edge.leaf:
            yield Place("input_shares", given.places, dtype=given.tensor.dtype)
        elif edge.edge == given.edge:
            yield Place("input_shares", given.places)
        elif edge.edge == given.base_edge and given.overwritten():
            yield Place("input_shares", given.places, given.region)
