"""Whether outputs and inputs require grad."""

import re
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.plain_tensors import is_inexact
from gradlib.private.modes import graphs_are_hidden, graphs_were_hidden
from gradlib.vjp.arguments import Argument, Arguments, short
from gradlib.vjp.cuts import cut_of
from gradlib.vjp.detached import original_of, view_of
from gradlib.vjp.diagnosis import Diagnosis, passing
from gradlib.vjp.fixes import FEW, ORIGINAL, all_ones, for_entries, recomputed
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
    original = original_of(output, arguments.frames)
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
    return passing(original, found, arguments, arguments.outputs)


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
    original = original_of(given, arguments.frames, of=arguments.outputs.values)
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
    return passing(instead, found, arguments, inputs)


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
    names = [original_of(inputs.values[i], frames, of) for i in detached]
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
    wanted = set(map(view_of, detached)) - {None}
    names = (
        name
        for name, it in named_tensors(frames)
        if "." in name and it.requires_grad and view_of(it) in wanted
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
