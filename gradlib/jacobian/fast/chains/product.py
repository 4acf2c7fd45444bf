"""Multiplies the Jacobians of a chain's layers, in a given order."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.fast.chains.bends import Bend, pulled
from gradlib.jacobian.fast.chains.order import Nesting, Product
from gradlib.jacobian.fast.matmul import multiplied


class Factors(NamedTuple):
    """The Jacobians of a chain's layers.

    Attributes:
        matrices: The weights of the linear layers, ``(outs, ins)``. The last may differ
            by sample, ``(batch, outs, ins)``.
        bends: The elementwise layers before the first matrix, and after each.
    """

    matrices: list[Tensor]
    bends: list[list[Bend]]


def is_by_columns(tree: Nesting) -> bool:
    """Tell whether a product is laid out ``(batch, ins, outs)``."""
    return isinstance(tree, Product) and tree.columns


def whole_product(factors: Factors, tree: Nesting, into: Tensor | None) -> Tensor:
    """Return the product of all factors, ``(batch, outs, ins)`` or ``(outs, ins)``.

    Args:
        factors: The factors.
        tree: The order.
        into: A tensor that the product may be written to.
    """
    columns = is_by_columns(tree)
    if into is not None:
        # Transposed, where the product is laid out by columns.
        seen = into.mT if columns else into
        if seen.is_contiguous():
            made = product(factors, tree, columns=columns, into=seen)
            if made.data_ptr() == into.data_ptr():  # perhaps another view of it
                return into
            return made.mT if columns else made
    made = product(factors, tree, columns=columns)
    return made.mT if columns else made


def product(
    factors: Factors, tree: Nesting, *, columns: bool, into: Tensor | None = None
) -> Tensor:
    """Return the product of the factors that a tree joins.

    Args:
        factors: All factors.
        tree: The order, or a part of it.
        columns: Whether the result is ``(batch, ins, outs)``, not ``(batch, outs,
            ins)``. Where no bend is inside, there is no batch axis.
        into: A tensor that the product may be written to.
    """
    if isinstance(tree, int):
        matrix = factors.matrices[tree]
        # Elementwise layers keep the layout, and the next product needs this one.
        made = matrix.mT.contiguous() if columns else matrix
        alone = len(factors.matrices) == 1
        return _ended(factors, 0, 0, made, columns) if alone else made
    if columns != tree.columns:
        return product(factors, tree, columns=not columns).mT
    inner, outer, _ = tree
    last = outer if isinstance(outer, int) else -1
    first = inner if isinstance(inner, int) else -1
    joins = first < 0 and last < 0  # then the bends at both ends are inside
    if into is not None and not _has_samples(factors, whole=joins):
        into = None
    if joins:
        return _joined(factors, tree, into)
    if columns:
        left = pulled(product(factors, inner, columns=True), factors.bends[last])
        made = multiplied(left, factors.matrices[last].mT, into)
    else:
        left = product(factors, outer, columns=False)
        left = pulled(left, factors.bends[first + 1])
        made = multiplied(left, factors.matrices[first], into)
    return _ended(factors, first, last, made, columns)


def _has_samples(factors: Factors, *, whole: bool) -> bool:
    """Tell whether the product of all factors has a batch axis.

    Args:
        factors: The factors.
        whole: Whether to count the bends before the first matrix and after the last.
    """
    bends = factors.bends if whole else factors.bends[1:-1]
    return any(bends) or factors.matrices[-1].dim() > 2


def _ended(
    factors: Factors, first: int, last: int, made: Tensor, columns: bool
) -> Tensor:
    """Multiply by the bends before the first matrix, and after the last."""
    before, after = factors.bends[0], factors.bends[-1]
    if first == 0 and before:
        made = pulled(made.mT, before).mT if columns else pulled(made, before)
    if last == len(factors.matrices) - 1 and after:
        made = pulled(made, after) if columns else pulled(made.mT, after).mT
    return made


def _joined(factors: Factors, tree: Product, into: Tensor | None) -> Tensor:
    inner = product(factors, tree.inner, columns=True)
    outer = product(factors, tree.outer, columns=False)
    bends = factors.bends[_first_of(tree.outer)]
    if inner.shape[-2] < outer.shape[-2]:
        inner = pulled(inner, bends)
    else:
        outer = pulled(outer, bends)
    left, right = (inner, outer.mT) if tree.columns else (outer, inner.mT)
    return torch.matmul(left, right, out=into)


def _first_of(tree: Nesting) -> int:
    """Return the number of the first matrix in a product."""
    while not isinstance(tree, int):
        tree = tree.inner
    return tree
