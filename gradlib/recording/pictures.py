"""What the pictures of a recording show: from calls to plain numbers, then drawn."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from gradlib.errors import NotKeptError, UnknownKindError
from gradlib.figure import require_axes
from gradlib.module_rows import NO_PASS
from gradlib.plain_tensors import wide
from gradlib.plot_heat_map import heat_map
from gradlib.plot_lines import gradient_flow
from gradlib.plot_ridges import Ridge, ridges
from gradlib.recording.backward_pass import Pass, with_keywords
from gradlib.recording.call import Call
from gradlib.recording.in_words import are_statistics, measured_in, numbered
from gradlib.recording.trace import CallTrace
from gradlib.stats import largest, norm
from gradlib.subclasses import UnknownToClassError, if_known, is_of_other_class
from gradlib.tree import Tree
from gradlib.wording import in_brief

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class OwnParameters:
    """A pass of a call that makes others: only own parameters are shown of it."""

    of: Pass


Shown: TypeAlias = Pass | OwnParameters
Places: TypeAlias = dict[str, dict[int, list[Shown]]]
"""The passes of the calls at each place in the forward, by place and by forward."""

BINS = 60  # of a histogram
NO_ENTRIES = (
    'plot("histogram") counts the entries of gradients, and record(..., reduce=...) '
    "kept only what sums them up. Record without reduce; "
    'plot("flow") and plot("steps") need no more than that.'
)
REDUCED = "what reduce gave"
VISIBLY = 1.05  # a total is drawn if it differs from its share by this factor


def draw(
    kind: str, calls: Sequence[CallTrace], fields: Collection[str], ax: "Axes | None"
) -> "Figure":
    """Draw a picture of some calls, of which `fields` were kept."""
    if not isinstance(cast(object, kind), str) or kind not in KINDS:
        known = ", ".join(f'"{name}"' for name in KINDS)
        raise UnknownKindError(
            f"plot(kind={in_brief(kind)}): there is no such picture. There are: "
            f"{known}; where to draw is plot(ax=...)."
        )
    require_axes(ax)
    is_reduced = any(call.block.is_reduced for call in calls)
    if kind == "histogram" and is_reduced:
        raise NotKeptError(NO_ENTRIES)
    kept = [field for field in ORDER if field in fields]
    if not kept:
        raise NotKeptError(
            "plot() shows gradients, and record(..., keep=...) left them all out."
        )
    drawn = kept if kind == "flow" else kept[:1]
    places = _places(calls, with_own_parameters="param_grads" in drawn)
    made = REDUCED if is_reduced and not _are_statistics(places, kept) else ""
    return KINDS[kind](places, kept, made, ax)


# The order of the legend; where one field is shown, it is the first that was kept.
ORDER = ("grad_output", "grad_input", "param_grads")


def _flow(places: Places, fields: list[str], made: str, ax: "Axes | None") -> "Figure":
    passes = [*map(_passes, places.values())]
    norms = {field: [_norms(field, found) for found in passes] for field in fields}
    totals = {
        field: [
            _where_apart(_norms(f"{field}_total", found), shares)
            for found, shares in zip(passes, norms[field], strict=True)
        ]
        for field in fields
        if field != "grad_output"  # which has no total
    }
    return gradient_flow(list(places), norms, totals, made or "the gradient", ax)


def _steps(places: Places, fields: list[str], made: str, ax: "Axes | None") -> "Figure":
    steps = sorted({step for by_forward in places.values() for step in by_forward})
    norms = [
        [largest(_norms(fields[0], by_forward.get(step, []))) for step in steps]
        for by_forward in places.values()
    ]
    of = f"{made} of {fields[0]}" if made else fields[0]
    return heat_map(list(places), steps, norms, of, ax)


def _histogram(
    places: Places, fields: list[str], _made: str, ax: "Axes | None"
) -> "Figure":
    entries = [
        [
            tensor
            for pass_ in _passes(by_forward)
            for tensor in _tensors(fields[0], pass_)
        ]
        for by_forward in places.values()
    ]
    low, high = _range(entries)
    found = [_ridge(tensors, low, high) for tensors in entries]
    nothing = "no gradient has an entry" if any(entries) else NO_PASS
    return ridges(list(places), found, (low, high), fields[0], nothing, ax)


KINDS: dict[str, Callable[[Places, list[str], str, Any], Any]] = {
    "flow": _flow,
    "steps": _steps,
    "histogram": _histogram,
}


def _places(calls: Iterable[CallTrace], *, with_own_parameters: bool) -> Places:
    """Gather the passes by place in the forward.

    Of calls that make others there are the gradients of own parameters, or nothing.
    """
    places: Places = {}
    seen: Counter[tuple[int, str]] = Counter()
    for call in calls:
        label = numbered(call.name, seen[call.forward, call.name])
        seen[call.forward, call.name] += 1
        passes: Sequence[Shown] = Call(call).passes
        if call.calls_others:
            if not (with_own_parameters and call.parameters):
                continue
            passes = [OwnParameters(it) for it in Call(call).passes]
            if not any(_measured("param_grads", it) for it in passes):
                continue
        place = places.setdefault(label, {})
        place.setdefault(call.forward, []).extend(passes)
    return places


def _are_statistics(places: Places, fields: list[str]) -> bool:
    """Tell whether gradients were kept as `TensorStats`."""
    return any(
        are_statistics(_structure(field, pass_))
        for by_forward in places.values()
        for pass_ in _passes(by_forward)
        for field in fields
    )


def _structure(field: str, shown: Shown) -> Any:
    """Return what is shown of a field of a pass."""
    if not isinstance(shown, OwnParameters):
        return with_keywords(shown, field)
    return with_keywords(shown.of, field) if field.startswith("param_grads") else ()


def _passes(by_forward: dict[int, list[Shown]]) -> list[Shown]:
    """Return all passes at one place."""
    return [*chain.from_iterable(by_forward.values())]


def _norms(field: str, passes: Sequence[Shown]) -> list[float]:
    """Return the norm of a field in each pass that has it."""
    found = (_measured(field, pass_) for pass_ in passes)
    return [norm(measured) for measured in found if measured]


def _measured(field: str, pass_: Shown) -> list[Any]:
    """Return what has a norm in a field of a pass; empty where the field is."""
    structure = _structure(field, pass_)
    measured = measured_in(structure)
    if not measured and any(leaf is not None for leaf in Tree.of(structure).leaves):
        raise NotKeptError(
            "plot() draws norms, and what record(..., reduce=...) kept has none. "
            "Reduce with gradlib.tensor_stats, or not at all."
        )
    return measured


def _tensors(field: str, pass_: Shown) -> list[Tensor]:
    """Return the tensors in a field of a pass."""
    measured = _measured(field, pass_)
    if not all(isinstance(it, Tensor) for it in measured):
        raise NotKeptError(NO_ENTRIES)
    return measured


def _where_apart(totals: list[float], shares: list[float]) -> list[float]:
    """Return the totals if they visibly differ from the shares, or nothing."""
    if not totals or not shares:
        return totals
    total, share = median(totals), median(shares)
    alike = total <= share * VISIBLY and share <= total * VISIBLY
    return [] if alike or math.isnan(total) else totals


def _range(entries: list[list[Tensor]]) -> tuple[float, float]:
    """Return the powers of ten between which all magnitudes lie."""
    # One tensor after the other: together they may be more than fits into memory.
    every = (tensor for tensors in entries for tensor in tensors)
    logs = [_ends(_logarithms(_magnitudes(tensor))) for tensor in every]
    low = min((ends[0] for ends in logs if ends), default=-0.5)
    high = max((ends[1] for ends in logs if ends), default=0.5)
    return (low, high) if high - low > 0.1 else (low - 0.5, high + 0.5)


def _ends(values: Tensor) -> tuple[float, float] | None:
    return (values.min().item(), values.max().item()) if len(values) else None


def _ridge(tensors: list[Tensor], low: float, high: float) -> Ridge:
    """Count the entries of one place by magnitude."""
    counts = [0.0] * BINS
    zeros = nonfinite = 0
    for tensor in tensors:
        magnitudes = _magnitudes(tensor)
        found = cast(Any, _logarithms(magnitudes)).histc(BINS, low, high).tolist()
        counts = [a + b for a, b in zip(counts, found, strict=True)]
        zeros += int((magnitudes == 0).sum())
        nonfinite += int((~magnitudes.isfinite()).sum())
    return Ridge(counts, zeros, nonfinite)


def _logarithms(magnitudes: Tensor) -> Tensor:
    """Return log10 of all magnitudes that are finite and not zero."""
    return magnitudes[(magnitudes > 0) & magnitudes.isfinite()].log10()


def _magnitudes(tensor: Tensor) -> Tensor:
    """Return the magnitudes of all entries in float64, NaN where there is no value."""
    with suppress(UnknownToClassError):
        if not tensor.is_meta:
            return if_known(lambda: _countable(tensor), [tensor])
    return torch.full(tensor.shape, torch.nan, dtype=torch.double, device="cpu")


def _countable(tensor: Tensor) -> Tensor:
    """Return the magnitudes; raise where their class cannot do what a picture needs."""
    found = wide(tensor).abs().double()
    if is_of_other_class(found):
        cast(Any, _logarithms(found)).histc(BINS).tolist()
    return found
