"""Carrying a plan out, and what to do where torch cannot."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from gradlib.errors import GradlibError, NoSuchWayError, OutOfBytesError
from gradlib.jacobian.faster import find_shorter
from gradlib.jacobian.finite import are_finite
from gradlib.jacobian.forward import BY_COLUMNS
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, require_rows
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.pieces import Block, Piece, collected, joined, written
from gradlib.jacobian.plan import Plan
from gradlib.jacobian.planning import fewer, takes
from gradlib.progress import reported


def compute(
    graph: Graph,
    plan: Plan,
    *,
    may_change: bool,
    may_shorten: bool = False,
    prove: bool = True,
    check: bool = False,
    out: dict[Block, Tensor] | None = None,
    create_graph: bool = False,
    progress: bool = False,
) -> dict[Block, Tensor]:
    """Return the blocks of a Jacobian.

    Args:
        graph: What it is of.
        plan: How to compute it.
        may_change: Whether another mode may serve, where this one cannot.
        may_shorten: Whether a way that is no mode may serve, where one is shorter.
        prove: Whether columns are held against a backward pass.
        check: Whether rows are that came several at once: one at a time is what torch's
            own tests look at.
        out: Where to write them.
        create_graph: Whether gradients flow through them.
        progress: Whether to say on the terminal how far it is.

    Raises:
        NoSuchWayError: torch cannot go back through the graph, in this mode.
        OutOfBytesError: Memory ran out, with single rows or columns too.
    """
    if may_shorten and not create_graph:
        found = _shortened(graph, plan, out, check=check)
        if found is not None:
            return found

    def carry(attempt: Plan) -> dict[Block, Tensor]:
        blocks = _carried_out(graph, attempt, out, create_graph, progress)
        proves = prove and attempt.mode in BY_COLUMNS
        if proves or (check and attempt.chunk > 1):
            require_rows(graph, blocks, Look.at_all(graph), mode=attempt.mode)
        return blocks

    *others, last = _attempts(plan, may_change)
    for attempt in others:
        try:
            return _in_memory(graph, _as_attempted(plan, *attempt), carry)
        except RuntimeError:
            # Not every node can work on batched values, or be gone through twice.
            # The graph is still there, so nothing is lost but the time.
            continue
    try:
        return _in_memory(graph, _as_attempted(plan, *last), carry)
    except RuntimeError as error:
        if isinstance(error, GradlibError):
            raise
        raise NoSuchWayError(explained(error)) from error


def _shortened(
    graph: Graph, plan: Plan, out: dict[Block, Tensor] | None, *, check: bool
) -> dict[Block, Tensor] | None:
    """Return the blocks where the graph offers a shorter way to them.

    They are held against a backward pass where that may say something else, as hooks
    do, which nobody sees in a graph, zeros that meet infinity, and kernels of a GPU.
    """
    if plan.needs_graph:
        return None
    if out is not None and not all(it.is_contiguous() for it in out.values()):
        return None
    found = find_shorter(graph, plan)
    if found is None:
        return None
    try:
        doubtful = graph.may_have_hooks or found.needs_proof
        prove = check or doubtful or graph.points[0].device.type != "cpu"
        # It comes first, while the graph is still in the caches.
        look = Look.at_all(graph) if prove else None
        blocks = found.blocks(graph, out)
        if look is None and not are_finite(blocks.values()):
            look = Look.at_all(graph)
        if look is not None:
            require_rows(graph, blocks, look)
    except RuntimeError:
        return None
    return blocks


def _attempts(plan: Plan, may_change: bool) -> list[tuple[str, int]]:
    """Return which modes to try, each with how many rows or columns at once."""
    modes = [plan.mode]
    if may_change and plan.mode in BY_COLUMNS:
        modes.append("reverse")
    at_once = [plan.chunk, 1] if plan.chunk > 1 else [1]
    return [(mode, chunk) for mode in modes for chunk in at_once]


def _as_attempted(plan: Plan, mode: str, chunk: int) -> Plan:
    if (mode, chunk) == (plan.mode, plan.chunk):  # as nearly always
        return plan
    return replace(plan, mode=mode, chunk=chunk)


def _in_memory(
    graph: Graph, plan: Plan, carry: Callable[[Plan], dict[Block, Tensor]]
) -> dict[Block, Tensor]:
    """Carry a plan out, with ever smaller chunks where memory runs out.

    What was free when it was made others may have taken, or be in pieces too small.
    """
    while True:
        try:
            return carry(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if plan.chunk == 1:
                raise OutOfBytesError(_too_large(graph, plan)) from error
        # Not sooner: the error holds on to all that the attempt had made.
        plan = replace(plan, chunk=plan.chunk // 2)


def _carried_out(
    graph: Graph,
    plan: Plan,
    out: dict[Block, Tensor] | None,
    create_graph: bool,
    progress: bool,
) -> dict[Block, Tensor]:
    pieces = plan.pieces(graph, create_graph=create_graph)
    if progress:
        pieces = reported(pieces, _share_done(graph))
    return _written(graph, pieces, out, create_graph)


def _written(
    graph: Graph,
    pieces: Iterable[Piece],
    out: dict[Block, Tensor] | None,
    create_graph: bool,
) -> dict[Block, Tensor]:
    if create_graph:
        return joined(graph, pieces)
    if out is None or all(it.is_contiguous() for it in out.values()):
        return written(graph, pieces, out)
    blocks = collected(graph, pieces)
    for block, tensor in out.items():
        tensor.copy_(blocks[block])
    return out


def _share_done(graph: Graph) -> Callable[[Piece], str]:
    """Return what says how much of a Jacobian has been computed."""
    total = sum(math.prod(graph.shape(*block)) for block in graph.blocks())
    done = 0

    def text(piece: Piece) -> str:
        nonlocal done
        done += 0 if piece.values is None else piece.values.numel()
        return f"Jacobian: {done / max(total, 1):.0%}"

    return text


def _too_large(graph: Graph, plan: Plan) -> str:
    what = takes(plan.result_bytes, plan.pass_bytes + plan.part_bytes)
    return (
        f"Memory ran out on {graph.points[0].device}, with one row or column at a time "
        f"too: {what}, by our count. {fewer(or_out=plan.result_bytes > 0)}"
    )


def explained(error: RuntimeError) -> str:
    """Return why torch cannot go back, in words that say what to do."""
    text = str(error)
    if "use_reentrant" in text or "Checkpointing is not compatible" in text:
        return (
            "A checkpoint inside fn is of the reentrant kind, which refuses "
            "torch.autograd.grad. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )
    if "cudnn RNN backward" in text:
        return (
            f"cuDNN goes back through an RNN in training mode only ({text}). Call this "
            "under torch.backends.cudnn.flags(enabled=False), or .train() the RNN."
        )
    if "numpy() on Tensor" in text:  # torch says to detach it, which would be wrong
        return (
            "A backward of yours calls .numpy(), so autograd cannot go back through "
            "that in its turn, as forward mode, a split and create_graph=True do. Pass "
            'mode="reverse", or let it compute with torch\'s operations.'
        )
    return f"torch cannot go back from the output: {text}"
