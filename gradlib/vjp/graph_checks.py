"""Whether inputs are parts of the graph behind the outputs."""

from collections.abc import Sequence
from types import FrameType

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


def _unused(arguments: Arguments, i: int) -> Diagnosis:
    outputs, inputs = arguments.outputs, arguments.inputs
    given, place = inputs.values[i], called(inputs, i, arguments.frames)
    what = f"{place} is not part of the graph of {outputs.name}."
    graph = dict.fromkeys(edges_behind(map(edge_of, outputs.values)))
    leaves = leaves_at(graph)
    made_from = edges_behind([edge_of(given)])  # the nearest first
    source, instead = next((it for it in made_from if it in graph), None), ""
    fix = recomputed(arguments, "y = f(x)")
    if outputs.values and not unconnected([given], outputs.values):
        intent = (
            f"The two stand in the wrong order: {place} was computed from "
            f"{called(outputs, 0, arguments.frames)}. The outputs come first."
        )
        fix = exchanged(arguments)
    elif source is not None:
        instead = _name_at(source, arguments.frames)
        origin, step = _described(source, instead), edge_of(given)[0].name()
        what += f" It was made (by {step}) from {origin}, which is."
        intent = (
            f"Differentiate with respect to {origin} and take that part of its "
            f"gradient, or make {inputs.places[i]} first and compute the output from "
            "it."
        )
    elif (twin := _twin(leaves, given)) is not None:
        instead = _name_at(edge_of(twin), arguments.frames)
        origin = _described(edge_of(twin), instead)
        what += f" It has the memory of {origin}, which is."
        intent = f"Pass {origin} itself."
    elif outputs.values and all(
        is_made_anew(it, inputs.values) for it in outputs.values
    ):
        what += f" {LEAF.format(called(outputs, 0, arguments.frames))}"
        is_view = leaf_of(edge_of(outputs.values[0])[0]) is None
        intent = _VIEW_WITHOUT_GRAPH if is_view else LEADS_NOWHERE
    elif arguments.materialize_grads:
        intent = "torch makes no zeros for an edge. Let it give None, or pass tensors."
        fix = recomputed(arguments, allow_unused=True, materialize_grads=None)
    else:
        what += f" {_ends(leaves, arguments.frames)}"
        if has_reentrant_checkpoint(outputs.values):
            intent = _HIDDEN
        else:
            intent, fix = _WAS_IT_USED, recomputed(arguments, allow_unused=True)
    return passing(instead, Diagnosis("GL109", what, intent, fix), arguments, inputs)


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
    shown = [*names.values()][:4] + ["..."] * (len(names) > 4)
    return f"It ends in {', '.join(shown)}."


def _twin(leaves: Sequence[Tensor], given: Tensor | GradientEdge) -> Tensor | None:
    """Return the leaf that shares the memory of the given tensor."""
    if isinstance(given, GradientEdge):
        return None
    return next((it for it in leaves if have_same_memory(it, given)), None)
