"""Tensors of any kind as plain ones that torch can compute with."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from gradlib.sharded import own_part


def wide(tensor: Tensor) -> Tensor:
    """Return a dense tensor of at least float32; a nested one in one row.

    Masked-out entries are zeros, as their gradients are. A DTensor gives this process's
    part: getting the others would mean waiting.
    """
    tensor = own_part(tensor)
    if tensor.is_nested:
        parts = [part.flatten() for part in tensor.unbind()]
        values = torch.cat(parts) if parts else torch.empty(0, device=tensor.device)
    elif isinstance(tensor, MaskedTensor):
        values: Tensor = cast(Any, tensor).to_tensor(0)
    else:
        values = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if values.is_quantized:
        return values.dequantize()
    if not (values.is_cpu or values.is_meta):
        _require_numbers(values.dtype)
    return values.to(_wider(values.dtype))


def is_inexact(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is floating point or complex: only these have gradients."""
    return dtype.is_floating_point or dtype.is_complex


def widest(tensor: Tensor) -> torch.dtype:
    """Return float64, or complex128 for a complex tensor."""
    return torch.complex128 if tensor.is_complex() else torch.float64


def _wider(dtype: torch.dtype) -> torch.dtype:
    if not is_inexact(dtype):
        return torch.float64
    if dtype.itemsize == 1:  # float8 dtypes cannot be promoted
        return torch.float32
    return torch.promote_types(dtype, torch.float32)


@cache
def _require_numbers(dtype: torch.dtype) -> None:
    """Raise, on the CPU, for a dtype that torch does not turn into numbers.

    A GPU's kernel does not refuse such a dtype: it fails, and this process can compute
    nothing more on that GPU.
    """
    torch.empty(1, dtype=dtype, device="cpu").to(_wider(dtype))
