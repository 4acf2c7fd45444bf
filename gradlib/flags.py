"""Arguments that are True or False, where anything else is a mistake."""

import numpy

from gradlib.errors import GradlibError
from gradlib.wording import in_brief


def as_flag(name: str, given: object, error: type[GradlibError]) -> bool:
    """Return a flag as a bool, from a bool, an int, or a bool of NumPy.

    Anything else is a mistake: ``"no"`` would be true, ``None`` false without being
    said so, and an array has no truth value.

    Args:
        name: What the argument is called.
        given: What was given in its place.
        error: What to raise.

    Raises:
        GradlibError: It is something else; of class `error`.
    """
    if issubclass(type(given), (int, numpy.bool_)):
        return bool(given)
    raise error(
        f"{name} must be True or False, but it is {in_brief(given)}, of type "
        f"{type(given).__name__}."
    )
