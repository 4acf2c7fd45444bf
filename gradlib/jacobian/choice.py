"""Which modes can be taken, and which of them is the cheapest."""

from typing import NamedTuple

from gradlib.errors import NoSuchWayError
from gradlib.jacobian import forward, split
from gradlib.jacobian.chunk import Passes
from gradlib.jacobian.cut import Cut
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.nodes import Nodes
from gradlib.jacobian.plan import FORWARD, SPLIT

FEWEST = 3
"""With fewer rows in a pass, convolutions are at least as fast row by row."""

FEW = 64
"""With at most this many rows, no shorter way is looked for on a GPU.

There a pass takes about as long for all of them as for one, and looking takes longer.
"""

LITTLE = 2**20
"""With at most this many bytes of gradients, all rows at once, starting each operation
takes most of a CPU's time in a pass. A forward pass starts about twice as many.

With torch 2.13 on a core of an AMD EPYC, all rows of such nets took half to nearly all
of the time of the columns, even where there were a hundred times as many rows; of
larger nets, columns took less.
"""


class Choice(NamedTuple):
    """The mode that is taken.

    Attributes:
        mode: The mode.
        why: Why this mode, in a clause.
        counts: For each mode, how many rows or columns it computes, or why it is out.
        cut: Where to split; ``None`` where that is not known or not worth it.
        settled: Whether no shorter way can be worth a search.
    """

    mode: str
    why: str
    counts: dict[str, int | str]
    cut: Cut | None
    settled: bool


def chosen(
    graph: Graph, known: Nodes, mode: str, passes: Passes, *, create_graph: bool
) -> Choice:
    """Return the mode that was asked for or, with ``"auto"``, the cheapest.

    Args:
        graph: The graph of the forward pass.
        known: Which of its nodes decide.
        mode: The mode, or ``"auto"``.
        passes: What backward passes through the graph are like.
        create_graph: Whether a loss will go back through the passes.

    Raises:
        NoSuchWayError: There is no tensor to split at, or torch has no right derivative
            for `create_graph`.
    """
    settled = mode == "auto" and _are_few(passes) and not any(graph.shared)
    counts, cut = _counts(graph, known, mode, passes.rows, settled=settled)
    if create_graph:
        _require_derivatives(known, counts, mode)
    if mode == "split" and cut is None:
        split.require(graph)  # which raises, and says why
    if settled:
        mode, why = "reverse", f"a GPU takes {passes.rows} rows in one pass"
    elif mode == "auto":
        mode, why = cheapest(counts, passes)
    else:
        why = "it was asked for"
    return Choice(mode, why, counts, cut, settled)


def _are_few(passes: Passes) -> bool:
    """Tell whether one pass on a GPU takes all rows, in the time of a single row."""
    return not passes.on_cpu and passes.rows <= FEW and not passes.singly


def _counts(
    graph: Graph, known: Nodes, mode: str, rows: int, *, settled: bool
) -> tuple[dict[str, int | str], Cut | None]:
    """Return each mode's rows or columns, or why it is out, and where to split."""
    columns: int | str = forward.count_columns(graph)
    cut: Cut | str = "would not be cheaper"  # so none is looked for
    fewest = min(rows, FORWARD * columns)
    if mode == "split" or not (
        settled or fewest <= SPLIT * _least_width(graph, fewest)
    ):
        cut = split.find(graph)
    halves = cut if isinstance(cut, str) else cut.width
    if known.python:
        columns = halves = f"{known.python} may have no graph of its own"
    elif known.mixing:
        columns = halves = f"{known.mixing} mixes the samples"
    elif known.no_second:
        columns = f"torch differentiates {known.no_second} only once"
        # Of what comes before its tensor, a split computes rows.
        if isinstance(cut, Cut) and known.no_second_at < cut.number:
            halves = columns
    counts = {"reverse": rows, "forward": columns, "split": halves, "loop": rows}
    return counts, None if isinstance(cut, str) else cut


def _least_width(graph: Graph, enough: int) -> float:
    """Return how many entries a sample has in the narrowest tensor of the graph."""
    if enough <= SPLIT:
        return 1  # no tensor can be narrow enough
    sizes = (form.bytes // form.dtype.itemsize for form in graph.drawing.kinds)
    return max(1, min(filter(None, sizes), default=0) / max(1, graph.batch))


def _require_derivatives(known: Nodes, counts: dict[str, int | str], mode: str) -> None:
    """Take out the modes that `create_graph` makes wrong, or raise if none is left.

    Args:
        known: What torch gets wrong at the graph's nodes.
        counts: Each mode's rows or columns; changed in place.
        mode: The mode, or ``"auto"``.
    """
    if known.once:
        raise NoSuchWayError(
            "create_graph=True asks for the second derivative of "
            f"{known.once}, whose backward is marked with @once_differentiable: it "
            "has none. Let that backward compute with torch's operations, without the "
            "mark, or pass create_graph=False."
        )
    if known.wrong_twice:
        raise NoSuchWayError(
            "create_graph=True asks for the second derivative of "
            f"{known.wrong_twice}, which torch gets wrong. Compute what it does by "
            "other operations, or pass create_graph=False."
        )
    if known.wrong_thrice:
        _refuse_thrice(counts, known.wrong_thrice, mode)


def _refuse_thrice(counts: dict[str, int | str], name: str, mode: str) -> None:
    """Take out the modes that differentiate twice: the loss does a third time."""
    if mode in forward.BY_COLUMNS:
        raise NoSuchWayError(
            f"mode={mode!r} with create_graph=True asks for the third derivative of "
            f"{name}, which torch gets wrong: it takes what that has saved for "
            'constants. Pass mode="auto" or mode="reverse".'
        )
    counts |= dict.fromkeys(
        forward.BY_COLUMNS, f"torch differentiates {name} wrongly a third time"
    )


def cheapest(counts: dict[str, int | str], passes: Passes) -> tuple[str, str]:
    """Return the mode with the cheapest passes, and why.

    Args:
        counts: Each mode's rows or columns, or why it is out.
        passes: What backward passes through the graph are like.
    """
    rows, columns, halves = (counts[it] for it in ("reverse", "forward", "split"))
    assert isinstance(rows, int), "reverse is always there"
    best, cost = "reverse", rows
    if isinstance(columns, int) and FORWARD * columns < cost:
        if passes.on_cpu and passes.rows * passes.each <= LITTLE:
            return "reverse", f"all {rows} rows at once are little work"
        best, cost = "forward", FORWARD * columns
    if isinstance(halves, int) and SPLIT * halves < cost:
        return "split", f"everything passes a tensor of {halves} entries"
    if best == "forward":
        return best, f"there are {columns} columns, and {rows} rows"
    if by_rows := _why_by_rows(passes):
        return "loop", by_rows
    return best, f"there are {rows} rows, and no cheaper way"


def _why_by_rows(passes: Passes) -> str:
    """Return why to compute one row at a time, or ``""``."""
    if passes.singly:
        return f"torch goes wrong for several rows of {passes.singly} at once"
    convolved = passes.on_cpu and passes.convolution
    if convolved and FEWEST * passes.each > passes.convolved:
        return "large convolutions are faster row by row"
    return ""
