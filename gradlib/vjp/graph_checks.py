"""Whether inputs are parts of the graph behind the outputs."""

from collections.abc import Collection, Sequence
from types import FrameType
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.edges import (
    Edge,
    edge_of,
    edges_behind,
    has_reentrant_checkpoint,
    leaves_at,
)
from gradlib.private.nodes import leaf_of
from gradlib.vjp.arguments import Arguments, shape_of
from gradlib.vjp.connection import (
    LEADS_NOWHERE,
    LEAF,
    is_at,
    is_made_anew,
    unconnected,
)
from gradlib.vjp.detached import have_same_memory
from gradlib.vjp.diagnosis import Diagnosis, passing
from gradlib.vjp.fixes import exchanged, recomputed
from gradlib.vjp.tensor_names import called, named_tensors
from gradlib.wording import listed


def check_connected(arguments: Arguments) -> Diagnosis | None:
    """Find an input that no output was computed from, unless it may be unused."""
    outputs, inputs = arguments.outputs.values, arguments.inputs.values
    candidates = range(len(inputs))
    if arguments.accumulates:
        return None
    if arguments.allow_unused:
        # torch cannot make zeros for a gradient edge, and says so too late.
        if not arguments.materialize_grads:
            return None
        candidates = [i for i in candidates if isinstance(inputs[i], GradientEdge)]
    missing = unconnected(outputs, [inputs[i] for i in candidates])
    if not missing:
        return None
    return _unused(arguments, candidates[missing[0]])


class _Reason(NamedTuple):
    """Why an input is not part of the graph.

    Attributes:
        said: What more is known of it, in a sentence, or ``""``.
        intent: What was probably meant.
        instead: The name of the tensor to pass instead, or ``""``.
        fix: The code that mends the call; without it, the outputs are computed anew.
    """

    said: str
    intent: str
    instead: str = ""
    fix: str = ""


def _unused(arguments: Arguments, i: int) -> Diagnosis:
    """Explain an input that is not part of the graph, as far as is known."""
    outputs, inputs, frames = arguments.outputs, arguments.inputs, arguments.frames
    graph = dict.fromkeys(edges_behind(map(edge_of, outputs.values)))
    leaves = leaves_at(graph)
    place = called(inputs, i, frames)
    reason = (
        _exchanged(arguments, i, place)
        or _made_from_part(arguments, i, graph)
        or _in_memory_of_leaf(arguments, i, leaves)
        or _outputs_are_leaves(arguments)
        or _not_reached(arguments, leaves)
    )
    what = f"{place} is not part of the graph of {outputs.name}. {reason.said}"
    fix = reason.fix or recomputed(arguments, "y = f(x)")
    found = Diagnosis("GL109", what.rstrip(), reason.intent, fix)
    return passing(reason.instead, found, arguments, inputs)


def _exchanged(arguments: Arguments, i: int, place: str) -> _Reason | None:
    """Find an input that was computed from the outputs."""
    outputs, given = arguments.outputs, arguments.inputs.values[i]
    if not outputs.values or unconnected([given], outputs.values):
        return None
    intent = (
        f"The two stand in the wrong order: {place} was computed from "
        f"{called(outputs, 0, arguments.frames)}. The outputs come first."
    )
    return _Reason("", intent, fix=exchanged(arguments))


def _made_from_part(
    arguments: Arguments, i: int, graph: Collection[Edge]
) -> _Reason | None:
    """Find an input that was made from a tensor in the graph, as a slice of one is."""
    at = edge_of(arguments.inputs.values[i])
    # The nearest come first.
    source = next((it for it in edges_behind([at]) if it in graph), None)
    if source is None:
        return None
    name = _name_at(source, arguments.frames)
    origin = _described(source, name)
    intent = (
        f"Differentiate with respect to {origin} and take that part of its gradient, "
        f"or make {arguments.inputs.places[i]} first and compute the output from it."
    )
    said = f"It was made (by {at[0].name()}) from {origin}, which is."
    return _Reason(said, intent, name)


def _in_memory_of_leaf(
    arguments: Arguments, i: int, leaves: Sequence[Tensor]
) -> _Reason | None:
    """Find an input that has the memory of a leaf in the graph."""
    twin = _twin(leaves, arguments.inputs.values[i])
    if twin is None:
        return None
    name = _name_at(edge_of(twin), arguments.frames)
    origin = _described(edge_of(twin), name)
    said = f"It has the memory of {origin}, which is."
    return _Reason(said, f"Pass {origin} itself.", name)


def _outputs_are_leaves(arguments: Arguments) -> _Reason | None:
    """Find outputs that are all leaves: they lead to no input."""
    outputs, inputs = arguments.outputs, arguments.inputs.values
    if not outputs.values or not all(is_made_anew(it, inputs) for it in outputs.values):
        return None
    said = LEAF.format(called(outputs, 0, arguments.frames))
    is_view = leaf_of(edge_of(outputs.values[0])[0]) is None
    return _Reason(said, _VIEW_WITHOUT_GRAPH if is_view else LEADS_NOWHERE)


def _not_reached(arguments: Arguments, leaves: Sequence[Tensor]) -> _Reason:
    """Say where the graph ends instead, and how to go on without that input."""
    if arguments.materialize_grads:
        fix = recomputed(arguments, allow_unused=True, materialize_grads=None)
        return _Reason("", _NO_ZEROS, fix=fix)
    said = _ends(leaves, arguments.frames)
    if has_reentrant_checkpoint(arguments.outputs.values):
        return _Reason(said, _HIDDEN)
    return _Reason(said, _WAS_IT_USED, fix=recomputed(arguments, allow_unused=True))


_NO_ZEROS = "torch makes no zeros for an edge. Let it give None, or pass tensors."

_WAS_IT_USED = (
    "Was its layer called, while it required grad, and the result used? If the output "
    "is a gradient: that of a function linear in it does not depend on it. If it is "
    "meant to be unused, allow_unused gives None for it, and materialize_grads zeros."
)

_HIDDEN = (
    "A checkpoint with use_reentrant=True hides what its function uses, such as "
    "weights, and torch refuses it in autograd.grad. Pass use_reentrant=False to "
    "torch.utils.checkpoint.checkpoint, or call backward() and read .grad."
)

_VIEW_WITHOUT_GRAPH = (
    "A view made under torch.no_grad() has no graph, though it says that it requires "
    "grad. Make it where gradients are enabled."
)


def _name_at(edge: Edge, frames: Sequence[FrameType]) -> str:
    """Return the name of the tensor whose gradient flows through `edge`, or ``""``."""
    named = named_tensors(frames)
    return next((name for name, tensor in named if is_at(tensor, edge)), "")


def _described(edge: Edge, name: str) -> str:
    """Return what to call the tensor whose gradient flows through `edge`."""
    if name:
        return f"`{name}`"
    leaf = leaf_of(edge[0])
    if leaf is not None:
        shape = shape_of(leaf)
        return "a nested leaf" if shape is None else f"a leaf of shape {list(shape)}"
    return f"an output of {edge[0].name()}"


def _ends(leaves: Sequence[Tensor], frames: Sequence[FrameType]) -> str:
    """Say in which leaves a graph ends, as far as they have names."""
    ids = set(map(id, leaves))
    names: dict[int, str] = {}
    for name, tensor in named_tensors(frames):
        if id(tensor) in ids:
            names.setdefault(id(tensor), f"`{name}`")
    if not names:
        return ""
    return f"It ends in {listed(names.values(), 4)}."


def _twin(leaves: Sequence[Tensor], given: Tensor | GradientEdge) -> Tensor | None:
    """Return the leaf that shares the memory of the given tensor."""
    if isinstance(given, GradientEdge):
        return None
    return next((it for it in leaves if have_same_memory(it, given)), None)
