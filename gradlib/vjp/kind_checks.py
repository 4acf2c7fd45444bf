"""Whether outputs and inputs are tensors or gradient edges."""

from collections.abc import Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlib.vjp.arguments import Argument, Arguments, is_differentiable, written_key
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.fixes import recomputed


def check_kinds(arguments: Arguments) -> Diagnosis | None:
    """Find outputs and inputs that are not tensors."""
    for argument, meant in (
        (arguments.outputs, _meant_output),
        (arguments.inputs, _meant_input),
    ):
        for i, value in enumerate(argument.values):
            if not is_differentiable(value):
                intent, line = meant(argument, i)
                vectors = arguments.grad_outputs
                by_name = argument is arguments.outputs and isinstance(value, Mapping)
                are_alone = not (argument.several or vectors.several)
                if by_name and are_alone and isinstance(vectors.values[0], Mapping):
                    line = f"v = [v.get(key) for key in y]\n{line}"
                return Diagnosis(
                    "GL114",
                    f"{argument.places[i]} is {kind_of(value)}.",
                    intent=intent,
                    fix=recomputed(arguments, line),
                )
    return None


def check_empty(arguments: Arguments) -> Diagnosis | None:
    """Find an empty list of outputs or inputs, where torch wants some."""
    outputs, inputs = arguments.outputs, arguments.inputs
    may_be_none = arguments.allow_unused and not arguments.is_grads_batched
    if inputs.values and (outputs.values or may_be_none):
        return None
    if arguments.into_leaves:
        return None
    empty = outputs if inputs.values else inputs
    line = "y = [f(x)]" if empty is outputs else "x = list(f.parameters())"
    return Diagnosis(
        "GL114",
        f"{empty.name} is empty.",
        intent="Nothing was passed, or an iterator, such as model.parameters(), that "
        "is empty once it was used. A list is not.",
        fix=recomputed(arguments, line),
    )


def kind_of(value: Any) -> str:
    """Describe a value that is not a tensor."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not a tensor"
    return f"of type {type(value).__name__}, not a tensor"


def _meant_output(outputs: Argument, i: int) -> tuple[str, str]:
    """Return what an output that is not a tensor was meant as, and the line for it."""
    value, spelled = outputs.values[i], outputs.spelled[i]
    if _is_of_numbers(value):
        return _NO_GRAPH
    if not _is_nested(value) and all(map(_holds_tensors, outputs.values)):
        intent = "Outputs are passed without their names and numbers."
        return intent, f"y = [{_TENSORS.format('y')}]"
    if isinstance(value, list | tuple):
        return "Nested outputs are passed flat.", _flat("y", outputs.values)
    if isinstance(value, Mapping):
        return "Outputs by name are passed as a sequence.", f"y = {spelled}.values()"
    line = f"{spelled} = {spelled}(x)"
    if outputs.several:
        line = f"y = list(y)\n{line}"
    if isinstance(value, nn.Module):
        return "The output is what the module returns.", line
    if isinstance(value, str) and outputs.several:
        return "Of a dict torch takes the keys. Pass its values().", "y = y.values()"
    if value is None:
        return "Does the function that computes it lack a return?", "y = f(x)"
    if callable(value):
        return "It is a function. Call it.", line
    return _NO_GRAPH


_NO_GRAPH = (
    "Numbers and arrays have no graph: .item(), float(), .tolist() and .numpy() leave "
    "it behind. Pass the tensor they were made from.",
    "y = f(x)",
)


def _meant_input(inputs: Argument, i: int) -> tuple[str, str]:
    """Return what an input that is not a tensor was meant as, and the line for it."""
    value, spelled = inputs.values[i], inputs.spelled[i]
    if isinstance(value, nn.Module):
        intent = "The gradients of a module are those of its parameters."
        if inputs.several:
            return intent, "x = [each for it in x for each in it.parameters()]"
        return intent, "x = tuple(x.parameters())"
    if all(map(_is_named, inputs.values)):
        return "A dict of tensors gives a dict of gradients.", "x = dict(x)"
    if line := _from_groups(inputs):
        return "The parameters of an optimizer stand in the lists of its groups.", line
    if _is_nested(value) and _are_spelled(inputs.keys or ()):
        return "Nested inputs are passed flat.", _flat("x", inputs.values, inputs.keys)
    if isinstance(value, Mapping) and not _is_learned(cast(Any, value)):
        intent = "A state_dict() holds detached tensors. Pass the parameters."
        return intent, "x = dict(f.named_parameters())"
    if isinstance(value, Mapping):
        intent = "Of the mappings torch opens only dict itself."
        return intent, f"x = dict({spelled})"
    intent = "Pass the very tensors that the output was computed from."
    return intent, _tensors_among(inputs)


def _from_groups(inputs: Argument) -> str:
    """Return the line that opens an optimizer or its groups, or ``""``."""
    if not inputs.several and isinstance(inputs.values[0], Optimizer):
        return 'x = [each for it in x.param_groups for each in it["params"]]'
    if inputs.keys is None:
        are_groups = all(map(_is_group, inputs.values))
        return 'x = [each for it in x for each in it["params"]]' * are_groups
    whole = dict(zip(inputs.keys, inputs.values, strict=True))
    return 'x = list(x["params"])' * _is_group(whole)


def _tensors_among(inputs: Argument) -> str:
    """Return the line that leaves only tensors among the inputs, or makes some."""
    if any(map(is_differentiable, inputs.values)):
        if inputs.keys is None:
            return "x = [it for it in x if isinstance(it, torch.Tensor)]"
        tensors = "for key, it in x.items() if isinstance(it, torch.Tensor)"
        return f"x = {{key: it {tensors}}}"
    if inputs.keys is None and all(map(_holds_tensors, inputs.values)):
        return f"x = [{_TENSORS.format('x')}]"
    if inputs.keys is None and _are_numbers(inputs):
        made = "x = torch.as_tensor(x, dtype=torch.float32).requires_grad_()"
        return f"{made}\ny = f(x)"
    return "x = list(f.parameters())"


_TENSORS = "it for each in {} for it in each if isinstance(it, torch.Tensor)"


def _is_group(value: object) -> bool:
    """Tell whether a value is one of an optimizer's parameter groups."""
    match value:
        case {"params": list()}:
            return True
        case _:
            return False


def _are_spelled(keys: Sequence[object]) -> bool:
    """Tell whether the keys of a dict can be written in code."""
    return all(isinstance(it, str | int | Enum) for it in keys)


def _are_numbers(inputs: Argument) -> bool:
    """Tell whether a tensor can be made of what was passed."""
    if inputs.several:
        return all(isinstance(it, int | float) for it in inputs.values)
    (value,) = inputs.values
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of a NumPy array
    return isinstance(value, int | float) or kind in ("b", "i", "u", "f")


def _is_of_numbers(value: object) -> bool:
    """Tell whether a value is a number, or nested lists of them, as of .tolist()."""
    if not isinstance(value, list | tuple):
        return isinstance(value, Number)
    entries = cast("Sequence[object]", value)
    return bool(entries) and all(map(_is_of_numbers, entries))


def _is_nested(value: Any) -> bool:
    """Tell whether a value is a list of nothing but tensors and such lists."""
    is_list = isinstance(value, list | tuple)
    return is_list and all(
        is_differentiable(it) or _is_nested(it) for it in cast(Sequence[Any], value)
    )


def _holds_tensors(value: Any) -> bool:
    """Tell whether a value is a list that holds a tensor, among other things."""
    is_list = isinstance(value, list | tuple)
    return is_list and any(isinstance(it, Tensor) for it in cast(Sequence[Any], value))


def _is_named(value: object) -> bool:
    """Tell whether a value is a name and a tensor, as from ``named_parameters()``."""
    match value:
        case (str(), Tensor()):
            return True
        case _:
            return False


def _is_learned(mapping: Mapping[Any, object]) -> bool:
    """Tell whether a mapping holds a tensor that requires grad."""
    return any(isinstance(it, Tensor) and it.requires_grad for it in mapping.values())


def _flat(letter: str, values: Sequence[Any], keys: Sequence[Any] | None = None) -> str:
    """Return the line that unpacks the lists nested among tensors."""
    parts = [
        f"{'*' * isinstance(value, list | tuple)}{letter}[{written_key(key)}]"
        for key, value in zip(keys or range(len(values)), values, strict=True)
    ]
    return f"{letter} = [{', '.join(parts)}]"
