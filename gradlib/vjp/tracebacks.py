"""What the traceback of an error shows: the autograd calls in it, and who raised."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from types import FrameType, TracebackType
from typing import Any, cast

from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function

from gradlib.vjp.arguments import (
    Argument,
    Arguments,
    flag,
    is_differentiable,
    read_argument,
    read_arguments,
    read_grad_outputs,
)
from gradlib.vjp.source import Site
from gradlib.vjp.tensor_names import is_of, module_of
from gradlib.vjp.wordings import code_of

# The options of backward(), and of grad().
_OF_BACKWARD = ("retain_graph", "create_graph")
_OF_GRAD = (*_OF_BACKWARD, "allow_unused", "is_grads_batched", "materialize_grads")

ONLY_RAISED = ("GL111", "GL112")
"""The codes that only the run itself shows, also where it reads what was saved."""


def raised_by_hook(error: BaseException) -> bool:
    """Tell whether a hook or custom Function raised an error, and not autograd.

    An error from reading what a Function has saved is autograd's.
    """
    inside = [*takewhile(lambda it: not _is_call(it.tb_frame), steps_of(error))]
    in_function = any(is_of(it.tb_frame, "torch.autograd.function") for it in inside)
    if in_function and code_of(str(error)) in ONLY_RAISED:
        return False
    # Code that torch.compile has generated belongs to no module.
    frames = (step.tb_frame for step in inside)
    return any(module_of(frame) and not is_of(frame, "torch") for frame in frames)


def _is_call(frame: FrameType) -> bool:
    """Tell whether a frame runs ``torch.autograd.grad`` or ``backward``."""
    name = frame.f_code.co_name
    return module_of(frame) == "torch.autograd" and name in ("grad", "backward")


def innermost_call(error: BaseException) -> Arguments | None:
    """Return the arguments of the innermost autograd call; ``None`` without a call."""
    steps = steps_of(error)
    frames = [step.tb_frame for step in steps]
    place = next((i for i, it in enumerate(frames) if _is_call(it)), None)
    if place is None:
        return None
    frame, callers = frames[place], steps[place + 1 :]
    if frame.f_code.co_name == "grad":
        first, _ = _before_modes(frame, callers)
        arguments = _arguments_of_grad(frame.f_locals | _dict_of_inputs(first))
    else:
        is_method = bool(callers) and is_of(callers[0].tb_frame, "torch._tensor")
        arguments = _arguments_of_backward(frame.f_locals, is_method=is_method)
        if is_method:
            frame, callers = callers[0].tb_frame, callers[1:]
    return replace(arguments, site=_site(frame, callers), frames=frames)


def _site(frame: FrameType, callers: list[TracebackType]) -> Site | None:
    """Return where a function was called; ``None`` where torch itself called it."""
    frame, callers = _before_modes(frame, callers)
    if not callers or is_of(callers[0].tb_frame, "torch"):
        return None
    return Site(callers[0].tb_frame, callers[0].tb_lasti, frame.f_code)


def _before_modes(
    frame: FrameType, callers: list[TracebackType]
) -> tuple[FrameType, list[TracebackType]]:
    """Return the frame and callers of the user's call, where function modes remade it.

    A default device is such a mode: torch hands it the call, and it calls again.
    """
    for i, step in enumerate(callers[:-1]):
        code, caller = step.tb_frame.f_code, callers[i + 1].tb_frame
        if code is frame.f_code:
            break  # an outer call, inside which this one was made
        if code is handle_torch_function.__code__ and caller.f_code is frame.f_code:
            return _before_modes(caller, callers[i + 2 :])
    return frame, callers


def steps_of(error: BaseException) -> list[TracebackType]:
    """Return the steps of an error's traceback, the innermost first."""
    found: list[TracebackType] = []
    step = error.__traceback__
    while step is not None:
        found.insert(0, step)
        step = step.tb_next
    return found


def _arguments_of_grad(variables: dict[str, Any]) -> Arguments:
    """Read the local variables of torch.autograd.grad; iterators may be used up."""
    options = _options(variables, _OF_GRAD)
    arguments = read_arguments(
        _alone(variables["outputs"]),
        _alone(_inputs(variables)),
        variables["grad_outputs"],
        **options,
    )
    return replace(arguments, function="torch.autograd.grad")


def _arguments_of_backward(variables: dict[str, Any], *, is_method: bool) -> Arguments:
    """Read the local variables of torch.autograd.backward."""
    outputs = read_argument("tensors", "y", _alone(variables["tensors"]))
    vectors = read_grad_outputs("grad_tensors", variables["grad_tensors"], outputs)
    inputs = Argument("inputs", "x", (), several=True)
    into_leaves = variables.get("inputs") is None
    if not into_leaves:
        inputs = read_argument("inputs", "x", _inputs(variables))
    if is_method:
        outputs = replace(outputs, name="the output", alone="the output")
        vectors = replace(vectors, name="gradient", alone="gradient")
    options = _options(variables, _OF_BACKWARD)
    function = "backward" if is_method else "torch.autograd.backward"
    return Arguments(
        outputs, inputs, vectors, options, function, into_leaves=into_leaves
    )


def _options(variables: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    # Where two of them were left out, torch has set them from other options.
    defaults = {
        "retain_graph": variables.get("create_graph"),
        "allow_unused": variables.get("materialize_grads"),
    }
    return {
        name: it
        for name in names
        if (it := flag(variables.get(name)))
        not in (None, flag(defaults.get(name)) or False)
    }


def _inputs(variables: dict[str, Any]) -> Any:
    """Return the inputs: a dict, or the tuple that torch has made of them."""
    inputs = variables["inputs"]
    is_dict = issubclass(type(inputs), dict)
    return inputs if is_dict else variables.get("inputs_tuple", inputs)


def _dict_of_inputs(frame: FrameType) -> dict[str, Any]:
    """Return a dict of inputs as a variable, of which modes get only the values."""
    inputs = frame.f_locals.get("inputs")
    return {"inputs": inputs} if issubclass(type(inputs), dict) else {}


def _alone(given: Any) -> Any:
    """Unwrap a single tensor, which torch has put into a tuple."""
    if isinstance(given, tuple) and not isinstance(given, GradientEdge):
        entries = cast(tuple[Any, ...], given)
        is_alone = len(entries) == 1 and is_differentiable(entries[0])
        return entries[0] if is_alone else entries
    return given


def is_of_another(error: RuntimeError, arguments: Arguments) -> bool:
    """Tell whether an error came from a hook or Function, or from a call inside one."""
    call = innermost_call(error)
    if call is None or raised_by_hook(error) or not _is_made_by_us(error):
        return True
    pairs = zip_longest(call.outputs.values, arguments.outputs.values)
    return any(one is not other for one, other in pairs)


def _is_made_by_us(error: BaseException) -> bool:
    """Tell whether the innermost call of autograd was made by this package."""
    frames = (step.tb_frame for step in steps_of(error))
    made = any(map(_is_call, frames))
    outside = next((it for it in frames if not is_of(it, "torch")), None)
    return made and outside is not None and is_of(outside, "gradlib")
