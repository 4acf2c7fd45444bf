"""What gradlib uses of tensors."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.testing
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

_C = cast(Any, torch._C)

# Copy-on-write: the clone shares the storage until one of the two is written to.
lazy_clone: Callable[[Tensor], Tensor] = torch._lazy_clone

# A view that shows every entry with its sign changed.
negative_view: Callable[[Tensor], Tensor] = torch._neg_view


def copy_of_quantized(tensor: Tensor) -> Tensor:
    """Do what ``clone`` does, but also for floating-point zero points."""
    if tensor.qscheme() != torch.per_channel_affine_float_qparams:
        return tensor.clone()
    return cast(Any, torch)._make_per_channel_quantized_tensor(
        tensor.int_repr(),
        tensor.q_per_channel_scales(),
        tensor.q_per_channel_zero_points(),
        tensor.q_per_channel_axis(),
    )


# Whether a tensor still shares its memory with a lazy clone: neither was written to.
is_copy_on_write: Callable[[Tensor], bool] = _C._is_cow_tensor

# Where a tensor's data begins, without the copy that asking data_ptr() may cause.
data_address: Callable[[Tensor], int] = _C._data_address


def tangent_of(tensor: Tensor) -> Tensor | None:
    """Return the tangent that forward-mode AD has given a tensor, if any."""
    return cast(Any, forward_ad).unpack_dual(tensor).tangent


def memory_is_held(tensor: Tensor) -> bool:
    """Tell whether others hold a CPU tensor's memory too, as a NumPy array may.

    A write to a tensor that shares its memory copy-on-write moves the tensor and lets
    go of the old memory. An array would then show freed memory.
    """
    if not tensor.is_cpu or tensor.layout != torch.strided:
        return False
    try:
        memory = tensor.untyped_storage()
    except RuntimeError:  # of a subclass that has none
        return False
    return _C._storage_Use_Count(memory._cdata) > ALONE


ALONE = 2
"""The use count of one tensor's own memory: by the tensor, and `memory_is_held`."""

# The rtol and atol of torch.testing.assert_close, the coarser of all dtypes given.
default_tolerances: Callable[..., tuple[float, float]] = (
    torch.testing._comparison.default_tolerances
)

# Whether a tensor stands for another, in a transform of torch.func.
is_stand_in: Callable[[Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor


def has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor has values: meta and fake tensors have none."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def referent(reference: weakref.ref[Tensor]) -> Tensor | None:
    """Return the tensor that a weak reference leads to, if it still exists.

    As torch.utils.weak does: if only autograd held the tensor, older releases of torch
    free it with the graph even though we hold it by now.
    """
    tensor: Any = reference()
    if hasattr(tensor, "_fix_weakref"):
        tensor._fix_weakref()
    return tensor
