"""What gradlib uses of torch that torch does not document, in one place.

Each was there in every release from 2.4 to 2.13 that was tried.
"""

# Private names are what this file is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

# Copy-on-write: the clone shares the storage until somebody writes to either one.
lazy_clone: Callable[[Tensor], Tensor] = torch._lazy_clone

AccumulateGrad: Any = cast(Any, torch._C)._functions.AccumulateGrad


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient ends at `node`; ``None`` for other nodes."""
    return cast(Any, node).variable if isinstance(node, AccumulateGrad) else None


def backward_pass_id() -> int:
    """Return a number that is one backward pass's own; -1 outside of any."""
    return torch._C._current_graph_task_id()


def next_sequence_number() -> int:
    """Return the sequence number that autograd gives to the next node it makes."""
    return cast(Any, torch._C)._autograd._get_sequence_nr()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` itself, by name.

    ``named_parameters(recurse=False)`` says the same, but is slow enough to show in a
    hook that runs at every call.
    """
    return {name: p for name, p in module._parameters.items() if p is not None}


def sequence_number(node: Node) -> int:
    """Return the sequence number of `node`: later nodes have higher ones."""
    return node._sequence_nr()
