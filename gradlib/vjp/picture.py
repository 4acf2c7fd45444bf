"""The figure of an explanation: from tensors to plain numbers, then drawn."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gradlib import plot_matrix
from gradlib.figure import message, require_axes
from gradlib.vjp.entries import entries_of
from gradlib.vjp.product import Jacobian, Product

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 20  # letters, at most, of a name that stands beside each row or column


def draw(product: Product | None, why_not: str, ax: "Axes | None") -> "Figure":
    """Draw v, J and vᵀJ.

    Args:
        product: What to draw.
        why_not: What to say where there is no Jacobian.
        ax: Where to draw; a new figure if left out.

    Raises:
        RecordingArgumentError: `ax` is no Axes.
    """
    require_axes(ax)
    if product is None or not isinstance(product.jacobian, Jacobian):
        return message(why_not, ax)
    if any(it.is_complex() for it in product.results):
        return message("x is complex: its numbers have no colours.", ax)
    short = {k: it for k, it in product.own_names.items() if len(it) <= LONGEST}
    entries = entries_of(product, product.jacobian, short)
    return plot_matrix.weighted_rows(
        entries.rows,
        entries.columns,
        entries.v,
        entries.blocks,
        entries.sums,
        _derivative(product, short),
        ax,
    )


def _derivative(product: Product, called: Mapping[str, str]) -> str:
    """Return what J is, ``" = dy/dx"``, in the names of the figure.

    It is ``""`` where several tensors have names that no letter stands for.
    """
    sides: list[str] = []
    parts: dict[str, Sequence[str]] = {"y": product.outputs, "x": product.inputs}
    for letter, formulas in parts.items():
        names = [called.get(it, it) for it in formulas]
        if len(names) > 1 and names != [*formulas]:
            return ""
        name = letter if len(names) > 1 else names[0]
        sides.append(name if name.isidentifier() else f"({name})")
    return " = d{}/d{}".format(*sides)
