"""The call of ``per_sample_jacobian``, as it was made."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import numpy

from gradlib.errors import JacobianArgumentError
from gradlib.wording import in_brief

Argnums: TypeAlias = int | tuple[int, ...] | str
"""The number of an input, a tuple of them, or ``"parameters"``."""


class Call(NamedTuple):
    """The arguments of ``per_sample_jacobian`` by their names, not validated yet."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    argnums: Argnums
    in_dims: Any
    mode: str
    chunk_size: int | str
    max_bytes: int | None
    out: Any
    create_graph: bool


def is_open(call: Call) -> bool:
    """Tell whether mode and chunk size are ``"auto"``, argnums and in_dims 0."""
    if not (is_auto(call.mode) and is_auto(call.chunk_size)):
        return False
    argnums, in_dims = call.argnums, call.in_dims
    return type(argnums) is type(in_dims) is int and argnums == in_dims == 0


def is_auto(given: object) -> bool:
    """Tell whether a value is ``"auto"``; an array compares with it by entry."""
    return isinstance(given, str) and given == "auto"


def asks_no_more(call: Call) -> bool:
    """Tell whether the call has no limit of memory, no `out` and no `create_graph`."""
    return call.max_bytes is None and call.out is None and not call.create_graph


def plain(given: Any) -> Any:
    """Return an integer of NumPy as an ``int``, also in a tuple, and all else as is."""
    if type(given) is tuple:
        return tuple(map(plain, cast("tuple[Any, ...]", given)))
    return int(cast(Any, given)) if isinstance(given, numpy.integer) else given


def as_flag(name: str, given: object) -> bool:
    """Return a flag as a bool, from a bool, an int, a bool of NumPy or ``None``.

    A string or an array is a mistake: ``"no"`` would be true, and an array has no truth
    value.

    Raises:
        JacobianArgumentError: It is something else.
    """
    if issubclass(type(given), (int, numpy.bool_, type(None))):
        return bool(given)
    raise JacobianArgumentError(
        f"{name} is {in_brief(given)} of type {type(given).__name__}; it is True or "
        "False."
    )
