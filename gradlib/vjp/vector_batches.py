"""Whether the first axis of grad_outputs counts vectors where it should."""

from math import prod

from torch import Tensor

from gradlib.vjp.arguments import Argument, Arguments, Form, Shape, shape_of
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.fixes import ONES_MEAN, all_ones, call, spelled_form, weights


def check_batch_axis(arguments: Arguments, i: int, form: Form) -> Diagnosis | None:
    """Find a vector with the batch axis and without is_grads_batched, or the reverse.

    Args:
        arguments: The call.
        i: Which output and grad_outputs.
        form: The form of that output.
    """
    count = _count(shape_of(arguments.grad_outputs.values[i]), form.shape)
    if arguments.is_grads_batched:
        return None if count else _no_axis(arguments, i, form)
    return _axis_unasked(arguments, i, form, count) if count > 1 else None


def _axis_unasked(
    arguments: Arguments, i: int, form: Form, count: int
) -> Diagnosis | None:
    """Explain vectors with the batch axis where is_grads_batched is missing."""
    vectors, shapes = arguments.grad_outputs, _shapes(arguments.grad_outputs)
    of_an_input = shapes[i] in _shapes(arguments.inputs)
    are_numbers = not any(_shapes(arguments.outputs))  # nobody wants rows for a loss
    if of_an_input or are_numbers or _counts(arguments) != {count}:
        return None
    intent = f"Likely meant: each of {count} vectors, by is_grads_batched."
    fix = call(arguments, is_grads_batched=True)
    if arguments.accumulates:
        intent = f"For {count} vectors the gradients add up: pass their sum."
        summed = "[each.sum(0) for each in v]" if vectors.several else "v.sum(0)"
        fix = f"v = {summed}\n{call(arguments, 'v')}"
    what = _compared(arguments, i, form)
    return Diagnosis("GL107", what, intent=intent, fix=fix)


def _no_axis(arguments: Arguments, i: int, form: Form) -> Diagnosis:
    """Explain a vector without the batch axis where is_grads_batched wants it."""
    vectors, shapes = arguments.grad_outputs, _shapes(arguments.grad_outputs)
    given, counts, mends = shapes[i], _counts(arguments) - {0}, dict[int, str]()
    what = _compared(arguments, i, form)
    if given is None:
        what = f"With is_grads_batched there is no {vectors.places[i]}."
    if shapes == _shapes(arguments.outputs):
        intent = "This is one vector: leave is_grads_batched out."
        fix = call(arguments, is_grads_batched=None)
    elif len(counts) == 1 and given in (None, form.shape):
        (count,) = counts
        intent = f"Of the others there are {count}. Likely meant: this one each time."
        one, fix = "{v}", ""
        if given is None:
            intent = f"Of the others there are {count}. {ONES_MEAN}"
            one = weights(arguments.outputs.values[i])
        mends = {i: f"{{v}} = {one}.expand({[count, *form.shape]})"}
    else:
        is_alone = not arguments.outputs.several and prod(form.shape)
        line = _unit_vectors(arguments, form) if is_alone else all_ones(arguments)
        intent = "Unit vectors, one for each entry of an output, give its Jacobian."
        fix = f"{line}\n{call(arguments, 'v')}"
    return Diagnosis("GL107", what, intent=intent, fix=fix, mends=mends)


def _compared(arguments: Arguments, i: int, form: Form) -> str:
    vectors = arguments.grad_outputs
    return (
        f"{vectors.places[i]} has shape {list(shape_of(vectors.values[i]) or ())}, and "
        f"{arguments.outputs.places[i]} has {list(form.shape)}."
    )


def _unit_vectors(arguments: Arguments, form: Form) -> str:
    """Return the line that makes a unit vector for each entry of the one output."""
    output = arguments.outputs.values[0]
    if isinstance(output, Tensor):
        return "v = torch.eye(y.numel()).to(y).reshape(-1, *y.shape)"
    count, (_, dtype, device) = prod(form.shape), spelled_form(output)
    made = f"torch.eye({count}, dtype={dtype}, device={device})"
    return f"v = {made}.reshape({[count, *form.shape]})"


def nested_in_batch(arguments: Arguments, i: int) -> Diagnosis:
    """Refuse is_grads_batched for nested tensors, which can have no axis in front."""
    one = all_ones(arguments, batched=False)
    return Diagnosis(
        "GL107",
        f"{arguments.outputs.places[i]} is nested, which is_grads_batched cannot take.",
        intent="Make a call for each vector, here for one.",
        fix=f"{one}\n{call(arguments, 'v', is_grads_batched=None)}",
    )


def _shapes(argument: Argument) -> list[Shape | None]:
    return [*map(shape_of, argument.values)]


def _counts(arguments: Arguments) -> set[int]:
    """Return the different numbers of vectors that the outputs are given."""
    vectors, outputs = arguments.grad_outputs, arguments.outputs
    return {*map(_count, _shapes(vectors), _shapes(outputs))}


def _count(shape: Shape | None, wanted: Shape | None) -> int:
    """Return the length of an axis in front of the `wanted` shape; 0 without one."""
    return shape[0] if shape and shape[1:] == wanted else 0


def check_batch_sizes(arguments: Arguments) -> Diagnosis | None:
    """Find outputs with different numbers of vectors, where is_grads_batched is on."""
    vectors = arguments.grad_outputs
    sizes = [len(it) for it in vectors.values] if arguments.is_grads_batched else []
    for i, size in enumerate(sizes):
        if size != sizes[0]:
            first, place = vectors.places[0], vectors.places[i]
            return Diagnosis(
                "GL107",
                f"{place} holds {size} vectors, and {first} holds {sizes[0]}.",
                intent="The first vectors of all outputs are taken together, then the "
                "second ones: there have to be as many for each.",
                fix=f"v = [each[:{min(sizes)}] for each in v]\n{call(arguments)}",
            )
    return None
