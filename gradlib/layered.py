"""Where the boxes of a drawn graph stand: in layers, without overlap."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TypeAlias

Key: TypeAlias = Hashable
Arrow: TypeAlias = tuple[Key, Key]

GAP = 0.25
"""Inches between the boxes of a layer."""

LANE = 0.1
"""Inches that an arrow takes across where it passes a layer."""

TILT = 1e-3
"""Inches that each next box above the same box wants to stand further right."""


@dataclass(frozen=True)
class Layout:
    """Where everything stands.

    Attributes:
        layer: The layer, from 0, of each box and of each lane of an arrow.
        middle: How many inches each is to the right of the first layer's middle.
        lines: For each arrow the keys it leads through, one in each layer.
        first: The first layer of each zone.
    """

    layer: dict[Key, int]
    middle: dict[Key, float]
    lines: list[list[Key]]
    first: list[int]


def laid_out(
    zones: Sequence[Sequence[Key]], widths: Mapping[Key, float], arrows: Sequence[Arrow]
) -> Layout:
    """Place each box above the boxes whose arrows lead to it.

    Args:
        zones: The boxes of each zone, the lowest zone first. A zone has layers of its
            own, at least one; the boxes of a layer keep their order unless the arrows
            ask for another.
        widths: The width of each box in inches.
        arrows: The boxes that each leads from and to, never to a lower zone; without
            cycles.
    """
    layer, first = _layers(zones, arrows)
    lines = [_lanes(arrow, layer) for arrow in arrows]
    return Layout(layer, _middles(layer, lines, widths), lines, first)


def _layers(
    zones: Sequence[Sequence[Key]], arrows: Sequence[Arrow]
) -> tuple[dict[Key, int], list[int]]:
    """Return the layer of each box, and the first layer of each zone."""
    below = _sources(arrows)
    order = {key: below[key] for zone in zones for key in zone}
    rank = {key: i for i, key in enumerate(TopologicalSorter(order).static_order())}
    layer: dict[Key, int] = {}
    first: list[int] = []
    start = 0
    for zone in zones:
        first.append(start)
        for key in sorted(zone, key=rank.__getitem__):
            layer[key] = max([start, *(layer[it] + 1 for it in below[key])])
        start = 1 + max([start, *(layer[key] for key in zone)])
    return {key: layer[key] for key in order}, first


def _lanes(arrow: Arrow, layer: dict[Key, int]) -> list[Key]:
    """Return the keys an arrow leads through; `layer` gets those between its ends."""
    start, end = arrow
    passed = range(layer[start] + 1, layer[end])
    between: list[Key] = [(arrow, i) for i in passed]
    layer.update(zip(between, passed, strict=True))
    return [start, *between, end]


def _middles(
    layer: Mapping[Key, int],
    lines: Sequence[Sequence[Key]],
    widths: Mapping[Key, float],
) -> dict[Key, float]:
    """Put each box above the mean of what leads to it, as far as there is room."""
    steps = [step for line in lines for step in pairwise(line)]
    below, above = _sources(steps), _sources([(end, start) for start, end in steps])
    middle: dict[Key, float] = {}

    def wanted(key: Key) -> float:
        # The boxes that one box leads to stand in the order of its arrows.
        places = [middle[it] + TILT * above[it].index(key) for it in below[key]]
        return fmean(places or [0.0])

    rows: defaultdict[int, list[Key]] = defaultdict(list)
    for key, number in layer.items():
        rows[number].append(key)
    for number in sorted(rows):
        middle |= _side_by_side({key: wanted(key) for key in rows[number]}, widths)
    return middle


def _side_by_side(
    wanted: Mapping[Key, float], widths: Mapping[Key, float]
) -> dict[Key, float]:
    """Move boxes apart until none overlap, and as little as that takes.

    The sum of the squared moves is the least possible. The offset of a box is its place
    when all stand side by side. Places less offsets must not decrease, so those that do
    are pooled (M. Ayer and others, "An empirical distribution function for sampling
    with incomplete information", 1955).
    """
    keys = sorted(wanted, key=wanted.__getitem__)
    halves = [widths.get(key, LANE) / 2 for key in keys]
    steps = (left + GAP + right for left, right in pairwise(halves))
    offsets = [*accumulate(steps, initial=0.0)][: len(keys)]
    pools: list[list[float]] = []
    for key, offset in zip(keys, offsets, strict=True):
        pool = [wanted[key] - offset]
        while pools and fmean(pools[-1]) > fmean(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    places = (fmean(pool) for pool in pools for _ in pool)
    return {
        key: place + offset
        for key, place, offset in zip(keys, places, offsets, strict=True)
    }


def _sources(arrows: Sequence[Arrow]) -> defaultdict[Key, list[Key]]:
    found: defaultdict[Key, list[Key]] = defaultdict(list)
    for start, end in arrows:
        found[end].append(start)
    return found
