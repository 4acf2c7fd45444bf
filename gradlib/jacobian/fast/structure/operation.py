"""An operation of a graph, and what a rule says of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.fast.structure.named_axes import Dims
from gradlib.private import forms_at


@dataclass(frozen=True)
class Step:
    """From what came out of an operation to one thing that went in.

    Attributes:
        dims: The axes of what went in.
        factors: Tensors with the axes of theirs. The derivative is their product, and
            zero where two entries differ along an axis that both sides have.
        scale: A number it is multiplied by too.
        work: The multiply-adds that a backward pass takes here.
    """

    dims: Dims
    factors: tuple[tuple[Tensor, Dims], ...] = ()
    scale: float = 1
    work: int = 0


Edge: TypeAlias = Callable[[Dims], Step | None]
"""From the axes of what came out of an operation."""


class Operation:
    """A node, what went in and what came out, and how large a factor may be."""

    def __init__(
        self, node: Node, number: int, shapes: Mapping[int, Sequence[int]], most: int
    ) -> None:
        """Take what `edges` was given."""
        forms = forms_at(node)
        self.node: Any = node
        self.number = number
        self.shapes = shapes
        self.most = most
        self.shape = tuple(map(int, forms[number].shape))
        self.like: dict[str, Any] = {
            "dtype": forms[number].dtype,
            "device": forms[number].device,
        }

    def saved(self, name: str) -> Any:
        """Return what the node has saved, or ``None``."""
        return getattr(self.node, "_saved_" + name, None)

    def dim(self, name: str = "dim") -> int:
        """Return a dimension that the node has saved, not negative."""
        return dim_of(self.saved(name), len(self.shape))


def same(*scales: float) -> dict[int, Edge]:
    """Return maps to what has the same axes, times a number for each."""

    def edge(scale: float) -> Edge:
        return lambda dims: Step(dims, scale=scale)

    return {i: edge(scale) for i, scale in enumerate(scales)}


def dim_of(value: int, count: int) -> int:
    """Return a dimension, which the node may have as an unsigned number."""
    return signed(value) % max(count, 1)


def signed(value: int) -> int:
    """Return a number that a node may have as an unsigned one."""
    return value - 2**64 if value >= 2**63 else value
