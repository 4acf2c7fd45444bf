"""One vector-Jacobian product, computed twice: by autograd, and from the rows of J."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradlib.plain_tensors import wide
from gradlib.private.tensors import has_values
from gradlib.retaining import retaining
from gradlib.stats import largest
from gradlib.values import keep
from gradlib.vjp.arguments import Arguments, Form, form_of
from gradlib.vjp.equation import equation
from gradlib.vjp.spelling import own_names
from gradlib.wording import in_bytes

ENTRIES = 10_000
"""The most entries of a Jacobian that is computed, all pairs of tensors together."""

ROWS = 1_000
"""The most rows, all outputs together: each is a backward pass."""


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J in blocks, one for each pair of an output and an input.

    Attributes:
        blocks: ``blocks[a][b]`` is dy[a]/dx[b], of shape ``(*out, *in)``; zero where
            the graph does not connect the two.
        connected: Whether the graph connects each pair, in the same order.
        contracted: For each input vᵀJ by einsum, summed over the outputs.
        difference: The largest difference between `contracted` and what autograd
            returned, over the entries whose terms are finite.
        rounding: The largest `difference` that rounding may cause.
        undefined: How many of the other entries differ: einsum makes NaN of zero times
            infinity, which autograd need not multiply.
        compares: Whether any entry has finite terms, or there are no entries.
    """

    blocks: list[list[Tensor]]
    connected: list[list[bool]]
    contracted: list[Tensor]
    difference: float
    rounding: float
    undefined: int
    compares: bool

    @property
    def agrees(self) -> bool:
        """Whether einsum and autograd agree, up to rounding."""
        return self.difference <= self.rounding


@dataclass(frozen=True, eq=False)
class Product:
    """What one call of ``torch.autograd.grad`` was given, and what it returned.

    Attributes:
        outputs: What formulas call the outputs: ``"y"``, or ``"y[0]"`` and so on.
        inputs: What formulas call the inputs: ``"x"``, or ``'x["weight"]'``.
        keys: The keys of a dict of inputs, or ``None``.
        vectors: What formulas call the vectors: ``"v"``, or ``"v[0]"``.
        own_names: The caller's names for these, by the formulas' names; only those that
            differ.
        v: For each output its vector, of the output's shape and dtype.
        results: For each input its gradient, of the input's shape.
        jacobian: J, or why it was not computed.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    keys: tuple[Any, ...] | None
    vectors: tuple[str, ...]
    own_names: dict[str, str]
    v: list[Tensor]
    results: list[Tensor]
    jacobian: Jacobian | str

    def by_input(self, values: Sequence[Any]) -> Any:
        """Return values as the inputs were given: alone, in a tuple or in a dict."""
        if self.keys is not None:
            return dict(zip(self.keys, values, strict=True))
        return values[0] if self.inputs == ("x",) else tuple(values)

    def by_pair(self, values: Sequence[Sequence[Any]]) -> Any:
        """Return the values of all pairs: the inputs' structure within the outputs'."""
        rows = tuple(map(self.by_input, values))
        return rows[0] if self.outputs == ("y",) else rows


def multiply(arguments: Arguments) -> Product:
    """Compute vᵀJ for good arguments, by autograd and from J.

    The graph can be used again, and every ``.grad`` stays as it was.

    Raises:
        RuntimeError: autograd cannot go back through the graph.
    """
    outputs, inputs = arguments.outputs.values, arguments.inputs.values
    given = arguments.grad_outputs.values
    with _grads_kept():
        found = torch.autograd.grad(outputs, inputs, given, retain_graph=True)
        results = [keep(it) for it in found]
        vectors = [_vector(v, form_of(y)) for v, y in zip(given, outputs, strict=True)]
        jacobian = _why_not(vectors, results) or _jacobian(
            outputs, inputs, vectors, results
        )
    return Product(
        arguments.outputs.spelled,
        arguments.inputs.spelled,
        arguments.inputs.keys,
        arguments.grad_outputs.spelled,
        _own_names(arguments),
        vectors,
        results,
        jacobian,
    )


def _own_names(arguments: Arguments) -> dict[str, str]:
    return {
        name: own
        for letter, it in arguments.by_letter.items()
        for name, own in zip(it.spelled, own_names(arguments, letter), strict=False)
        if own != name
    }


@contextmanager
def _grads_kept() -> Generator[None]:
    """Undo what a backward pass adds to the ``.grad`` of tensors that retain it.

    ``torch.autograd.grad`` adds to these too, though not to leaves.
    """
    kept = [(it, it.grad) for it in retaining()]
    try:
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad


def _vector(given: Tensor | None, form: Form | None) -> Tensor:
    """Return v as autograd uses it."""
    if given is None:
        assert form is not None
        return torch.ones(form.shape, dtype=form.dtype, device=form.device)
    return keep(given) if form is None else keep(given).to(form.dtype)


def _why_not(vectors: list[Tensor], results: list[Tensor]) -> str:
    """Return why J is not computed, or ``""``."""
    every = [*vectors, *results]
    if any(it.is_nested for it in every) or any(
        v.layout != torch.strided for v in vectors
    ):
        return "J is not computed: an output or its v is sparse, or a tensor nested."
    if not all(map(has_values, every)):
        return (
            'J is not computed: on the device "meta", and in a FakeTensorMode, there '
            "are no values."
        )
    if any(it.is_complex() for it in vectors):
        return (
            "J is not computed: an output is complex, and its real and imaginary parts "
            "have one row each. Explain torch.view_as_real(y) to see them."
        )
    if not all(equation(v, result) for v in vectors for result in results):
        return "J is not computed: it would have more axes than einsum has letters."
    rows, columns = (sum(it.numel() for it in part) for part in (vectors, results))
    if rows * columns > ENTRIES:
        size = rows * sum(it.numel() * it.itemsize for it in results)
        return (
            f"J is not computed: it would have {rows * columns:,} entries, "
            f"{in_bytes(size)}. The most is {ENTRIES:,} entries."
        )
    if rows > ROWS:
        return (
            f"J is not computed: it would have {rows:,} rows, and each is a backward "
            f"pass. The most is {ROWS:,} rows."
        )
    return ""


def _jacobian(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    vectors: list[Tensor],
    results: list[Tensor],
) -> Jacobian:
    """Compute J by rows, and vᵀJ from it."""
    rows = [
        _blocks(y, v, inputs, results) for y, v in zip(outputs, vectors, strict=True)
    ]
    blocks = [[block for block, _ in row] for row in rows]
    connected = [[reached for _, reached in row] for row in rows]
    columns = list(zip(*blocks, strict=True))
    contracted = list(map(partial(_contracted, vectors), columns, results))
    # The same sums of magnitudes: how large the terms of each sum are.
    weights = [v.abs() for v in vectors]
    magnitudes = [[block.abs() for block in column] for column in columns]
    sizes = list(map(partial(_contracted, weights), magnitudes, results))
    # Flat: on a GPU a mask may have 25 axes at most.
    finite = [it.isfinite().flatten() for it in sizes]
    differences = [it.flatten() for it in map(_difference, contracted, results)]
    pairs = list(zip(differences, finite, strict=True))
    return Jacobian(
        blocks,
        connected,
        [sums.to(it.dtype) for sums, it in zip(contracted, results, strict=True)],
        _largest([it[compared] for it, compared in pairs]),
        _rounding(weights, sizes, results),
        sum(int((it[~compared] != 0).sum()) for it, compared in pairs),
        any(bool(it.any()) for it in finite) or not any(map(len, finite)),
    )


def _blocks(
    output: Any, v: Tensor, inputs: Sequence[Any], results: list[Tensor]
) -> list[tuple[Tensor, bool]]:
    """Return dy/dx for one output and each input, and whether anything connects them.

    The rows are computed one by one: ``is_grads_batched`` would give the hooks of the
    graph tensors that cannot be used after the call.
    """
    rows: list[tuple[Tensor | None, ...]] = [
        torch.autograd.grad(
            output, inputs, _one_hot(v, i), retain_graph=True, allow_unused=True
        )
        for i in range(v.numel())
    ]
    blocks: list[tuple[Tensor, bool]] = []
    for b, result in enumerate(results):
        shape = (*v.shape, *result.shape)
        block = torch.zeros(shape, dtype=result.dtype, device=result.device)
        connected = not rows
        for part, row in zip(block.view(len(rows), *result.shape), rows, strict=True):
            gradient = row[b]
            if gradient is not None:
                part.copy_(gradient.to_dense())
                connected = True
        blocks.append((block, connected))
    return blocks


def _one_hot(v: Tensor, i: int) -> Tensor:
    """Return the vector that picks row `i` of J, of the shape and dtype of `v`."""
    picked = torch.zeros(v.numel(), device=v.device)
    picked[i] = 1
    return picked.to(v.dtype).reshape(v.shape)


def _contracted(
    vectors: Sequence[Tensor], blocks: Sequence[Tensor], result: Tensor
) -> Tensor:
    """Return vᵀJ for one input: the einsums of all outputs, summed."""
    parts: list[Tensor] = []
    for v, block in zip(vectors, blocks, strict=True):
        block, v = wide(block), wide(v).to(block.device)
        dtype = torch.promote_types(v.dtype, block.dtype)
        terms = equation(v, result)
        parts.append(torch.einsum(terms, v.to(dtype), block.to(dtype)))
    return torch.stack(parts).sum(0)


def _difference(by_einsum: Tensor, result: Tensor) -> Tensor:
    """Return the difference of two results; zero where both are NaN or the same inf."""
    by_autograd = wide(result)
    alike = (by_einsum == by_autograd) | (by_einsum.isnan() & by_autograd.isnan())
    return (by_einsum - by_autograd).masked_fill(alike, 0)


def _rounding(
    weights: Sequence[Tensor], sizes: list[Tensor], results: list[Tensor]
) -> float:
    """Return how large a difference rounding may cause.

    A sum's rounding error grows with the size of its terms, even where these cancel.
    """
    eps = max(torch.finfo(it.dtype).eps for it in (*weights, *results))
    size, weight = (_largest(list(map(_finite, it))) for it in (sizes, weights))
    return math.sqrt(eps) * size + eps * weight


def _finite(values: Tensor) -> Tensor:
    """Return the entries that are finite."""
    entries = wide(values).flatten()  # on a GPU a mask may have 25 axes at most
    return entries[entries.isfinite()]


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest magnitude: NaN if there is one, 0 without entries."""
    sizes = [wide(it).abs().max().item() for it in tensors if it.numel()]
    return largest(sizes) or 0.0
