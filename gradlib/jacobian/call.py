"""The call of ``per_sample_jacobian``, as it was made."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy

from gradlib import flags
from gradlib.errors import JacobianArgumentError

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


as_flag = partial(flags.as_flag, error=JacobianArgumentError)
"""Return a flag as a bool, or raise `JacobianArgumentError`."""
