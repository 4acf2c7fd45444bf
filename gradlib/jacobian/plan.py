"""Which way a Jacobian is computed, why, and what it takes."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from gradlib.errors import JacobianArgumentError, NoSuchWayError, OutOfBytesError
from gradlib.jacobian import forward, nodes, reverse, split
from gradlib.jacobian.cut import Cut
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import bytes_of_pass, room_on
from gradlib.jacobian.pieces import Piece, detached
from gradlib.render import Printable, Table

Way: TypeAlias = Callable[..., Iterator[Piece]]

WAYS: dict[str, Way] = {
    "reverse": reverse.pieces,
    "forward": forward.pieces,
    "split": split.pieces,
    "loop": reverse.pieces,
}
"""A function of the graph, the chunk and `create_graph` for each mode."""

MODES = ("auto", *WAYS)

BATCHED = 3
"""How many times the gradients of one pass, for each vector, a batched pass holds."""

FAST = 2**25
"""How many bytes of gradients a batched pass takes at most on a CPU: more is slower."""

FILLING = 2**31
"""The same on other devices, which want much at once: an H100 gains by every row."""

CONVOLVED = 3 * 2**20
"""The same where there are convolutions, before it is counted how often it is held.

With torch 2.13 on a core of an Intel Xeon that has 2 MiB of cache, passes of 2 to 3 MiB
were the fastest, and took half to nine tenths of the time of a loop.
"""

FEWEST = 3
"""With fewer rows in a pass, convolutions are as fast row by row, or faster."""

WHOLE = 2**24
"""With `create_graph`, how many bytes all rows together may take, for each thread.

With two threads of an Intel Xeon, 32 MiB took a tenth less time than row by row, and
64 MiB a tenth more.
"""

PAIR = 2
"""Up to how many rows a CPU takes one after the other: there is little to share.

With torch 2.13 on a core of an Intel Xeon, 2 rows of small nets, of a layer of a
transformer and of a convolution took 3 to 11 per cent longer in one pass.
"""

FEW = 64
"""Up to how many rows nothing shorter is looked for, but on a CPU.

There a pass takes about as long for all of them as for one, and looking takes longer.
"""

FORWARD = 2
"""How many rows a column costs: its pass goes through the graph of a backward pass."""

SPLIT = 4
"""How many rows an entry of the tensor at a split costs, with all that joins them."""

SURE = 2**26
"""How many bytes are taken for granted on a CPU by what holds a small part of them, all
rows at once: asking what is free would take longer than some small Jacobians do."""

FEWER = (
    "Pass fewer samples at a time, have fn return fewer outputs, ask for fewer inputs "
    "or parameters, or pass out= with memory of your own."
)
"""What to do where the memory does not do."""


@dataclass(frozen=True)
class Plan(Printable):
    """How a Jacobian will be computed. It prints as a table of all ways.

    Attributes:
        mode: ``"reverse"``, ``"forward"``, ``"split"`` or ``"loop"``. Or a shorter way:
            ``"chain"`` multiplies the Jacobians of the layers, ``"structure"`` those of
            the graph's operations, axis by axis, and ``"by sample"``, for parameters,
            each sample's input of an operation with the gradient of its output.
            ``"stacked"`` goes in reverse, through operations that take several rows as
            more samples; ``"replicas"`` also forward, for small transformers.
        why: Why this way, in a sentence.
        chunk: How many rows or columns one pass computes.
        counts: For each way, how many rows or columns it computes, or why it cannot be
            taken. A split computes as many rows before its tensor as columns after it;
            a shorter way computes none, and says what it does instead.
        result_bytes: The size of the Jacobian itself; 0 if the caller passes memory.
        part_bytes: The size of the two parts of a split, or of a shorter way's
            products.
        pass_bytes: What one pass holds for each row or column.
        max_bytes: What may be held at once on top of the forward pass.
        shapes: The shape of each block of the Jacobian, ``(batch, *out, *in)``.
        work: For each way, how many multiply-adds it takes, if that was counted.
        check_bytes: What the check's calls take; 0 if there is nothing to check.
    """

    mode: str
    why: str
    chunk: int
    counts: dict[str, int | str]
    result_bytes: int
    part_bytes: int
    pass_bytes: int
    max_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    work: dict[str, int]
    check_bytes: int = 0
    # Whether to look for no shorter way, as looking would take longer.
    settled: bool = False
    # Whether torch is right only in a pass that has a graph itself.
    needs_graph: bool = False
    # Whether there are convolutions on the way.
    convolution: bool = False

    @property
    def check_first(self) -> bool:
        """Whether the check's calls have no room beside the Jacobian."""
        return self.result_bytes + self.check_bytes > self.max_bytes

    @property
    def passes(self) -> int:
        """How many backward passes it takes."""
        return self.passes_of(self.mode)

    @property
    def bytes(self) -> int:
        """What is held at once on top of the forward pass, the result included."""
        copies = BATCHED if self.chunk > 1 else 1
        passes = self.pass_bytes * self.chunk * copies
        return self.result_bytes + self.part_bytes + passes

    @property
    def rows_worth(self) -> int:
        """How many rows, one at a time, would take as long as this."""
        count = self.counts[self.mode]
        assert isinstance(count, int), f"{self.mode} cannot be taken: {count}"
        return count * {"forward": FORWARD, "split": SPLIT}.get(self.mode, 1)

    def passes_of(self, mode: str) -> int:
        """Return how many backward passes a way takes, with this plan's chunks.

        Args:
            mode: One of `counts`; what has no rows or columns takes none.
        """
        count = self.counts[mode]
        if isinstance(count, str):
            return 0
        passes = math.ceil(count / (1 if mode == "loop" else self.chunk))
        return 2 * passes if mode == "split" else passes

    def shortened(
        self, mode: str, why: str, how: str, multiply_adds: int | None, part_bytes: int
    ) -> "Plan":
        """Return the plan of a shorter way, beside the ways there are.

        Args:
            mode: What it is called.
            why: Why it can be taken.
            how: What it does instead of asking for rows or columns.
            multiply_adds: What it takes, where that was counted.
            part_bytes: What it holds on top of the result.
        """
        return replace(
            self,
            mode=mode,
            why=why,
            counts=self.counts | {mode: how},
            work=self.work | ({} if multiply_adds is None else {mode: multiply_adds}),
            part_bytes=part_bytes,
            pass_bytes=0,
        )

    def together(
        self, mode: str, why: str, chunk: int, part_bytes: int, pass_bytes: int
    ) -> "Plan":
        """Return the plan of a shorter way to the rows of ``"reverse"``.

        Args:
            mode: What it is called.
            why: Why it can be taken.
            chunk: How many rows one pass computes.
            part_bytes: What it holds on top of result and passes.
            pass_bytes: What one pass holds for each row.
        """
        taken = {mode: self.work["reverse"]} if "reverse" in self.work else {}
        return replace(
            self,
            mode=mode,
            why=why,
            chunk=chunk,
            counts=self.counts | {mode: self.counts["reverse"]},
            work=self.work | taken,
            part_bytes=part_bytes,
            pass_bytes=pass_bytes,
        )

    def pieces(self, graph: Graph, *, create_graph: bool) -> Iterator[Piece]:
        """Return the Jacobian in pieces."""
        made = WAYS[self.mode](
            graph, self.chunk, create_graph=create_graph or self.needs_graph
        )
        return map(detached, made) if self.needs_graph and not create_graph else made

    def _table(self) -> Table:
        shapes = ", ".join(str(list(shape)) for shape in self.shapes[:3])
        if len(self.shapes) > 3:
            shapes += f" and {len(self.shapes) - 3} more"
        rows = [self._row(mode) for mode in self.counts]
        per_pass = "1 row or column" if self.chunk == 1 else f"{self.chunk} of them"
        asks = f"A pass asks for {per_pass}. " if self.passes else ""
        when = "before" if self.check_first else "afterwards"
        size = in_words(self.check_bytes)
        checked = f" The check takes {size}, {when}." if self.check_bytes else ""
        return Table(
            f"Jacobian {shapes}, {in_words(self.result_bytes)}: mode={self.mode!r}, "
            f"as {self.why}.",
            ("mode", "rows or columns", "passes", "multiply-adds"),
            rows,
            (
                f"{asks}Held at once, on top of the forward pass: "
                f"{in_words(self.bytes)}, of {in_words(self.max_bytes)}.{checked}",
            ),
        )

    def _row(self, mode: str) -> tuple[str, ...]:
        count = self.counts[mode]
        work = f"{self.work[mode]:.3g}" if mode in self.work else ""
        passes = "" if isinstance(count, str) else str(self.passes_of(mode))
        return mode, str(count), passes, work


def make(
    graph: Graph,
    mode: str,
    chunk_size: int | str,
    max_bytes: int | None,
    *,
    has_room: bool = False,
    check_bytes: int = 0,
    create_graph: bool = False,
) -> Plan:
    """Choose a way and its chunks.

    Args:
        graph: What the Jacobian is of.
        mode: The way, or ``"auto"``.
        chunk_size: How many rows or columns a pass asks for, or ``"auto"``.
        max_bytes: What may be held at once; ``None`` for half of what is free.
        has_room: Whether the caller brings the memory of the result.
        check_bytes: What the check's calls take.
        create_graph: Whether somebody goes back through the passes.

    Raises:
        JacobianArgumentError: There is no such mode, or a size is no whole number.
        OutOfBytesError: It does not fit into `max_bytes`.
    """
    _require(mode, chunk_size, max_bytes)
    known = nodes.look(graph)
    on_cpu = graph.points[0].device.type == "cpu"
    rows = reverse.passes(graph)
    singly = known.wrong_at_once or (create_graph and known.wrong_at_once_twice)
    small = not on_cpu and rows <= FEW and not any(graph.shared)
    settled = mode == "auto" and small and not singly
    if settled:
        mode, why = "reverse", f"a GPU takes {rows} rows in one pass"
    else:
        why = "it was asked for"
    counts, cut = _counts(graph, known, mode, settled=settled)
    if create_graph and known.once:
        raise NoSuchWayError(
            "create_graph=True asks for the second derivative of "
            f"{known.once}, whose backward is marked with @once_differentiable: it "
            "has none. Let that backward compute with torch's operations, without the "
            "mark, or pass create_graph=False."
        )
    if create_graph and known.wrong_twice:
        raise NoSuchWayError(
            "create_graph=True asks for the second derivative of "
            f"{known.wrong_twice}, which torch gets wrong. Compute what it does by "
            "other operations, or pass create_graph=False."
        )
    if create_graph and known.wrong_thrice:
        _refuse_thrice(counts, known.wrong_thrice, mode)
    each = bytes_of_pass(graph.drawing)
    convolved = _convolved(rows * each) if create_graph else CONVOLVED
    if mode == "auto":
        by_row = known.convolution and on_cpu and FEWEST * each > convolved
        by_rows = "large convolutions are faster row by row" if by_row else ""
        if singly:
            by_rows = f"torch goes wrong for several rows of {singly} at once"
        mode, why = _choice(counts, by_rows)
    result = 0 if has_room else graph.size()
    parts = _parts(graph, cut) if mode == "split" and cut is not None else 0
    if max_bytes is None:
        held = result + parts + BATCHED * each * rows
        sure = on_cpu and held <= SURE // 16 and check_bytes <= SURE
        max_bytes = SURE if sure else room_on(graph.points[0].device)
    room = max_bytes - result - parts
    if room < each:
        raise OutOfBytesError(
            f"The Jacobian takes {in_words(result)} and a pass another "
            f"{in_words(each + parts)}, and max_bytes is {in_words(max_bytes)}. {FEWER}"
        )
    if max_bytes < check_bytes:
        raise OutOfBytesError(
            f"The check calls fn in float64, which takes {in_words(check_bytes)} by "
            f"our count, and max_bytes is {in_words(max_bytes)}. Pass fewer samples at "
            "a time, or check=False."
        )
    count = counts[mode]
    most = count if isinstance(count, int) else sys.maxsize
    paired = mode == "reverse" and most <= PAIR and on_cpu and chunk_size == "auto"
    if mode == "loop" or singly or paired:
        chunk = 1
    elif isinstance(chunk_size, int):
        chunk = max(1, min(chunk_size, most))
        needs = BATCHED * each * chunk if chunk > 1 else each
        if room < needs:
            raise OutOfBytesError(
                f"A pass with chunk_size={chunk} takes {in_words(needs)}, and of "
                f"max_bytes the Jacobian leaves {in_words(room)}. Pass a smaller "
                'chunk_size, or "auto".'
            )
    else:
        held = BATCHED * each
        if mode != "reverse":
            convolved = CONVOLVED
        fitting = at_once(
            room,
            held,
            each,
            convolution=known.convolution,
            on_cpu=on_cpu,
            convolved=convolved,
        )
        chunk = max(1, min(fitting, most))
        if isinstance(count, int) and count:
            chunk = math.ceil(count / math.ceil(count / chunk))  # all passes alike
    shapes = tuple(graph.shape(*block) for block in graph.blocks())
    return Plan(
        mode,
        why,
        chunk,
        counts,
        result,
        parts,
        each,
        max_bytes,
        shapes,
        work={},
        check_bytes=check_bytes,
        settled=settled,
        needs_graph=known.wrong_without_graph,
        convolution=known.convolution,
    )


def at_once(
    room: int,
    held: int,
    each: int,
    *,
    convolution: bool,
    on_cpu: bool,
    convolved: int = CONVOLVED,
) -> int:
    """Return how many vectors a pass is to take: as many as fit, while more is faster.

    Args:
        room: How many bytes it may take.
        held: How many it holds for each vector.
        each: How many of them are gradients, counted once.
        convolution: Whether it goes through convolutions.
        on_cpu: Whether it runs there.
        convolved: How many bytes of gradients it takes then, at most, on a CPU.
    """
    fast = max(FAST, BATCHED * convolved) if on_cpu else FILLING
    many = min(room, fast) // max(1, held)
    if convolution and on_cpu:
        many = min(many, convolved // max(1, each))
    return many


def _convolved(whole: int) -> int:
    """Return how many bytes a pass is to take that somebody goes back through.

    Args:
        whole: How many all rows take together.
    """
    return whole if whole <= WHOLE * torch.get_num_threads() else CONVOLVED


def _require(mode: str, chunk_size: int | str, max_bytes: int | None) -> None:
    if mode not in MODES:
        raise JacobianArgumentError(
            f"mode is {mode!r}; it is one of {', '.join(map(repr, MODES))}."
        )
    if chunk_size != "auto" and (type(chunk_size) is not int or chunk_size < 1):
        raise JacobianArgumentError(
            f'chunk_size is {chunk_size!r}; it is "auto" or how many rows (reverse) or '
            "columns (forward) one pass asks for, 1 or more."
        )
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise JacobianArgumentError(
            f"max_bytes is {max_bytes!r}; it is a whole number of bytes, or None for "
            "half of what is free."
        )


def _counts(
    graph: Graph, known: nodes.Nodes, mode: str, *, settled: bool
) -> tuple[dict[str, int | str], Cut | None]:
    """Return what each way asks for, or why it cannot be taken, and where to split."""
    rows = reverse.passes(graph)
    columns: int | str = forward.passes(graph)
    halves: int | str = "no tensor inside that all pass"
    cut: Cut | None = None
    fewest = min(rows, FORWARD * columns)
    if settled or (mode != "split" and fewest <= SPLIT * _least_width(graph, fewest)):
        halves = "would not be cheaper"  # so nobody needs to look for one
    elif (cut := split.find(graph)) is not None:
        halves = cut.width
    if known.python:
        columns = halves = f"{known.python} may have no graph of its own"
    return {"reverse": rows, "forward": columns, "split": halves, "loop": rows}, cut


def _least_width(graph: Graph, enough: int) -> float:
    """Return how many entries any tensor has, at the least, for each sample."""
    if enough <= SPLIT:
        return 1  # there is no need to look
    sizes = (form.bytes // form.dtype.itemsize for form in graph.drawing.kinds)
    return max(1, min(filter(None, sizes), default=0) / max(1, graph.batch))


def _refuse_thrice(counts: dict[str, int | str], name: str, mode: str) -> None:
    """Take out the ways that differentiate twice, which somebody does once more."""
    if mode in forward.BY_COLUMNS:
        raise NoSuchWayError(
            f"mode={mode!r} with create_graph=True asks for the third derivative of "
            f"{name}, which torch gets wrong: it takes what that has saved for "
            'constants. Pass mode="auto" or mode="reverse".'
        )
    counts |= dict.fromkeys(
        forward.BY_COLUMNS, f"torch differentiates {name} wrongly a third time"
    )


def _choice(counts: dict[str, int | str], by_rows: str) -> tuple[str, str]:
    """Return the way with the cheapest passes, and why.

    Args:
        counts: How many rows or columns each way asks for.
        by_rows: Why rows are to be taken one after the other, if they are.
    """
    rows, columns, halves = (counts[it] for it in ("reverse", "forward", "split"))
    assert isinstance(rows, int), "reverse is always there"
    best, cost = "reverse", rows
    if isinstance(columns, int) and FORWARD * columns < cost:
        best, cost = "forward", FORWARD * columns
    if isinstance(halves, int) and SPLIT * halves < cost:
        return "split", f"everything passes a tensor of {halves} entries"
    if best == "forward":
        return best, f"there are {columns} columns, and {rows} rows"
    if by_rows:
        return "loop", by_rows
    return best, f"there are {rows} rows, and no cheaper way"


def _parts(graph: Graph, cut: Cut) -> int:
    """Return what dY/dH and dH/dX take."""
    entries = graph.rows(0) + sum(map(graph.columns, range(len(graph.points))))
    return graph.batch * cut.width * entries * cut.dtype.itemsize


def in_words(size: int) -> str:
    """Return a number of bytes as a reader says it."""
    for power, unit in reversed([*enumerate(("bytes", "KiB", "MiB", "GiB"))]):
        if size >= 1024**power or not power:
            return f"{size / 1024**power:.4g} {unit}"
    raise AssertionError("some unit fits")
