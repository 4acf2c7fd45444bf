"""Calls and their values in words: names, shapes and norms."""

import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from torch import Tensor

from gradlib.sharded import is_distributed, own_part
from gradlib.stats import TensorStats, norm
from gradlib.tree import Tree
from gradlib.wording import counted, listed


def shown(name: str) -> str:
    """Return a module's name to show: ``(root)`` for the root, whose name is empty."""
    return name or "(root)"


def quoted(name: str) -> str:
    """Return a module's name to use in a sentence."""
    return f'"{name}"' if name else "the root"


NOTHING_IN_BOTH = "nothing is in both that could be compared"
"""What a comparison says if it could not compare a single value."""

NAMES = 4


def calls_text(names: Sequence[str]) -> str:
    """Return how many calls there are, with the names of some."""
    return f"{counted(len(names), 'call')}: {listed(names, NAMES)}"


def numbered(name: str, index: int) -> str:
    """Return a module's name to show, with the index of any call but its first."""
    return shown(name) + (f" ({index})" if index else "")


def passes_text(numbers: Sequence[int]) -> str:
    """Name backward passes: ``pass 3``, ``passes 0 to 4``, ``passes 0, 2``."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"pass {first}"
    if len(numbers) > 2 and [*numbers] == [*range(first, last + 1)]:
        return f"passes {first} to {last}"
    return f"passes {', '.join(map(str, numbers))}"


def of_pass(place: int, count: int) -> str:
    """Return the prefix of a pass's fields, ``passes[1].``; empty for an only pass."""
    return f"passes[{place}]." if count > 1 else ""


def shape_text(structure: object, most: int = sys.maxsize) -> str:
    """Return the shapes of the tensors in `structure`: ``[4, 20], [4]``.

    Args:
        structure: Tensors or `TensorStats`, nested in any way.
        most: How many shapes to show; the others are counted.
    """
    shapes = [*map(_shape, measured_in(structure))]
    if len(shapes) > most:
        shapes[most:] = [f"{len(shapes) - most} more"]
    return ", ".join(shapes) or "-"


def _shape(measured: Tensor | TensorStats) -> str:
    if isinstance(measured, Tensor):
        if measured.is_nested:
            return f"{measured.size(0)} nested"
        if is_distributed(measured):
            return f"{list(own_part(measured).shape)} of {list(measured.shape)}"
    return str(list(measured.shape))


def norm_text(structure: object) -> str:
    """Return the norm over all tensors in `structure`, to three digits.

    Where `reduce` gave plain numbers, return these.
    """
    if measured := measured_in(structure):
        return f"{norm(measured):.3g}"
    return ", ".join(map(_short, numbers_in(structure))) or "-"


def _short(number: Any) -> str:
    if isinstance(number, bool):
        return str(number)
    try:
        return f"{number:.3g}"
    except OverflowError:  # an integer beyond all floats
        return f"{Decimal(number):.3g}"


def numbers_in(structure: object) -> list[Any]:
    """Return the plain numbers of a nested structure, those of NumPy too, in order."""
    return [it for it in Tree.of(structure).leaves if _is_number(it)]


def _is_number(value: object) -> bool:
    is_duration = isinstance(value, np.timedelta64)  # which is a number to NumPy
    return isinstance(value, int | float | complex | np.number) and not is_duration


def measured_in(structure: object) -> list[Tensor | TensorStats]:
    """Return the tensors and `TensorStats` of a nested structure, in order."""
    tree = Tree.of(structure)
    leaves = map(tree.leaves.__getitem__, tree.own_order())
    return [leaf for leaf in leaves if isinstance(leaf, Tensor | TensorStats)]


def are_statistics(structure: object) -> bool:
    """Tell whether a structure holds `TensorStats`, as `tensor_stats` returns."""
    return any(isinstance(it, TensorStats) for it in measured_in(structure))
