"""Whether outputs and inputs are parts of one graph."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.edges import Edge, edge_of
from gradlib.private.modes import graphs_are_hidden, graphs_were_hidden
from gradlib.private.nodes import leaf_of
from gradlib.stats import is_inexact
from gradlib.vjp.arguments import Argument, Arguments, shape_of, short
from gradlib.vjp.connection import (
    LEADS_NOWHERE,
    LEAF,
    Graph,
    graph_behind,
    is_at,
    is_made_anew,
    source_in,
    unconnected,
)
from gradlib.vjp.cuts import cut_of
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.fixes import (
    FEW,
    ORIGINAL,
    all_ones,
    exchanged,
    for_entries,
    recomputed,
)
from gradlib.vjp.spelling import LONGEST
from gradlib.vjp.tensor_names import called, in_reach, named_tensors


def check_requires_grad(arguments: Arguments) -> Diagnosis | None:
    """Find outputs, then inputs, that do not require grad."""
    for i, output in enumerate(arguments.outputs.values):
        if _needs_no_grad(output):
            return _output_needs_no_grad(arguments, i)
    for i, given in enumerate(arguments.inputs.values):
        if _needs_no_grad(given):
            return _input_needs_no_grad(arguments, i)
    return None


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
    return _unused(arguments, candidates[missing[0]], graph_behind(outputs))


def _needs_no_grad(value: Any) -> bool:
    return not isinstance(value, GradientEdge) and not value.requires_grad


def _output_needs_no_grad(arguments: Arguments, i: int) -> Diagnosis:
    output: Tensor = arguments.outputs.values[i]
    place, lines = called(arguments.outputs, i, arguments.frames), ["y = f(x)"]
    if not is_inexact(output.dtype):
        what = _is_no_float(place, output)
        intent = (
            "argmax, comparisons and casts to integers cut the graph. Compute the "
            "output with operations on floats."
        )
    elif output.is_inference():
        what = f"{place} was computed under torch.inference_mode()."
        intent = "Compute it outside, from an input made outside, or from a clone."
        lines = [f"x = {_clones(arguments.inputs)}", *lines]
        if arguments.into_leaves:  # the inputs were not named
            lines = ["with torch.inference_mode(False):", "    y = f(x)"]
    elif not torch.is_grad_enabled():
        what = f"{place} does not require grad, and gradients are switched off here."
        intent = "Compute it outside of torch.no_grad(), or switch gradients on for it."
        lines = ["with torch.enable_grad():", "    y = f(x)"]
    elif graphs_are_hidden() or graphs_were_hidden(arguments.frames):
        return _of_a_transform(arguments, place)
    else:
        return _cut_before(arguments, output, place)
    return Diagnosis("GL108", what, intent, recomputed(arguments, *lines))


def _cut_before(arguments: Arguments, output: Tensor, place: str) -> Diagnosis:
    """Say what cut the graph of an output, as far as that can be found out."""
    inputs = arguments.inputs
    tensors = [it for it in inputs.values if isinstance(it, Tensor)]
    what, intent, lines = f"{place} does not require grad", _SOMETHING_CUT, ["y = f(x)"]
    original = _original(output, arguments.frames)
    if original:
        what += f": it is `{original}`, detached"
        intent = f"Pass `{original}` itself."
    elif tensors and not any(it.requires_grad for it in tensors):
        what += f", and neither does {inputs.places[0]}"
        intent = "Let the input require grad, then compute the output from it."
        lines = _lines_for_grad(inputs)
    elif (cut := cut_of(arguments)) is not None:
        what += f": {cut.what}"
        intent = cut.intent
    found = Diagnosis("GL108", f"{what}.", intent, recomputed(arguments, *lines))
    return _passing(original, found, arguments, arguments.outputs)


_SOMETHING_CUT = (
    "Something cut the graph before the output: torch.no_grad(), detach(), .data, "
    ".item(), .numpy(), torch.tensor(...) around a result, or what has no derivative, "
    "as argmax, a comparison, a cast to integers. Or nothing required grad: the "
    "weights are frozen, or a checkpoint with use_reentrant=True was given only data. "
    "Or it is a gradient: computed without create_graph=True, or by a backward that is "
    "once_differentiable, or that of a linear function, which is constant. Or "
    "requires_grad was set too late."
)


def _is_no_float(place: str, tensor: Tensor) -> str:
    return f"{place} has dtype {short(tensor.dtype)}, and only floats have gradients."


def _of_a_transform(arguments: Arguments, place: str) -> Diagnosis:
    """Say what to do inside a transform, where no tensor requires grad."""
    outputs = arguments.outputs
    given = arguments.grad_outputs.values
    vectors = [all_ones(arguments)] if any(it is None for it in given) else []
    v = "type(y)(v)" if outputs.several else "v"
    pulled = f"torch.vmap(vjp)({v})" if arguments.is_grads_batched else f"vjp({v})"
    return Diagnosis(
        "GL108",
        f"{place} does not require grad: in a function that torch.vmap or "
        "torch.func.jvp calls, no tensor does.",
        intent="There torch.func.vjp goes back, and torch.func.grad where the output "
        "is one number. Or call autograd outside, on the whole batch.",
        fix="\n".join(["y, vjp = torch.func.vjp(f, x)", *vectors, pulled]),
    )


def _input_needs_no_grad(arguments: Arguments, i: int) -> Diagnosis:
    inputs = arguments.inputs
    given: Tensor = inputs.values[i]
    place = called(inputs, i, arguments.frames)
    original = _original(given, arguments.frames, of=arguments.outputs.values)
    what, instead = f"{place} does not require grad.", ""
    intent = "Let it require grad, then compute the output from it."
    back, others = _put_back(arguments, original) if original else ([], {})
    if not is_inexact(given.dtype):
        what = _is_no_float(place, given)
        intent = "Leave indices and labels out. Make a float of what is a quantity."
        back = _left_out(inputs)
    elif given.is_inference():
        what = f"{place} was made under torch.inference_mode()."
        intent = "A clone that is made outside can require grad."
    elif original:
        what = f"{place} does not require grad: it is `{original}`, detached."
        if back or not inputs.several:
            intent = f"Pass `{original}` itself, from which the output was computed."
        instead = original
    fix = recomputed(arguments, *(back or _lines_for_grad(inputs)))
    found = Diagnosis("GL110", what, intent=intent, fix=fix, others=others)
    return _passing(instead, found, arguments, inputs)


def _put_back(arguments: Arguments, first: str) -> tuple[list[str], dict[str, str]]:
    """Return the lines that replace detached inputs with originals, if all have names.

    Args:
        arguments: The call.
        first: The name of the first original.

    Returns:
        The lines, and what further letters in them stand for.
    """
    inputs, frames = arguments.inputs, arguments.frames
    detached = [i for i, it in enumerate(inputs.values) if _needs_no_grad(it)]
    is_list = inputs.keys is None
    if not inputs.several or not in_reach(first, frames):
        return [], {}
    if len(detached) > FEW:
        owner = _owner([inputs.values[i] for i in detached], frames)
        every = "list(w.parameters())" if is_list else "dict(w.named_parameters())"
        if owner:
            return [f"x = {every}"], {ORIGINAL: owner}
    of = arguments.outputs.values
    names = [_original(inputs.values[i], frames, of) for i in detached]
    entries, originals = (inputs.spelled[i] for i in detached), ", ".join(names)
    if not all(in_reach(name, frames) for name in names) or len(originals) > LONGEST:
        return [], {}
    line = f"{', '.join(entries)} = {ORIGINAL}"
    return ["x = list(x)"] * is_list + [line], {ORIGINAL: originals}


def _left_out(inputs: Argument) -> list[str]:
    """Return the line that leaves out integers, if all floats require grad."""
    if not all(isinstance(it, Tensor) for it in inputs.values):
        return []
    floats = [it for it in inputs.values if is_inexact(it.dtype)]
    if not floats or any(map(_needs_no_grad, floats)):
        return []
    if inputs.keys is not None:
        return ["x = {key: it for key, it in x.items() if it.requires_grad}"]
    return ["x = [it for it in x if it.requires_grad]"]


def _owner(detached: Sequence[Tensor], frames: Sequence[FrameType]) -> str:
    """Return the module that most of the tensors are parameters of, or ``""``."""
    wanted = set(map(_view, detached)) - {None}
    names = (
        name
        for name, it in named_tensors(frames)
        if "." in name and it.requires_grad and _view(it) in wanted
    )
    owners = Counter(re.split(r"\W", name)[0] for name in names)
    return max(owners, key=owners.__getitem__, default="")


def _lines_for_grad(inputs: Argument) -> list[str]:
    """Return the lines that let all inputs require grad, and compute the outputs."""
    lines = {
        i: _line_for_grad(given)
        for i, given in enumerate(inputs.values)
        if _needs_no_grad(given)
    }
    are_new = any(" = " in line for line in lines.values())
    is_list = inputs.several and inputs.keys is None
    opened = ["x = list(x)"] if are_new and is_list else []
    return [*opened, *for_entries(lines, inputs), "y = f(x)"]


def _line_for_grad(given: Tensor) -> str:
    if not is_inexact(given.dtype):
        return "{x} = {x}.to(torch.float32).requires_grad_()"
    if given.is_inference():
        return "{x} = {x}.clone().requires_grad_()"
    return "{x}.requires_grad_()"


def _clones(inputs: Argument) -> str:
    """Return the code of copies of the inputs that require grad."""
    if inputs.keys is not None:
        return "{key: it.clone().requires_grad_() for key, it in x.items()}"
    one = "clone().requires_grad_()"
    return f"[it.{one} for it in x]" if inputs.several else f"x.{one}"


def _passing(
    name: str,
    found: Diagnosis,
    arguments: Arguments,
    argument: Argument,
) -> Diagnosis:
    """Return the diagnosis with code that passes the tensor `name`, if it can."""
    if not name or argument.several or not in_reach(name, arguments.frames):
        return found
    place = "outputs" if argument is arguments.outputs else "inputs"
    fix = recomputed(arguments, **{place: ORIGINAL})
    return replace(found, fix=fix, others={ORIGINAL: name})


def _unused(arguments: Arguments, i: int, graph: Graph) -> Diagnosis:
    outputs, inputs = arguments.outputs, arguments.inputs
    given = inputs.values[i]
    place = called(inputs, i, arguments.frames)
    what = f"{place} is not part of the graph of {outputs.name}."
    source, instead = source_in(graph, given), ""
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
    elif (twin := _twin(graph, given)) is not None:
        instead = _name_at(edge_of(twin), arguments.frames)
        origin = _described(edge_of(twin), instead)
        what += f" It has the memory of {origin}, which is."
        intent = f"Pass {origin} itself."
    elif outputs.values and all(
        is_made_anew(it, inputs.values) for it in outputs.values
    ):
        what += f" {LEAF.format(called(outputs, 0, arguments.frames))}"
        intent = LEADS_NOWHERE
    elif arguments.materialize_grads:
        intent = "torch makes no zeros for an edge. Let it give None, or pass tensors."
        fix = recomputed(arguments, allow_unused=True, materialize_grads=None)
    else:
        what += f" {_leaves(graph, arguments.frames)}"
        intent = _WAS_IT_USED
        fix = recomputed(arguments, allow_unused=True)
    found = Diagnosis("GL109", what, intent, fix)
    return _passing(instead, found, arguments, inputs)


_WAS_IT_USED = (
    "Was its layer called, while it required grad, and the result used? If the output "
    "is a gradient: that of a function linear in it does not depend on it. If it is "
    "meant to be unused, allow_unused gives None for it, and materialize_grads zeros."
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


def _leaves(graph: Graph, frames: Sequence[FrameType]) -> str:
    """Say in which leaves a graph ends, as far as they have names."""
    leaves = {id(leaf) for leaf in graph.leaves}
    names: dict[int, str] = {}
    for name, tensor in named_tensors(frames):
        if id(tensor) in leaves:
            names.setdefault(id(tensor), f"`{name}`")
    if not names:
        return ""
    shown = [*names.values()][:4] + ["..."] * (len(names) > 4)
    return f"It ends in {', '.join(shown)}."


def _twin(graph: Graph, given: Tensor | GradientEdge) -> Tensor | None:
    """Return a leaf of the graph that shares the memory of the given tensor."""
    if isinstance(given, GradientEdge):
        return None
    return next((it for it in graph.leaves if _same_memory(it, given)), None)


def _original(
    tensor: Tensor, frames: Sequence[FrameType], of: Sequence[Any] = ()
) -> str:
    """Return the name of the tensor that `tensor` is a detached view of, or ``""``.

    Args:
        tensor: The tensor that may be detached.
        frames: Where to look for the name.
        of: Outputs that the original has to lead to; any will do if empty.
    """
    for name, it in named_tensors(frames):
        if it.requires_grad and _same_memory(it, tensor):
            if of and unconnected(of, [it]):
                continue
            return name
    return ""


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values in the same memory."""
    view = _view(one)
    return view is not None and view == _view(other)


def _view(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return how a tensor views memory: from where, which entries, and as what.

    Returns:
        ``None`` where it has no memory of its own: sparse, or a stand-in.
    """
    try:
        start, entries = tensor.data_ptr(), (tensor.shape, tensor.stride())
    except RuntimeError:
        return None
    as_what = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (start, *entries, *as_what) if start else None
