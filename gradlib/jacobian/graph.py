"""The graph of the one forward pass, which every mode starts from."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import Edge, edge_of
from gradlib.jacobian.drawing import Drawing, drawn
from gradlib.private.nodes import is_packed
from gradlib.tree import Tree


@dataclass(frozen=True)
class Graph:
    """Outputs, the tensors their Jacobian is with respect to, and the graph between.

    Attributes:
        outputs: What the function returned.
        places: The places of the tensors among the leaves of `outputs`.
        points: The tensors that the Jacobian is with respect to.
        ends: The edge that the gradient of each point flows through.
        shared: For each point whether all samples share it.
        names: For each point what messages call it.
        batch: The number of samples.
        others: Tensors of the user's whose ``.grad`` a pass may fill.
        may_have_hooks: Whether hooks may have been set while the outputs were computed.
            Tensors computed from parameters before that may have some too.
    """

    outputs: Tree
    places: tuple[int, ...]
    points: tuple[Tensor, ...]
    ends: tuple[Edge, ...]
    shared: tuple[bool, ...]
    names: tuple[str, ...]
    batch: int
    others: tuple[Tensor, ...] = ()
    may_have_hooks: bool = True

    @cached_property
    def roots(self) -> list[Tensor]:
        """The output tensors, ``(batch, *out)`` each."""
        return [self.outputs.leaves[place] for place in self.places]

    @cached_property
    def _drawn(self) -> tuple[Drawing, list[Node]]:
        tops = [edge_of(it) if it.requires_grad else None for it in self.roots]
        return drawn(tops, self.ends)

    @property
    def on_cpu(self) -> bool:
        """Whether passes run on a CPU."""
        return self.points[0].device.type == "cpu"

    @property
    def drawing(self) -> Drawing:
        """The structure of this graph, without its values."""
        return self._drawn[0]

    @property
    def nodes(self) -> list[Node]:
        """The nodes from outputs to points, in the order of `drawing`."""
        return self._drawn[1]

    @cached_property
    def is_packed(self) -> bool:
        """Whether a node's saved tensors were packed by saved-tensor hooks."""
        drawing, nodes = self._drawn
        return any(map(is_packed, itertools.compress(nodes, drawing.led)))

    def rows(self, root: int) -> int:
        """Return how many entries an output has for each sample."""
        return math.prod(self._sizes[0][root][1:])

    def columns(self, point: int) -> int:
        """Return how many entries a row of the Jacobian of one sample has."""
        return math.prod(self._sizes[1][point])

    def shape(self, root: int, point: int) -> tuple[int, ...]:
        """Return the shape of a block: ``(batch, *out, *in)``."""
        outs, ins = self._sizes
        return outs[root] + ins[point]

    @cached_property
    def _sizes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The shapes of the outputs, and of a sample of each point."""
        pairs = zip(self.points, self.shared, strict=True)
        ins = [tuple(it.shape)[0 if shared else 1 :] for it, shared in pairs]
        return [tuple(it.shape) for it in self.roots], ins

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Return each pair of the number of an output and that of a point."""
        return itertools.product(range(len(self.places)), range(len(self.points)))

    def size(self) -> int:
        """Return how many bytes the whole Jacobian takes."""
        return sum(
            math.prod(self.shape(root, point)) * self.points[point].element_size()
            for root, point in self.blocks()
        )


def output_path(outputs: Tree, place: int) -> str:
    """Return what messages call an output: ``output['mean']``."""
    return "output" + outputs.path(place)
