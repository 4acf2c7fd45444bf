"""The nesting of the result, and the memory a caller brings for it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block
from gradlib.tree import Tree


def nested(graph: Graph, inner: Tree, blocks: Mapping[Block, Any]) -> Any:
    """Return blocks as the outputs' structure, with that of the inputs inside.

    Args:
        graph: What they are blocks of.
        inner: The structure of what is differentiated for, with positions as leaves.
        blocks: A leaf for each block.
    """
    return graph.outputs.filled(
        {
            place: inner.filled(
                {
                    at: blocks[root, point]
                    for at, point in enumerate(inner.leaves)
                    if point is not None
                }
            )
            for root, place in enumerate(graph.places)
        }
    )


def blocks_of(out: Any, graph: Graph, inner: Tree) -> dict[Block, Tensor]:
    """Return the tensors of `out` by block.

    Raises:
        JacobianArgumentError: It does not fit the result.
    """
    blocks = list(graph.blocks())
    numbers = {block: number for number, block in enumerate(blocks)}
    wanted, given = Tree.of(nested(graph, inner, numbers)), Tree.of(out)
    if given.spec != wanted.spec:
        raise JacobianArgumentError(
            f"out is nested as {given.spec}, and the result as {wanted.spec}: the "
            "outputs' structure, with that of what argnums asks for inside."
        )
    found: dict[Block, Tensor] = {}
    for position, leaf in enumerate(wanted.leaves):
        if leaf is not None:
            number: int = leaf
            name = "out" + given.path(position)
            _require_fit(name, given.leaves[position], graph, blocks[number])
            found[blocks[number]] = given.leaves[position]
    return found


def require_own_memory(out: Mapping[Block, Tensor], arguments: Arguments) -> None:
    """Raise where writing the result would change what it is computed from.

    Raises:
        JacobianArgumentError: `out` shares memory with an input or parameter.
    """
    used = {
        f"inputs{arguments.inputs.path(place)}": leaf
        for place, leaf in enumerate(arguments.inputs.leaves)
        if isinstance(leaf, Tensor)
    }
    if isinstance(arguments.fn, torch.nn.Module):
        used |= dict(arguments.fn.named_parameters())
    owners = {_memory(tensor): name for name, tensor in used.items() if tensor.numel()}
    for tensor in out.values():
        if tensor.numel() and _memory(tensor) in owners:
            raise JacobianArgumentError(
                f"out shares memory with {owners[_memory(tensor)]}, which the result "
                "is computed from. Pass a tensor of its own: torch.empty(...)."
            )


def _require_fit(name: str, tensor: Any, graph: Graph, block: Block) -> None:
    point = graph.points[block[1]]
    shape, dtype, device = graph.shape(*block), point.dtype, point.device
    fix = f"torch.empty({list(shape)}, dtype={dtype}, device={str(device)!r})"
    if not isinstance(tensor, Tensor):
        raise JacobianArgumentError(
            f"{name} is a {type(tensor).__name__}, and must be a tensor: {fix}."
        )
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        raise JacobianArgumentError(
            f"{name} has shape {list(tensor.shape)}, {tensor.dtype} on "
            f"{tensor.device}. The Jacobian (batch, *out, *in) needs {fix}."
        )
    if tensor.requires_grad or not _is_whole(tensor):
        raise JacobianArgumentError(
            f"{name} requires grad, or has several entries in one place of memory: "
            f"it cannot be written to. Pass {fix}."
        )


def _is_whole(tensor: Tensor) -> bool:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride or size < 2 for stride, size in steps)


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
