"""What gradlib uses of the nodes of autograd's graph."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.classes import once_for_each_class

_C = cast(Any, torch._C)

# The node that adds to the .grad of a leaf.
AccumulateGrad: type[Node] = _C._functions.AccumulateGrad

# The node of an in-place operation on a view: it hands on the gradient of the base.
CopySlices: type[Node] = _C._functions.CopySlices

# The node of Tensor.clone().
CloneNode: type[Node] = _C._functions.CloneBackward0

# The node of Tensor.to() and of autocast's casts.
ToCopy: type[Node] = _C._functions.ToCopyBackward0

# The node of the CTC loss. On a CPU its threads read the saved loss, and there torch
# refuses to read memory that is shared copy-on-write.
CtcLoss: type[Node] = _C._functions.CtcLossBackward0

# The node of a group norm.
GroupNorm: type[Node] = _C._functions.NativeGroupNormBackward0

# Nodes of operations that only lay out a tensor anew: callable with a gradient alone.
LAID_OUT: frozenset[type[Node]] = frozenset(
    (
        _C._functions.TBackward0,
        _C._functions.TransposeBackward0,
        _C._functions.UnsafeViewBackward0,
        _C._functions.ViewBackward0,
    )
)

# The sequence number that autograd gives to the next node this thread makes.
next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr

# The sequence number of a node: later nodes have higher ones.
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")


def ends_the_process(group_norm: Any) -> bool:
    """Tell whether a group norm's backward would, if it computes only its weights'.

    It does on a CPU, of an input in channels_last: in torch 2.8 and 2.13, no longer in
    2.14.1.
    """
    if torch.__version__ >= "2.14":
        return False
    x = group_norm._saved_input
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if x.device.type != "cpu" or x.is_contiguous() or last is None:
        return False
    return x.is_contiguous(memory_format=last)


def is_packed(node: Node) -> bool:
    """Tell whether what a node has saved is unpacked by saved-tensors hooks.

    A checkpoint's hooks compute all of it again, each time it is read outside a
    backward pass. Before torch 2.10 a node does not show its hooks, so this is
    ``False`` and the saved tensors are read: they are right all the same.
    """
    for name in _raw_names(type(node)):
        if getattr(getattr(node, name), "unpack_hook", None) is not None:
            return True
    return False


@once_for_each_class
def _raw_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def changed_since_saved(node: Node) -> list[Tensor]:
    """Return the tensors that a node has saved and that were changed in place since.

    Before torch 2.10 none are found. Tensors that hooks have packed do not count.
    """
    found: list[Tensor] = []
    for name in _raw_names(type(node)):
        with suppress(RuntimeError):  # what the node saved has been freed
            held: Any = getattr(node, name)
            for raw in cast(Any, held if isinstance(held, tuple) else (held,)):
                saved = getattr(raw, "data", None)
                if not isinstance(saved, Tensor) or raw.unpack_hook is not None:
                    continue
                if not _is_as_saved(node, name, raw):
                    found.append(saved)
    return found


def _is_as_saved(node: Node, name: str, raw: Any) -> bool:
    unpack: Callable[[], object] | None = getattr(raw, "unpack", None)
    if unpack is not None:  # torch 2.12 has it, 2.11 has not
        with suppress(RuntimeError):
            unpack()
            return True
    # unpack() refuses a node's own results too, which the node alone can unpack.
    for shown in (name.removeprefix("_raw"), name.removeprefix("_raw_")):
        with suppress(RuntimeError, AttributeError):
            getattr(node, shown)
            return True
    return False


def dtype_at(edge: tuple[Any, int]) -> torch.dtype:
    """Return the dtype of the output that an edge leads to."""
    node, number = edge
    return node._input_metadata[number].dtype


def is_reentrant_checkpoint(node: Node) -> bool:
    """Tell whether a node is that of a checkpoint of the reentrant kind."""
    return type(node).__name__ == "CheckpointFunctionBackward"


def leaf_of(node: Node) -> Tensor | None:
    """Return the leaf whose gradient ends at `node`; ``None`` for other nodes."""
    leaf: Any = node
    return leaf.variable if type(node) is AccumulateGrad else None


# The shape, dtype and device of each gradient that comes in at a node, read where
# torch.autograd.grad itself reads them.
forms_at: Callable[[Node], Sequence[Any]] = attrgetter("_input_metadata")
