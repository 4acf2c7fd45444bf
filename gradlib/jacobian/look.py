"""One VJP with random numbers: what a Jacobian must agree with."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.nodes import narrowest_dtype
from gradlib.jacobian.pieces import Block

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By which part of a sample's slope the Jacobian's may be apart, by its dtype."""

COARSE = 0.05
"""The same for narrower dtypes."""


def closeness(graph: Graph) -> float:
    """Return by which part two slopes may be apart, by the digits that gradients have.

    They lose some on their way where a dtype is narrow, or a GPU uses TF32.
    """
    dtype, device = narrowest_dtype(graph), graph.points[0].device
    names = {node.name() for node in graph.way}
    if dtype == torch.float32 and may_use_tf32(device, names):
        return COARSE
    return CLOSE.get(dtype, COARSE)


def may_use_tf32(device: torch.device, nodes: Collection[str]) -> bool:
    """Tell whether a device may multiply float32 numbers with fewer digits.

    Args:
        device: The device.
        nodes: The names of the nodes whose backward passes run there.
    """
    if device.type != "cuda":
        return False
    try:
        in_matmul = bool(torch.backends.cuda.matmul.allow_tf32)
        in_cudnn = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set by their newer names, which can say what these cannot
        return True
    cudnns = any("Convolution" in name or "Cudnn" in name for name in nodes)
    return in_matmul or (in_cudnn and cudnns)


ROUNDING = 10
"""How many times eps, of all that is added up, a gradient may be off."""


@dataclass(frozen=True)
class Look:
    """A VJP whose vector is zero for all samples but some.

    Attributes:
        half: Which samples those are, ``(batch,)``.
        vectors: What it began with, for each output.
        grads: What came of it, for each input it went to.
    """

    half: Tensor
    vectors: list[Tensor]
    grads: list[Tensor | None]

    @classmethod
    def at(
        cls,
        chance: Chance,
        roots: Sequence[Tensor],
        points: Sequence[Tensor],
        half: Tensor,
    ) -> "Look":
        """Go back once, from random numbers at the samples of a half."""
        vectors = [_only(chance.vector(root), half) for root in roots]
        return cls(half, vectors, _dense(roots, points, vectors))

    def coupled(self, count: int) -> int | None:
        """Return which of the first inputs the other samples have a gradient of."""
        for i, grad in enumerate(self.grads[:count]):
            if grad is not None:
                others = grad[~self.half.to(grad.device)]
                # 0 · inf is NaN, and no sign of anything.
                if ((others != 0) & ~others.isnan()).any():
                    return i
        return None


def require_rows(graph: Graph, blocks: Mapping[Block, Tensor], look: Look) -> None:
    """Raise where columns make another Jacobian than a backward pass.

    Columns come from the graph of a backward pass, and one that is somebody's Python
    may have none.

    Raises:
        NoSuchWayError: They do.
    """
    wrong = [
        point for point, is_wrong in _wrong(graph, blocks, look).items() if is_wrong
    ]
    if not wrong:
        return
    rounding = _rounding(graph, look)
    for point, is_wrong in _wrong(graph, blocks, look, rounding).items():
        if is_wrong:
            raise NoSuchWayError(
                f"The Jacobian with respect to {graph.names[point]} is not what a "
                "backward pass gives. Most likely the backward of an operation here "
                "has no graph of its own, which columns need, or a hook changes "
                "gradients; it may also be that zero meets infinity. Use "
                'mode="reverse".'
            )


def _wrong(
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    look: Look,
    rounding: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Return whether the Jacobian by each point is another than a pass gives."""
    close = closeness(graph)
    wrong: dict[int, Tensor] = {}
    for point, grad in enumerate(look.grads):
        if grad is None:
            continue
        total = torch.zeros_like(grad, dtype=torch.float64)
        size = torch.zeros((), dtype=torch.float64, device=grad.device)
        for root, vector in enumerate(look.vectors):
            rows, columns = graph.rows(root), graph.columns(point)
            block = blocks[root, point].detach().reshape(graph.batch, rows, columns)
            v = vector.reshape(graph.batch, 1, rows).to(block)
            parts = (v @ block).squeeze(1).double()
            size = size + _square(parts)
            parts = parts.sum(0) if graph.shared[point] else parts
            total += parts.reshape(grad.shape)
        apart = _square(total - grad)
        same = (total.isfinite() == grad.isfinite()).all()
        allowed = close**2 * size + (0 if rounding is None else rounding[point])
        wrong[point] = (apart > allowed) | ~same
    return wrong


def _rounding(graph: Graph, look: Look) -> dict[int, Tensor]:
    """Return the square of what rounding may make of each point's gradient.

    Where derivatives cancel there is nothing else. What a pass gives besides when
    gradients are changed a little all the way shows how much there is to be rounded.
    """
    chance, eps = Chance(), torch.finfo(narrowest_dtype(graph)).eps
    little = eps**0.5

    def changed(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return tuple(
            it if it is None else it * (1 + little * chance.vector(it)) for it in grads
        )

    hooks = [cast(Any, node).register_prehook(changed) for node in graph.way]
    try:
        grads = _dense(graph.roots, graph.points, look.vectors)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        point: (ROUNDING * eps / little) ** 2 * _square(grad - before)
        for point, (grad, before) in enumerate(zip(grads, look.grads, strict=True))
        if grad is not None and before is not None
    }


def _dense(
    roots: Sequence[Tensor], points: Sequence[Tensor], vectors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Go back once."""
    grads = torch.autograd.grad(
        roots, points, vectors, retain_graph=True, allow_unused=True
    )
    return [it if it is None else it.to_dense() for it in cast(Any, grads)]


def _square(values: Tensor) -> Tensor:
    """Return the sum of the squares of what is finite, without waiting for it."""
    values = values.detach().double()
    return values.where(values.isfinite(), 0).square().sum()


def _only(vector: Tensor, half: Tensor) -> Tensor:
    vector[~half.to(vector.device)] = 0
    return vector
