"""The structure of a graph, without its values: most calls of a function have the same.

What follows from the structure alone is computed for the first of equal graphs, and
kept: see `kept_for_each`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from itertools import chain, compress, islice
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.jacobian.between import NOWHERE, Spot, between
from gradlib.jacobian.form import Form, form
from gradlib.private.nodes import forms_at, sequence_number

Made = TypeVar("Made")

KEPT, MOST = 16, 1000
"""How many drawings are kept, and of how many nodes at most: half a KiB each."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """The structure of a graph. Equal graphs share one.

    Attributes:
        names: Autograd's name of each node; a node comes before those it leads to.
        led: For each node, the spots it leads to on the way to an end.
        positions: For each node, which inputs of its operation these spots are.
        forms: The form of the gradient at each spot, those of the outputs included.
        roots: The spot of each output.
        ends: The spot of each tensor that the Jacobian is with respect to; ``None``
            where no output depends on it.
        order: The nodes in the order in which autograd runs them, the last made first.
        lost: The numbers of the outputs that lead to no end, which have no spot.
    """

    names: tuple[str, ...]
    led: tuple[tuple[Spot, ...], ...]
    positions: tuple[Sequence[int], ...]
    forms: Mapping[Spot, Form]
    roots: tuple[Spot, ...]
    ends: tuple[Spot | None, ...]
    order: tuple[int, ...]
    lost: tuple[int, ...]
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    @cached_property
    def kinds(self) -> list[Form]:
        """The forms, without most repetitions: there are fewer than spots."""
        return list({id(it): it for it in self.forms.values()}.values())

    @cached_property
    def narrowest_dtype(self) -> torch.dtype:
        """The narrowest floating dtype of the gradients in a backward pass."""
        dtypes = {it.dtype for it in self.kinds if it.dtype.is_floating_point}
        return min(dtypes, key=attrgetter("itemsize"))


def kept_for_each(function: Callable[[Drawing], Made]) -> Callable[[Drawing], Made]:
    """Return `function` with its results kept, in each drawing it is called with."""

    @wraps(function)
    def kept(drawing: Drawing) -> Made:
        known = drawing._known  # pyright: ignore[reportPrivateUsage] (ours)
        if function not in known:
            known[function] = function(drawing)
        return known[function]

    return kept


class _Whole(NamedTuple):
    """All that outputs lead to, as flat tuples: the key that a drawing is kept by.

    Attributes:
        names: Autograd's name of each node, in the order that a search finds them.
        counts: How many edges each node has.
        nodes: The number of the node of each edge: those of the outputs, then those of
            each node.
        places: Which output of that node's operation it is.
        arities: How many outputs each node's operation has.
        shapes: The shape of each of these, or ``None`` if it is not made of integers.
        dtypes: The dtype of each.
        devices: The device of each.
        order: The nodes in the order in which autograd runs them.
        ends: The spot of each tensor that the Jacobian is with respect to; ``None``
            where the outputs do not lead to its node.
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    nodes: tuple[int, ...]
    places: tuple[int, ...]
    arities: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    order: tuple[int, ...]
    ends: tuple[Spot | None, ...]


_NODE, _PLACE, _NAME = itemgetter(0), itemgetter(1), methodcaller("name")
_SHAPE, _DTYPE, _DEVICE = map(attrgetter, ("shape", "dtype", "device"))


def drawn(
    roots: Iterable[Edge | None], ends: Iterable[Edge]
) -> tuple[Drawing, list[Node]]:
    """Return the drawing of a graph, and its nodes in the order of their numbers.

    Args:
        roots: The edge of each output; ``None`` for one without a graph.
        ends: The edge of each tensor that the Jacobian is with respect to; some may
            not be on the way.

    Raises:
        NoSuchWayError: The graph computes with nested tensors.
    """
    # Each call of a user runs this, so the lists are flat, and made in few steps.
    edges: list[Any] = [it or (None, 0) for it in roots]
    numbers: dict[Node | None, int] = {None: NOWHERE}
    counts: list[int] = []
    for node, _ in edges:  # the list grows meanwhile
        if node not in numbers:
            numbers[node] = len(counts)
            below = node.next_functions
            counts.append(len(below))
            edges += below
    _, *nodes = cast("list[Node]", list(numbers))
    forms = list(map(forms_at, nodes))
    flat = list(chain.from_iterable(forms))
    made = list(map(sequence_number, nodes))
    whole = _Whole(
        tuple(map(_NAME, nodes)),
        tuple(counts),
        tuple(map(numbers.__getitem__, map(_NODE, edges))),
        tuple(map(_PLACE, edges)),
        tuple(map(len, forms)),
        _shapes(flat),
        tuple(map(_DTYPE, flat)),
        tuple(map(_DEVICE, flat)),
        tuple(sorted(range(len(nodes)), key=made.__getitem__, reverse=True)),
        tuple([(numbers[it[0]], it[1]) if it[0] in numbers else None for it in ends]),
    )
    drawing, found = (_kept if len(nodes) <= MOST else _kept.__wrapped__)(whole)
    return drawing, list(map(nodes.__getitem__, found))


def _shapes(forms: Sequence[Any]) -> tuple[tuple[int, ...] | None, ...]:
    try:
        return tuple(map(tuple, map(_SHAPE, forms)))
    except RuntimeError:
        return tuple(map(_shape, forms))


def _shape(form: Any) -> tuple[int, ...] | None:
    try:
        return tuple(form.shape)
    except RuntimeError:  # that of a nested tensor is not known
        return None


@lru_cache(maxsize=KEPT)
def _kept(whole: _Whole) -> tuple[Drawing, tuple[int, ...]]:
    """Return the drawing of a graph, and the nodes it has, by their numbers in all."""
    ahead = zip(whole.nodes, whole.places, strict=True)
    roots = list(islice(ahead, len(whole.nodes) - sum(whole.counts)))
    edges = [list(islice(ahead, count)) for count in whole.counts]
    way = between(edges, [it for it, _ in roots], {*filter(None, whole.ends)})
    numbers = dict(zip(way, range(len(way)), strict=True))
    led = [[edges[node][i] for i in some] for node, some in way.items()]
    looks = zip(whole.shapes, whole.dtypes, whole.devices, strict=True)
    each = [list(islice(looks, arity)) for arity in whole.arities]
    spots = [it for it in chain(roots, *led) if it[0] in numbers]
    forms = {(numbers[node], i): form(*each[node][i]) for node, i in spots}

    def spot_of(edge: Spot) -> Spot | None:
        spot = numbers.get(edge[0], NOWHERE), edge[1]
        return spot if spot in forms else None

    tops = list(map(spot_of, roots))
    ends = tuple([it and spot_of(it) for it in whole.ends])
    lost = [not (top and (top in ends or led[top[0]])) for top in tops]
    drawing = Drawing(
        tuple([whole.names[node] for node in way]),
        tuple([tuple(filter(None, map(spot_of, some))) for some in led]),
        tuple(map(tuple, way.values())),
        forms,
        tuple(filter(None, tops)),
        ends,
        tuple([numbers[node] for node in whole.order if node in numbers]),
        tuple(compress(range(len(lost)), lost)),
    )
    return drawing, tuple(way)
