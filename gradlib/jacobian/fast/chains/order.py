"""Finds the cheapest order in which to multiply the Jacobians of a chain's layers.

This is the matrix-chain problem: each product joins the layers before a tensor in the
chain with those after it, and the order decides how large the products are. Here a
layer's own matrix is the same for all samples, but a product of several layers with a
bend, an elementwise layer, between them differs by sample. So a product with a single
layer is one large multiplication of matrices, for the whole batch.

Godbole, "On efficient computation of matrix chain products", 1973.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple, TypeAlias

ENTRY = 64
"""How many multiply-adds take as long as writing an entry."""

MOST = 32
"""How many matrices a chain has at most: finding the order takes their cube."""


class Product(NamedTuple):
    """The product of two neighbours.

    Attributes:
        inner: The factor that comes first in the forward pass.
        outer: The factor that comes after it.
        columns: Whether the result is laid out ``(batch, ins, outs)``, by columns, or
            ``(batch, outs, ins)``, by rows.
    """

    inner: "Nesting"
    outer: "Nesting"
    columns: bool


Nesting: TypeAlias = int | Product
"""The number of a layer's matrix, or a product."""


class Order(NamedTuple):
    """An order, and what it takes.

    Attributes:
        tree: The last product, with the others inside.
        multiply_adds: How many all products take.
        entries: How many entries all products and scaled factors have together.
        each: The same for one sample, without the last product.
    """

    tree: Nesting
    multiply_adds: int
    entries: int
    each: int = 0

    @property
    def cost(self) -> int:
        """The cost in multiply-adds, entries included."""
        return self.multiply_adds + ENTRY * self.entries

    def text(self, tree: Nesting | None = None) -> str:
        """Return the order in words, the last layer first: ``(3 2) 1``."""
        tree = self.tree if tree is None else tree
        if isinstance(tree, int):
            return str(tree + 1)
        sides = (tree.outer, tree.inner)
        return " ".join(
            self.text(it) if isinstance(it, int) else f"({self.text(it)})"
            for it in sides
        )


def is_by_rows(tree: Nesting) -> bool:
    """Tell whether an order is that of a backward pass."""
    while isinstance(tree, Product):
        if tree.columns or not isinstance(tree.inner, int):
            return False
        tree = tree.outer
    return True


@lru_cache(maxsize=4096)  # a model may meet any number of batch sizes
def best(widths: tuple[int, ...], bends: tuple[bool, ...], batch: int) -> Order:
    """Return the cheapest order.

    Args:
        widths: The widths of the tensors between matrices, the chain's ends included.
        bends: For each matrix whether elementwise layers come after it.
        batch: The number of samples.
    """

    @cache
    def of(first: int, last: int, columns: bool) -> Order:
        if first == last:
            return Order(first, 0, 0)
        # A product of two products takes either layout of both.
        pairs = [
            (middle, cheapest(first, middle - 1), cheapest(middle, last))
            for middle in range(first + 2, last)
        ]
        if columns:
            pairs.append((last, laid_out(first, last - 1, True), of(last, last, True)))
        else:
            inner = of(first, first, False)
            pairs.append((first + 1, inner, laid_out(first + 1, last, False)))
        span = widths[first : last + 2], bends[first:last], batch
        orders = [
            _joined(*span, middle - first, inner, outer, columns)
            for middle, inner, outer in pairs
        ]
        return min(orders, key=_cost)

    def cheapest(first: int, last: int) -> Order:
        return min(of(first, last, False), of(first, last, True), key=_cost)

    def laid_out(first: int, last: int, columns: bool) -> Order:
        """Return the cheapest order with this layout, or with the other and a copy."""
        other = of(first, last, not columns)
        copied = 0 if first == last else batch * widths[first] * widths[last + 1]
        other = other._replace(entries=other.entries + copied)
        return min(of(first, last, columns), other, key=_cost)

    chosen = cheapest(0, len(widths) - 2)
    each = chosen.entries // batch - widths[0] * widths[-1]
    return chosen._replace(each=max(0, each))  # a single matrix has no product


_cost = attrgetter("cost")


def _joined(
    widths: Sequence[int],
    bends: Sequence[bool],
    batch: int,
    middle: int,
    inner: Order,
    outer: Order,
    columns: bool,
) -> Order:
    """Return the product of what is before matrix `middle`, and of the rest."""
    ins, between, outs = widths[0], widths[middle], widths[-1]
    samples = batch if any(bends) else 1
    scaled = ins if columns else outs
    if 1 < middle < len(bends):
        scaled = min(ins, outs)
    if not bends[middle - 1]:
        scaled = 0
    return Order(
        Product(inner.tree, outer.tree, columns),
        inner.multiply_adds + outer.multiply_adds + samples * outs * between * ins,
        inner.entries + outer.entries + samples * (scaled * between + outs * ins),
    )
