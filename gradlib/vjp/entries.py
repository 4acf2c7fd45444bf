"""The entries of a product as plain numbers, with a name for each row and column."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product as every
from typing import Any, cast

from torch import Tensor

from gradlib.plain_tensors import wide
from gradlib.vjp.product import Jacobian, Product


@dataclass(frozen=True)
class Entries:
    """The entries of v, J and vᵀJ, with each tensor flattened.

    Attributes:
        rows: For each output the names of its entries, as ``"y[0, 2]"``.
        columns: For each input the names of its entries.
        v: For each output the weights of its rows.
        blocks: For each output and input the rows of J.
        sums: For each input vᵀJ.
    """

    rows: list[list[str]]
    columns: list[list[str]]
    v: list[list[Any]]
    blocks: list[list[list[list[Any]]]]
    sums: list[list[Any]]


def entries_of(
    product: Product, jacobian: Jacobian, called: Mapping[str, str]
) -> Entries:
    """Return the entries of a product that has a Jacobian.

    Args:
        product: The product.
        jacobian: Its Jacobian.
        called: Names for outputs and inputs that replace those of formulas.
    """
    ys, xs = (
        [called.get(it, it) for it in part]
        for part in (product.outputs, product.inputs)
    )
    return Entries(
        list(map(_names, ys, product.v)),
        list(map(_names, xs, product.results)),
        list(map(_flat, product.v)),
        [
            [
                cast(Any, wide(block).reshape(v.numel(), result.numel())).tolist()
                for block, result in zip(row, product.results, strict=True)
            ]
            for v, row in zip(product.v, jacobian.blocks, strict=True)
        ],
        list(map(_flat, product.results)),
    )


def _names(name: str, tensor: Tensor) -> list[str]:
    indices = every(*map(range, tensor.shape))
    return [f"{name}{list(index) or ''}" for index in indices]


def _flat(tensor: Tensor) -> list[Any]:
    return cast(Any, wide(tensor).flatten()).tolist()
