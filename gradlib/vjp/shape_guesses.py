"""What was meant by a grad_outputs of the wrong shape."""

from math import prod

import torch
from torch import Tensor

from gradlib.shapes import broadcasts
from gradlib.vjp.arguments import Argument, Arguments, Shape, shape_of
from gradlib.vjp.fixes import ONES_MEAN, weights


def guess(arguments: Arguments, i: int, given: Shape, wanted: Shape) -> tuple[str, str]:
    """Return what an entry of grad_outputs was meant as, and the line that mends it.

    Args:
        arguments: The call.
        i: Which entry.
        given: Its shape.
        wanted: The shape of its output.
    """
    other = _partner(arguments, given, wanted)
    if other is not None and _partner(arguments, wanted, given) == i:
        words = f"It fits {arguments.outputs.places[other]}: two are swapped."
        one, two = sorted((i, other))
        return words, f"v[{one}], v[{two}] = v[{two}], v[{one}]"
    output = arguments.outputs.values[i]
    ones = weights(output)
    like = "_as({y})" if isinstance(output, Tensor) else f"({list(wanted)})"
    words, expression = _meant(given, wanted, like) or (ONES_MEAN, ones)
    place = _place_of_shape(arguments.inputs, given)
    place = place or _place_of_shape(arguments.outputs, given)
    if place:
        words, expression = f"{list(given)} is the shape of {place}. {ONES_MEAN}", ones
    elif arguments.grad_outputs.values[i].layout != torch.strided:
        words, expression = ONES_MEAN, ones
    if broadcasts(given, wanted):
        words = f"Only broadcasting would make it fit. {words}"
    return words, f"{{v}} = {expression}"


def _meant(given: Shape, wanted: Shape, like: str) -> tuple[str, str] | None:
    if len(given) == 2 and given == wanted[::-1]:
        return "It is transposed.", "{v}.T"
    if prod(given) == prod(wanted):
        return "It has the right number of entries.", f"{{v}}.reshape{like}"
    if not given:
        return "Likely meant: this weight for every entry.", f"{{v}}.expand{like}"
    if broadcasts(given, wanted):
        return "Likely meant: these weights, repeated.", f"{{v}}.expand{like}"
    if given == wanted[: len(given)]:
        rest = len(wanted) - len(given)
        entry = ", ".join([*"ijklmn"[: len(given)], *[":"] * rest])
        axes = ", ".join([":"] * len(given) + ["None"] * rest)
        words = f"Likely meant: one weight for each [{entry}]."
        return words, f"{{v}}[{axes}].expand{like}"
    return None


def _partner(arguments: Arguments, given: Shape, wanted: Shape) -> int | None:
    """Return which entry of shape `wanted` has an output of shape `given`, if any."""
    outputs, vectors = arguments.outputs.values, arguments.grad_outputs.values
    for i, (output, vector) in enumerate(zip(outputs, vectors, strict=True)):
        if shape_of(output) == given and shape_of(vector) == wanted:
            return i
    return None


def _place_of_shape(argument: Argument, shape: Shape) -> str:
    """Return the place of the first entry that has a shape, or ``""``."""
    pairs = zip(argument.places, argument.values, strict=True)
    return next((place for place, it in pairs if shape_of(it) == shape), "")
