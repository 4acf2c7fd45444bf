"""The figure of a hook report: where in the autograd graph each kind of hook sits."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from gradlib.figure import message, require_axes
from gradlib.hook_reports.call_graph import CallGraph, Key, Stream
from gradlib.hook_reports.hooks import FULL, LEGACY
from gradlib.plot_graph import (
    ABOVE,
    BELOW,
    INSIDE,
    LOWER_EDGE,
    UPPER_EDGE,
    Box,
    framed_graph,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange of the Okabe-Ito palette, so dark that white letters can be read.
COLOURS = {FULL: "#0067A3", LEGACY: "#B84F00"}
NOTHING = "0.5"

Tag: TypeAlias = tuple[str, str]
"""An entry that a hook received: the kind of hook, and ``"grad_input[0]"``."""


def draw(
    title: str,
    graph: CallGraph,
    received: Mapping[str, Mapping[str, str]],
    ax: "Axes | None",
) -> "Figure":
    """Draw what gradients flow through, and where each hook receives what.

    Args:
        title: The name of the module's class.
        graph: The graph of the call.
        received: For each kind of hook, by the place of each entry, its shape, or
            ``"None"`` or ``"zeros"``.
        ax: Where to draw; a new figure if left out.

    Raises:
        RecordingArgumentError: `ax` is no Axes.
    """
    require_axes(ax)
    if not graph.flows:
        return message("No tensor that requires grad is found in the output.", ax)
    # An argument that a forward pre-hook has computed is drawn inside the border.
    inside = {
        f"grad_input[{i}]"
        for i, (key, _) in enumerate(graph.arguments)
        if key[0] != "input"
    }
    tags = {
        (kind, place): _tag(kind, place, said, inside)
        for kind in COLOURS
        for place, said in received[kind].items()
        if kind == FULL or graph.last
    }
    lines = [[*_along(flow, graph, tags)] for flow in graph.flows]
    reached = {key for line in lines for key in line}
    places = {
        key: _place(key, text, faint=key not in reached)
        for key, text in graph.texts.items()
        if key in reached or (key, 0) in graph.arguments
    }
    arrows = dict.fromkeys(step for line in lines for step in pairwise(line))
    legend = {"the gradient flows upwards": ""} | {
        f"{kind}: {_where(kind, graph, received)}": colour
        if received[kind]
        else NOTHING
        for kind, colour in COLOURS.items()
    }
    if any(tag.fill == NOTHING for tag in tags.values()):
        legend["an entry that is None or zeros"] = NOTHING
    return framed_graph(title, {**tags, **places}, [*arrows], legend, ax)


def _tag(kind: str, place: str, said: str, inside: Collection[str]) -> Box:
    """Return the box of an entry: grey where it holds nothing."""
    zone = INSIDE
    if kind == FULL and place not in inside:
        zone = UPPER_EDGE if place.startswith("grad_input") else LOWER_EDGE
    fill = COLOURS[kind] if said.startswith("[") else NOTHING
    return Box(f"{place} {said}", zone, fill)


def _place(key: Key, text: str, *, faint: bool) -> Box:
    zone = {"output": BELOW, "input": ABOVE, "outside": ABOVE}.get(key[0], INSIDE)
    return Box(text, zone, outlined=key[0] in ("node", "more"), faint=faint)


def _along(flow: Stream, graph: CallGraph, tags: Collection[Tag]) -> Iterator[Key]:
    """Yield what a gradient passes, from the start of its flow to its end."""
    passed: list[Tag] = []
    if flow.start in graph.results:
        passed.append((FULL, f"grad_output[{graph.results.index(flow.start)}]"))
    if flow.end == graph.last:
        passed.append((LEGACY, f"grad_output[{flow.number}]"))
    if flow.start == graph.last:
        passed.append((LEGACY, f"grad_input[{flow.slot}]"))
    if (flow.end, flow.number) in graph.arguments:
        place = graph.arguments.index((flow.end, flow.number))
        passed.append((FULL, f"grad_input[{place}]"))
    yield flow.start
    yield from (tag for tag in passed if tag in tags)
    if flow.end:
        yield flow.end


def _where(
    kind: str, graph: CallGraph, received: Mapping[str, Mapping[str, str]]
) -> str:
    if not received[kind]:
        return "never called"
    if kind == FULL:
        return "at the border of the module"
    return f"at {graph.texts[graph.last]}" if graph.last else "outside of the module"
