"""Computing in float64 what was written for a narrower dtype."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradlib.tree import tensors_in_call


class Double(TorchFunctionMode):
    """Widens each dtype that a torch function is given, such as float32 to float64.

    A result that has the narrow default dtype is widened as well. The default itself is
    left alone: it holds for all threads.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with wider dtypes."""
        given = {name: wider(value) for name, value in (kwargs or {}).items()}
        result = _WIDER_METHODS.get(func, func)(*map(wider, args), **given)
        if not isinstance(result, Tensor) or result.dtype not in _WIDER:
            return result
        if any(it.dtype in _WIDER for it in tensors_in_call(args, given)):
            return result  # it has their dtype
        if result.is_leaf and result.requires_grad:
            return result.detach().to(_WIDER[result.dtype]).requires_grad_()
        return result.to(_WIDER[result.dtype])


def wider(value: Any) -> Any:
    """Return float64 or complex128 for a narrower dtype; all else as it is."""
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def doubled(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128; one of integers as it is."""
    return tensor.detach().to(wider(tensor.dtype))


_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_WIDER_METHODS: dict[Any, Any] = {
    Tensor.half: Tensor.double,
    Tensor.bfloat16: Tensor.double,
    Tensor.float: Tensor.double,
    cast(Any, Tensor).cfloat: cast(Any, Tensor).cdouble,
    cast(Any, Tensor).chalf: cast(Any, Tensor).cdouble,
}
