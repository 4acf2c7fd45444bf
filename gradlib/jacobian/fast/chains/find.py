"""The way into this folder: is there a chain that gives what is asked for?"""

from collections.abc import Callable
from typing import Any

from gradlib.jacobian.fast.chains.chain import Chain, chain_of
from gradlib.jacobian.fast.chains.result import has_room


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
    if mode != "auto" or chunk_size != "auto":
        return None
    if type(argnums) is not int or type(in_dims) is not int or argnums or in_dims:
        return None
    chain = chain_of(fn, inputs)
    if chain is None or not has_room(chain, out, max_bytes):
        return None
    if create_graph and (out is not None or chain.x.is_inference()):
        return None
    return chain
