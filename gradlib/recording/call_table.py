"""What the table of a call, or of a pass of it, shows of each field."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from gradlib.recording.gaps import gap
from gradlib.recording.in_words import norm_text, shape_text, shown
from gradlib.recording.trace import CallTrace
from gradlib.sharded import own_part
from gradlib.tree import Tree

COLUMNS = ("field", "shape", "norm")
MOST = 40
"""A field with more entries than this shows the first half of that many."""

Place: TypeAlias = tuple[str, int]
"""Where something stands in a field: the path to it, ``[0]``, and its number."""

SAME_TOTALS = "a _total without a row is equal to its share"


def title_of_call(call: CallTrace) -> str:
    """Name a call: ``fc2, call 0 in forward 3``."""
    return f"{shown(call.name)}, call {call.index} in forward {call.forward}"


def leaves_of(
    call_or_pass: object, fields: Mapping[str, str], call: CallTrace
) -> dict[str, dict[Place, Any]]:
    """Return what stands in each field that was kept, by its place there.

    A keyword argument that is a flag or a number has no place in gradients: it cannot
    have one. With ``reduce``, a number may be what was made of a tensor.
    """
    trees = {
        name: Tree.of(getattr(call_or_pass, name))
        for name, travels_with in fields.items()
        if travels_with in call.block.fields
    }
    without = bool | str if call.block.is_reduced else bool | str | int | float
    flags = {
        place
        for place, given in enumerate(Tree.of(call.inputs.build()[1]).leaves)
        if given is None or isinstance(given, without)
    }
    paths = {name: tree.paths() for name, tree in trees.items()}
    return {
        name: {
            (paths[name][place], place): tree.leaves[place]
            for place in tree.own_order()
            if not (name.startswith("grad_kwargs") and place in flags)
        }
        for name, tree in trees.items()
    }


def leave_out_same_totals(by_field: dict[str, dict[Place, Any]]) -> int:
    """Leave out the totals that are equal to their shares, and return how many."""
    before = sum(map(len, by_field.values()))
    for name in [it for it in by_field if f"{it}_total" in by_field]:
        shares, totals = by_field[name], by_field[f"{name}_total"]
        by_field[f"{name}_total"] = {
            place: total
            for place, total in totals.items()
            if place not in shares or not _are_same(shares[place], total)
        }
    return before - sum(map(len, by_field.values()))


def _are_same(share: Any, total: Any) -> bool:
    """Tell whether two gradients are equal, or here, if they are distributed."""
    here = (own_part(it) if isinstance(it, Tensor) else it for it in (share, total))
    return not gap(*here).difference


def rows_of(
    by_field: Mapping[str, Mapping[Place, Any]], prefix: str = ""
) -> list[tuple[str, ...]]:
    """Return a row for each thing that stands in some fields, or for some of many."""
    rows: list[tuple[str, ...]] = []
    for name, leaves in by_field.items():
        every = [(prefix + name + path, leaf) for (path, _), leaf in leaves.items()]
        some = every if len(every) <= MOST else every[: MOST // 2]
        rows += [(path, shape_text(leaf), norm_text(leaf)) for path, leaf in some]
        if left_out := len(every) - len(some):
            rows.append((f"... {left_out} more in {prefix}{name}", "", ""))
    return rows
