"""One VJP with random numbers: of a whole batch, or of some samples and not others."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlib.edges import Differentiable
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.passes import vjp


@dataclass(frozen=True)
class Look:
    """A VJP of random vectors, which may be zero for some samples or entries.

    Attributes:
        vectors: The cotangent of each output, ``(batch, *out)``.
        grads: The gradient of each input; ``None`` where no way leads to it.
    """

    vectors: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def at(
        cls,
        chance: Chance,
        roots: Sequence[Tensor],
        points: Sequence[Differentiable],
        half: Tensor,
    ) -> "Look":
        """Return the VJP of vectors that are random in `half`, and zero elsewhere."""
        vectors = vectors_in(half, chance, roots)
        return cls(vectors, vjp(roots, points, vectors))

    @classmethod
    def at_all(cls, graph: Graph) -> "Look":
        """Return the VJP of vectors that are random at every sample."""
        chance = Chance()
        vectors = [chance.vector(root) for root in graph.roots]
        return cls(vectors, vjp(graph.roots, graph.points, vectors))

    @classmethod
    def at_entries(cls, graph: Graph, root: int, entries: Tensor) -> "Look":
        """Return the VJP of a vector that is random at some entries of an output.

        Args:
            graph: The graph.
            root: Which output.
            entries: Which of its entries, ``(batch, out)``.
        """
        vectors = [torch.zeros_like(it) for it in graph.roots]
        drawn = Chance().vector(graph.roots[root])
        drawn[~entries.view(drawn.shape).to(drawn.device)] = 0
        vectors[root] = drawn
        return cls(vectors, vjp(graph.roots, graph.points, vectors))

    def coupled(self, half: Tensor, count: int) -> int | None:
        """Return the first of `count` inputs that has a gradient outside of `half`."""
        for i, grad in enumerate(self.grads[:count]):
            if grad is not None:
                others = grad[~half.to(grad.device)]
                # NaN may be 0 · inf, and proves nothing.
                if others.any() and ((others != 0) & ~others.isnan()).any():
                    return i
        return None


def vectors_in(half: Tensor, chance: Chance, roots: Sequence[Tensor]) -> list[Tensor]:
    """Return a vector for each output, random in `half`, and zero elsewhere."""
    vectors = [chance.vector(root) for root in roots]
    for vector in vectors:
        vector[~half.to(vector.device)] = 0
    return vectors


def first_coupled(
    chance: Chance, roots: Sequence[Tensor], points: Sequence[Tensor]
) -> tuple[int, Tensor] | None:
    """Return which input couples samples: it leads to outputs of other samples.

    Args:
        chance: Draws the cotangents.
        roots: The outputs, ``(batch, *out)``.
        points: The inputs, ``(batch, *in)``.

    Returns:
        Its number in `points`, and the samples whose outputs were asked; ``None`` where
        no input does.
    """
    if not points:
        return None
    for half in every_pair(len(roots[0])):
        number = Look.at(chance, roots, points, half).coupled(half, len(points))
        if number is not None:
            return number, half
    return None


def every_pair(batch: int) -> Iterator[Tensor]:
    """Yield subsets of a batch that tell any two samples apart.

    For any two samples, one subset has the first and not the second. Each sample is in
    equally many subsets, and no two samples are in the same ones. That takes as few as
    can be, 8 for a batch of 64 (E. Sperner, Ein Satz ueber Untermengen einer endlichen
    Menge, Mathematische Zeitschrift 27, 1928).
    """
    if batch < 2:
        return
    count = next(it for it in itertools.count() if math.comb(it, it // 2) >= batch)
    several = itertools.combinations(range(count), count // 2)
    its_parts = torch.tensor([*itertools.islice(several, batch)], device="cpu")
    parts = torch.zeros(batch, count, dtype=torch.bool, device="cpu")
    yield from parts.scatter_(1, its_parts, True).unbind(1)
