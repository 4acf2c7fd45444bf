"""What one entry that a hook got is, in words, or why there is nothing."""

from torch import Tensor

from gradlib.edges import Edge, edge_of
from gradlib.hook_reports.call_graph import name_of
from gradlib.hook_reports.hooked_call import HookedCall
from gradlib.hook_reports.hooks import FULL, ON_LAST_NODE, Got
from gradlib.hook_reports.naming import name_by_value
from gradlib.hook_reports.tensor_names import COMPUTED, OUTSIDE
from gradlib.hook_reports.trial import requires_grad
from gradlib.tree import tensors_in

NOT_KNOWN = "not known: it is another gradient at each run"


def what_it_is(call: HookedCall, got: Got) -> str:
    """Name an entry by its place and its value, or say why it has no name."""
    grad = got.grad
    if grad is None:
        if got.tensor and call.known.arrives(got.tensor):
            return "None: torch called the hook without it"
        return f"None: {_why_nothing(call, got)}"
    if grad.is_nested:
        return "gradient of an inner tensor, which is nested"
    if grad.numel() and not grad.any():
        dtype = "" if grad.is_floating_point() else f"{grad.dtype} "
        return f"{dtype}zeros: {_why_zeros(call, got)}"
    if name := call.known.name(grad, outputs_first=False, among=call.names_of(got)):
        return name
    if _is_of_last_node(got):
        return _what_of_last_node(call, got, grad)
    if got.tensor and not call.known.repeats:
        return NOT_KNOWN
    if _is_of_pre_hook(call, got):
        return _also_known_as(call, grad, "gradient of an inner tensor")
    of_output = got.field == "grad_output"
    if not got.tensor and (name := _name(call, grad, outputs_first=of_output)):
        return name
    return _what_else(call, got)


def _what_else(call: HookedCall, got: Got) -> str:
    """Say how an entry is more or less than the gradient of a tensor with a name."""
    name = min(call.names_of(got), default="")
    edge = call.hooked_at.get(name)
    if edge is None:
        return "gradient of an inner tensor"
    if name not in call.plain.names_at[edge]:
        return f"gradient of {name} as it was overwritten"
    if call.uses[edge] > 1 and got.field == "grad_input":  # a pre-hook uses it, too
        return _a_part_of(name)
    # As for an argument that is returned, or is passed in two places.
    if call.uses[edge] > 1 or name in call.plain.in_several_places:
        return _with_all_uses(name)
    return f"gradient of {name}, changed by a hook that the forward sets"


def _is_of_pre_hook(call: HookedCall, got: Got) -> bool:
    """Tell whether an entry is for an argument that a forward pre-hook computed."""
    if (
        got.kind != FULL
        or got.field != "grad_input"
        or got.number >= len(call.names.arguments)
    ):
        return False
    value = call.plain.given[got.number]
    has_name = requires_grad(value) and call.plain.names_at.get(edge_of(value))
    return call.plain.argument_at(got.number) is None and not has_name


def _is_of_last_node(got: Got) -> bool:
    """Tell whether an entry is the gradient of an input of the last node."""
    return got.kind in ON_LAST_NODE and got.field == "grad_input"


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
        if name := name_by_value(grad, {}, call.idle):
            return f"{name}, which does not require grad"
        return "gradient for a tensor that does not require grad"
    if end in (OUTSIDE, COMPUTED):
        return f"gradient for {end}"
    if end and call.uses[edge] > 1:
        return _a_part_of(end)
    if end in call.plain.in_several_places:
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
    hooked = {at: name for name, at in of_hooked if name in call.plain.names_at[at]}
    if name := hooked.get(edge) or call.plain.inner.get(edge):
        return _a_part_of(name)
    return f"a part of the {said}"


def _with_all_uses(name: str) -> str:
    return f"gradient of {name}, with all its other uses"


def _a_part_of(name: str) -> str:
    return f"a part of the gradient of {name}, which has other uses, too"


def _why_zeros(call: HookedCall, got: Got) -> str:
    """Say which gradient is zero, by its place, or why there is none."""
    _, field, i, _, name = got
    last = call.last_node
    if _is_of_last_node(got) and (edge := last.ways[i].edge) is not None:
        end = last.ways[i].end
        if end and call.uses[edge] > 1:
            return _a_part_of(end)
        return f"gradient of {end or f'input {i} of {last.name}'}"
    if got.kind == FULL and field == "grad_input" and i < len(call.names.arguments):
        name, value = call.plain.position(field, i)
        is_made = _is_of_pre_hook(call, got) and requires_grad(value)
        if is_made and call.uses[edge_of(value)]:
            return "gradient of an inner tensor"
    if name and call.known.arrives(name):
        whole = got.tensor and name in call.plain.in_several_places
        return _with_all_uses(name) if whole else f"gradient of {name}"
    return _why_nothing(call, got)


def _why_nothing(call: HookedCall, got: Got) -> str:
    """Say why an entry is ``None``, or zeros that stand for it."""
    field, i = got.field, got.number
    if got.kind in ON_LAST_NODE:
        last = call.last_node
        if field == "grad_output":
            return f"nothing flows into output {i} of {last.name}"
        if last.ways[i].edge is None:
            return f"input {i} of {last.name} needs no gradient"
        return f"nothing flows out of input {i} of {last.name}"
    if field == "grad":
        return "nothing flows to it"
    if field == "grad_input" and i >= len(call.names.arguments):
        return "a forward pre-hook added the argument"
    if _is_of_pre_hook(call, got) and requires_grad(call.plain.given[i]):
        return "nothing flows to what a forward pre-hook has put there"
    name, value = call.plain.position(field, i)
    if not isinstance(value, Tensor):
        lost = ", and no tensor inside gets an entry" if tensors_in(value) else ""
        return f"{name} is of type {type(value).__name__}{lost}"
    if not value.requires_grad:
        return f"{name} does not require grad"
    if field == "grad_input" and not call.plain.asked[i]:
        return f"{name} did not require grad when the module was called"
    return f"nothing flows to {name}"
