"""Says what a product computed, judging by the values of v and J."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from gradlib.plain_tensors import wide
from gradlib.private.tensors import has_values
from gradlib.stats import count_nonfinite
from gradlib.vjp.patterns import Pattern, patterns_of
from gradlib.vjp.product import Jacobian, Product
from gradlib.vjp.weights import Kind, Weights, weights_in

FEW = 4  # names that a sentence lists; the rest are counted

NOTHING = (Kind.ZEROS, Kind.EMPTY)
"""The kinds of v that add nothing to a product."""


def headline(product: Product) -> str:
    """Say what the call computed."""
    weights = list(map(weights_in, product.v))
    if all(it.kind is Kind.EMPTY for it in weights):
        return "Zero: v has no entries, and J no rows."
    if all(it.kind in NOTHING for it in weights):
        zero = "" if any(map(_nonzero, product.results)) else "Zero: "
        return f"{zero}v gives every row of J the weight 0."
    if any(map(_nonfinite, product.results)):  # zero times inf is nan
        weights = [Weights(Kind.MIXED) if it.kind in NOTHING else it for it in weights]
    terms = list(map(_term, product.outputs, product.vectors, weights))
    total = _listed([it for it in terms if it], " + ")
    if isinstance(product.jacobian, Jacobian) and not product.jacobian.agrees:
        return (
            f"What autograd returns as the gradient of {total}. The rows of J, each "
            "times its weight in v, do not add up to it."
        )
    if len(terms) > 1:
        return (
            f"The gradient of L = {total}. Each input gets the sum over all outputs: "
            "no output is paired with an input."
        )
    return _of_one_output(product, terms[0], weights[0])


def _of_one_output(product: Product, term: str, weights: Weights) -> str:
    """Say what a call with a single output computed."""
    y, times = product.outputs[0], _times(weights)
    match weights.kind:
        case Kind.SINGLE:
            return f"This is {times}dy/dx: {y} has one entry, so J is one row."
        case Kind.ONE_HOT:
            index = weights.index
            row = index[0] if len(index) == 1 else list(index)
            said = f"{times}row {row} of J: the gradient of {term}."
            return said[0].upper() + said[1:]
        case Kind.CONSTANT | Kind.MEAN:
            return _of_equal_weights(product, term, weights)
        case Kind.COMPLEX:
            return f"The gradient of {term}. If v is dL/dy, this is dL/dx."
        case _:
            diagonal = set(patterns_of(product)[0]) == {Pattern.DIAGONAL}
            return (
                f"The gradient of {term}: the rows of J, each times its weight in v, "
                "summed. If v is dL/dy, this is dL/dx."
                + " J is diagonal at this x: each entry is v times dy/dx."
                * diagonal
            )


def _term(y: str, v: str, weights: Weights) -> str:
    """Return the part of L whose gradient is one output's v; ``""`` for zeros."""
    at = str(list(weights.index)) if weights.index else ""
    exact = weights.exact
    times = f"{weights.factor} * " if weights.factor and exact else ""
    match weights.kind:
        case Kind.ZEROS | Kind.EMPTY:
            return ""
        case Kind.SINGLE | Kind.ONE_HOT:
            return f"{times}{y}{at}" if exact else f"{y}{at} * {v}{at}"
        case Kind.CONSTANT if exact:
            return f"{times}{y}.sum()"
        case Kind.MEAN:
            return f"{y}.mean()"
        case Kind.COMPLEX:
            return f"({y} * {v}.conj()).real.sum()"
        case _:
            return f"({y} * {v}).sum()"


def _of_equal_weights(product: Product, term: str, weights: Weights) -> str:
    """Say what a constant v computes, and whether that is dy/dx."""
    patterns = patterns_of(product)[0]
    gradient = f"The gradient of {term}"
    mean = weights.kind is Kind.MEAN
    one = f"{weights.factor} of dy/dx" if mean else f"{_times(weights)}dy/dx"
    all_ = "the mean of" if mean else f"{_times(weights)}the sum of"
    if Pattern.UNKNOWN in patterns or Pattern.HIDDEN in patterns:
        return f"{gradient}: each entry is {all_} a column of J, in general not dy/dx."
    if set(patterns) == {Pattern.ZERO}:
        return f"{gradient}: zero, because J is zero at this x."
    if set(patterns) == {Pattern.DIAGONAL}:
        return (
            f"{gradient}. Here that is {one}, entry by entry: J is diagonal at this x, "
            "so each sum has one term."
        )
    alone = [
        name
        for name, it in zip(product.inputs, patterns, strict=True)
        if it.sums_one_entry
    ]
    if len(alone) == len(patterns):
        return (
            f"{gradient}. Here each entry is {one}, of the one entry of y that changes "
            "with that x: at this x no column of J has two nonzero entries."
        )
    but = f", but for {_listed(alone, ', ')}" if alone else ""
    return f"{gradient}: each entry is {all_} a column of J, not dy/dx{but}."


def remarks(product: Product) -> Iterator[str]:
    """Yield sentences on what else is worth knowing of the call."""
    jacobian = product.jacobian
    if isinstance(jacobian, Jacobian):
        yield from _of_samples(product)
        yield from _of_gaps(product, jacobian)
        yield from _of_nonfinite("J", [it for row in jacobian.blocks for it in row])
    else:
        yield jacobian
    if any(it.is_complex() for it in product.v):
        yield (
            "y is complex: the real part of v weighs the real part of y, and the "
            "imaginary part the imaginary one."
        )
    if any(it.is_complex() for it in product.results):
        yield (
            "x is complex: what is called its gradient is dL/d(real part) + i "
            "dL/d(imaginary part), and each row of J is one."
        )
    yield from _of_nonfinite("v", product.v)
    yield from _of_nonfinite("vᵀJ", product.results)


def _of_samples(product: Product) -> Iterator[str]:
    """Name the pairs whose samples do not influence each other."""
    for y, row in zip(product.outputs, patterns_of(product), strict=True):
        for x, pattern in zip(product.inputs, row, strict=True):
            if pattern is Pattern.PER_SAMPLE:
                yield (
                    f"At this x, {x}[b] reaches {y}[b] alone, as a sample of a batch "
                    "does: its sums have no other rows of J."
                )


def _of_gaps(product: Product, jacobian: Jacobian) -> Iterator[str]:
    """Name the pairs that the graph does not connect."""
    gaps = [
        f"{y} and {x}"
        for y, row in zip(product.outputs, jacobian.connected, strict=True)
        for x, connected in zip(product.inputs, row, strict=True)
        if not connected
    ]
    if gaps:
        yield f"The graph does not connect {_listed(gaps, ', ')}: J is zero there."


def _of_nonfinite(name: str, tensors: Iterable[Tensor]) -> Iterator[str]:
    if count := sum(map(_nonfinite, tensors)):
        yield f"{name} holds nan or inf: {count:,} of its entries."


def _nonfinite(tensor: Tensor) -> int:
    """Count the entries that are nan or inf."""
    is_known = has_values(tensor) and not tensor.is_nested
    return int(count_nonfinite(wide(tensor))) if is_known else 0


def _nonzero(tensor: Tensor) -> bool:
    is_known = has_values(tensor) and not tensor.is_nested
    return is_known and bool(wide(tensor).any())


def _listed(names: Sequence[str], separator: str) -> str:
    more = [f"... ({len(names) - FEW:,} more)"] if len(names) > FEW else []
    return separator.join([*names[:FEW], *more])


def _times(weights: Weights) -> str:
    return f"{weights.factor} times " if weights.factor else ""
