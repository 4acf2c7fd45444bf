"""Whether every operation of a graph has a rule."""

from collections.abc import Collection

from gradlib.jacobian.drawing import Drawing
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.moves import SEVERAL


def all_is_known(drawing: Drawing, rules: Collection[str]) -> bool:
    """Tell whether every node has a rule, and all gradients have one dtype and device.

    Args:
        drawing: The drawing of the graph.
        rules: The names of the nodes that have rules.
    """
    _, dtype, device, _ = drawing.forms[drawing.roots[0]]
    if dtype not in DTYPES:
        return False
    for form in drawing.kinds:
        if form.dtype != dtype or form.device != device or form.shape == ():
            return False
    for node, number in drawing.forms:
        if number and drawing.names[node] not in SEVERAL:
            return False
    # An end may not lead on to another end.
    return not any(drawing.led[end[0]] for end in drawing.ends if end) and not any(
        name not in rules
        for name, led in zip(drawing.names, drawing.led, strict=True)
        if led
    )
