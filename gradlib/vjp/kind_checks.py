"""Whether outputs and inputs are of a kind that a gradient can be taken of."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from gradlib.vjp.arguments import Argument, Arguments, is_differentiable
from gradlib.vjp.diagnosis import Diagnosis, diagnosis
from gradlib.vjp.fixes import recomputed


def check_kinds(arguments: Arguments) -> Diagnosis | None:
    """Find outputs and inputs that are no tensors."""
    for argument, meant in ((arguments.outputs, _output), (arguments.inputs, _input)):
        for i, value in enumerate(argument.values):
            if not is_differentiable(value):
                intent, line = meant(argument, i)
                return diagnosis(
                    "GL114",
                    f"{argument.places[i]} is {kind_of(value)}.",
                    intent=intent,
                    fix=recomputed(arguments, line),
                )
    return None


def check_empty(arguments: Arguments) -> Diagnosis | None:
    """Find no outputs or inputs at all, where torch wants some."""
    outputs, inputs = arguments.outputs, arguments.inputs
    may_be_none = arguments.allow_unused and not arguments.is_grads_batched
    if inputs.values and (outputs.values or may_be_none):
        return None
    if arguments.into_leaves:
        return None
    empty = outputs if inputs.values else inputs
    line = "y = [f(x)]" if empty is outputs else "x = list(f.parameters())"
    return diagnosis(
        "GL114",
        f"{empty.name} is empty.",
        intent="An iterator, such as model.parameters(), is empty once it was used. A "
        "list is not.",
        fix=recomputed(arguments, line),
    )


def kind_of(value: Any) -> str:
    """Say what a value is that is no tensor."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not a tensor"
    return f"of type {type(value).__name__}, not a tensor"


def _output(outputs: Argument, i: int) -> tuple[str, str]:
    """Return what was meant by an output that is no tensor, and the line for it."""
    value, spelled = outputs.values[i], outputs.spelled[i]
    if isinstance(value, list | tuple):
        return "Nested outputs are passed flat.", _flat("y", outputs.values)
    if isinstance(value, Mapping):
        return "Outputs by name are passed as a sequence.", f"y = {spelled}.values()"
    if isinstance(value, nn.Module):
        line = f"y = {spelled}(x)"
        return "The output is what the module returns.", line
    if value is None:
        return "Does the function that computes it lack a return?", "y = f(x)"
    return (
        "Numbers and arrays have no graph: .item(), float(), .tolist() and .numpy() "
        "leave it behind. Pass the tensor they were made from.",
        "y = f(x)",
    )


def _input(inputs: Argument, i: int) -> tuple[str, str]:
    """Return what was meant by an input that is no tensor, and the line for it."""
    value, spelled = inputs.values[i], inputs.spelled[i]
    if isinstance(value, nn.Module):
        intent = "The gradients of a module are those of its parameters."
        if inputs.several:
            return intent, "x = [each for it in x for each in it.parameters()]"
        return intent, "x = tuple(x.parameters())"
    if all(map(_is_named, inputs.values)):
        return "A dict of tensors gives a dict of gradients.", "x = dict(x)"
    if isinstance(value, list | tuple):
        return "Nested inputs are passed flat.", _flat("x", inputs.values)
    if isinstance(value, Mapping) and not _is_learned(cast(Any, value)):
        intent = "A state_dict() holds detached tensors. Pass the parameters."
        return intent, "x = dict(f.named_parameters())"
    if isinstance(value, Mapping):
        intent = "Of the mappings torch opens only dict itself."
        return intent, f"x = dict({spelled})"
    intent = "Pass the very tensors that the output was computed from."
    if inputs.several:
        return intent, "x = [it for it in x if isinstance(it, torch.Tensor)]"
    if value is None or isinstance(value, str):
        return intent, "x = list(f.parameters())"
    return (
        intent,
        "x = torch.as_tensor(x, dtype=torch.float32).requires_grad_()\ny = f(x)",
    )


def _is_named(value: object) -> bool:
    """Tell whether a value is one of what ``named_parameters()`` gives."""
    match value:
        case (str(), Tensor()):
            return True
        case _:
            return False


def _is_learned(mapping: Mapping[Any, object]) -> bool:
    """Tell whether a mapping holds a tensor that requires grad."""
    return any(isinstance(it, Tensor) and it.requires_grad for it in mapping.values())


def _flat(letter: str, values: Sequence[Any]) -> str:
    """Return the line that opens what stands nested among tensors."""
    parts = [
        f"{'*' * isinstance(value, list | tuple)}{letter}[{i}]"
        for i, value in enumerate(values)
    ]
    return f"{letter} = [{', '.join(parts)}]"
