"""Whether each grad_outputs fits its output."""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradlib.plain_tensors import is_inexact
from gradlib.subclasses import is_of_other_class
from gradlib.vjp.arguments import Argument, Arguments, Form, form_of, shape_of, short
from gradlib.vjp.connection import LEADS_NOWHERE, LEAF, is_made_anew
from gradlib.vjp.diagnosis import Diagnosis, together
from gradlib.vjp.fixes import call, recomputed, spelled_form, weights, with_ones
from gradlib.vjp.layout_checks import check_layout
from gradlib.vjp.shape_guesses import guess
from gradlib.vjp.tensor_names import called
from gradlib.vjp.vector_batches import (
    check_batch_axis,
    check_batch_sizes,
    nested_in_batch,
)

_GATHERED = ("GatherBackward", "StackBackward0")  # by DataParallel, by torch.stack


def check_vectors(arguments: Arguments) -> Diagnosis | None:
    """Find a grad_outputs that does not fit its output."""
    every = range(len(arguments.outputs.values))
    found = (_check_vector(arguments, i) for i in every)
    return together(filter(None, found), arguments) or check_batch_sizes(arguments)


def _check_vector(arguments: Arguments, i: int) -> Diagnosis | None:
    output, vector = arguments.outputs.values[i], arguments.grad_outputs.values[i]
    if (found := check_layout(arguments, i)) is not None:
        return found
    form = form_of(output)
    if form is None or (vector is not None and shape_of(vector) is None):
        # torch itself compares nested tensors.
        return nested_in_batch(arguments, i) if arguments.is_grads_batched else None
    if (found := check_batch_axis(arguments, i, form)) is not None:
        return found
    if vector is None:
        return _check_presence(arguments, i, form)
    return (
        _check_shape(arguments, i, form)
        or _check_dtype(arguments, i, form)
        or _check_device(arguments, i, form)
    )


def _check_presence(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    """Find an output that needs weights and has none."""
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    output, place = outputs.values[i], called(outputs, i, arguments.frames)
    if prod(form.shape) == 1:
        is_real = form.dtype.is_floating_point
        return None if is_real else _complex_number(arguments, i, place)
    what = f"{place} has shape {list(form.shape)}, and "
    none_given = f"no {vectors.name} was given."
    what += f"{vectors.places[i]} is None." if vectors.is_given else none_given
    if is_made_anew(output, arguments.inputs.values):
        what += f" {LEAF.format('It')}"
        fix = recomputed(arguments, "y = f(x)")
        return Diagnosis("GL101", what, LEADS_NOWHERE, fix)
    return _without_weights(arguments, i, what)


def _without_weights(arguments: Arguments, i: int, what: str) -> Diagnosis:
    """Explain an output of several entries that has no weights."""
    outputs = arguments.outputs
    of_mean = call(arguments, "", outputs="y.mean()") * _has_a_mean(outputs)
    if _is_gathered(outputs.values[i]):
        code, fix = "GL113", of_mean
        what += " It was put together from single numbers, or from several GPUs."
        intent = (
            "If these are losses, take their mean() or their sum(). If not, pass a "
            "weight for each entry, v."
        )
    elif arguments.accumulates and of_mean:
        code, fix = "GL101", of_mean
        intent = (
            "A loss is one number: take the mean() of its entries, or the sum(). For "
            "anything else, pass a weight for each entry: backward(v)."
        )
    else:
        code, fix = "GL101", ""
        intent = (
            "Weights of one give the gradient of the output's sum, which is not dy/dx. "
            "A one among zeros gives one row of the Jacobian. Of a loss, take the "
            "mean() or the sum() first: then no weights are needed."
        )
    found = Diagnosis(code, what, intent, fix)
    return found if fix else _with_ones(found, arguments, i)


def _complex_number(arguments: Arguments, i: int, place: str) -> Diagnosis:
    what = f"{place} is complex, and only a real number has the weight one unasked."
    intent = "A loss is real: take .real or .abs() of it. Or pass the weight."
    found = Diagnosis("GL101", what, intent)
    if _is_one_dense(arguments.outputs):
        return replace(found, fix=call(arguments, "", outputs="y.real"))
    return _with_ones(found, arguments, i)


def _with_ones(found: Diagnosis, arguments: Arguments, i: int) -> Diagnosis:
    """Add the code that gives an output weights of one, or all if none has any."""
    if arguments.outputs.several and not arguments.grad_outputs.is_given:
        return replace(found, fix=with_ones(arguments))
    line = f"{{v}} = {weights(arguments.outputs.values[i])}"
    return replace(found, mends={i: line})


def _has_a_mean(outputs: Argument) -> bool:
    """Tell whether there is one output, real and dense, so that its mean is a loss."""
    return _is_one_dense(outputs) and not outputs.values[0].is_complex()


def _is_one_dense(outputs: Argument) -> bool:
    output = outputs.values[0]
    is_dense = isinstance(output, Tensor) and output.layout == torch.strided
    return is_dense and not outputs.several


def _is_gathered(output: Any) -> bool:
    """Tell whether a vector was put together from single numbers, or from GPUs."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    if node is None or output.dim() != 1:
        return False
    parts = {part.name() for part, _ in node.next_functions if part is not None}
    unsqueezed = node.name() == "CatBackward0" and parts == {"UnsqueezeBackward0"}
    return unsqueezed or node.name() in _GATHERED


def _check_shape(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    place = arguments.grad_outputs.places[i]
    shape = tuple(arguments.grad_outputs.values[i].shape)
    if arguments.is_grads_batched or shape == form.shape:
        return None
    output = called(arguments.outputs, i, arguments.frames)
    what = f"{place} has shape {list(shape)}, and {output} has {list(form.shape)}."
    intent, line = guess(arguments, i, shape, form.shape)
    return Diagnosis("GL102", what, intent=intent, mends={i: line})


def _check_dtype(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    place, vector = arguments.grad_outputs.places[i], arguments.grad_outputs.values[i]
    given, wanted = vector.dtype, form.dtype
    if is_inexact(given) and given.is_complex == wanted.is_complex:
        return None  # torch casts between floats, and it may
    output = arguments.outputs.places[i]
    what = f"{place} is {short(given)}, and {output} is {short(wanted)}."
    _, dtype, _ = spelled_form(arguments.outputs.values[i])
    expression = f"{{v}}.to({dtype})"
    if given.is_complex:
        intent = "The gradient of a real output is real."
        expression = "{v}.real"
    elif wanted.is_complex:
        intent = "The gradient of a complex output is complex."
    elif vector.is_quantized:
        intent = "torch goes back with floats only, not with quantized numbers."
        expression = "{v}.dequantize()"
    else:
        intent = "torch casts it silently. Likely meant: these weights, as floats."
    mends = {i: f"{{v}} = {expression}"}
    # To word its error torch compares tensors by ==, which may raise another error.
    is_refused = given.is_complex != wanted.is_complex
    return Diagnosis("GL105", what, intent, mends=mends, is_refused=is_refused)


def _check_device(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    place, vector = arguments.grad_outputs.places[i], arguments.grad_outputs.values[i]
    is_single = vector.dim() == (1 if arguments.is_grads_batched else 0)
    if vector.device == form.device:
        return None
    if is_of_other_class(vector):  # a stand-in has the device of what it stands for
        return None
    if is_single and not vector.is_meta:
        return None  # torch moves it
    output = arguments.outputs.places[i]
    what = f"{place} is on {vector.device}, and {output} is on {form.device}."
    _, _, device = spelled_form(arguments.outputs.values[i])
    intent, expression = "Move it to the output.", f"{{v}}.to({device})"
    if vector.is_meta:
        intent = "A meta tensor has a shape and no values: make one that has some."
        expression = f"torch.ones_like({{v}}, device={device})"
    mends = {i: f"{{v}} = {expression}"}
    return Diagnosis("GL106", what, intent=intent, mends=mends)
