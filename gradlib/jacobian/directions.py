"""Random directions to move the inputs in: those that derivatives are meant for."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.arguments import Arguments, Asked
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.graph import Graph

Moves: TypeAlias = dict[int | str, Tensor]
"""What is added to inputs, by place, and to parameters, by name; in their dtypes."""

FOR_SYMMETRIC = {
    "LinalgCholeskyExBackward0": "torch.linalg.cholesky",
    "LinalgEighBackward0": "torch.linalg.eigh",
    "CholeskyBackward0": "torch.cholesky",
    # Nothing tells it from the one that reads all of the matrix.
    "LinalgPinvBackward0": "torch.linalg.pinv(hermitian=True)",
}
"""Nodes whose derivatives hold for symmetric changes, as only half the matrix is read,
and the functions that made them."""

FOR_TRIANGULAR = {
    "CholeskyInverseBackward0": "torch.cholesky_inverse",
    "CholeskySolveBackward0": "torch.cholesky_solve",
}
"""Nodes whose derivatives hold for triangular changes: they fill both halves of a
matrix of which the function reads one."""


@dataclass(frozen=True)
class Meant:
    """What torch's derivatives leave out.

    Attributes:
        symmetric: What takes a matrix for symmetric: those that are so stay so.
        triangular: What takes a matrix for triangular: those that are so stay so.
        constant: The rows of tables that torch takes for constant, by their key.
    """

    symmetric: str | None
    triangular: str | None
    constant: dict[int | str, set[int]]


def key(it: Asked) -> int | str:
    """Return the key of a tensor among `Moves`."""
    return it.name if it.place is None else it.place


def meant(arguments: Arguments, graph: Graph) -> Meant:
    """Look through a graph for what derivatives leave out.

    Args:
        arguments: The call.
        graph: What it left.
    """
    keys = {
        node: key(it) for it, (node, _) in zip(arguments.asked, graph.ends, strict=True)
    }
    symmetric = triangular = None
    constant: dict[int | str, set[int]] = {}
    for node in graph.way:
        name = node.name()
        symmetric = symmetric or FOR_SYMMETRIC.get(name)
        triangular = triangular or FOR_TRIANGULAR.get(name)
        if name == "EmbeddingBackward0":
            table, row = _table_of(node), _padding_of(node)
            if table in keys and row is not None:
                constant.setdefault(keys[table], set()).add(row)
    return Meant(symmetric, triangular, constant)


def direction(chance: Chance, arguments: Arguments, meant: Meant) -> Moves:
    """Return a random direction, in which each entry goes by its own size.

    Args:
        chance: Where the numbers come from.
        arguments: What is asked for.
        meant: What stays as it is.
    """
    moves: Moves = {}
    for it in arguments.asked:
        made = _by_size(chance, it.value.detach())
        if meant.symmetric is not None and _is_symmetric(it.value):
            made = (made + made.mT) / 2
        if meant.triangular is not None and _is_square(it.value):
            made = _as_triangular_as(it.value, made)
        for row in meant.constant.get(key(it), ()):
            made[row] = 0
        moves[key(it)] = made
    return moves


def _by_size(chance: Chance, value: Tensor) -> Tensor:
    sizes = value.abs()
    if sizes.numel():
        least, most = sizes.aminmax()
        if least > 0 and most < math.inf:  # nor is any NaN
            return sizes.mul_(chance.vector(value))
    others = sizes[sizes.isfinite() & (sizes != 0)]
    # Each entry by its own size: a time of day beside an angle.
    sizes[sizes == 0] = others.median() if others.numel() else 1.0
    sizes[~sizes.isfinite()] = 0
    return sizes.mul_(chance.vector(value))


def _is_square(value: Tensor) -> bool:
    return value.dim() > 1 and value.shape[-2] == value.shape[-1]


def _is_symmetric(value: Tensor) -> bool:
    return _is_square(value) and torch.equal(value, value.mT)


def _as_triangular_as(value: Tensor, made: Tensor) -> Tensor:
    """Return a direction in which a half that is zero stays so."""
    for half in (torch.tril, torch.triu):
        if torch.equal(value, half(value)):
            made = half(made)
    return made


def _table_of(node: Node) -> Node | None:
    table = node.next_functions[0][0]
    if table is not None and table.name() == "CloneBackward0":  # an input's, of ours
        table = table.next_functions[0][0]
    return table


def _padding_of(node: Any) -> int | None:
    row: int = node._saved_padding_idx
    return row if row < 2**63 else None  # -1 without a sign says that there is none
