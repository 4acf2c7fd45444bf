"""Whether each grad_outputs fits its output."""

from collections.abc import Sequence
from math import prod
from types import FrameType
from typing import Any

from torch import Tensor, nn

from gradlib.vjp.arguments import Arguments, Form, form_of, shape_of
from gradlib.vjp.diagnosis import ALL_ONES, ONES, Diagnosis, call, diagnosis, mended
from gradlib.vjp.layout_checks import check_layout
from gradlib.vjp.names import called
from gradlib.vjp.shape_guesses import guess
from gradlib.vjp.vector_batches import (
    check_batch_axis,
    check_batch_sizes,
    nested_in_batch,
)

Frames = Sequence[FrameType]

_PLAIN = (Tensor, nn.Parameter)  # stand-ins give the device of what they stand for
_GATHERED = ("GatherBackward", "StackBackward0")  # by DataParallel, by torch.stack


def check_vectors(arguments: Arguments, frames: Frames) -> Diagnosis | None:
    """Find a grad_outputs that does not fit its output."""
    for i, output in enumerate(arguments.outputs.values):
        form, vector = form_of(output), arguments.grad_outputs.values[i]
        if (found := check_layout(arguments, i)) is not None:
            return found
        if form is None or (vector is not None and shape_of(vector) is None):
            if arguments.is_grads_batched:
                return nested_in_batch(arguments, i)
            continue  # nested tensors: torch compares them
        found = check_batch_axis(arguments, i, form)
        if found is None and vector is None:
            found = _check_presence(arguments, i, form, frames)
        elif found is None:
            found = (
                _check_shape(arguments, i, form, frames)
                or _check_dtype(arguments, i, form)
                or _check_device(arguments, i, form)
            )
        if found is not None:
            return found
    return check_batch_sizes(arguments)


def _check_presence(
    arguments: Arguments, i: int, form: Form, frames: Frames
) -> Diagnosis | None:
    """Find an output that needs weights and has none."""
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    is_single = prod(form.shape) == 1
    if is_single and form.dtype.is_floating_point:
        return None
    output = called(outputs, i, frames)
    none_at_all = all(it is None for it in vectors.values)
    what = f"{output} has shape {list(form.shape)}, and "
    none_given = f"no {vectors.name} was given."
    what += none_given if none_at_all else f"{vectors.places[i]} is None."
    fix = mended(arguments, i, ONES)
    if none_at_all and outputs.several:
        fix = f"{ALL_ONES}\n{call(arguments, 'v')}"
    code = "GL101"
    if is_single:
        what = (
            f"{output} is complex, and only a real number has the weight one unasked."
        )
        intent = "A loss is real: take .real or .abs() of it. Or pass the weight."
    elif _is_gathered(outputs.values[i]):
        code = "GL113"
        what += " It was put together from single numbers, or from several GPUs."
        intent = (
            "If these are losses, take their mean() or their sum(). If not, pass a "
            "weight for each entry, v."
        )
        if not outputs.several:
            fix = call(arguments, "", outputs="y.mean()")
    elif arguments.accumulates and not outputs.several:
        intent = (
            "A loss is one number: take the mean() of its entries, or the sum(). For "
            "anything else, pass a weight for each entry: backward(v)."
        )
        fix = call(arguments, "", outputs="y.mean()")
    else:
        intent = (
            "Weights of one give the gradient of the output's sum, which is not dy/dx. "
            "A one among zeros gives one row of the Jacobian. Of a loss, take the "
            "mean() or the sum() first: then no weights are needed."
        )
    return diagnosis(code, vectors.places[i], what, intent=intent, fix=fix)


def _is_gathered(output: Any) -> bool:
    """Tell whether a vector was put together from single numbers, or from GPUs."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    if node is None or output.dim() != 1:
        return False
    parts = {part.name() for part, _ in node.next_functions if part is not None}
    unsqueezed = node.name() == "CatBackward0" and parts == {"UnsqueezeBackward0"}
    return unsqueezed or node.name() in _GATHERED


def _check_shape(
    arguments: Arguments, i: int, form: Form, frames: Frames
) -> Diagnosis | None:
    place = arguments.grad_outputs.places[i]
    shape = tuple(arguments.grad_outputs.values[i].shape)
    if arguments.is_grads_batched or shape == form.shape:
        return None
    output = called(arguments.outputs, i, frames)
    what = f"{place} has shape {list(shape)}, and {output} has {list(form.shape)}."
    intent, fix = guess(arguments, i, shape, form.shape)
    return diagnosis("GL102", place, what, intent=intent, fix=fix)


def _check_dtype(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    place, vector = arguments.grad_outputs.places[i], arguments.grad_outputs.values[i]
    given, wanted = vector.dtype, form.dtype
    is_float = given.is_floating_point or given.is_complex
    if is_float and given.is_complex == wanted.is_complex:
        return None  # torch casts between floats, and it may
    output = arguments.outputs.places[i]
    what = f"{place} is {_short(given)}, and {output} is {_short(wanted)}."
    expression = "{v}.to({y}.dtype)"
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
    fix = mended(arguments, i, expression)
    return diagnosis("GL105", place, what, intent=intent, fix=fix)


def _check_device(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    place, vector = arguments.grad_outputs.places[i], arguments.grad_outputs.values[i]
    is_single = vector.dim() == (1 if arguments.is_grads_batched else 0)
    if vector.device == form.device or type(vector) not in _PLAIN:
        return None
    if is_single and not vector.is_meta:
        return None  # torch moves it
    output = arguments.outputs.places[i]
    what = f"{place} is on {vector.device}, and {output} is on {form.device}."
    intent, expression = "Move it to the output.", "{v}.to({y}.device)"
    if vector.is_meta:
        intent = "A meta tensor has a shape and no values: make one that has some."
        expression = ONES
    fix = mended(arguments, i, expression)
    return diagnosis("GL106", place, what, intent=intent, fix=fix)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
