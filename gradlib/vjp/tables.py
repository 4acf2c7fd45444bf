"""The tables that explain a product: its tensors, and its entries if they are few."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from gradlib.render import WIDTH, Table
from gradlib.vjp.entries import Entries, entries_of
from gradlib.vjp.equation import equation
from gradlib.vjp.meaning import headline, remarks
from gradlib.vjp.patterns import patterns_of
from gradlib.vjp.product import Jacobian, Product
from gradlib.vjp.weights import weights_in

LISTED = 6  # tensors of a kind that are listed; the rest are counted
SMALL = 20  # rows or columns, at most, of the table of numbers

Line: TypeAlias = tuple[str, str, str]


def tables(product: Product) -> Iterator[Table]:
    """Yield the tables of a product; those of numbers only if they fit a terminal."""
    jacobian = product.jacobian
    lines = [line for part in _tensors(product) for line in _shortened(part)]
    footer = (*remarks(product), *_check(jacobian))
    yield Table(headline(product), ("", "shape", "what"), lines, footer)
    if isinstance(jacobian, Jacobian):
        yield from _of_numbers(product, jacobian)


def _of_numbers(product: Product, jacobian: Jacobian) -> list[Table]:
    """Return J as a table, or as one for each input; none where it does not fit."""
    rows, columns = (
        [it.numel() for it in part] for part in (product.v, product.results)
    )
    are_few = len(columns) <= LISTED and 0 < max(columns) <= SMALL
    if not 0 < sum(rows) <= SMALL or not (are_few or 0 < sum(columns) <= SMALL):
        return []
    entries = entries_of(product, jacobian, {})
    whole = _numbers(entries)
    if sum(columns) <= SMALL and _fits(whole):
        return [whole]
    if not are_few or len(columns) == 1:
        return []
    names = enumerate(product.inputs)
    each = [_numbers(_of_input(entries, i, x), x) for i, x in names]
    return each if all(map(_fits, each)) else []


def _fits(table: Table) -> bool:
    return all(len(line) <= WIDTH for line in table.text().splitlines())


def _of_input(entries: Entries, i: int, name: str) -> Entries:
    """Return the entries of one input, whose columns are named by their indices."""
    (columns, sums), place = (entries.columns[i], entries.sums[i]), slice(i, i + 1)
    return replace(
        entries,
        columns=[[it.removeprefix(name) or name for it in columns]],
        blocks=[row[place] for row in entries.blocks],
        sums=[sums],
    )


def _tensors(product: Product) -> Iterator[list[Line]]:
    """Yield the lines for outputs, inputs, vectors, blocks of J, and results."""
    ys, xs, vectors = product.outputs, product.inputs, product.vectors
    outs, ins = list(map(_shape, product.v)), list(map(_shape, product.results))
    own = {name: f" (`{it}`)" for name, it in product.own_names.items()}
    yield [
        (y, shape, f"outputs{own.get(y, '')}")
        for y, shape in zip(ys, outs, strict=True)
    ]
    yield [
        (x, shape, f"inputs{own.get(x, '')}") for x, shape in zip(xs, ins, strict=True)
    ]
    yield [
        (v, shape, f"grad_outputs{own.get(v, '')}: {weights_in(it)}")
        for v, shape, it in zip(vectors, outs, product.v, strict=True)
    ]
    yield [
        (
            f"J{y[1:]}{x[1:]}",
            _shape(v, result),
            f"d{y}/d{x}" + (f", {pattern.value}" if pattern.value else ""),
        )
        for y, v, row in zip(ys, product.v, patterns_of(product), strict=True)
        for x, result, pattern in zip(xs, product.results, row, strict=True)
    ]
    more = " + ..." if ys[1:] else ""
    v = product.v[0]
    yield [
        (
            f"vᵀJ{x[1:]}",
            shape,
            f'einsum("{terms}", {vectors[0]}, J{ys[0][1:]}{x[1:]}){more}'
            if (terms := equation(v, result))
            else "",
        )
        for x, shape, result in zip(xs, ins, product.results, strict=True)
    ]


def _shape(*tensors: Tensor) -> str:
    """Return the shapes of tensors, joined into one."""
    if any(it.is_nested for it in tensors):
        return "nested"
    return str([size for it in tensors for size in it.shape])


def _shortened(lines: list[Line]) -> list[Line]:
    more = len(lines) - LISTED
    return [*lines[:LISTED], ("...", "", f"{more:,} more")] if more > 1 else lines


def _numbers(entries: Entries, x: str = "") -> Table:
    """Return J as a table, or the part of J for the one input `x`.

    v is in front of its rows, and vᵀJ below its columns.
    """
    columns = [name for part in entries.columns for name in part]
    lines = [
        (name, _number(v), *(_number(it) for block in row for it in block[i]))
        for names, weights, row in zip(
            entries.rows, entries.v, entries.blocks, strict=True
        )
        for i, (name, v) in enumerate(zip(names, weights, strict=True))
    ]
    sums = [_number(it) for part in entries.sums for it in part]
    return Table(
        f"J{x[1:]}, with v in front of its rows and vᵀJ{x[1:]} below its columns",
        ("", "v", *columns),
        [*lines, (f"vᵀJ{x[1:]}", "", *sums)],
    )


def _number(value: Any) -> str:
    return f"{value + 0.0:.4g}"  # no negative zero


def _check(jacobian: Jacobian | str) -> Iterator[str]:
    """Say whether einsum and autograd give the same vᵀJ."""
    if isinstance(jacobian, str):
        return
    twice = "Computed twice, by einsum and by one call of autograd"
    if not jacobian.compares:
        pass
    elif not jacobian.difference:
        yield f"{twice}: the same."
    elif jacobian.agrees:
        yield f"{twice}: the difference, up to {jacobian.difference:.2g}, is rounding."
    else:
        yield (
            f"{twice}: THEY DIFFER, by up to {jacobian.difference:.2g}. A hook or a "
            "custom backward does more than weigh rows, or is random; or the graph "
            "rounds much, in a narrower dtype or where large numbers cancel. J is what "
            "autograd returns for each one-hot v."
        )
    if jacobian.undefined:
        yield (
            f"Not compared: {jacobian.undefined:,} of the entries of vᵀJ. J or v holds "
            "nan or inf there, so 0 times inf, which is nan, turns up on the way by J. "
            "autograd computes vᵀJ without J."
        )
