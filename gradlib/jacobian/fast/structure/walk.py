"""Goes from Y back to X, one operation after the other, and computes nothing yet."""

import math
from collections import defaultdict
from collections.abc import Sequence

from gradlib.jacobian.drawing import Spot
from gradlib.jacobian.fast.operation import Drawn, Operation, operations
from gradlib.jacobian.fast.structure.contract import ENTRY
from gradlib.jacobian.fast.structure.named_axes import Axis, flat, fresh
from gradlib.jacobian.fast.structure.rules import RULES
from gradlib.jacobian.fast.structure.terms import Sum, Term, added, through
from gradlib.jacobian.graph import Graph

FACTORS = 6
"""With this many factors in a term, or more terms than that, they are added up to one
factor: the cheapest order of so few is quickly found."""


class Walk:
    """The sum of terms that a walk from Y to X gives.

    Attributes:
        total: dY/dX; ``None`` where an operation is not known.
        work: The multiply-adds of one backward pass.
    """

    def __init__(self, graph: Graph, most: int) -> None:
        """Go all the way.

        Args:
            graph: The graph of one output, Y, and one input, X.
            most: How many entries a computed factor has at most.
        """
        self.work = 0
        self._dims = fresh(graph.roots[0].shape)
        self._waiting: dict[Spot, list[Term]] = defaultdict(list)
        self.total = self._go(graph, most)

    @property
    def rows(self) -> tuple[Axis, ...]:
        """The axes of Y."""
        return flat(self._dims)

    def _go(self, graph: Graph, most: int) -> Sum | None:
        drawing, nodes = graph.drawing, graph.nodes
        (start,), (end,) = drawing.roots, drawing.ends
        self._waiting[start].append(Term((), self._dims))
        for it in operations(drawing):
            if it.spot in self._waiting and not self._pass(it, it.among(nodes, most)):
                return None
        assert end is not None, "the output depends on the input"
        return added(self._waiting[end], self.rows, self._dims[0])

    def _pass(self, it: Drawn, op: Operation) -> bool:
        """Carry the terms that wait at an operation's output through it."""
        terms = self._waiting.pop(it.spot)
        if self._is_worth_it(terms, len(it.given)):
            total = added(terms, self.rows)
            if total is None:
                return False
            terms = [total.as_term(self.rows)]
        maps = RULES[it.name](op)
        for i, place in it.given.items():
            if i not in maps:
                return False
            work = 0
            for term in terms:
                carried = through(term, maps[i], it.shapes[i], self.rows)
                if carried is None:
                    return False
                after, work = carried
                self._waiting[place].append(after)
            self.work += work + 2 * ENTRY * math.prod(it.shapes[i])
        return True

    def _is_worth_it(self, terms: Sequence[Term], ways: int) -> bool:
        """Return whether to add terms up, rather than to carry each on by itself.

        A sum that is used twice is computed once. Where all ways meet in one tensor,
        adding up costs nothing that carrying on would save.
        """
        most = max(len(term.factors) for term in terms)
        if most >= FACTORS or len(terms) > FACTORS:
            return True
        if ways > 1:
            return most > 1 or len(terms) > 1
        return len(terms) > 1 and not self._waiting
