"""A recording as a pandas data frame: plain rows, handed to pandas."""

import importlib
import math
from collections.abc import Collection, Iterable
from typing import Any

from gradlib.errors import MissingPackageError
from gradlib.recording.backward_pass import Pass, with_keywords
from gradlib.recording.call import Call
from gradlib.recording.in_words import measured_in, numbers_in, shape_text
from gradlib.recording.kept_fields import PASS_FIELDS
from gradlib.stats import norm

PASS_COLUMNS = (
    *("grad_output", "grad_input", "grad_input_total"),
    *("param_grads", "param_grads_total"),
)
"""The columns of a pass; those of inputs include keyword arguments."""


def data_frame(calls: Iterable[Call], fields: Collection[str]) -> Any:
    """Return a data frame with a row for each call and pass.

    Args:
        calls: The calls.
        fields: The fields that were kept.
    """
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingPackageError(
            "to_frame() needs pandas, which is not installed: pip install pandas"
        ) from error
    output = ["output_shape", "output"] if "output" in fields else []
    gradients = [name for name in PASS_COLUMNS if PASS_FIELDS[name] in fields]
    rows = [
        [*head, *_of_pass(pass_, gradients), note]
        for call in calls
        for head, note in [(_of_call(call, output), call.note)]  # once for all passes
        for pass_ in call.passes or (None,)
    ]
    columns = [*CALL, *output, "backward", *gradients, "note"]
    frame = pandas.DataFrame(rows, columns=columns)
    # A call without a pass has no number there: NumPy's integers have no such value.
    return frame.astype({"backward": "Int64"})


CALL = ("forward", "name", "index", "module_type")


def _of_call(call: Call, output: list[str]) -> list[Any]:
    head = [getattr(call, name) for name in CALL]
    return [*head, shape_text(call.output), _size(call.output)] if output else head


def _of_pass(pass_: Pass | None, gradients: list[str]) -> list[Any]:
    if pass_ is None:
        return [None, *[math.nan] * len(gradients)]
    return [pass_.backward, *(_size(with_keywords(pass_, name)) for name in gradients)]


def _size(structure: object) -> Any:
    """Return the norm over all tensors in `structure`, or NaN.

    Where `reduce` gave plain numbers, return these: one, or a tuple.
    """
    measured = measured_in(structure)
    if measured:
        return norm(measured)
    numbers = tuple(numbers_in(structure))
    return numbers if len(numbers) > 1 else (*numbers, math.nan)[0]
