"""Which way a Jacobian is computed, why, and what it takes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from gradlib.errors import listed
from gradlib.jacobian import forward, reverse, split
from gradlib.jacobian.graph import Graph
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

BATCHED = 3
"""How many times the gradients of one pass, for each vector, a batched pass holds."""

FORWARD = 2
"""How many rows a column costs: its pass goes through the graph of a backward pass."""

SPLIT = 4
"""How many rows an entry of the tensor at a split costs, with all that joins them."""


@dataclass(frozen=True)
class Plan(Printable):
    """How a Jacobian will be computed. It prints as a table of all ways.

    Attributes:
        mode: ``"reverse"``, ``"forward"``, ``"split"`` or ``"loop"``. Or a shorter way:
            ``"chain"`` multiplies the Jacobians of the layers, ``"structure"`` those of
            the graph's operations, axis by axis, and ``"by sample"``, for parameters,
            each sample's input of an operation with the gradient of its output.
            ``"stacked"`` goes in reverse, through operations that take several rows as
            more samples; ``"pushed"`` forward, with columns in their place;
            ``"replicas"`` both ways, for small transformers.
        why: Why this way, in a sentence.
        chunk: How many rows or columns one pass computes.
        counts: For each way, how many rows or columns it computes, or why it cannot be
            taken. A split computes as many rows before its tensor as columns after it;
            a shorter way computes none, and says what it does instead.
        result_bytes: The size of the Jacobian itself; 0 if the caller passes memory.
        part_bytes: What is kept through all passes: the graph of a backward pass for
            columns, the two parts of a split too, or a shorter way's products.
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
        self,
        mode: str,
        why: str,
        chunk: int,
        part_bytes: int,
        pass_bytes: int,
        *,
        of: str = "reverse",
    ) -> "Plan":
        """Return the plan of a shorter way to the rows of another, or to its columns.

        Args:
            mode: What it is called.
            why: Why it can be taken.
            chunk: How many rows or columns one pass computes.
            part_bytes: What it holds on top of result and passes.
            pass_bytes: What one pass holds for each of them.
            of: Which way's they are.
        """
        taken = {mode: self.work[of]} if of in self.work else {}
        return replace(
            self,
            mode=mode,
            why=why,
            chunk=chunk,
            counts=self.counts | {mode: self.counts[of]},
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
        shapes = listed(map(list, self.shapes))
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


def in_words(size: int) -> str:
    """Return a number of bytes as a reader says it."""
    units = "bytes", "KiB", "MiB", "GiB"
    power = max(it for it in range(len(units)) if size >= 1024**it or not it)
    return f"{size / 1024**power:.4g} {units[power]}"
