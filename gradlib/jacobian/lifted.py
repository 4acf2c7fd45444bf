"""Widens all tensors that a function computes with, and notes where autograd ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.double import Double, wider
from gradlib.jacobian.generators import Met
from gradlib.jacobian.warned import theirs
from gradlib.tree import tensors_in_call

# Functions of torch whose results autograd does not follow.
_LEAVES_AUTOGRAD: dict[Any, str] = {
    Tensor.detach: ".detach()",
    Tensor.detach_: ".detach_()",
    Tensor.numpy: ".numpy()",
    Tensor.item: ".item()",
    cast(Any, Tensor).tolist: ".tolist()",
    Tensor.__float__: "float()",
    cast(Any, Tensor).__array__: "a NumPy function",
    cast(Any, Tensor.data).__get__: ".data",
}

# Functions that ask for a tensor's place and size, not its numbers. It may have none:
# sharded parameters are freed, and get new memory before they are used.
_ASKING = frozenset(
    (
        *("__get__", "data_ptr", "storage", "untyped_storage", "_typed_storage"),
        *("element_size", "numel", "nelement", "size", "dim", "ndimension"),
        *("stride", "storage_offset", "is_contiguous", "get_device"),
    )
)

# Functions that take integers as indices, not amounts. By name, as the functions that
# torch.nn.functional calls inside are not public.
_INDEXING = frozenset(
    (
        *("__getitem__", "index_select", "gather", "take", "take_along_dim"),
        *("scatter", "scatter_add", "scatter_reduce"),
        *("index_add", "index_copy", "index_fill", "index_put", "index_reduce"),
        *("embedding", "embedding_bag", "one_hot"),
        *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        *("multi_margin_loss", "multilabel_margin_loss"),
    )
)

_CASTS = frozenset(
    {
        *(Tensor.int, Tensor.long, Tensor.short, Tensor.char, Tensor.byte),
        *(Tensor.to, Tensor.type, Tensor.type_as),
    }
)


@dataclass
class Cast:
    """A cast of real numbers to integers."""

    where: str
    sums: Tensor  # of the real numbers, to see whether they depend on the input
    # The integers, and what they become.
    whole: list[Tensor] = field(default_factory=list[Tensor])
    used: bool = False  # as real numbers again


class Lifted(Double):
    """Widens the function's own tensors too; notes casts and where autograd ends."""

    def __init__(self, generators: Met) -> None:
        """Start with nothing noted."""
        super().__init__()
        self._generators = generators
        self.left: dict[str, None] = {}  # where values left autograd
        self.casts: list[Cast] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with everything in float64."""
        kwargs = kwargs or {}
        self._generators.meet(kwargs)
        if func in _LEAVES_AUTOGRAD:
            self.left[f"{_LEAVES_AUTOGRAD[func]} in {_place()}"] = None
        name = getattr(func, "__name__", "")
        writes = _writes(name)
        asks = name in _ASKING
        narrow = not asks and any(map(_is_narrow, tensors_in_call(args, kwargs)))
        if writes or narrow:
            first, rest = args[:writes], args[writes:]
            args = (*first, *map(_lifted, rest))
            out = kwargs.get("out")
            kwargs = {name: _lifted(value) for name, value in kwargs.items()}
            if out is not None:
                kwargs["out"] = out
        result = super().__torch_function__(func, types, args, kwargs)
        if self.casts or func in _CASTS:
            self._look_for_casts(func, args, result)
        return result

    def _look_for_casts(
        self, func: Callable[..., Any], args: tuple[Any, ...], result: Any
    ) -> None:
        if not isinstance(result, Tensor):
            return
        whole = not result.dtype.is_floating_point and not result.is_complex()
        whole = whole and result.dtype != torch.bool
        if whole and func in _CASTS and args[0].is_floating_point():
            sums = args[0].detach().sum(dtype=torch.float64)
            self.casts.append(Cast(_place(), sums, [result]))
            return
        name = getattr(func, "__name__", "")
        if _out_of_place(name) in _INDEXING:
            return
        given = {id(it) for it in tensors_in_call(args, {})}
        for cast_ in self.casts:
            if any(id(it) in given for it in cast_.whole):
                if whole:
                    cast_.whole.append(result)
                elif result.is_floating_point():
                    cast_.used = True


@cache
def _writes(name: str) -> int:
    """Return how many arguments a function writes into: 1, the first, or 0."""
    return int(name == "__setitem__" or name != _out_of_place(name))


def _out_of_place(name: str) -> str:
    """Return the name of a function, without the ``_`` of in-place ones."""
    return name if name.endswith("__") else name.removesuffix("_")


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(wider(value.dtype)) if _is_narrow(value) else value
    kind = type(cast(object, value))
    return cast(Any, kind)(map(_lifted, value)) if kind in (list, tuple) else value


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _place() -> str:
    """Return the innermost running line that is neither torch's nor ours."""
    frame, _ = theirs()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
