"""The picture of a comparison: how far apart two recordings are, module by module."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gradlib import plot_lines
from gradlib.figure import require_axes
from gradlib.recording.difference import Difference
from gradlib.recording.in_words import NOTHING_IN_BOTH, numbered

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIELD = re.compile(r"^(?:passes\[\d+\]\.)?(\w+)")
"""Finds the field in a place such as ``"passes[0].grad_output[0]"``."""

KINDS = ("output", "grad_output", "param_grads")


def draw(
    errors: Sequence[Difference],
    returned: Iterable[tuple[str, int]],
    first: Difference | None,
    rtol: float,
    ax: "Axes | None",
) -> "Figure":
    """Draw the errors of a comparison, and where the two first differ.

    Args:
        errors: The errors, also of values that agree.
        returned: The calls, by name and index, in the order in which they returned.
        first: Where the two first differ; ``None`` if they agree.
        rtol: How far values may be apart, as a part of the value.
        ax: Where to draw; a new figure if left out.

    Raises:
        RecordingArgumentError: `ax` is no Axes.
    """
    require_axes(ax)
    rows: dict[str, dict[str, float]] = {numbered(*call): {} for call in returned}
    for it in errors:
        row = rows[numbered(it.name, it.index)]
        kind = FIELD.findall(it.field)[0]
        row[kind] = max(row.get(kind, 0.0), it.error)
    rows = {label: row for label, row in rows.items() if row}
    labels = [*rows]
    by_kind = {
        kind: [row.get(kind) for row in rows.values()]
        for kind in KINDS
        if any(kind in row for row in rows.values())
    }
    parted = None
    if first is not None:
        row = labels.index(numbered(first.name, first.index))
        drawn = FIELD.findall(first.field)[0] in KINDS
        said = "they part first" + (f": {first.field}" if not drawn else "")
        parted = row, first.error, said
    return plot_lines.errors(labels, by_kind, rtol, parted, _why_empty(errors), ax)


def _why_empty(errors: Sequence[Difference]) -> str:
    """Say why the picture is empty, if it is."""
    if not errors:
        return NOTHING_IN_BOTH
    if not any(it.error for it in errors):
        return "the two are equal"
    return "nothing that is drawn here differs"
