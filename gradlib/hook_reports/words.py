"""The words of a hook report: what each entry is, and why there are that many."""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.edges import Edge, edge_of
from gradlib.hook_reports.first_tensor import ENDLESS, first_tensor
from gradlib.hook_reports.graph import name_of
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
    Got,
)
from gradlib.hook_reports.last_node import Variant, variants
from gradlib.hook_reports.tensor_names import COMPUTED, OUTSIDE
from gradlib.hook_reports.trial import differentiable, requires_grad
from gradlib.tree import tensors_in
from gradlib.wording import counted

NOT_KNOWN = "not known: it is another gradient at each run"

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


def what_it_is(call: HookedCall, kind: str, got: Got) -> str:
    """Name an entry by its place and its value, or say why it has no name."""
    grad = got.grad
    if grad is None:
        if got.tensor and call.known.arrives(got.tensor):
            return "None: torch called the hook without it"
        return f"None: {_why_nothing(call, kind, got)}"
    if grad.is_nested:
        return "gradient of an inner tensor, which is nested"
    if grad.numel() and not grad.any():
        dtype = "" if grad.is_floating_point() else f"{grad.dtype} "
        return f"{dtype}zeros: {_why_zeros(call, kind, got)}"
    if name := call.known.name(
        grad, outputs_first=False, among=call.names_of(kind, got)
    ):
        return name
    if _is_of_last_node(kind, got):
        return _what_of_last_node(call, got, grad)
    if got.tensor and not call.known.repeats:
        return NOT_KNOWN
    if _is_of_pre_hook(call, kind, got):
        return _also_known_as(call, grad, "gradient of an inner tensor")
    of_output = got.field == "grad_output"
    if not got.tensor and (name := _name(call, grad, outputs_first=of_output)):
        return name
    return _what_else(call, kind, got)


def _what_else(call: HookedCall, kind: str, got: Got) -> str:
    """Say how an entry is more or less than the gradient of a tensor with a name."""
    name = min(call.names_of(kind, got), default="")
    edge = call.hooked_at.get(name)
    if edge is None:
        return "gradient of an inner tensor"
    if name not in call.names_at[edge]:
        return f"gradient of {name} as it was overwritten"
    if call.uses[edge] > 1 and got.field == "grad_input":  # a pre-hook uses it, too
        return _a_part_of(name)
    # As for an argument that is returned, or is passed in two places.
    if call.uses[edge] > 1 or name in call.in_several_places:
        return _with_all_uses(name)
    return f"gradient of {name}, changed by a hook that the forward sets"


def _is_of_pre_hook(call: HookedCall, kind: str, got: Got) -> bool:
    """Tell whether an entry is for an argument that a forward pre-hook computed."""
    if kind != FULL or got.field != "grad_input" or got.number >= len(call.args):
        return False
    value = call.given[got.number]
    has_name = requires_grad(value) and call.names_at.get(edge_of(value))
    return call.argument_at(got.number) is None and not has_name


def _is_of_last_node(kind: str, got: Got) -> bool:
    """Tell whether an entry is the gradient of an input of the last node."""
    return kind in ON_LAST_NODE and got.field == "grad_input"


def _name(call: HookedCall, grad: Tensor, *, outputs_first: bool) -> str | None:
    """Name a gradient by its value, or say that it cannot have a name."""
    if not grad.isfinite().any():
        return None  # NaN is equal to any NaN
    name = call.known.name(grad, outputs_first=outputs_first)
    return NOT_KNOWN if name is None and not call.known.repeats else name


def _what_of_last_node(call: HookedCall, got: Got, grad: Tensor) -> str:
    """Say what the gradient of an input of the last node is, if no name fits."""
    edge, end, source, of = call.last_node.ways[got.number]
    if edge is None:
        if name := call.name_of_idle(grad):
            return f"{name}, which does not require grad"
        return "gradient for a tensor that does not require grad"
    if end in (OUTSIDE, COMPUTED):
        return f"gradient for {end}"
    if end and call.uses[edge] > 1:
        return _a_part_of(end)
    if end in call.in_several_places:
        return _with_all_uses(end)
    if end and not call.known.repeats:
        return NOT_KNOWN
    if end:
        return f"gradient of {end}, before a hook that the forward sets"
    if source and of and call.uses[source] > 1:
        return _a_part_of(f"{of}, in another layout")
    return _also_known_as(call, grad, _what_inner(call, edge))


def _also_known_as(call: HookedCall, grad: Tensor, said: str) -> str:
    """Add to the words for an inner tensor's gradient what else has that value."""
    name = _name(call, grad, outputs_first=False)
    if name and name.startswith("gradient"):  # equal because of a sum or unit weights
        return f"{said}, equal to {name.replace('gradient', 'that', 1)}"
    return name or said


def _what_inner(call: HookedCall, edge: Edge) -> str:
    """Name the gradient of one use of a tensor that the module itself computes."""
    said = f"gradient of an inner tensor, from {name_of(edge[0])}"
    if call.uses[edge] < 2:
        return said
    of_hooked = call.hooked_at.items()  # an overwritten one has the edge of another
    hooked = {at: name for name, at in of_hooked if name in call.names_at[at]}
    if name := hooked.get(edge) or call.inner.get(edge):
        return _a_part_of(name)
    return f"a part of the {said}"


def _with_all_uses(name: str) -> str:
    return f"gradient of {name}, with all its other uses"


def _a_part_of(name: str) -> str:
    return f"a part of the gradient of {name}, which has other uses, too"


def _why_zeros(call: HookedCall, kind: str, got: Got) -> str:
    """Say which gradient is zero, by its place, or why there is none."""
    field, i, _, name = got
    last = call.last_node
    if _is_of_last_node(kind, got) and (edge := last.ways[i].edge) is not None:
        end = last.ways[i].end
        if end and call.uses[edge] > 1:
            return _a_part_of(end)
        return f"gradient of {end or f'input {i} of {last.name}'}"
    if kind == FULL and field == "grad_input" and i < len(call.args):
        name, value = call.position(field, i)
        is_made = _is_of_pre_hook(call, kind, got) and requires_grad(value)
        if is_made and call.uses[edge_of(value)]:
            return "gradient of an inner tensor"
    if name and call.known.arrives(name):
        whole = got.tensor and name in call.in_several_places
        return _with_all_uses(name) if whole else f"gradient of {name}"
    return _why_nothing(call, kind, got)


def _why_nothing(call: HookedCall, kind: str, got: Got) -> str:
    """Say why an entry is ``None``, or zeros that stand for it."""
    field, i = got.field, got.number
    if kind in ON_LAST_NODE:
        last = call.last_node
        if field == "grad_output":
            return f"nothing flows into output {i} of {last.name}"
        if last.ways[i].edge is None:
            return f"input {i} of {last.name} needs no gradient"
        return f"nothing flows out of input {i} of {last.name}"
    if field == "grad":
        return "nothing flows to it"
    if field == "grad_input" and i >= len(call.args):
        return "a forward pre-hook added the argument"
    if _is_of_pre_hook(call, kind, got) and requires_grad(call.given[i]):
        return "nothing flows to what a forward pre-hook has put there"
    name, value = call.position(field, i)
    if not isinstance(value, Tensor):
        lost = ", and no tensor inside gets an entry" if tensors_in(value) else ""
        return f"{name} is of type {type(value).__name__}{lost}"
    if not value.requires_grad:
        return f"{name} does not require grad"
    if field == "grad_input" and not call.asked[i]:
        return f"{name} did not require grad when the module was called"
    return f"nothing flows to {name}"


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
    if call.seen is not call.output:
        return "what forward returned"
    if len(tensors_in(call.output.build())) < 2:
        return "the output"
    first = first_tensor(call.output.build())
    for place, leaf in enumerate(call.output.leaves):
        if leaf is first:
            return f"output{call.output.path(place)}"
    return "the first tensor in the output"  # in an object that is not opened


def _why_full(call: HookedCall, length: int) -> str:
    """Say what decides the length of the tuple that the full hook gets."""
    said = f"{_entries(length)} in grad_input: one for each positional argument."
    if not any(call.asked):
        said += " None of these is a tensor that requires grad."
    if call.keywords:
        said += f" No entry for a keyword argument ({', '.join(call.keywords)})."
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
    if first_tensor(call.seen.build()) is not ENDLESS:
        return ""
    if kind == LEGACY:
        return "Not tried: torch would look for a tensor in the output for ever."
    return f"Not tried: there is no node that {LEGACY} would sit on."


def why_never_called(call: HookedCall, kind: str) -> str:
    """Say why a hook was never called, though nothing was raised."""
    tree = call.seen if kind in (LEGACY, *BORDER) else call.output
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
    if not call.runs_hooks:
        kind_of = type(call.module).__name__
        return f"Never called: {kind_of} has a __call__ of its own, without hooks."
    return "Never called, for a reason that this report does not know."


def _why_several_never(call: HookedCall) -> str:
    if call.odd_leaf:
        return (
            "Never called: torch finds no node to count for a leaf of class "
            f"{call.odd_leaf}."
        )
    if any(map(call.known.arrives, call.of_several)):
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
        and any(call.asked)
        and not any(map(call.known.arrives, call.arguments))
    ):
        return (
            "Never called: where an argument requires grad, this hook waits for "
            "the gradient of one, and none comes."
        )
    return ""
