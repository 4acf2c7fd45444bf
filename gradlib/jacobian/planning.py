"""Chooses the mode in which a Jacobian is computed, within the memory there is."""

import math
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.errors import JacobianArgumentError, OutOfBytesError
from gradlib.jacobian import forward, nodes, reverse
from gradlib.jacobian.call import is_auto
from gradlib.jacobian.choice import Choice, cheapest, chosen
from gradlib.jacobian.chunk import CONVOLVED, Passes, chunk_of, convolved_at_once
from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import room_on
from gradlib.jacobian.pass_memory import bytes_of_graph, bytes_of_pass
from gradlib.jacobian.plan import BATCHED, WAYS, JacobianPlan
from gradlib.wording import in_brief, in_bytes

MODES = ("auto", *WAYS)


SURE = 2**29
"""How many bytes are taken to be free on a CPU where all rows at once, and the check,
hold a small part of them: asking the system takes as long as some small Jacobians."""


def make(
    graph: Graph,
    mode: str,
    chunk_size: int | str,
    max_bytes: int | None,
    *,
    has_room: bool = False,
    check_bytes: int = 0,
    create_graph: bool = False,
) -> JacobianPlan:
    """Choose a mode and its chunks, or recall them for an equal graph.

    Args:
        graph: The graph of the forward pass.
        mode: The mode, or ``"auto"``.
        chunk_size: How many rows or columns a pass computes, or ``"auto"``.
        max_bytes: How many bytes may be held at once; ``None`` for half of those free.
        has_room: Whether the caller passes the result's memory, as `out`.
        check_bytes: How many bytes the check's calls take.
        create_graph: Whether a loss will go back through the passes.

    Raises:
        JacobianArgumentError: There is no such mode, or a size is no whole number.
        NoSuchWayError: There is no tensor to split at, or torch has no right derivative
            for `create_graph`.
        OutOfBytesError: The Jacobian or the check does not fit into `max_bytes`.
    """
    _require(mode, chunk_size, max_bytes)
    known = nodes.nodes_of(graph)
    asked = mode, chunk_size, max_bytes, has_room, check_bytes, create_graph
    points = tuple([(it.shape, it.dtype, it.device) for it in graph.points])
    key = asked, known, graph.batch, graph.shared, points, torch.get_num_threads()
    last = _last_plan(graph.drawing)
    plan = last.get(key)
    if plan is None:
        plan = _made(graph, known, *asked)
        last.clear()
        # How much memory is free, if that was asked for, is another number each time.
        if plan.max_bytes in (max_bytes, SURE):
            last[key] = plan
    return plan


@kept_for_each
def _last_plan(_: Drawing) -> dict[Any, JacobianPlan]:
    """Return the memory for the last plan of graphs with a drawing."""
    return {}


def _made(
    graph: Graph,
    known: nodes.Nodes,
    mode: str,
    chunk_size: int | str,
    max_bytes: int | None,
    has_room: bool,
    check_bytes: int,
    create_graph: bool,
) -> JacobianPlan:
    """Choose a mode and its chunks, as `make` does."""
    passes = _passes_through(graph, known, create_graph=create_graph)
    choice = chosen(graph, known, mode, passes, create_graph=create_graph)
    result, each = 0 if has_room else graph.size(), passes.each
    limit = "max_bytes"
    if max_bytes is None:
        limit = "half of what is free"
        held = result + _parts(graph, choice) + BATCHED * each * passes.rows
        max_bytes = _room(graph, held, check_bytes)
    if mode == "auto":
        choice = _fitting(graph, choice, passes, max_bytes - result)
    parts = _parts(graph, choice)
    _require_room(limit, max_bytes, result, each, parts, check_bytes)
    room = max_bytes - result - parts
    count = choice.counts[choice.mode]
    return JacobianPlan(
        choice.mode,
        choice.why,
        chunk_of(choice.mode, count, chunk_size, passes, room=room),
        choice.counts,
        result,
        parts,
        each,
        max_bytes,
        shapes=tuple(graph.shape(*block) for block in graph.blocks()),
        work={},
        check_bytes=check_bytes,
        settled=choice.settled,
        needs_graph=known.wrong_without_graph,
        convolution=known.convolution,
    )


def _fitting(graph: Graph, choice: Choice, passes: Passes, room: int) -> Choice:
    """Return the cheapest mode for whose parts there is room beside a pass.

    The counts stay as they are: a shorter way to columns keeps no graph.
    """
    counts = choice.counts
    while (parts := _parts(graph, choice)) and room < passes.each + parts:
        why = f"{choice.mode} would keep {in_bytes(parts)}, which does not fit"
        counts = counts | {choice.mode: why}
        choice = choice._replace(mode=cheapest(counts, passes)[0], why=why)
    return choice


def without_graph(
    shape: tuple[int, ...], like: Tensor, max_bytes: int, *, has_room: bool
) -> JacobianPlan:
    """Return the plan where autograd records nothing, so that no mode can be taken.

    Args:
        shape: The shape of the Jacobian.
        like: A tensor of its dtype.
        max_bytes: How many bytes may be held at once.
        has_room: Whether the caller passes the result's memory, as `out`.
    """
    why = "not recorded by autograd"
    size = 0 if has_room else math.prod(shape) * like.element_size()
    counts: dict[str, int | str] = dict.fromkeys(WAYS, why)
    return JacobianPlan("loop", why, 1, counts, size, 0, 0, max_bytes, (shape,), {})


def _require(mode: str, chunk_size: int | str, max_bytes: int | None) -> None:
    if not isinstance(cast(Any, mode), str) or mode not in MODES:
        raise JacobianArgumentError(
            f"mode is {in_brief(mode)}; it is one of {', '.join(map(repr, MODES))}."
        )
    is_count = type(chunk_size) is int and chunk_size >= 1
    if not (is_count or is_auto(chunk_size)):
        raise JacobianArgumentError(
            f'chunk_size is {in_brief(chunk_size)}; it is "auto" or how many rows '
            "(reverse) or columns (forward) one pass asks for, 1 or more."
        )
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise JacobianArgumentError(
            f"max_bytes is {in_brief(max_bytes)}; it is a whole number of bytes, or "
            "None for half of what is free."
        )


def _passes_through(graph: Graph, known: nodes.Nodes, *, create_graph: bool) -> Passes:
    rows, each = reverse.count_rows(graph), bytes_of_pass(graph.drawing)
    return Passes(
        rows,
        each,
        on_cpu=graph.on_cpu,
        convolution=known.convolution,
        convolved=convolved_at_once(rows * each) if create_graph else CONVOLVED,
        singly=known.wrong_at_once
        or (create_graph and known.wrong_at_once_twice)
        or "",
    )


def _room(graph: Graph, held: int, check_bytes: int) -> int:
    """Return how many bytes may be held, or `SURE` where far less is needed.

    Args:
        graph: The graph of the forward pass.
        held: How many bytes all rows at once would hold.
        check_bytes: How many bytes the check's calls take.
    """
    sure = graph.on_cpu and max(held, check_bytes) <= SURE // 16
    return SURE if sure else room_on(graph.points[0].device)


def _parts(graph: Graph, choice: Choice) -> int:
    """Return how many bytes a mode keeps through all its passes.

    Columns keep the graph of a backward pass; a split keeps dY/dH and dH/dX as well.
    """
    mode, cut = choice.mode, choice.cut
    if mode not in forward.BY_COLUMNS:
        return 0
    kept = bytes_of_graph(graph.drawing)
    if mode == "split" and cut is not None:
        entries = graph.rows(0) + sum(map(graph.columns, range(len(graph.points))))
        kept += graph.batch * cut.width * entries * cut.dtype.itemsize
    return kept


def _require_room(
    limit: str, room: int, result: int, each: int, parts: int, check_bytes: int
) -> None:
    """Raise where not even one row at a time fits.

    Args:
        limit: What the message calls the limit.
        room: How many bytes may be held.
        result: How many bytes the Jacobian takes; 0 if the caller passes `out`.
        each: How many bytes a pass with a single row takes.
        parts: How many bytes are kept through all passes.
        check_bytes: How many bytes the check's calls take.
    """
    a_pass = each + parts
    if room < result + a_pass:
        advice = fewer(or_out=result > 0 and a_pass <= room)
        if parts and room >= result + each:
            advice += ' Or pass mode="reverse", which keeps less.'
        raise OutOfBytesError(
            f"Not even one row or column at a time fits: {takes(result, a_pass)}, and "
            f"{limit} is {in_bytes(room)}. {advice}"
        )
    if room < check_bytes:
        raise OutOfBytesError(
            f"The check calls fn in float64, which takes {in_bytes(check_bytes)} by "
            f"our count, and {limit} is {in_bytes(room)}. Pass fewer samples at a "
            "time, or check=False."
        )


def takes(result: int, a_pass: int) -> str:
    """Return in words the bytes of the Jacobian and of a pass with a single row."""
    if result == 0:
        return f"a pass takes {in_bytes(a_pass)} besides out"
    return (
        f"the Jacobian takes {in_bytes(result)} and a pass another {in_bytes(a_pass)}"
    )


def fewer(*, or_out: bool) -> str:
    """Return what to do where memory does not suffice.

    Args:
        or_out: Whether it would suffice without the Jacobian's own memory.
    """
    own = ", or pass out= with memory of your own" if or_out else ""
    return (
        "Pass fewer samples at a time, have fn return fewer outputs, or ask for fewer "
        f"inputs or parameters{own}."
    )
