"""Nested arguments and outputs, kept flat."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import optree
from optree import PyTreeSpec
from torch import Tensor


@dataclass(slots=True)
class Tree:
    """A nested structure as a list of leaves and the shape of the nesting.

    ``None`` is a leaf: an absent argument keeps its place.
    """

    leaves: list[Any]
    spec: PyTreeSpec

    @classmethod
    def of(cls, structure: object) -> "Tree":
        """Flatten `structure`: tuples, lists, dicts and named tuples, to any depth."""
        return cls(*optree.tree_flatten(cast(Any, structure), none_is_leaf=True))

    def build(self) -> Any:
        """Return the structure."""
        return self.spec.unflatten(self.leaves)

    def filled(self, values: Mapping[Any, object]) -> Any:
        """Return the structure with `values` by position, and ``None`` elsewhere."""
        return self.spec.unflatten(list(map(values.get, range(len(self.leaves)))))

    def map(self, function: Callable[[Any], object]) -> "Tree":
        """Return the tree with `function` of each leaf in its place."""
        return Tree(list(map(function, self.leaves)), self.spec)

    def is_leaf(self) -> bool:
        """Tell whether the structure is one bare leaf."""
        return self.spec.is_leaf()

    def path(self, position: int) -> str:
        """Return where a leaf stands, as one would index: ``[0]['mask']``."""
        return "".join(f"[{step!r}]" for step in self.spec.paths()[position])


def tensors_in(structure: object) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    return [leaf for leaf in Tree.of(structure).leaves if isinstance(leaf, Tensor)]
