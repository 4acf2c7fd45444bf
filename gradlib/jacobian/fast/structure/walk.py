"""From Y back to X, one operation after the other, with nothing computed yet."""

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
"""How many factors a term has at most, and how many terms a sum has, before it is
computed: the cheapest order of so many is soon found."""


class Walk:
    """What is found on the way.

    Attributes:
        total: dY/dX; ``None`` where an operation is not known.
        work: The multiply-adds of one backward pass.
    """

    def __init__(self, graph: Graph, most: int) -> None:
        """Go all the way.

        Args:
            graph: Of one output, Y, and one input, X.
            most: How many entries a factor has at most that nobody has saved.
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
        *before, _ = self._way  # X comes last: all of them lead to it
        for node in before:
            for edge in [it for it in self._waiting if it[0] is node]:
                if not self._pass(edge):
                    return None
        return added(self._waiting[self._end], self.rows, self._dims[0])

    def _pass(self, edge: Edge) -> bool:
        """Carry what waits at an edge through its operation."""
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
        for i, there in before.items():
            if i not in maps:
                return False
            work = 0
            for term in terms:
                found = through(term, maps[i], shapes[i], self.rows)
                if found is None:
                    return False
                after, work = found
                self._waiting[there].append(after)
            self.work += work + 2 * ENTRY * math.prod(shapes[i])
        return True

    def _is_worth_it(self, terms: Sequence[Term], ways: int) -> bool:
        """Return whether to add terms up, rather than to carry each on by itself.

        What is used twice is computed once, and where everything passes there is
        nothing that would make it more.
        """
        most = max(len(term.factors) for term in terms)
        if most >= FACTORS or len(terms) > FACTORS:
            return True
        if ways > 1:
            return most > 1 or len(terms) > 1
        return len(terms) > 1 and not self._waiting
