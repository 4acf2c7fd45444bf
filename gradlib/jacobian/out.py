"""The nesting of the result, and the memory passed for it as `out`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.real import is_dense
from gradlib.tree import Tree


def nested(graph: Graph, inner: Tree, blocks: Mapping[Block, Any]) -> Any:
    """Return blocks nested as the outputs and, inside, as the inputs asked for.

    Args:
        graph: The graph of the forward pass.
        inner: The structure of the inputs asked for, with positions as leaves.
        blocks: The value to put in the place of each block.
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


def blocks_of(
    out: Any, graph: Graph, inner: Tree, used: Iterable[tuple[str, Tensor]]
) -> dict[Block, Tensor] | None:
    """Return the tensors of `out` by block; ``None`` where it is not given.

    Args:
        out: What the caller passes as memory for the result.
        graph: The graph of the forward pass.
        inner: The structure of the inputs asked for, with positions as leaves.
        used: The names and tensors that the result is computed from.

    Raises:
        JacobianArgumentError: `out` does not fit the result, or shares memory with a
            tensor that it is computed from.
    """
    if out is None:
        return None
    blocks = list(graph.blocks())
    numbers = {block: number for number, block in enumerate(blocks)}
    wanted, given = Tree.of(nested(graph, inner, numbers)), Tree.of(out)
    if given.spec != wanted.spec:
        raise JacobianArgumentError(
            f"out has {_paths(given)}, and the result {_paths(wanted)}: out must have "
            "the structure of the outputs, with that of what argnums asks for inside."
        )
    tensors: dict[Block, Tensor] = {}
    for position, leaf in enumerate(wanted.leaves):
        if leaf is not None:
            number: int = leaf
            name = "out" + given.path(position)
            _require_fit(name, given.leaves[position], graph, blocks[number])
            tensors[blocks[number]] = given.leaves[position]
    _require_apart(tensors.values())
    _require_own_memory(tensors.values(), used)
    return tensors


def require_no_graph(out: object, *, create_graph: bool) -> None:
    """Raise where both `out` and `create_graph` are given.

    Raises:
        JacobianArgumentError: They are.
    """
    if out is not None and create_graph:
        raise JacobianArgumentError(
            "out= and create_graph=True exclude each other: gradients do not flow "
            "through memory that is written to. Leave one of them out."
        )


def _require_own_memory(
    out: Iterable[Tensor], used: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise where writing the result would overwrite what it is computed from."""
    owners = {_memory(it): name for name, it in used if is_dense(it) and it.numel()}
    for tensor in out:
        if tensor.numel() and _memory(tensor) in owners:
            raise JacobianArgumentError(
                f"out shares memory with {owners[_memory(tensor)]}, which the result "
                "is computed from. Pass a tensor of its own: torch.empty(...)."
            )


def _paths(tree: Tree) -> str:
    paths = [f"out{tree.path(place)}" for place in range(len(tree.leaves))]
    return "one tensor" if paths == ["out"] else ", ".join(paths) or "none"


def _require_fit(name: str, tensor: Any, graph: Graph, block: Block) -> None:
    point = graph.points[block[1]]
    shape, dtype, device = graph.shape(*block), point.dtype, point.device
    fix = f"torch.empty({list(shape)}, dtype={dtype}, device={str(device)!r})"
    if not (isinstance(tensor, Tensor) and is_dense(tensor)):
        raise JacobianArgumentError(
            f"{name} is of type {type(tensor).__name__}, and must be a dense tensor: "
            f"{fix}."
        )
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        raise JacobianArgumentError(
            f"{name} has shape {list(tensor.shape)}, {tensor.dtype} on "
            f"{tensor.device}. The Jacobian (batch, *out, *in) needs {fix}."
        )
    if tensor.requires_grad or tensor.is_inference():
        made = "requires grad" if tensor.requires_grad else "is an inference tensor"
        raise JacobianArgumentError(
            f"{name} {made}, so nothing can be written to it here. Pass {fix}, made "
            "outside of torch.inference_mode()."
        )


def _require_apart(tensors: Collection[Tensor]) -> None:
    """Raise where two entries of `out` share a place in memory."""
    taken: dict[object, Tensor] = {}
    for tensor in tensors:
        if len(tensors) == 1 and tensor.is_contiguous():
            return
        if not tensor.numel():
            continue
        entries = tensor.untyped_storage().nbytes() // tensor.element_size()
        places = taken.setdefault(
            _memory(tensor), torch.zeros(entries, dtype=torch.bool, device="cpu")
        )
        ours = tensor.shape, tensor.stride(), tensor.storage_offset()
        if _may_overlap(tensor) or places.as_strided(*ours).any():
            raise JacobianArgumentError(
                f"out, of shape {list(tensor.shape)}, has several entries in one place "
                "of memory, or shares some with another part of out. Pass a tensor of "
                "its own for each: torch.empty(...)."
            )
        places.as_strided(*ours).fill_(True)


def _may_overlap(tensor: Tensor) -> bool:
    """Tell whether entries may overlap: smaller strides reach as far as a larger."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += step * (size - 1)
    return False


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
