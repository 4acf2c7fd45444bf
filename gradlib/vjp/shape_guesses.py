"""What was meant by a grad_outputs of the wrong shape."""

from math import prod

from gradlib.vjp.arguments import Argument, Arguments, Shape, shape_of
from gradlib.vjp.diagnosis import call, mended

_SUM = "Weights of one give the gradient of the output's sum."


def guess(arguments: Arguments, i: int, given: Shape, wanted: Shape) -> tuple[str, str]:
    """Return what an entry of grad_outputs was meant as, in words and as code.

    Args:
        arguments: Of the call.
        i: Which entry.
        given: Its shape.
        wanted: The shape of its output.
    """
    other = _partner(arguments, given, wanted)
    if other is not None:
        words = f"It fits {arguments.outputs.places[other]}: two stand exchanged."
        swap = f"v[{i}], v[{other}] = v[{other}], v[{i}]"
        return words, f"v = list(v)\n{swap}\n{call(arguments)}"
    words, expression = _meant(given, wanted)
    place = _place_of_shape(arguments.inputs, given)
    place = place or _place_of_shape(arguments.outputs, given)
    if place:
        words = f"{list(given)} is the shape of {place}. {_SUM}"
        expression = "torch.ones_like({y})"
    if _broadcasts(given, wanted):
        words = f"Only broadcasting would make it fit. {words}"
    return words, mended(arguments, i, expression)


def _meant(given: Shape, wanted: Shape) -> tuple[str, str]:
    if len(given) == 2 and given == wanted[::-1]:
        return "It is transposed.", "{v}.T"
    if prod(given) == prod(wanted):
        return "It has the right number of entries.", "{v}.reshape_as({y})"
    if not given:
        return "Likely meant: this weight for every entry.", "{v}.expand_as({y})"
    if _broadcasts(given, wanted):
        return "Likely meant: these weights, repeated.", "{v}.expand_as({y})"
    if given == wanted[: len(given)]:
        rest = len(wanted) - len(given)
        entry = ", ".join([*"ijklmn"[: len(given)], *[":"] * rest])
        axes = ", ".join([":"] * len(given) + ["None"] * rest)
        words = f"Likely meant: one weight for each [{entry}]."
        return words, f"{{v}}[{axes}].expand_as({{y}})"
    return _SUM, "torch.ones_like({y})"


def _partner(arguments: Arguments, given: Shape, wanted: Shape) -> int | None:
    """Return which entry would fit, and be fitted, if the two changed places."""
    outputs, vectors = arguments.outputs.values, arguments.grad_outputs.values
    for i, (output, vector) in enumerate(zip(outputs, vectors, strict=True)):
        if shape_of(output) == given and shape_of(vector) == wanted:
            return i
    return None


def _place_of_shape(argument: Argument, shape: Shape) -> str:
    """Return the place of the first entry of a shape, or ``""``."""
    pairs = zip(argument.places, argument.values, strict=True)
    return next((place for place, it in pairs if shape_of(it) == shape), "")


def _broadcasts(given: Shape, wanted: Shape) -> bool:
    pairs = zip(reversed(given), reversed(wanted), strict=False)
    return len(given) <= len(wanted) and all(a in (1, b) for a, b in pairs)
