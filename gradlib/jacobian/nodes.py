"""Finds the nodes of a graph that decide the mode: most of them torch gets wrong."""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.graph import Graph
from gradlib.private.nodes import ends_the_process


class Nodes(NamedTuple):
    """Which nodes of a graph decide how to compute its Jacobian.

    Each name is that of one such node, or ``None`` where there is none.

    Attributes:
        convolution: Whether there is a convolution: batched values slow it down on a
            CPU.
        python: A custom ``torch.autograd.Function``: its backward may have no graph.
        once: A custom function whose backward is marked with ``once_differentiable``.
        no_second: The node nearest to the output whose backward torch has no derivative
            of, which columns need.
        no_second_at: Its number in the graph, with the output's first.
        wrong_without_graph: Whether a node's backward is right only with
            ``create_graph=True``.
        wrong_at_once: A node that torch gets wrong for several vectors in one pass.
        wrong_at_once_twice: The same with ``create_graph=True``.
        wrong_twice: A node whose second derivative torch gets wrong.
        wrong_thrice: A node whose third derivative torch gets wrong.
        mixing: A norm over the samples of the batch. A column that is computed for all
            samples at once is then a sum over samples.
    """

    convolution: bool
    python: str | None = None
    once: str | None = None
    no_second: str | None = None
    no_second_at: int = -1
    wrong_without_graph: bool = False
    wrong_at_once: str | None = None
    wrong_at_once_twice: str | None = None
    wrong_twice: str | None = None
    wrong_thrice: str | None = None
    mixing: str | None = None


# All of these were found by comparison with single vectors and finite differences, as
# tests/jacobian/test_jacobian_where_torch_is_wrong.py does.

# The gradient of a singular matrix is right only with create_graph=True, which computes
# it in another way.
_WRONG_WITHOUT_GRAPH = "LinalgDet"
# vmap of its backward is wrong, also for this node alone.
_WRONG_AT_ONCE = "Cdist"
# The fused kernels of attention; torch 2.14.1 has one of cdist.
_NO_SECOND = (
    ("ScaledDotProduct",)
    if torch.__version__ >= "2.14"
    else ("ScaledDotProduct", "Cdist")
)
# The first is fused, and has another formula with create_graph=True. The second takes
# the logarithm of gradients, which may be zero.
_WRONG_TWICE = ("WeightNormInterface", "Logcumsumexp")
# The backward of their double backward takes saved values, as the mean and deviation of
# the input, for constants. tests/jacobian/test_jacobian_in_a_loss.py shows which other
# norms are right. Under vmap the backward of their weights' gradient is wrong already.
_WRONG_THRICE = (
    *("NativeLayerNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"),
    *("BatchNormWithUpdate", "BatchNormBackwardBackward"),
)
# Where fn takes derivatives itself, its backward pass is in the graph already.
_OF_A_BACKWARD_PASS = "BackwardBackward"
# A fused node of torch.jit: it may hold any operation.
_SCRIPTED = "DifferentiableGraphBackward"
# Every function that once_differentiable returns has the same code. Autograd takes its
# result for a constant, and raises only where the incoming gradient is not one.
_MARKED = once_differentiable(lambda _ctx: None).__code__


def nodes_of(graph: Graph) -> Nodes:
    """Return which nodes of a graph decide how to compute its Jacobian.

    Raises:
        NoSuchWayError: A backward pass would end the process.
    """
    convolution = wrong_without_graph = False
    names: dict[str, Any] = {}
    for number, name, kinds in _noteworthy(graph.drawing):
        node = graph.nodes[number]
        if "group_norm" in kinds and 0 not in graph.drawing.positions[number]:
            _require_survivable(node)
        if isinstance(node, BackwardCFunction):
            names["python"] = name
            if _is_marked(node):
                names["once"] = name
        convolution = convolution or "convolution" in kinds
        wrong_without_graph = wrong_without_graph or "wrong_without_graph" in kinds
        if "no_second" in kinds and "no_second" not in names:
            names |= {"no_second": name, "no_second_at": number}
        for kind in kinds & {"wrong_at_once", "wrong_twice"}:
            names[kind] = name
        if "wrong_thrice" in kinds and computes_statistics(node):
            names["wrong_thrice"] = name
            if graph.batch > 1 and _is_over_samples(node):
                names["mixing"] = name
            if is_norm_of_a_backward_pass(node):
                names["wrong_twice"] = name
            # Position 0 is the norm's input, the others its weights.
            if any(graph.drawing.positions[number]):
                names["wrong_at_once_twice"] = name
        if "scripted" in kinds:
            names["wrong_thrice"] = names["wrong_at_once_twice"] = _SCRIPTED
    return Nodes(convolution, wrong_without_graph=wrong_without_graph, **names)


@kept_for_each
def _noteworthy(drawing: Drawing) -> list[tuple[int, str, frozenset[str]]]:
    """Return the number, name and kinds of each node that has a kind."""
    kinds = enumerate(map(_kinds, drawing.names))
    return [(number, drawing.names[number], it) for number, it in kinds if it]


def _kinds(name: str) -> frozenset[str]:
    """Return the kinds that the name of a node tells."""
    kinds = {
        "convolution": "Convolution" in name,
        "wrong_without_graph": name.startswith(_WRONG_WITHOUT_GRAPH),
        "no_second": name.startswith(_NO_SECOND),
        "wrong_at_once": name.startswith(_WRONG_AT_ONCE),
        "wrong_twice": name.startswith(_WRONG_TWICE),
        "wrong_thrice": name.startswith(_WRONG_THRICE),
        "group_norm": name.startswith("NativeGroupNormBackward"),
        "scripted": _SCRIPTED in name,
        # Those of torch's own operations have a number after that.
        "perhaps_python": name.endswith("Backward"),
    }
    return frozenset(kind for kind, is_so in kinds.items() if is_so)


def _require_survivable(node: Any) -> None:
    """Raise where the gradients of a group norm's weights would end the process."""
    if _saved_input(node) is not None and ends_the_process(node):
        raise NoSuchWayError(
            f"{node.name()} is of a GroupNorm whose input has its channels last in "
            "memory. On a CPU torch ends the process as it computes the gradients of "
            "its weights, and not that of its input. Have it get x.contiguous()."
        )


def _is_marked(node: Any) -> bool:
    """Tell whether a custom backward is marked with once_differentiable."""
    backwards = node._forward_cls.backward, node._forward_cls.vjp
    return any(getattr(it, "__code__", None) is _MARKED for it in backwards)


def computes_statistics(node: Any) -> bool:
    """Tell whether a norm computes its statistics; batch norm in eval does not."""
    return getattr(node, "_saved_training", getattr(node, "_saved_train", True))


def _is_over_samples(node: Any) -> bool:
    """Tell whether a norm is over several samples; an instance norm sees one."""
    given = _saved_input(node) if "BatchNorm" in node.name() else None
    return given is not None and given.shape[0] > 1


def _saved_input(node: Any) -> Tensor | None:
    """Return the input that a norm has saved; ``None`` where torch refuses to read it.

    It was freed, or changed in place since. The backward pass is refused as well.
    """
    with suppress(RuntimeError):
        return getattr(node, "_saved_input", None)
    return None


def is_norm_of_a_backward_pass(node: Any) -> bool:
    """Tell whether a norm is that of a derivative which fn takes itself."""
    name = node.name()
    is_norm = name.startswith(_WRONG_THRICE) and _OF_A_BACKWARD_PASS in name
    return is_norm and computes_statistics(node)
