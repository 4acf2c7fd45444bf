"""What a graph looks like, without its values: most calls of a function draw the same.

What follows from the looks alone is worked out for the first of equal graphs, and kept
by functions of a `Drawing`, as `kept_for_each` makes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from itertools import islice
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.errors import NoSuchWayError
from gradlib.jacobian.form import NESTED, Form, form
from gradlib.private.nodes import forms_at, sequence_number

Spot: TypeAlias = tuple[int, int]
"""An edge by the number of its node, and which of its operation's outputs it is."""

Made = TypeVar("Made")

KEPT, MOST = 16, 1000
"""How many drawings are remembered, and of how many nodes at most: half a KiB each."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a graph looks like. Equal graphs have one and the same.

    Attributes:
        names: What autograd calls each node; each comes before those that it leads to.
        led: For each node the spots that lead on to an end.
        positions: Which of what went into a node's operation those are.
        forms: What gradients come in at each spot, the outputs' included.
        roots: Where the outputs' come in.
        ends: Where those of what is differentiated for do, if they do.
        order: In which order autograd passes the nodes, the one made last first.
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
        """The forms, each once or a few times: there are fewer than spots."""
        return list({id(it): it for it in self.forms.values()}.values())


def kept_for_each(function: Callable[[Drawing], Made]) -> Callable[[Drawing], Made]:
    """Return the function, which answers again what it has answered for a drawing."""

    @wraps(function)
    def asked(drawing: Drawing) -> Made:
        known = drawing._known  # pyright: ignore[reportPrivateUsage] (it is its own)
        if function not in known:
            known[function] = function(drawing)
        return known[function]

    return asked


def drawn(
    way: Mapping[Node, Sequence[Edge]], roots: Sequence[Edge], ends: Sequence[Edge]
) -> Drawing:
    """Return what a graph looks like.

    Args:
        way: Its nodes, each before those that it leads to, with the edges that lead
            on to an end.
        roots: Where the outputs' gradients come in.
        ends: Where those of what is differentiated for do; some may not be on the way.
    """
    # Each call goes through this, so the lists are flat, and made in few steps.
    nodes, led = list(way), list(way.values())
    numbers = dict(zip(nodes, range(len(nodes)), strict=True))
    edges = [edge for some in led for edge in some]
    here = list(dict.fromkeys([*roots, *edges]))
    spots = tuple([(numbers[node], number) for node, number in here])
    spot_of = dict(zip(here, spots, strict=True))
    metas = list(map(forms_at, nodes))
    try:
        looks = [_look(metas[node][number]) for node, number in spots]
    except RuntimeError as error:  # of a nested one nobody knows the shape
        raise NoSuchWayError(NESTED) from error
    made = list(map(sequence_number, nodes))
    return (_kept if len(nodes) <= MOST else _kept.__wrapped__)(
        tuple([node.name() for node in nodes]),
        tuple(map(len, led)),
        tuple([spot_of[edge] for edge in edges]),
        tuple(map(_positions, nodes, led)),
        spots,
        tuple([(tuple(shape), dtype, device) for shape, dtype, device in looks]),
        tuple([spot_of[root] for root in roots]),
        tuple([spot_of.get(end) for end in ends]),
        tuple(sorted(range(len(nodes)), key=made.__getitem__, reverse=True)),
    )


_look = attrgetter("shape", "dtype", "device")


def _positions(node: Node, led: Sequence[Edge]) -> tuple[int, ...] | None:
    """Return which of what went in leads on; ``None`` for all."""
    before = node.next_functions
    if len(before) == len(led):
        return None
    return tuple([i for i, it in enumerate(before) if it in led])


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
    """Put a drawing together, of lists that have an entry for each node or spot."""
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
