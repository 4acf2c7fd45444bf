"""The Jacobian of a chain, from one forward pass without a graph."""

from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.chains import maps
from gradlib.jacobian.fast.chains.bends import Bend, bent
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.order import Product
from gradlib.jacobian.fast.chains.product import Factors, product
from gradlib.jacobian.fast.chains.result import empty, samples_at_once
from gradlib.private import enable_grad, grad_is_enabled


def evaluate(chain: Chain, out: Tensor | None, *, create_graph: bool) -> Tensor:
    """Return the Jacobian of a chain, ``(batch, out, *in)``.

    Args:
        chain: The chain.
        out: Where to write it, contiguous; ``None`` for memory of its own.
        create_graph: Whether gradients flow through it.
    """
    before = grad_is_enabled()
    enable_grad(create_graph)
    try:
        seen, h = maps.forward(chain.maps.layers, chain.x)
        samples = h.shape[0]
        at_once = samples if create_graph else samples_at_once(chain)
        if at_once >= samples and out is None:
            made = _of(chain, seen, h, None)
        else:
            made = _in_parts(chain, seen, h, at_once, out)
    finally:
        enable_grad(before)
    if out is not None:
        return out
    return made if chain.x.dim() == 2 else made.view(chain.shape)


def _in_parts(
    chain: Chain, seen: maps.Seen, h: Tensor, at_once: int, out: Tensor | None
) -> Tensor:
    """Go through the samples in parts, and write what they give into the result."""
    samples, outs, ins = h.shape[0], chain.outs, chain.x[0].numel()
    if out is not None:
        whole = out.view(samples, outs, ins)
    elif _is_by_columns(chain):
        whole = empty((samples, ins, outs), h).mT
    else:
        whole = empty((samples, outs, ins), h)
    for start in range(0, samples, at_once):
        part = whole[start : start + at_once]
        stop = start + part.shape[0]
        made = _of(chain, maps.part(seen, start, stop), h[start:stop], part)
        if made is not part:
            part.copy_(made)
    return whole


def _of(chain: Chain, seen: maps.Seen, h: Tensor, into: Tensor | None) -> Tensor:
    """Return the Jacobian of some samples, ``(samples, outs, ins)``.

    Args:
        chain: The chain.
        seen: What is needed to go back through its maps.
        h: What comes out of them, ``(samples, ...)``.
        into: Where to write it, if it can be written there at once.
    """
    columns = _is_by_columns(chain)
    if into is not None and columns:
        into = into.mT
    if chain.maps.layers or (into is not None and not into.is_contiguous()):
        into = None
    made = product(_factors(chain, h), chain.order.tree, columns=columns, into=into)
    made = made.mT if columns else made
    if chain.maps.layers:
        v = made.expand(h.shape[0], -1, -1).view(h.shape[0], -1, *h.shape[1:])
        return maps.backward(seen, v).flatten(2)
    if made.dim() > 2:
        return made
    return made.expand(h.shape[0], -1, -1).clone()  # no memory of a weight


def _factors(chain: Chain, h: Tensor) -> Factors:
    """Go forward; the last layers' output, which nothing needs, is not computed."""
    if h.dim() > 2:
        h = h.flatten(1)
    found: list[list[Bend]] = [[] for _ in chain.bends]
    reach = len(found)
    while reach and not chain.bends[reach - 1]:
        reach -= 1
    for place in range(reach):
        if place:
            h = F.linear(h, *chain.linears[place - 1])
        if layers := chain.bends[place]:
            last = place == reach - 1
            found[place], h = bent(layers, h, ours=place > 0, last=last)
    return Factors([it.weight for it in chain.linears], found)


def _is_by_columns(chain: Chain) -> bool:
    tree = chain.order.tree
    return isinstance(tree, Product) and tree.columns and not chain.maps.layers
