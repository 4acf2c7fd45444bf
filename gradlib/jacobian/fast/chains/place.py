"""Tensors that x becomes in the user's code, and the layers that lead to them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from gradlib.jacobian.fast.chains.layers import (
    SQUEEZED,
    UNSQUEEZED,
    Joined,
    Stage,
    Taken,
    Woven,
)
from gradlib.jacobian.fast.chains.rebound import UnknownError
from gradlib.jacobian.fast.chains.shapes import Shape, shape_after


class Place(NamedTuple):
    """A tensor that x has become, after some layers.

    Attributes:
        before: The place before the last layer; ``None`` at x.
        layer: The last layer; ``None`` for a `Woven`, which is made with the line
            that it is part of: made here, each would repeat the stages of those before.
        sources: The place before; or those that were combined.
        by: The operation that combined them; ``""`` for none.
        gone: The layers that x has gone through, on all ways: a bit for each.
        shape: The shape of the tensor.
        dtype: The dtype of all tensors.
        layers_of: A function of a module, the shape of its input and the dtype, that
            gives the layers it goes through.
        made: A list of one number that all places share: how many layers were made so
            far, used or not.
        writes: A list of one number that views share: how often their memory was
            written to.
        version: That number when this tensor was made.
    """

    before: "Place | None"
    layer: Any
    sources: "tuple[Place, ...]"
    by: str
    gone: int
    shape: Shape
    dtype: torch.dtype
    layers_of: Callable[[nn.Module, Shape, torch.dtype], list[Any]]
    made: list[int]
    writes: list[int]
    version: int

    def after(self, layers: Sequence[Any]) -> "Place":
        """Return the tensor after more layers."""
        self.require_current()
        place = self
        for layer in layers:
            if type(layer) is not nn.Identity:
                place = place._after(layer)
        return place

    def replaced(self, layer: Any) -> "Place":
        """Return the tensor with another layer in place of the last.

        Args:
            layer: The layer, which counts as made too. It gives the same shape, in
                memory of its own.
        """
        self.require_current()
        before = self.sources
        return self._made(*before, layer=layer, shape=self.shape, writes=[0])

    def line(self) -> list[Any]:
        """Return the layers that lead here, if all layers made do."""
        self.require_current()
        if self.gone.bit_count() != self.made[0]:  # others may have written to memory
            raise UnknownError("it does something whose result is not used")
        return _layers(self, None)

    def require_current(self) -> None:
        """Raise where the tensor has been overwritten."""
        if self.version != self.writes[0]:
            raise UnknownError("it was overwritten")

    def _after(self, layer: Any) -> "Place":
        shape = None if layer is None else shape_after([layer], self.shape)
        if shape is None:
            raise UnknownError("it is random, or for other numbers or shapes")
        writes = self.writes
        if is_in_place(layer):
            _require_writable(self)
            writes[0] += 1
        elif not is_view(layer):
            writes = [0]
        return self._made(self, layer=layer, shape=shape, writes=writes)

    def _made(self, before: "Place", *, writes: list[int], **others: Any) -> "Place":
        """Return the place after one more layer."""
        gone = self.gone | 1 << self.made[0]
        self.made[0] += 1
        return self._replace(
            before=before,
            sources=(before,),
            by="",
            gone=gone,
            writes=writes,
            version=writes[0],
            **others,
        )


def start(
    shape: Shape,
    dtype: torch.dtype,
    layers_of: Callable[[nn.Module, Shape, torch.dtype], list[Any]],
) -> Place:
    """Return the place of x."""
    return Place(None, None, (), "", 0, shape, dtype, layers_of, [0], [0], 0)


def joined(one: Place, other: Place, by: str, *, inplace: bool = False) -> Place:
    """Return the combination of two tensors that x has become on two ways.

    Args:
        one: The first tensor.
        other: The second tensor.
        by: The operation that combines them, as in a `Joined`.
        inplace: Whether that overwrites the first.

    Raises:
        UnknownError: They differ in shape, or a tensor is overwritten that both ways
            need.
    """
    root = _root((one, other))
    if one.shape != other.shape:
        raise UnknownError("it puts something else together")
    if one.gone & other.gone != root.gone:
        if inplace:
            raise UnknownError("it overwrites what is used elsewhere")
        layer = None
    else:
        ways = _layers(one, root), _layers(other, root)
        if any(map(_begins_in_place, ways)) or (inplace and not _is_own(ways[0])):
            raise UnknownError("it overwrites what it goes on from twice")
        layer = Joined(ways, by, inplace)
    place = _combined(root, (one, other), layer, by)
    if not inplace:
        return place
    _require_writable(one)
    # It has an effect, even if its result is not used.
    gone = place.gone | 1 << one.made[0]
    one.made[0] += 1
    one.writes[0] += 1
    return place._replace(gone=gone, writes=one.writes, version=one.writes[0])


def gathered(places: Sequence[Place]) -> Place:
    """Return the concatenation of vectors that x has become on several ways.

    Args:
        places: The vectors, ``(batch, ins)`` each.

    Raises:
        UnknownError: They are no vectors, or one was overwritten.
    """
    root = _root(places)
    if len(places) < 2 or {len(it.shape) for it in places} != {2}:
        raise UnknownError("it puts something else together")
    shape = root.shape[0], sum(it.shape[1] for it in places)
    return _combined(root, places, None, "cat")._replace(shape=shape)


def _root(places: Sequence[Place]) -> Place:
    """Return the last place that x has been at on all ways to places, or x itself."""
    for place in places:
        place.require_current()
    one, *others = places
    around = [{id(it) for it in _back(place)} for place in others]
    return next(it for it in _back(one) if all(id(it) in ids for ids in around))


def _combined(root: Place, places: Sequence[Place], layer: Any, by: str) -> Place:
    """Return the combination of places after `root`, with the shape of the first."""
    gone = 0
    for place in places:
        gone |= place.gone
    return places[0]._replace(
        before=root,
        layer=layer,
        sources=(*places,),
        by=by,
        gone=gone,
        writes=[0],
        version=0,
    )


def _woven(end: Place) -> Woven:
    """Return the ways from the place before a combination to it."""
    root = cast(Place, end.before)
    numbers = {id(root): 0}
    stages: list[Stage] = []

    def add(place: Place) -> int:
        if id(place) not in numbers:
            given = tuple(map(add, place.sources))
            if type(place.layer) is Joined and place.layer.inplace:
                raise UnknownError("it overwrites what may be used elsewhere")
            stages.append(Stage([] if place.by else [place.layer], place.by, given))
            numbers[id(place)] = len(stages)
        return numbers[id(place)]

    given = tuple(map(add, end.sources))
    stages.append(Stage([], end.by, given))
    # Large images are faster row by row, and this was not measured with images.
    if len(root.shape) > 2 or any(
        is_in_place(it) for stage in stages for it in stage.layers
    ):
        raise UnknownError("it goes through some layers twice, which may overwrite")
    return Woven(stages)


def _require_writable(place: Place) -> None:
    """Raise where torch refuses to overwrite a tensor: it is one of several views."""
    for it in _back(place):
        if not is_view(it.layer):
            break
        if type(it.layer) is Taken and it.layer.is_one_of_several:
            raise UnknownError("torch refuses it")


def is_in_place(layer: Any) -> bool:
    """Tell whether a layer overwrites its input."""
    return isinstance(layer, nn.Module) and bool(vars(layer).get("inplace"))


def is_view(layer: Any) -> bool:
    """Tell whether a layer may return its input, or a view of it."""
    return type(layer) in (nn.Flatten, Taken) or layer in (SQUEEZED, UNSQUEEZED)


def _back(place: Place | None) -> Iterator[Place]:
    """Yield the places from one back to x."""
    while place is not None:
        yield place
        place = place.before


def _layers(end: Place, root: Place | None) -> list[Any]:
    """Return the layers from `root`, or x, to `end`."""
    backwards: list[Any] = []
    for place in _back(end):
        if place is root or place.before is None:
            break
        backwards.append(_woven(place) if place.layer is None else place.layer)
    return backwards[::-1]


def _begins_in_place(way: list[Any]) -> bool:
    first = next((it for it in way if not is_view(it)), None)
    return is_in_place(first)


def _is_own(way: list[Any]) -> bool:
    """Tell whether the output of a way is not a view of its input."""
    return not all(map(is_view, way))
