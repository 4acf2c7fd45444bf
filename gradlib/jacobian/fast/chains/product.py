"""Carrying an order out: the products of layers' Jacobians."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.fast.chains.bends import Bend, pulled
from gradlib.jacobian.fast.chains.order import Nesting, Product
from gradlib.jacobian.fast.matmul import multiplied


class Factors(NamedTuple):
    """The Jacobians of a chain's layers.

    Attributes:
        matrices: The weights of the linear layers, ``(outs, ins)``. The last may be
            another for each sample, ``(batch, outs, ins)``.
        bends: What comes before the first of them, after each, and after the last.
    """

    matrices: list[Tensor]
    bends: list[list[Bend]]


def is_by_columns(tree: Nesting) -> bool:
    """Tell whether a product is laid out ``(batch, ins, outs)``."""
    return isinstance(tree, Product) and tree.columns


def whole_product(factors: Factors, tree: Nesting, into: Tensor | None) -> Tensor:
    """Return all factors multiplied, ``(batch, outs, ins)`` or ``(outs, ins)``.

    Args:
        factors: What is multiplied.
        tree: In which order.
        into: Where to write it, if it can be written there at once.
    """
    columns = is_by_columns(tree)
    if into is not None:
        # Its layout, seen as the product has it, if it is the same.
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
    """Multiply.

    Args:
        factors: What is multiplied.
        tree: In which order.
        columns: Whether the result is ``(batch, ins, outs)``, not ``(batch, outs,
            ins)``. Where no bend is inside, there is no batch axis.
        into: Where to write it, if it can be written there at once.
    """
    if isinstance(tree, int):
        matrix = factors.matrices[tree]
        # What is elementwise keeps the layout, and the next product wants this one.
        made = matrix.mT.contiguous() if columns else matrix
        alone = len(factors.matrices) == 1
        return _ended(factors, 0, 0, made, columns) if alone else made
    if columns != tree.columns:
        return product(factors, tree, columns=not columns).mT
    inner, outer, _ = tree
    last = outer if isinstance(outer, int) else -1
    first = inner if isinstance(inner, int) else -1
    joins = first < 0 and last < 0  # then what comes before and after is inside
    if into is not None and not _has_samples(factors, whole=joins):
        into = None
    if joins:
        return _joined(factors, tree, into)
    if columns:
        left = _pulled(product(factors, inner, columns=True), factors.bends[last])
        made = multiplied(left, factors.matrices[last].mT, into)
    else:
        left = product(factors, outer, columns=False)
        left = _pulled(left, factors.bends[first + 1])
        made = multiplied(left, factors.matrices[first], into)
    return _ended(factors, first, last, made, columns)


def _has_samples(factors: Factors, *, whole: bool) -> bool:
    """Tell whether a product has a batch axis.

    Args:
        factors: What is multiplied.
        whole: Whether with what comes before the first matrix, and after the last.
    """
    bends = factors.bends if whole else factors.bends[1:-1]
    return any(bends) or factors.matrices[-1].dim() > 2


def _ended(
    factors: Factors, first: int, last: int, made: Tensor, columns: bool
) -> Tensor:
    """Put in what comes before the first matrix of all, and after the last."""
    before, after = factors.bends[0], factors.bends[-1]
    if first == 0 and before:
        made = _pulled(made.mT, before).mT if columns else _pulled(made, before)
    if last == len(factors.matrices) - 1 and after:
        made = _pulled(made, after) if columns else _pulled(made.mT, after).mT
    return made


def _joined(factors: Factors, tree: Product, into: Tensor | None) -> Tensor:
    inner = product(factors, tree.inner, columns=True)
    outer = product(factors, tree.outer, columns=False)
    bends = factors.bends[_first_of(tree.outer)]
    if inner.shape[-2] < outer.shape[-2]:
        inner = _pulled(inner, bends)
    else:
        outer = _pulled(outer, bends)
    left, right = (inner, outer.mT) if tree.columns else (outer, inner.mT)
    return torch.matmul(left, right, out=into)


def _pulled(v: Tensor, bends: list[Bend]) -> Tensor:
    """Return vectors times slopes; none but the weights, of all samples, are kept."""
    return pulled(v, bends, ours=True)


def _first_of(tree: Nesting) -> int:
    """Return the number of the first matrix in a product."""
    while not isinstance(tree, int):
        tree = tree.inner
    return tree
