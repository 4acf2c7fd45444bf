"""Which way a Jacobian is computed, why, and what it takes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian import forward, reverse, split
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Piece, detached
from gradlib.render import Printable, Table
from gradlib.wording import in_brief, in_bytes, listed

Way: TypeAlias = Callable[..., Iterator[Piece]]

WAYS: dict[str, Way] = {
    "reverse": reverse.pieces,
    "forward": forward.pieces,
    "split": split.pieces,
    "loop": reverse.pieces,
}
"""A function of the graph, the chunk and `create_graph` for each mode."""

BATCHED = 3
"""A batched pass holds, for each vector, this many times the gradients of one pass."""

FORWARD = 2
"""A column costs as much as this many rows: it goes through a backward pass's graph."""

SPLIT = 4
"""An entry of the tensor split at costs as much as this many rows, with products."""


@dataclass(frozen=True)
class JacobianPlan(Printable):
    """How a Jacobian will be computed. It prints as a table of all ways.

    Attributes:
        mode: ``"reverse"``, ``"forward"``, ``"split"`` or ``"loop"``; or a shorter way,
            as ``"chain"``. The reference of per-sample Jacobians says what each does,
            under "What a plan calls its way".
        why: Why this mode, in a clause.
        chunk: How many rows or columns one pass computes.
        counts: For each mode, how many rows or columns it computes, or why it cannot be
            taken. A split computes as many rows before its tensor as columns after it;
            a shorter way computes none, and its entry says what it does instead.
        result_bytes: The size of the Jacobian itself; 0 if the caller passes `out`.
        part_bytes: What is kept through all passes: for columns the graph of a backward
            pass, for a split its two parts as well, for a shorter way its products.
        pass_bytes: What one pass holds for each row or column.
        max_bytes: What may be held at once on top of the forward pass.
        shapes: The shape of each block of the Jacobian, ``(batch, *out, *in)``.
        work: For each mode, how many multiply-adds it takes, if that was counted.
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
    # Whether to skip the search for a shorter way, which would take longer.
    settled: bool = False
    # Whether torch's backward pass is right only with create_graph=True.
    needs_graph: bool = False
    # Whether passes go through convolutions.
    convolution: bool = False

    @property
    def check_first(self) -> bool:
        """Whether to check before computing: beside the Jacobian there is no room."""
        return self.result_bytes + self.check_bytes > self.max_bytes

    @property
    def passes(self) -> int:
        """How many backward passes the plan takes."""
        return self.passes_of(self.mode)

    @property
    def bytes(self) -> int:
        """How many bytes are held on top of the forward pass, the result included."""
        copies = BATCHED if self.chunk > 1 else 1
        passes = self.pass_bytes * self.chunk * copies
        return self.result_bytes + self.part_bytes + passes

    @property
    def rows_worth(self) -> int:
        """How many rows, computed one at a time, would take as long as the plan."""
        count = self.counts[self.mode]
        assert isinstance(count, int), f"{self.mode} cannot be taken: {count}"
        return count * {"forward": FORWARD, "split": SPLIT}.get(self.mode, 1)

    def passes_of(self, mode: str) -> int:
        """Return how many backward passes a mode takes, with this plan's chunks.

        Args:
            mode: A key of `counts`; without rows or columns there are 0 passes.

        Raises:
            JacobianArgumentError: The plan has no such mode.
        """
        if not isinstance(cast(object, mode), str) or mode not in self.counts:
            known = ", ".join(map(repr, self.counts))
            raise JacobianArgumentError(
                f"passes_of(mode): mode is {in_brief(mode)}; it is one of {known}."
            )
        count = self.counts[mode]
        if isinstance(count, str):
            return 0
        passes = math.ceil(count / (1 if mode == "loop" else self.chunk))
        return 2 * passes if mode == "split" else passes

    def shortened(
        self, mode: str, why: str, how: str, multiply_adds: int | None, part_bytes: int
    ) -> "JacobianPlan":
        """Return the plan of a shorter way without passes, added to the other modes.

        Args:
            mode: The name of the shorter way.
            why: Why it can be taken.
            how: What it does instead of computing rows or columns.
            multiply_adds: How many it takes, if counted.
            part_bytes: How many bytes it holds on top of the result.
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
    ) -> "JacobianPlan":
        """Return the plan of a shorter way to the rows or columns of another mode.

        Args:
            mode: The name of the shorter way.
            why: Why it can be taken.
            chunk: How many rows or columns one pass computes.
            part_bytes: How many bytes it holds on top of result and passes.
            pass_bytes: How many bytes one pass holds for each row or column.
            of: The mode whose rows or columns it computes.
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
        size = in_bytes(self.check_bytes)
        checked = f" The check takes {size}, {when}." if self.check_bytes else ""
        return Table(
            f"Jacobian {shapes}, {in_bytes(self.result_bytes)}: mode={self.mode!r}, "
            f"as {self.why}.",
            ("mode", "passes", "multiply-adds", "rows or columns"),
            rows,
            (
                f"{asks}Held at once, on top of the forward pass: "
                f"{in_bytes(self.bytes)}, of {in_bytes(self.max_bytes)}.{checked}",
            ),
        )

    def _row(self, mode: str) -> tuple[str, ...]:
        count = self.counts[mode]
        work = f"{self.work[mode]:.3g}" if mode in self.work else ""
        passes = "" if isinstance(count, str) else str(self.passes_of(mode))
        return mode, passes, work, str(count)
