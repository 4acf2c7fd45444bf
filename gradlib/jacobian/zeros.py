"""Zeros that autograd holds without memory, written out for modes of torch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class ZerosWrittenOut(TorchDispatchMode):
    """Gives each function of torch zeros that have memory.

    Forward over reverse, as of `torch.func.hessian`, leaves others in a graph. Under
    another mode a product with one of them ends the process (torch 2.13), so this one
    is entered after it.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with zeros that have memory."""
        return func(*map(_written_out, args), **(kwargs or {}))


def _written_out(value: Any) -> Any:
    is_unwritten = isinstance(value, Tensor) and value._is_zerotensor()
    return value.clone() if is_unwritten else value
