"""The way into this folder: is there a chain, and what is its Jacobian?"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.evaluate import evaluate
from gradlib.jacobian.fast.chains.recalled import chain_of
from gradlib.jacobian.fast.chains.result import has_room
from gradlib.jacobian.fast.chains.small import jacobian_if_small, small_jacobian
from gradlib.jacobian.memory import is_out_of_memory


def jacobian_of_chain(
    fn: Callable[..., Any], inputs: tuple[Any, ...], *asked: Any
) -> Tensor | None:
    """Return the Jacobian of a function that is a chain of layers, or ``None``.

    Args:
        fn: As for `find_chain`, as all that follow.
        inputs: See there.
        asked: See there.
    """
    argnums, in_dims, mode, chunk_size, max_bytes, out, create_graph = asked
    if not _is_plainly_asked(argnums, in_dims, mode, chunk_size):
        return None
    may_be_small = max_bytes is None and out is None and not create_graph
    try:
        small = small_jacobian(fn, inputs) if may_be_small else None
        if small is not None:
            return small
        chain = find_chain(fn, inputs, *asked)
        if chain is None:
            return None
        small = jacobian_if_small(chain) if may_be_small else None
        if small is not None:
            return small
        return evaluate(chain, out, create_graph=create_graph)
    except RuntimeError as error:  # what was free others may have taken since
        if not is_out_of_memory(error):
            raise
    return None


def find_chain(
    fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    argnums: Any,
    in_dims: Any,
    mode: Any,
    chunk_size: Any,
    max_bytes: Any,
    out: Any,
    create_graph: bool,
) -> Chain | None:
    """Return the chain of layers that a function is, or ``None``.

    A call that is wrong has none, so that the general way may say what is wrong.

    Args:
        fn: As for `per_sample_jacobian`, as all that follow.
        inputs: See there.
        argnums: See there.
        in_dims: See there.
        mode: See there.
        chunk_size: See there.
        max_bytes: See there.
        out: See there.
        create_graph: See there.
    """
    if not _is_plainly_asked(argnums, in_dims, mode, chunk_size):
        return None
    chain = chain_of(fn, inputs)
    if chain is None or not has_room(chain, out, max_bytes):
        return None
    if create_graph and (out is not None or chain.x.is_inference()):
        return None
    return chain


def _is_plainly_asked(argnums: Any, in_dims: Any, mode: Any, chunk_size: Any) -> bool:
    """Tell whether the first input is meant, by whichever way."""
    if mode != "auto" or chunk_size != "auto":
        return False
    return type(argnums) is type(in_dims) is int and argnums == in_dims == 0
