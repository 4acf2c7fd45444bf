"""An operation of a graph: what went in, what came out, and what it has saved."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.form import Form


class Operation:
    """A node, what went in and what came out, and how large a factor may be."""

    __slots__ = ("_form", "most", "node", "number", "shape", "shapes")

    def __init__(
        self,
        node: Node | None,
        number: int,
        form: Form,
        shapes: Mapping[int, Sequence[int]],
        most: int = sys.maxsize,
    ) -> None:
        """Take an operation.

        Args:
            node: The node; ``None`` where it will not be asked what it has saved.
            number: Which of its outputs.
            form: What that is.
            shapes: Of what went in, by position, where it matters.
            most: How many entries a factor has at most that nobody has saved.
        """
        self.node: Any = node
        self.number = number
        self.shapes = shapes
        self.most = most
        self.shape = form.shape
        self._form = form

    @property
    def like(self) -> dict[str, Any]:
        """The dtype and device of what came out."""
        return {"dtype": self._form.dtype, "device": self._form.device}

    def saved(self, name: str) -> Any:
        """Return what the node has saved, or ``None``."""
        value = getattr(self.node, "_saved_" + name, None)
        return value.detach() if isinstance(value, Tensor) else value

    def dim(self, name: str = "dim") -> int:
        """Return a dimension that the node has saved, not negative."""
        return dim_of(self.saved(name), len(self.shape))


def dim_of(value: int, count: int) -> int:
    """Return a dimension, which the node may have as an unsigned number."""
    return signed(value) % max(count, 1)


def of_each_axis(saved: list[int], axes: int) -> list[int]:
    """Return a number for each axis of a convolution, which may have saved one for all.

    It has where it was given a list of one, or ``padding="valid"``.
    """
    return saved * axes if len(saved) == 1 else saved


def signed(value: int) -> int:
    """Return a number that a node may have as an unsigned one."""
    return value - 2**64 if value >= 2**63 else value
