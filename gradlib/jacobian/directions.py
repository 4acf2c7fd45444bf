"""Random directions to move inputs in, of those that torch's derivatives hold for."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.graph import Graph

Moves: TypeAlias = dict[int | str, Tensor]
"""A direction: by place for inputs, by name for parameters; in their dtypes."""

FOR_SYMMETRIC = {
    "LinalgCholeskyExBackward0": "torch.linalg.cholesky",
    "LinalgEighBackward0": "torch.linalg.eigh",
    "CholeskyBackward0": "torch.cholesky",
    # Its node is the same without hermitian=True.
    "LinalgPinvBackward0": "torch.linalg.pinv(hermitian=True)",
}
"""Nodes whose derivatives hold for symmetric changes, as only half the matrix is read,
and the functions that make them."""

FOR_TRIANGULAR = {
    "CholeskyInverseBackward0": "torch.cholesky_inverse",
    "CholeskySolveBackward0": "torch.cholesky_solve",
}
"""Nodes whose derivatives hold for triangular changes, as the function reads half of
the matrix and its gradient fills both, and the functions that make them."""


@dataclass(frozen=True)
class Meant:
    """The limits on directions that torch's derivatives hold for.

    Attributes:
        symmetric: A function that takes a matrix for symmetric, if there is one:
            symmetric matrices stay so.
        triangular: The same for triangular matrices.
        constant: For each embedding table, by its key, the rows that have no gradient.
    """

    symmetric: str | None
    triangular: str | None
    constant: dict[int | str, set[int]]


def meant(arguments: Arguments, graph: Graph) -> Meant:
    """Return the limits on directions that a graph's nodes set."""
    keys = {
        node: it.key for it, (node, _) in zip(arguments.asked, graph.ends, strict=True)
    }
    symmetric = triangular = None
    constant: dict[int | str, set[int]] = {}
    for name, node in zip(graph.drawing.names, graph.nodes, strict=True):
        symmetric = symmetric or FOR_SYMMETRIC.get(name)
        triangular = triangular or FOR_TRIANGULAR.get(name)
        if name == "EmbeddingBackward0":
            table, row = _table_of(node), _padding_of(node)
            if table in keys and row is not None:
                constant.setdefault(keys[table], set()).add(row)
    return Meant(symmetric, triangular, constant)


def direction(chance: Chance, arguments: Arguments, meant: Meant) -> Moves:
    """Return a random direction, in which each entry moves in proportion to its size.

    Args:
        chance: Draws the numbers.
        arguments: The tensors that move are those in `asked`.
        meant: The limits on directions.
    """
    moves: Moves = {}
    for it in arguments.asked:
        made = _by_size(chance, it.value.detach())
        if meant.symmetric is not None and _is_symmetric(it.value):
            made = (made + made.mT) / 2
        if meant.triangular is not None and _is_square(it.value):
            made = _as_triangular_as(it.value, made)
        for row in meant.constant.get(it.key, ()):
            made[row] = 0
        moves[it.key] = made
    return moves


def _by_size(chance: Chance, value: Tensor) -> Tensor:
    sizes = value.abs()
    if sizes.numel():
        least, most = sizes.aminmax()
        if least > 0 and most < math.inf:  # so no NaN either
            return sizes.mul_(chance.vector(value))
    others = sizes[sizes.isfinite() & (sizes != 0)]
    # Sizes may differ by much, as of a time of day beside an angle.
    sizes[sizes == 0] = others.median() if others.numel() else 1.0
    sizes[~sizes.isfinite()] = 0
    return sizes.mul_(chance.vector(value))


def _is_square(value: Tensor) -> bool:
    return value.dim() > 1 and value.shape[-2] == value.shape[-1]


def _is_symmetric(value: Tensor) -> bool:
    return _is_square(value) and torch.equal(value, value.mT)


def _as_triangular_as(value: Tensor, made: Tensor) -> Tensor:
    """Return the direction `made`, zero in a half of the matrix that is zero."""
    for half in (torch.tril, torch.triu):
        if torch.equal(value, half(value)):
            made = half(made)
    return made


def _table_of(node: Node) -> Node | None:
    table = node.next_functions[0][0]
    if table is not None and table.name() == "CloneBackward0":  # our clone of an input
        table = table.next_functions[0][0]
    return table


def _padding_of(node: Any) -> int | None:
    row: int = node._saved_padding_idx
    return row if row < 2**63 else None  # -1, read as unsigned, means none
