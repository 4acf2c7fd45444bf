"""The code that mends an autograd call."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from math import prod
from textwrap import fill
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.render import WIDTH
from gradlib.vjp.arguments import (
    NO_FLAG,
    Argument,
    Arguments,
    form_of,
    is_differentiable,
    shape_of,
    written_key,
)

ONES_MEAN = "Weights of one give the gradient of the output's sum."

FEW = 2  # entries, at most, that get a line each; more get a loop

# Letters in the code of an explanation, for a tensor that the call was not given, and
# for another call.
ORIGINAL, CALL = "w", "u"


def call(
    arguments: Arguments,
    vectors: str | None = None,
    outputs: str = "y",
    inputs: str = "x",
    **changed: Any,
) -> str:
    """Return the line of code that makes the call again.

    Args:
        arguments: The call. Its options are spelled as they were given.
        vectors: What to pass as grad_outputs, ``""`` for nothing; as the call did if
            left out.
        outputs: What to pass as outputs.
        inputs: What to pass as inputs.
        changed: The options that shall differ; ``None`` leaves one out.
    """
    if vectors is None:
        vectors = "v" if arguments.grad_outputs.is_given else ""
    options = {
        k: it
        for k, it in (arguments.options | changed).items()
        if it is not None and it is not NO_FLAG
    }
    passed = [vectors] * bool(vectors) + [f"{k}={it!r}" for k, it in options.items()]
    if arguments.accumulates and not arguments.into_leaves:
        passed.append(f"inputs={inputs}")
    if arguments.function == "backward":
        return f"{outputs}.backward({', '.join(passed)})"
    between = [] if arguments.accumulates else [inputs]
    return f"{arguments.function}({', '.join([outputs, *between, *passed])})"


def recomputed(arguments: Arguments, *lines: str, **changed: Any) -> str:
    """Return the code that computes the outputs anew, as `lines` say, and calls again.

    Weights of one are filled in where the call had none and needs some.
    """
    pairs = zip(arguments.outputs.values, arguments.grad_outputs.values, strict=False)
    if any(v is None and _needs_weights(y) for y, v in pairs):
        return "\n".join([*lines, all_ones(arguments), call(arguments, "v", **changed)])
    return "\n".join([*lines, call(arguments, **changed)])


def exchanged(arguments: Arguments) -> str:
    """Return the code that makes the call with outputs and inputs exchanged."""
    outputs, vectors = arguments.inputs, arguments.grad_outputs.values
    pairs = zip_longest(outputs.values, vectors)
    if all(it is not None and shape_of(y) == tuple(it.shape) for y, it in pairs):
        return call(arguments, "v", outputs="x", inputs="y")
    if not any(map(_needs_weights, outputs.values)):
        return call(arguments, "", outputs="x", inputs="y")
    made = {weights(y) + "[None]" * arguments.is_grads_batched for y in outputs.values}
    one = made.pop() if len(made) == 1 else "torch.ones_like({y})"
    ones = _for_each(outputs, one, "x")
    return f"{ones}\n{call(arguments, 'v', outputs='x', inputs='y')}"


def _for_each(outputs: Argument, made: str, letter: str) -> str:
    """Return the code that makes v, the same way for each of the outputs."""
    if outputs.several:
        return f"v = [{made.format(y='each')} for each in {letter}]"
    return f"v = {made.format(y=letter)}"


def _needs_weights(output: Any) -> bool:
    if isinstance(output, Tensor):
        return output.numel() != 1
    form = form_of(output) if isinstance(output, GradientEdge) else None
    return form is not None and prod(form.shape) != 1


def mended(arguments: Arguments, mends: Mapping[int, str]) -> str:
    """Return the code that mends entries of grad_outputs, and calls again."""
    vectors = arguments.grad_outputs
    start = "v = list(v)" if vectors.is_given else f"v = [None] * {len(vectors.values)}"
    opened = [start] if vectors.several else []
    lines = for_entries(mends, arguments.outputs, vectors)
    return "\n".join([*opened, *lines, call(arguments, "v")])


def for_entries(lines: Mapping[int, str], *arguments: Argument) -> list[str]:
    """Return the code that handles entries, in a loop if there are many.

    Args:
        lines: The line for each entry, by index, with letters in braces for the entries
            of `arguments`.
        arguments: Arguments of a call, each of which has all these entries.
    """
    by_line: dict[str, list[int]] = {}
    for i, line in lines.items():
        by_line.setdefault(line, []).append(i)
    code: list[str] = []
    for line, entries in by_line.items():
        if len(entries) > FEW:
            names = {it.letter: f"{it.letter}[i]" for it in arguments}
            head = f"for i in {_spelled_indices(entries, arguments[0])}:"
            code += [head, f"    {line.format(**names)}"]
        else:
            each = ({it.letter: it.spelled[i] for it in arguments} for i in entries)
            code += dict.fromkeys(line.format(**names) for names in each)
    return code


def _spelled_indices(entries: list[int], argument: Argument) -> str:
    if argument.keys is not None:
        return f"[{', '.join(written_key(argument.keys[i]) for i in entries)}]"
    if entries == [*range(len(entries))]:
        return f"range({len(entries)})"
    return fill(str(entries), WIDTH - 2 * len("for i in "))


def all_ones(arguments: Arguments, *, batched: bool | None = None) -> str:
    """Return the code that gives every output weights of one.

    Args:
        arguments: The call.
        batched: Whether as a batch of one; as the call asks if left out.
    """
    outputs = arguments.outputs
    is_batched = arguments.is_grads_batched if batched is None else batched
    made = [weights(output) + "[None]" * is_batched for output in outputs.values]
    if len(set(made)) == 1:
        return _for_each(outputs, made[0], "y")
    vectors = replace(arguments.grad_outputs, values=outputs.values, several=True)
    lines = {i: f"{{v}} = {it}" for i, it in enumerate(made)}
    start = f"v = [None] * {len(made)}"
    return "\n".join([start, *for_entries(lines, outputs, vectors)])


def with_ones(arguments: Arguments) -> str:
    """Return the code that gives every output weights of one, and calls again."""
    return f"{all_ones(arguments)}\n{call(arguments, 'v')}"


def weights(output: Any, value: str = "") -> str:
    """Return the code of a vector for an output, with one value everywhere.

    Args:
        output: A tensor or a gradient edge.
        value: The code of the value; one if left out.

    Returns:
        An expression with ``{y}`` for the output.
    """
    form = form_of(output) if is_differentiable(output) else None
    if form is None:
        return f"torch.ones_like({{y}}) * {value}" if value else "torch.ones_like({y})"
    if isinstance(output, Tensor) and output.layout == torch.strided:
        return f"torch.full_like({{y}}, {value})" if value else "torch.ones_like({y})"
    # ones_like() takes no gradient edge; of a sparse tensor torch makes only zeros.
    shape, dtype, device = spelled_form(output)
    made = f"torch.full({shape}, {value}" if value else f"torch.ones({shape}"
    if value or form.dtype.is_complex:
        made += f", dtype={dtype}"
    if form.device != torch.get_default_device():
        made += f", device={device}"
    is_mkldnn = isinstance(output, Tensor) and output.is_mkldnn
    return f"{made})" + ".to_mkldnn()" * is_mkldnn


def spelled_form(output: Any) -> tuple[str, str, str]:
    """Return the code of an output's shape, dtype and device.

    Returns:
        Expressions with ``{y}`` for the output; for a gradient edge, which has no such
        attributes, the values.
    """
    form = None if isinstance(output, Tensor) else form_of(output)
    if form is None:
        return "{y}.shape", "{y}.dtype", "{y}.device"
    return str(list(form.shape)), str(form.dtype), f'"{form.device}"'
