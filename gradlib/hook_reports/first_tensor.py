"""The first tensor of an output, on whose node the old hook sits."""

from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.tree import Tree

ENDLESS, DEEPEST = object(), 1000
"""What has no first tensor: in a str there is always another one. So deep we look."""


def first_node(output: Tree) -> Node | None:
    """Return the node that the legacy hook sits on."""
    first = first_tensor(output.build())
    return first.grad_fn if isinstance(first, Tensor) else None


def first_tensor(value: Any) -> Any:
    """Go to the first tensor as torch does, and return where that ends."""
    for _ in range(DEEPEST):
        if isinstance(value, Tensor):
            return value
        try:
            if isinstance(value, dict):
                inside = cast("dict[Any, Any]", value).values()
                value = next(it for it in inside if isinstance(it, Tensor))
            else:
                value = value[0]
        except Exception:  # of a class of somebody's too
            return cast(Any, value)
    return ENDLESS
