"""Whether grad_outputs are tensors, one for each output."""

from dataclasses import replace
from numbers import Number
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.vjp.arguments import NO_FLAG, Argument, Arguments, Shape, form_of, shape_of
from gradlib.vjp.diagnosis import Diagnosis, together
from gradlib.vjp.fixes import (
    ONES_MEAN,
    ORIGINAL,
    call,
    recomputed,
    spelled_form,
    weights,
    with_ones,
)
from gradlib.vjp.kind_checks import kind_of
from gradlib.vjp.source import expressions
from gradlib.wording import counted


def check_vector_kinds(arguments: Arguments) -> Diagnosis | None:
    """Find grad_outputs that are not tensors, among those that are needed."""
    needed = arguments.grad_outputs.values[: len(arguments.outputs.values)]
    found = (
        _not_a_tensor(arguments, i)
        for i, value in enumerate(needed)
        if value is not None and not isinstance(value, Tensor)
    )
    return together(found, arguments)


def check_options(arguments: Arguments) -> Diagnosis | None:
    """Find a tensor where True or False belongs; mostly it is meant as grad_outputs."""
    options, vectors = arguments.options, arguments.grad_outputs
    name = next((it for it in options if options[it] is NO_FLAG), "")
    if not name:
        return None
    written = expressions(arguments.site).get(name) if arguments.site else None
    return Diagnosis(
        "GL104",
        f"{name} is a tensor.",
        rule=f"{name} is True or False. What weights an output is its {vectors.name}.",
        intent="Leave it out."
        if vectors.is_given
        else f"Likely meant: {vectors.name}.",
        fix=call(arguments, None if vectors.is_given else ORIGINAL),
        others={ORIGINAL: written.text if written else "v"},
    )


def check_count(arguments: Arguments) -> Diagnosis | None:
    """Find more or fewer grad_outputs than outputs."""
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    wanted, given = len(outputs.values), len(vectors.values)
    if given == wanted:
        return None
    what = f"{_counted(vectors)}, and {_counted(outputs)}."
    if given < wanted:
        intent = ONES_MEAN
        if wanted > 1:
            intent = (
                "Several outputs are differentiated as one sum, each times its own "
                "weights."
            )
        fix = with_ones(arguments)
    elif are_rows(arguments):
        silently = "torch uses the first alone, silently. "
        intent = (
            f"{silently * (not arguments.is_grads_batched)}Likely meant: a result for "
            "each, as is_grads_batched gives it for one tensor with an axis in front."
        )
        fix = f"v = torch.stack(list(v))\n{call(arguments, is_grads_batched=True)}"
    else:
        intent = "torch drops what is too much, silently."
        fix = f"v = list(v)[:{wanted}]\n{call(arguments, 'v')}"
    return Diagnosis("GL103", what, intent=intent, fix=fix)


def _not_a_tensor(arguments: Arguments, i: int) -> Diagnosis:
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    value = vectors.values[i]
    what = f"{vectors.places[i]} is {kind_of(value)}"
    if _is_one_list(arguments):
        what = f"{vectors.name} is a list of numbers, not a tensor"
        shape = _shape_of_numbers(vectors.values)
        made = _as_tensor(outputs.values[i]).format(v="v", y="y")
        intent = _THESE_WEIGHTS
        fix = f"v = {made}{_missing_axis(arguments, shape)}\n{call(arguments, 'v')}"
    elif isinstance(value, bool) and not vectors.several:
        intent = "Likely meant: retain_graph or create_graph, by its name."
        without = replace(vectors, values=(None,) * len(outputs.values))
        kept = {"retain_graph": True} if value else {}
        fix = recomputed(replace(arguments, grad_outputs=without), **kept)
    elif _are_unpaired(arguments):
        intent = "Each output needs weights of its own, of its shape."
        fix = with_ones(arguments)
    else:
        return _of_one_output(arguments, i, what)
    return Diagnosis("GL104", f"{what}.", intent, fix)


def _of_one_output(arguments: Arguments, i: int, what: str) -> Diagnosis:
    """Explain what is no tensor, and stands for the weights of one output."""
    output, value = arguments.outputs.values[i], arguments.grad_outputs.values[i]
    intent, made, shape = _THESE_WEIGHTS, _as_tensor(output), _shape_of_numbers(value)
    if isinstance(value, Number) or shape == () != shape_of(output):
        intent = "Likely meant: this weight for every entry of the output."
        number = "{v}" if isinstance(value, Number) else "{v}.item()"
        if isinstance(value, complex) and not _is_complex(output):
            intent = (
                "The gradient of a real output is real. Likely meant: the real part."
            )
            number = "{v}.real"
        made, shape = weights(output, number), shape_of(output)
    elif shape is None or not _fits(arguments, i, shape):
        intent = ONES_MEAN
        if shape is not None:
            wanted = list(shape_of(output) or ())
            what += f", and has shape {list(shape)}, where the output has {wanted}"
        made, shape = weights(output), shape_of(output)
    mends = {i: f"{{v}} = {made}{_missing_axis(arguments, shape, i)}"}
    return Diagnosis("GL104", f"{what}.", intent, mends=mends)


_THESE_WEIGHTS = "Likely meant: these weights, as a tensor like the output."


def _as_tensor(output: Any) -> str:
    """Return the code that makes a tensor like an output of ``{v}``."""
    _, dtype, device = spelled_form(output)
    return f"torch.as_tensor({{v}}, dtype={dtype}, device={device})"


def _are_unpaired(arguments: Arguments) -> bool:
    """Tell whether outputs and grad_outputs do not pair up one by one."""
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    if not vectors.several:
        return outputs.several
    return len(outputs.values) != len(vectors.values)


def _is_complex(output: Any) -> bool:
    form = form_of(output)
    return form is not None and form.dtype.is_complex


def _fits(arguments: Arguments, i: int, shape: Shape) -> bool:
    """Tell whether weights of a shape fit an output, by themselves or as a batch."""
    wanted = shape_of(arguments.outputs.values[i])
    is_batch = arguments.is_grads_batched and shape[1:] == wanted
    return shape == wanted or is_batch


def _missing_axis(arguments: Arguments, shape: Shape | None, i: int = 0) -> str:
    """Return the code that adds the batch axis where one is wanted, or ``""``."""
    is_one = shape is not None and shape == shape_of(arguments.outputs.values[i])
    return "[None]" if is_one and arguments.is_grads_batched else ""


def _counted(argument: Argument) -> str:
    if not argument.several:
        return f"{argument.name} is one tensor"
    return f"{argument.name} has {counted(len(argument.values), 'entry', 'entries')}"


def are_rows(arguments: Arguments) -> bool:
    """Tell whether each of several vectors fits the one output."""
    if len(arguments.outputs.values) != 1:
        return False
    wanted = shape_of(arguments.outputs.values[0])
    shapes = {shape_of(vector) for vector in arguments.grad_outputs.values}
    values = arguments.grad_outputs.values
    layouts = {it.layout for it in values if isinstance(it, Tensor)}
    return shapes == {wanted} != {None} and layouts == {torch.strided}


def _is_one_list(arguments: Arguments) -> bool:
    """Tell whether grad_outputs is a list of numbers that fits the one output."""
    if arguments.outputs.several or not arguments.grad_outputs.several:
        return False
    shape = _shape_of_numbers(arguments.grad_outputs.values)
    return bool(shape) and _fits(arguments, 0, shape)


def _shape_of_numbers(value: Any) -> Shape | None:
    """Return the shape of a tensor made of `value`; ``None`` if none can be made."""
    if isinstance(value, int | float):
        return ()
    if isinstance(value, Tensor):
        return None if shape_of(value) else ()  # torch makes none of a list of vectors
    if hasattr(value, "__array__") and not isinstance(value, type):
        shape = getattr(value, "shape", None)  # pyarrow arrays have none
        holds_numbers = getattr(getattr(value, "dtype", None), "kind", "f") in "biufc"
        is_shape = isinstance(shape, tuple) and holds_numbers
        return tuple(cast(Any, shape)) if is_shape else None
    if not isinstance(value, list | tuple) or not value:
        return None
    entries = cast(list[Any], value)
    first, *others = {_shape_of_numbers(entry) for entry in entries}
    return None if others or first is None else (len(entries), *first)
