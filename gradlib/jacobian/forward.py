"""Forward: the Jacobian column by column, each a JVP with a unit vector.

The VJP is linear in its vector v, so its own VJP with respect to v is the JVP (J.
Townsend, "A new trick for calculating Jacobian vector products", 2017). All of it uses
the graph of the one forward pass; nothing is computed with other numbers than that.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlib.edges import Differentiable
from gradlib.errors import NoSuchWayError
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.passes import chunks, one_hot, one_hot_for_all, pull
from gradlib.jacobian.pieces import COLUMNS, Piece

BY_COLUMNS = ("forward", "split")
"""The modes that ask for columns, and so differentiate twice."""


def count_columns(graph: Graph) -> int:
    """Return how many columns there are to ask for."""
    return sum(graph.columns(i) for i in range(len(graph.points)))


Push: TypeAlias = Callable[[int, Tensor], Sequence[Tensor | None]]
"""From which input, and tangents of it, ``(count, *x.shape)``, to those of each output;
``None`` where it does not depend."""


def pieces(
    graph: Graph,
    chunk: int,
    *,
    create_graph: bool = False,
    push: Push | None = None,
) -> Iterator[Piece]:
    """Return the Jacobian in chunks of columns.

    Args:
        graph: Where it comes from.
        chunk: How many columns a pass asks for.
        create_graph: Whether the pieces have a graph too.
        push: What makes a pass, if not autograd.

    Raises:
        NoSuchWayError: The graph cannot be differentiated twice.
    """
    for i, point in enumerate(graph.points):
        columns = graph.columns(i)
        if push:
            go = partial(push, i)
        else:
            linear = Linearized(graph.roots, point)
            go = partial(linear.push, create_graph=create_graph)
        for start, length in chunks(columns, chunk):
            if graph.shared[i]:
                u = one_hot(length, point, start, columns).view(length, *point.shape)
            else:
                u = one_hot_for_all(length, point, start, point.shape)
            found = go(u)
            for root, tangents in enumerate(found):
                if tangents is not None:
                    rows = graph.rows(root)
                    tangents = tangents.reshape(length, graph.batch, rows)
                    tangents = tangents.movedim(0, 2)
                yield Piece((root, i), COLUMNS, start, length, tangents)


NO_COLUMNS = (
    "The backward pass of an operation here leaves no graph of its own, so it has no "
    'columns to give. Use mode="reverse".'
)
"""What is said of a function that cannot be linearized."""


class Linearized:
    """The map from a tangent at one place of the graph to those of the outputs."""

    def __init__(self, outputs: Sequence[Tensor], place: Differentiable) -> None:
        """Go back once, with vectors that stay variable."""
        # Which these are does not matter. But some backward passes answer zeros with
        # nothing.
        self._v = [torch.ones_like(y).requires_grad_() for y in outputs]
        grad: Any = torch.autograd.grad  # its stubs know no edge among tensors
        found = grad(outputs, [place], self._v, create_graph=True, allow_unused=True)
        self._pulled: Tensor | None = found[0]
        if self._pulled is not None and not self._pulled.requires_grad:
            raise NoSuchWayError(NO_COLUMNS)

    def push(self, tangents: Tensor, create_graph: bool = False) -> list[Tensor | None]:
        """Return J u for several u.

        Args:
            tangents: ``(count, *x.shape)``.
            create_graph: Whether the result has a graph too.

        Returns:
            For each output ``(count, *y.shape)``; ``None`` where it does not depend.

        Raises:
            NoSuchWayError: An operation cannot be differentiated twice.
        """
        if self._pulled is None:
            return [None] * len(self._v)
        try:
            return pull(self._pulled, self._v, tangents, create_graph=create_graph)
        except RuntimeError as error:
            if len(tangents) > 1 or is_out_of_memory(error):
                raise  # it may be that they cannot run together
            raise NoSuchWayError(
                "An operation here cannot be differentiated twice, which columns need: "
                f'{str(error).rstrip(".")}. Use mode="reverse".'
            ) from error
