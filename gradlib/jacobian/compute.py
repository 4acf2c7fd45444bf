"""Carries out a plan, and falls back to another where torch cannot."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from gradlib.errors import OutOfBytesError
from gradlib.jacobian.agreement import require_rows
from gradlib.jacobian.cannot_go_back import refuse
from gradlib.jacobian.faster import find_in_graph
from gradlib.jacobian.finite import are_finite
from gradlib.jacobian.forward import BY_COLUMNS
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.pieces import Block, Piece, joined, written
from gradlib.jacobian.plan import JacobianPlan
from gradlib.jacobian.planning import fewer, takes
from gradlib.progress import reported


def compute(
    graph: Graph,
    plan: JacobianPlan,
    *,
    may_change: bool,
    may_shorten: bool = False,
    check: bool = False,
    out: dict[Block, Tensor] | None = None,
    create_graph: bool = False,
    progress: bool = False,
) -> dict[Block, Tensor]:
    """Return the blocks of a Jacobian.

    Args:
        graph: The graph of the forward pass.
        plan: How to compute the Jacobian.
        may_change: Whether to take rows where columns fail.
        may_shorten: Whether to take a shorter way, which is no mode, where there is
            one.
        check: Whether to compare rows too that were computed several at once: torch's
            own tests look at single ones.
        out: Where to write the blocks, ``(batch, *out, *in)`` each.
        create_graph: Whether gradients flow through the blocks.
        progress: Whether to show progress on the terminal.

    Raises:
        NoSuchWayError: torch cannot go back through the graph, in this mode.
        OutOfBytesError: Memory ran out, even with single rows or columns.
    """
    keep_what_is_freed()
    if may_shorten and not create_graph:
        shortened = _shortened(graph, plan, out, check=check)
        if shortened is not None:
            return shortened

    def carry(attempt: JacobianPlan) -> dict[Block, Tensor]:
        blocks = _carried_out(graph, attempt, out, create_graph, progress)
        # Columns that were asked for are compared by the check, if there is one.
        proves = attempt.mode in BY_COLUMNS and (may_change or not check)
        if proves or (check and attempt.chunk > 1):
            require_rows(graph, blocks, Look.at_all(graph), mode=attempt.mode)
        return blocks

    *others, last = _attempts(plan, may_change)
    for attempt in others:
        try:
            return _in_memory(graph, _as_attempted(plan, *attempt), carry)
        except RuntimeError:
            # Not every node takes batched values or can be differentiated twice. The
            # graph is still there, so only time is lost.
            continue
    try:
        return _in_memory(graph, _as_attempted(plan, *last), carry)
    except RuntimeError as error:
        refuse(error)


def _shortened(
    graph: Graph, plan: JacobianPlan, out: dict[Block, Tensor] | None, *, check: bool
) -> dict[Block, Tensor] | None:
    """Return the blocks by a shorter way, or ``None`` where the graph offers none.

    They are compared with a backward pass where that may differ: by hooks, which a
    graph does not show, by zero times infinity, or by kernels of a GPU.
    """
    if plan.needs_graph or plan.settled:
        return None
    if out is not None and not all(it.is_contiguous() for it in out.values()):
        return None
    shorter = find_in_graph(graph, plan)
    if shorter is None:
        return None
    try:
        doubtful = graph.may_have_hooks or shorter.needs_proof
        prove = check or doubtful or not graph.on_cpu
        # The backward pass comes first, while the graph is still in the caches.
        look = Look.at_all(graph) if prove else None
        blocks = shorter.blocks(graph, out)
        if look is None and not are_finite(blocks.values()):
            look = Look.at_all(graph)
        if look is not None:
            require_rows(graph, blocks, look)
    except RuntimeError:
        return None
    return blocks


def _attempts(plan: JacobianPlan, may_change: bool) -> list[tuple[str, int]]:
    """Return the modes to try, each with its rows or columns per pass."""
    modes = [plan.mode]
    if may_change and plan.mode in BY_COLUMNS:
        modes.append("reverse")
    at_once = [plan.chunk, 1] if plan.chunk > 1 else [1]
    return [(mode, chunk) for mode in modes for chunk in at_once]


def _as_attempted(plan: JacobianPlan, mode: str, chunk: int) -> JacobianPlan:
    if (mode, chunk) == (plan.mode, plan.chunk):  # as nearly always
        return plan
    return replace(plan, mode=mode, chunk=chunk)


def _in_memory(
    graph: Graph,
    plan: JacobianPlan,
    carry: Callable[[JacobianPlan], dict[Block, Tensor]],
) -> dict[Block, Tensor]:
    """Carry a plan out, halving its chunks each time memory runs out.

    Memory that was free when the plan was made may be taken by now, or fragmented.
    """
    while True:
        try:
            return carry(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if plan.chunk == 1:
                raise OutOfBytesError(_too_large(graph, plan)) from error
        # After the except block: the error keeps alive all that the attempt made.
        plan = replace(plan, chunk=plan.chunk // 2)


def _carried_out(
    graph: Graph,
    plan: JacobianPlan,
    out: dict[Block, Tensor] | None,
    create_graph: bool,
    progress: bool,
) -> dict[Block, Tensor]:
    pieces = plan.pieces(graph, create_graph=create_graph)
    if progress:
        pieces = reported(pieces, _share_done(graph))
    return joined(graph, pieces) if create_graph else written(graph, pieces, out)


def _share_done(graph: Graph) -> Callable[[Piece], str]:
    """Return a function that is given each piece and says how much is computed."""
    total = sum(math.prod(graph.shape(*block)) for block in graph.blocks())
    done = 0

    def text(piece: Piece) -> str:
        nonlocal done
        done += 0 if piece.values is None else piece.values.numel()
        return f"Jacobian: {done / max(total, 1):.0%}"

    return text


def _too_large(graph: Graph, plan: JacobianPlan) -> str:
    what = takes(plan.result_bytes, plan.pass_bytes + plan.part_bytes)
    return (
        f"Memory ran out on {graph.points[0].device}, with one row or column at a time "
        f"too: {what}, by our count. {fewer(or_out=plan.result_bytes > 0)}"
    )
