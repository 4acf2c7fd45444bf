"""The structure of a graph, without its values: most calls of a function have the same.

What follows from the structure alone is computed for the first of equal graphs, and
kept: see `kept_for_each`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import torch

from gradlib.edges import Edge
from gradlib.errors import NoSuchWayError
from gradlib.jacobian.between import Way
from gradlib.jacobian.form import NESTED, Form, form
from gradlib.private.nodes import forms_at, sequence_number

Spot: TypeAlias = tuple[int, int]
"""An edge: the number of its node, and which output of that node's operation it is."""

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
    """

    names: tuple[str, ...]
    led: tuple[tuple[Spot, ...], ...]
    positions: tuple[Sequence[int], ...]
    forms: Mapping[Spot, Form]
    roots: tuple[Spot, ...]
    ends: tuple[Spot | None, ...]
    order: tuple[int, ...]
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    @cached_property
    def kinds(self) -> list[Form]:
        """The forms, without most repetitions: there are fewer than spots."""
        return list({id(it): it for it in self.forms.values()}.values())


def kept_for_each(function: Callable[[Drawing], Made]) -> Callable[[Drawing], Made]:
    """Return `function` with its results kept, in each drawing it is called with."""

    @wraps(function)
    def kept(drawing: Drawing) -> Made:
        known = drawing._known  # pyright: ignore[reportPrivateUsage] (ours)
        if function not in known:
            known[function] = function(drawing)
        return known[function]

    return kept


def drawn(way: Way, roots: Sequence[Edge], ends: Sequence[Edge]) -> Drawing:
    """Return the drawing of a graph.

    Args:
        way: Its nodes.
        roots: The edge of each output.
        ends: The edge of each tensor that the Jacobian is with respect to; some may
            not be on the way.
    """
    # Each call of a user runs this, so the lists are flat, and made in few steps.
    nodes, led = list(way.led), list(way.led.values())
    numbers = dict(zip(nodes, range(len(nodes)), strict=True))
    edges = [edge for some in led for edge in some]
    places = list(dict.fromkeys([*roots, *edges]))
    spots = tuple([(numbers[node], number) for node, number in places])
    spot_of = dict(zip(places, spots, strict=True))
    metas = list(map(forms_at, nodes))
    gradients = [metas[node][number] for node, number in spots]
    try:
        looks = tuple([(tuple(it.shape), it.dtype, it.device) for it in gradients])
    except RuntimeError as error:  # a nested tensor's shape is not known
        raise NoSuchWayError(NESTED) from error
    made = list(map(sequence_number, nodes))
    return (_kept if len(nodes) <= MOST else _kept.__wrapped__)(
        tuple([node.name() for node in nodes]),
        tuple(map(len, led)),
        tuple([spot_of[edge] for edge in edges]),
        tuple(map(way.positions.get, nodes)),
        spots,
        looks,
        tuple([spot_of[root] for root in roots]),
        tuple([spot_of.get(end) for end in ends]),
        tuple(sorted(range(len(nodes)), key=made.__getitem__, reverse=True)),
    )


@lru_cache(maxsize=KEPT)
def _kept(
    names: tuple[str, ...],
    counts: tuple[int, ...],
    led: tuple[Spot, ...],
    positions: tuple[tuple[int, ...] | None, ...],
    spots: tuple[Spot, ...],
    looks: tuple[tuple[tuple[int, ...], torch.dtype, torch.device], ...],
    roots: tuple[Spot, ...],
    ends: tuple[Spot | None, ...],
    order: tuple[int, ...],
) -> Drawing:
    """Make a drawing from flat tuples, which are the key that it is kept by."""
    remaining = iter(led)
    return Drawing(
        names,
        tuple(tuple(islice(remaining, count)) for count in counts),
        tuple(
            range(count) if some is None else some
            for some, count in zip(positions, counts, strict=True)
        ),
        {spot: form(*look) for spot, look in zip(spots, looks, strict=True)},
        roots,
        ends,
        order,
    )
