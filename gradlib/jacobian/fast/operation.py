"""An operation of a graph: the shapes of its inputs and output, and saved values."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.drawing import Drawing, Spot, kept_for_each
from gradlib.jacobian.form import Form

FACTORS = {
    "AddmmBackward0": ("mat1", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2"),
}
"""The names of the saved factors, for products to which something is added."""


@dataclass(slots=True, eq=False)
class Operation:
    """An output of a node, with the shapes of its inputs and a limit of size.

    Attributes:
        node: The node.
        number: Which of its outputs.
        form: The form of that output.
        shapes: The shapes of the inputs that gradients go to, by position.
        most: How many entries a computed factor of the Jacobian has at most.
    """

    node: Any
    number: int
    form: Form
    shapes: Mapping[int, Sequence[int]]
    most: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output."""
        return self.form.shape

    @property
    def like(self) -> dict[str, Any]:
        """The dtype and device of the output."""
        return {"dtype": self.form.dtype, "device": self.form.device}

    def saved(self, name: str) -> Any:
        """Return a value that the node has saved, by its name, or ``None``."""
        value = getattr(self.node, "_saved_" + name, None)
        return value.detach() if isinstance(value, Tensor) else value

    def dim(self, name: str = "dim") -> int:
        """Return a saved dimension as a non-negative number."""
        return dim_of(self.saved(name), len(self.shape))


class Drawn(NamedTuple):
    """An operation as far as the drawing of a graph tells.

    Attributes:
        node: The number of its node.
        name: The name of that.
        spot: The spot of its output.
        form: The form of that.
        given: The spots of the inputs that gradients go to, by position.
        shapes: The shapes of these.
    """

    node: int
    name: str
    spot: Spot
    form: Form
    given: dict[int, Spot]
    shapes: dict[int, tuple[int, ...]]

    def among(self, nodes: Sequence[Node], most: int = sys.maxsize) -> Operation:
        """Return the operation, among the nodes of a graph of that drawing.

        Args:
            nodes: The nodes.
            most: How many entries a computed factor of the Jacobian has at most.
        """
        return Operation(nodes[self.node], self.spot[1], self.form, self.shapes, most)


@kept_for_each
def operations(drawing: Drawing) -> list[Drawn]:
    """Return all operations, each before those that gradients go to from it."""
    spots: dict[int, list[Spot]] = defaultdict(list)
    for spot in sorted(drawing.forms):  # a node may have several outputs
        spots[spot[0]].append(spot)
    every: list[Drawn] = []
    for node, led in enumerate(drawing.led):
        if led:
            given = dict(zip(drawing.positions[node], led, strict=True))
            shapes = {i: drawing.forms[spot].shape for i, spot in given.items()}
            every += [
                Drawn(node, drawing.names[node], it, drawing.forms[it], given, shapes)
                for it in spots[node]
            ]
    return every


def dim_of(value: int, count: int) -> int:
    """Return a dimension, maybe saved as unsigned, as a non-negative number."""
    return signed(value) % max(count, 1)


def of_each_axis(saved: list[int], axes: int) -> list[int]:
    """Return a number for each axis of a convolution, which may have saved one for all.

    It saves one where it was given a list of one, or ``padding="valid"``.
    """
    return saved * axes if len(saved) == 1 else saved


def signed(value: int) -> int:
    """Return a number that a node may have saved as unsigned."""
    return value - 2**64 if value >= 2**63 else value
