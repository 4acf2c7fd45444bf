"""Whether grad_outputs are tensors, one for each output."""

from typing import Any, cast

from torch import Tensor

from gradlib.vjp.arguments import Argument, Arguments, Shape, shape_of
from gradlib.vjp.diagnosis import ALL_ONES, ONES, Diagnosis, call, diagnosis, mended
from gradlib.vjp.kind_checks import kind_of

_AS_TENSOR = "torch.as_tensor({v}, dtype={y}.dtype, device={y}.device)"


def check_vector_kinds(arguments: Arguments) -> Diagnosis | None:
    """Find grad_outputs that are no tensors, among those that are needed."""
    needed = arguments.grad_outputs.values[: len(arguments.outputs.values)]
    for i, value in enumerate(needed):
        if value is not None and not isinstance(value, Tensor):
            return _not_a_tensor(arguments, i)
    return None


def check_count(arguments: Arguments) -> Diagnosis | None:
    """Find more or fewer grad_outputs than outputs."""
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    wanted, given = len(outputs.values), len(vectors.values)
    if given == wanted:
        return None
    what = f"{_counted(vectors)}, and {_counted(outputs)}."
    if given < wanted:
        intent = (
            "Several outputs are differentiated as one sum, each times its own weights."
        )
        line = ALL_ONES if outputs.several else f"v = {ONES.format(y='y')}"
        fix = f"{line}\n{call(arguments, 'v')}"
    elif wanted == 1 and _are_rows(arguments):
        intent = (
            "torch uses the first alone, silently. Likely meant: a result for each, as "
            "is_grads_batched gives it."
        )
        fix = f"v = torch.stack(list(v))\n{call(arguments, is_grads_batched=True)}"
    else:
        intent = "torch drops what is too much, silently."
        fix = f"v = list(v)[:{wanted}]\n{call(arguments, 'v')}"
    return diagnosis("GL103", vectors.name, what, intent=intent, fix=fix)


def _not_a_tensor(arguments: Arguments, i: int) -> Diagnosis:
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    value, place = vectors.values[i], vectors.places[i]
    kind = kind_of(value)
    intent = "Likely meant: these weights, as a tensor like the output."
    if _is_one_list(arguments):
        place, kind = vectors.name, "a list of numbers, not a tensor"
        fix = f"v = {_AS_TENSOR.format(v='v', y='y')}\n{call(arguments, 'v')}"
    elif outputs.several and not vectors.several:
        intent = "Each output needs weights of its own."
        fix = f"{ALL_ONES}\n{call(arguments, 'v')}"
    elif isinstance(value, int | float):
        intent = "Likely meant: this weight for every entry of the output."
        fix = mended(arguments, i, "torch.full_like({y}, {v})")
    elif _shape_of_numbers(value) is not None:
        fix = mended(arguments, i, _AS_TENSOR)
    else:
        intent = "Weights of one give the gradient of the output's sum."
        fix = mended(arguments, i, ONES)
    return diagnosis("GL104", place, f"{place} is {kind}.", intent=intent, fix=fix)


def _counted(argument: Argument) -> str:
    count = len(argument.values)
    if not argument.several:
        return f"{argument.name} is one tensor"
    return f"{argument.name} has {count} entr{'y' if count == 1 else 'ies'}"


def _are_rows(arguments: Arguments) -> bool:
    """Tell whether each of several vectors fits the one output."""
    wanted = shape_of(arguments.outputs.values[0])
    shapes = {shape_of(vector) for vector in arguments.grad_outputs.values}
    return shapes == {wanted} != {None}


def _is_one_list(arguments: Arguments) -> bool:
    """Tell whether grad_outputs is a list of numbers, as many as the one output has."""
    if arguments.outputs.several or not arguments.grad_outputs.several:
        return False
    wanted = shape_of(arguments.outputs.values[0])
    return bool(wanted) and _shape_of_numbers(arguments.grad_outputs.values) == wanted


def _shape_of_numbers(value: Any) -> Shape | None:
    """Return the shape a tensor made of `value` would have; ``None`` for none."""
    if isinstance(value, int | float):
        return ()
    if isinstance(value, Tensor):
        return shape_of(value)
    if hasattr(value, "__array__"):
        return tuple(value.shape)
    if not isinstance(value, list | tuple) or not value:
        return None
    entries = cast(list[Any], value)
    first, *others = {_shape_of_numbers(entry) for entry in entries}
    return None if others or first is None else (len(entries), *first)
