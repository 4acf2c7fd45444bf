"""Gives memory to the zeros that autograd holds without any."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class ZerosWrittenOut(TorchDispatchMode):
    """Passes zeros with memory to each function of torch, in place of those without.

    Forward over reverse, as in `torch.func.hessian`, leaves zeros without memory in a
    graph. Under another dispatch mode a product with one ends the process (torch 2.13),
    so this mode is entered after the other.
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
