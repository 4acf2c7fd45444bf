"""The first tensor of an output: the old hook sits on its node."""

from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.tree import Tree

ENDLESS, DEEPEST = object(), 1000
"""`ENDLESS` stands for an output without end, as a str, whose first entry is a str
again; `DEEPEST` is how deep we look."""


def first_node(output: Tree) -> Node | None:
    """Return the node that the old hook sits on, if there is one."""
    first = first_tensor(output.build())
    return first.grad_fn if isinstance(first, Tensor) else None


def first_tensor(value: Any) -> Any:
    """Return the first tensor as torch finds it, or the value where its search ends."""
    for _ in range(DEEPEST):
        if isinstance(value, Tensor):
            return value
        try:
            if isinstance(value, dict):
                inside = cast("dict[Any, Any]", value).values()
                value = next(it for it in inside if isinstance(it, Tensor))
            else:
                value = value[0]
        except Exception:  # a class of the user's may raise any
            return cast(Any, value)
    return ENDLESS
