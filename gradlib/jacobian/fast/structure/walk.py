"""Goes from Y back to X, one operation after the other, and computes nothing yet."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from gradlib.edges import Edge, edge_of
from gradlib.jacobian.fast.operation import Operation
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
        root = graph.roots[0]
        self.work = 0
        self._most = most
        self._dims = fresh(root.shape)
        self._end = graph.ends[0]
        self._way = graph.way
        self._forms = graph.forms
        self._waiting: dict[Edge, list[Term]] = defaultdict(list)
        self.total = self._go(edge_of(root))

    @property
    def rows(self) -> tuple[Axis, ...]:
        """The axes of Y."""
        return flat(self._dims)

    def _go(self, start: Edge) -> Sum | None:
        self._waiting[start].append(Term((), self._dims))
        *before, _ = self._way  # X comes last: all nodes lead to it
        for node in before:
            for edge in [it for it in self._waiting if it[0] is node]:
                if not self._pass(edge):
                    return None
        return added(self._waiting[self._end], self.rows, self._dims[0])

    def _pass(self, edge: Edge) -> bool:
        """Carry the terms that wait at an edge through its operation."""
        node, number = edge
        terms = self._waiting.pop(edge)
        before = {
            i: cast(Edge, it)
            for i, it in enumerate(node.next_functions)
            if it[0] in self._way
        }
        if self._is_worth_it(terms, len(before)):
            total = added(terms, self.rows)
            if total is None:
                return False
            terms = [total.as_term(self.rows)]
        shapes = {i: self._forms[it].shape for i, it in before.items()}
        op = Operation(node, number, self._forms[edge], shapes, self._most)
        maps = RULES[node.name()](op)
        for i, place in before.items():
            if i not in maps:
                return False
            work = 0
            for term in terms:
                carried = through(term, maps[i], shapes[i], self.rows)
                if carried is None:
                    return False
                after, work = carried
                self._waiting[place].append(after)
            self.work += work + 2 * ENTRY * math.prod(shapes[i])
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
