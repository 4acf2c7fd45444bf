"""The names that the running code has for a tensor."""

import re
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from gradlib.opaque import is_module, is_tensor
from gradlib.vjp.arguments import Argument, written_key

_MOST = 100  # entries of a list or dict that are searched
_CALLERS = 8  # frames further out that are searched


def name_of(tensor: Tensor, frames: Iterable[FrameType]) -> str:
    """Return the name of `tensor` in the innermost of `frames` that has one, or ``""``.

    Args:
        tensor: The very tensor; an equal one does not count.
        frames: From the innermost out.
    """
    return next((name for name, it in named_tensors(frames) if it is tensor), "")


def named_tensors(frames: Iterable[FrameType]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, by name, that variables hold directly or one step down.

    A step leads into a list, tuple or dict, or to the parameters and buffers of a
    module. The variables of `frames` come first, then those of their callers. Those of
    torch's own code are left out.
    """
    users = _users(frames)
    scopes = (it for frame in users for it in (frame.f_locals, frame.f_globals))
    for scope in {id(it): it for it in scopes}.values():  # frames share globals
        for name, value in list(scope.items()):
            for step, it in _one_step_down(value):
                if is_tensor(it) and not is_lazy(it):
                    yield name + step, it


def variable_of(value: Any, frame: FrameType) -> str:
    """Return the name of a variable of `frame` that holds a tensor, or ``""``."""
    scope = frame.f_globals | frame.f_locals
    names = (name for name, it in scope.items() if it is value and is_tensor(it))
    return next(names, "")


def in_reach(name: str, frames: Iterable[FrameType]) -> bool:
    """Tell whether code in the innermost frame outside torch can use a name."""
    user = next(_users(frames), None)
    variable = re.split(r"\W", name)[0]
    return user is not None and variable in user.f_globals | user.f_locals


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def is_of(frame: FrameType, package: str) -> bool:
    """Tell whether a frame runs code of a package, or of a module."""
    return f"{module_of(frame)}.".startswith(f"{package}.")


def called(argument: Argument, i: int, frames: Iterable[FrameType]) -> str:
    """Return what to call an entry: ``"inputs[0] (`w`)"`` where `frames` name it."""
    value = argument.values[i]
    name = name_of(value, frames) if isinstance(value, Tensor) else ""
    return f"{argument.places[i]} (`{name}`)" if name else argument.places[i]


def _users(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Yield the frames, then those of their callers, that run no code of torch."""
    every = [*frames]
    for _ in range(_CALLERS):
        if every and (caller := every[-1].f_back) is not None:
            every.append(caller)
    return (frame for frame in every if not is_of(frame, "torch"))


def _one_step_down(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value and what is one step down from it, with the code of each step."""
    yield "", value
    # By type(): isinstance() may make a lazy proxy load its object.
    if is_module(value):
        for named in (value.named_parameters(), value.named_buffers()):
            yield from ((attribute(name), tensor) for name, tensor in named)
    elif issubclass(type(value), list | tuple):
        yield from ((f"[{i}]", entry) for i, entry in enumerate(value[:_MOST]))
    elif issubclass(type(value), dict):
        entries = list(value.items())[:_MOST]
        yield from ((f"[{written_key(key)}]", entry) for key, entry in entries)


def attribute(name: str) -> str:
    """Return a parameter's name as code: ``"0.weight"`` becomes ``"[0].weight"``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f".{name}")
