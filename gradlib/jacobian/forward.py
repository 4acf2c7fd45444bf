"""Forward: the Jacobian column by column, each a JVP with a unit vector.

The VJP is linear in its vector v, so its own VJP with respect to v is the JVP (J.
Townsend, "A new trick for calculating Jacobian vector products", 2017). So columns use
the graph and the numbers of the one forward pass.
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
"""The modes that compute columns, and so differentiate twice."""


def count_columns(graph: Graph) -> int:
    """Return how many JVPs the whole Jacobian takes."""
    return sum(graph.columns(i) for i in range(len(graph.points)))


Push: TypeAlias = Callable[[int, Tensor], Sequence[Tensor | None]]
"""A function of an input's number and its tangents, ``(count, *x.shape)``, that gives
those of each output, ``(count, *y.shape)``; ``None`` where it does not depend."""


def pieces(
    graph: Graph,
    chunk: int,
    *,
    create_graph: bool = False,
    push: Push | None = None,
) -> Iterator[Piece]:
    """Return the Jacobian in chunks of columns.

    Args:
        graph: The graph of the forward pass.
        chunk: How many columns a pass computes.
        create_graph: Whether the pieces have a graph too.
        push: What computes JVPs in place of autograd.

    Raises:
        NoSuchWayError: The graph cannot be differentiated twice.
    """
    for i, point in enumerate(graph.points):
        columns = graph.columns(i)
        if push:
            push_point = partial(push, i)
        else:
            linear = Linearized(graph.roots, point)
            push_point = partial(linear.push, create_graph=create_graph)
        for start, length in chunks(columns, chunk):
            if graph.shared[i]:
                u = one_hot(length, point, start, columns).view(length, *point.shape)
            else:
                u = one_hot_for_all(length, point, start, point.shape)
            pushed = push_point(u)
            for root, tangents in enumerate(pushed):
                if tangents is not None:
                    rows = graph.rows(root)
                    tangents = tangents.reshape(length, graph.batch, rows)
                    tangents = tangents.movedim(0, 2)
                yield Piece((root, i), COLUMNS, start, length, tangents)


NO_COLUMNS = (
    "The backward pass of an operation here leaves no graph of its own, so it has no "
    'columns to give. Use mode="reverse".'
)
"""The message for a function that cannot be linearized."""


class Linearized:
    """The linear map from tangents at a tensor or edge to those of the outputs.

    Attributes:
        vjp: The VJP of the vectors that it was made with, with a graph; ``None`` where
            no output depends on the tensor.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        place: Differentiable,
        vectors: Sequence[Tensor] | None = None,
    ) -> None:
        """Go back once, with vectors v that require grad.

        Args:
            outputs: The outputs.
            place: The tensor or edge.
            vectors: The cotangent of each output, where its VJP is wanted too. Any will
                do, but for zeros: some backward passes return nothing for them.
        """
        vectors = vectors or [torch.ones_like(y) for y in outputs]
        self._v = [v.requires_grad_() for v in vectors]
        grad: Any = torch.autograd.grad  # its stubs know no edge among tensors
        found = grad(outputs, [place], self._v, create_graph=True, allow_unused=True)
        self.vjp: Tensor | None = found[0]
        if self.vjp is not None and not self.vjp.requires_grad:
            raise NoSuchWayError(NO_COLUMNS)

    def push(self, tangents: Tensor, create_graph: bool = False) -> list[Tensor | None]:
        """Return the JVPs of several tangents.

        Args:
            tangents: The tangents of x, ``(count, *x.shape)``.
            create_graph: Whether the result has a graph too.

        Returns:
            For each output ``(count, *y.shape)``; ``None`` where it does not depend.

        Raises:
            NoSuchWayError: An operation cannot be differentiated twice.
        """
        if self.vjp is None:
            return [None] * len(self._v)
        try:
            return pull(self.vjp, self._v, tangents, create_graph=create_graph)
        except RuntimeError as error:
            if len(tangents) > 1 or is_out_of_memory(error):
                raise  # maybe only for several tangents at once
            raise NoSuchWayError(
                "An operation here cannot be differentiated twice, which columns need: "
                f'{str(error).rstrip(".")}. Use mode="reverse".'
            ) from error
