"""Why a kind of hook got so many entries, or none, and what would change that."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.hook_reports.call_graph import name_of
from gradlib.hook_reports.first_tensor import ENDLESS, first_tensor
from gradlib.hook_reports.hooked_call import HookedCall
from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    BORDER,
    FULL,
    FULL_PRE,
    LEGACY,
    NODE,
    ON_LAST_NODE,
    ON_NODE,
    SEVERAL,
    TENSOR,
)
from gradlib.hook_reports.last_node import Variant, variants
from gradlib.hook_reports.trial import differentiable, requires_grad
from gradlib.subclasses import is_of_other_class
from gradlib.tree import tensors_in
from gradlib.wording import counted

_WHY_ON_TENSORS = {
    TENSOR: "No tuple: each output that requires grad has a hook of its own.",
    ACCUMULATED: (
        "No tuple: the hook gets the leaf, and reads its .grad, to which this pass has "
        "just added. Here each argument and own parameter that is a leaf has one."
    ),
    SEVERAL: (
        "One tuple for all the tensors it was set on, in their order: here the "
        "arguments that require grad, and the module's own parameters."
    ),
}


def why_so_many(call: HookedCall, kind: str, lengths: Mapping[str, int]) -> str:
    """Say why the tuples have their lengths, and what would change them."""
    if kind == LEGACY:
        return _why_legacy(call, lengths["grad_input"])
    if kind == FULL:
        return _why_full(call, lengths["grad_input"])
    if kind == FULL_PRE:
        count = _entries(lengths["grad_output"])
        return f"{count} in grad_output: one for each output. No grad_input."
    if kind in ON_NODE:
        return _why_node(call, kind, lengths)
    return _WHY_ON_TENSORS[kind]


def _why_legacy(call: HookedCall, length: int) -> str:
    """Say what decides the length of the tuple that the old hook gets."""
    maker, inputs = call.last_node.name, call.last_node.inputs
    if name := call.last_node.returned:
        return (
            f"The module returns {name} itself, so this hook sits on the node that "
            f"made {name}, {maker}, outside the module: where that is, it receives "
            f"{_entries(len(inputs))}. In the copy a stand-in has one."
        )
    said = (
        f"{_entries(length)} in grad_input: one for each input of {maker}, the "
        f"node of {_first_output(call)}."
    )
    changes = [
        f"{it.words}: {_what_then(it)}."
        for it in variants(call.module, call.inputs)
        if it.node is None or len(it.node.next_functions) != length
    ]
    general = "Another last operation may give another length."
    return " ".join([said, *(changes or [general])])


def _what_then(variant: Variant) -> str:
    """Say what the old hook gets, or does, where something was changed."""
    node, first = variant.node, variant.first
    if node is not None:
        return f"{len(node.next_functions)}, for {name_of(node)}"
    if first is ENDLESS:
        return "torch looks for a tensor in the output for ever"
    if not isinstance(first, Tensor):
        return "an error, as torch looks for a tensor in the output and finds none"
    return "never called"


def _first_output(call: HookedCall) -> str:
    """Return the name of the output on whose node the old hook sits."""
    if call.plain.seen is not call.plain.output:
        return "what forward returned"
    if len(tensors_in(call.plain.output.build())) < 2:
        return "the output"
    first = first_tensor(call.plain.output.build())
    for place, leaf in enumerate(call.plain.output.leaves):
        if leaf is first:
            return f"output{call.plain.output.path(place)}"
    return "the first tensor in the output"  # in an object that is not opened


def _why_full(call: HookedCall, length: int) -> str:
    """Say what decides the length of the tuple that the full hook gets."""
    said = f"{_entries(length)} in grad_input: one for each positional argument."
    if not any(call.plain.asked):
        said += " None of these is a tensor that requires grad."
    if call.plain.keywords:
        said += f" No entry for a keyword argument ({', '.join(call.plain.keywords)})."
    return said + " The operations inside do not change that."


def _why_node(call: HookedCall, kind: str, lengths: Mapping[str, int]) -> str:
    """Say what decides the lengths of the tuples that a node's hook gets."""
    field = "grad_input" if kind == NODE else "grad_output"
    maker = call.last_node.name
    if name := call.last_node.returned:
        return (
            f"The module returns {name} itself, so the node is {maker}, which made "
            f"{name} outside the module: there the hook receives one entry for "
            f"each {field.removeprefix('grad_')} of {maker}. In the copy a "
            f"stand-in has {lengths[field]}."
        )
    said = (
        f"{_entries(lengths[field])} in {field}: one for each "
        f"{field.removeprefix('grad_')} of {maker}, the node that "
        f"{LEGACY} sets its hook on too."
    )
    return said if kind == NODE else f"{said} No grad_input."


_entries = partial(counted, one="entry", many="entries")


def why_not_tried(call: HookedCall, kind: str) -> str:
    """Say why a kind of hook cannot even be tried, or ``""``."""
    if kind not in ON_LAST_NODE:
        return ""
    if first_tensor(call.plain.seen.build()) is not ENDLESS:
        return ""
    if kind == LEGACY:
        return "Not tried: torch would look for a tensor in the output for ever."
    return f"Not tried: there is no node that {LEGACY} would sit on."


def why_never_called(call: HookedCall, kind: str) -> str:
    """Say why a hook was never called, though nothing was raised."""
    tree = call.plain.seen if kind in (LEGACY, *BORDER) else call.plain.output
    output = tree.build()
    if not tensors_in(output) and output is not None:
        kind_of = type(output).__name__
        return f"Never called: no tensor is found in the output, of type {kind_of}."
    if not differentiable(tree):
        off = "" if torch.is_grad_enabled() else ": gradients are disabled"
        return f"Never called: no output requires grad{off}."
    if kind in ON_LAST_NODE and not call.last_node.name:
        if not isinstance(found := first_tensor(output), Tensor):
            return (
                "Never called: torch looks for a tensor at the first entry of the "
                "output, and of what stands there, and comes to a value of type "
                f"{type(found).__name__}."
            )
        return (
            "Never called: the first output tensor has no autograd node, as it is "
            "a leaf or does not require grad."
        )
    if kind == ACCUMULATED:
        return (
            "Never called: neither an argument nor a parameter of the module's own "
            "is a leaf that requires grad."
        )
    if kind == SEVERAL:
        return _why_several_never(call)
    if kind in BORDER and (why := _why_border_never(call, kind, output)):
        return why
    if not call.plain.trial.runs_hooks:
        kind_of = type(call.module).__name__
        return f"Never called: {kind_of} has a __call__ of its own, without hooks."
    return "Never called, for a reason that this report does not know."


def _why_several_never(call: HookedCall) -> str:
    for it in call.several.values():
        if it.is_leaf and is_of_other_class(it):
            return (
                "Never called: torch finds no node to count for a leaf of class "
                f"{type(it).__name__}."
            )
    if any(map(call.known.arrives, call.several)):
        return (
            "Never called: torch does not count a tensor that the backward pass "
            "begins at."
        )
    return (
        "Never called: no gradient comes to an argument or to a parameter of "
        "the module's own."
    )


def _why_border_never(call: HookedCall, kind: str, output: object) -> str:
    """Say why no full hook at the border of the module is called, or ``""``."""
    if not isinstance(output, Tensor | tuple):
        return (
            f"Never called: the output is of type {type(output).__name__}, and "
            "this hook needs a tensor or a tuple of tensors."
        )
    if not torch.is_grad_enabled():
        return "Never called: gradients are disabled where the module is called."
    top = cast(Any, output if isinstance(output, tuple) else (output,))
    if not any(map(requires_grad, top)):
        return "Never called: no tensor that requires grad is at the top level."
    if (
        kind == FULL
        and any(call.plain.asked)
        and not any(map(call.known.arrives, call.names.arguments))
    ):
        return (
            "Never called: where an argument requires grad, this hook waits for "
            "the gradient of one, and none comes."
        )
    return ""
