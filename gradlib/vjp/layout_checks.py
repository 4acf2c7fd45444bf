"""Whether each grad_outputs has a layout that fits its output."""

from typing import Any

import torch
from torch import Tensor

from gradlib.vjp.arguments import Arguments, form_of
from gradlib.vjp.diagnosis import Diagnosis, together
from gradlib.vjp.fixes import ONES_MEAN, weights


def check_layout(arguments: Arguments, i: int) -> Diagnosis | None:
    """Find a grad_outputs of a layout that torch does not take for its output.

    Args:
        arguments: The call.
        i: Which output and grad_outputs.
    """
    output, vector = arguments.outputs.values[i], arguments.grad_outputs.values[i]
    if vector is None:
        lacks_weight = isinstance(output, Tensor) and _needs_weight(output)
        return _without_weight(arguments, i) if lacks_weight else None
    if not isinstance(output, Tensor):  # an edge tells only whether it is nested
        differs = vector.is_nested != (form_of(output) is None)
        return _mismatch(arguments, i) if differs else None
    return None if _takes(output, vector) else _mismatch(arguments, i)


def sparse_refused(arguments: Arguments, message: str) -> Diagnosis | None:
    """Explain a backward pass that failed after it began with another layout.

    Args:
        arguments: The call, in which `check_layout` finds nothing wrong.
        message: The message of torch's error.

    Returns:
        ``None`` where every vector has the layout of its output.
    """
    said = message.split("\n", 1)[0].rstrip(".")
    pairs = zip(arguments.outputs.values, arguments.grad_outputs.values, strict=True)
    found = (
        _mismatch(arguments, i, f" torch has raised: {said}.")
        for i, (output, vector) in enumerate(pairs)
        if vector is not None and layout_of(vector) != _layout_behind(output)
    )
    return together(found, arguments)


def layout_of(tensor: Tensor) -> str:
    """Return the layout of a tensor: ``"strided"``, ``"sparse_csr"``, ``"nested"``."""
    layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
    return "nested" if tensor.is_nested and layout == "strided" else layout


def _layout_behind(output: Any) -> str:
    """Return the layout of an output; of an edge, as far as torch tells it."""
    if isinstance(output, Tensor):
        return layout_of(output)
    return "nested" if form_of(output) is None else "strided"


def _needs_weight(output: Tensor) -> bool:
    """Tell whether torch cannot fill in the weight of an output of one entry."""
    if output.is_nested or output.layout == torch.strided:
        return False
    return output.numel() == 1


def _without_weight(arguments: Arguments, i: int) -> Diagnosis:
    outputs = arguments.outputs
    output = outputs.values[i]
    what = f"{outputs.places[i]} is {layout_of(output)}, and has no weight."
    intent = "torch fills in the weight one only where the output is strided."
    mends = {i: f"{{v}} = {weights(output)}"}
    return Diagnosis("GL115", what, intent=intent, mends=mends)


def _takes(output: Tensor, vector: Tensor) -> bool:
    """Tell whether torch lets a backward pass from `output` begin with `vector`.

    An operation on the way may still refuse it.
    """
    wanted, given = layout_of(output), layout_of(vector)
    if wanted == given:
        return True
    if output.is_nested:
        return False
    is_for_sparse = given == "strided" and wanted.startswith("sparse")
    return given == "sparse_coo" or is_for_sparse


def _mismatch(arguments: Arguments, i: int, raised: str = "") -> Diagnosis:
    outputs, vectors = arguments.outputs, arguments.grad_outputs
    output, vector = outputs.values[i], vectors.values[i]
    place = vectors.places[i]
    what = (
        f"{place} is {layout_of(vector)}, and {outputs.places[i]} is "
        f"{_layout_behind(output)}.{raised}"
    )
    expression, intent = _like(output, vector)
    mends = {i: f"{{v}} = {expression}"}
    return Diagnosis("GL115", what, intent=intent, mends=mends)


def _like(output: Any, vector: Any) -> tuple[str, str]:
    """Return the code for a vector in its output's layout, and what it means."""
    is_nested = vector.is_nested or form_of(output) is None
    if is_nested or vector.is_meta or not vector.is_floating_point():
        return weights(output), ONES_MEAN
    made = "{v}" if layout_of(vector) == "strided" else "{v}.to_dense()"
    intent = "Likely meant: these weights, in a layout that is taken here."
    return made + ".to_mkldnn()" * (_layout_behind(output) == "mkldnn"), intent
