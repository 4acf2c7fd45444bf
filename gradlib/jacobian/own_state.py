"""Modules that run on a state of their own, and have theirs again afterwards."""

import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gradlib.module_hook import without_ours
from gradlib.private.compiling import never_compiled
from gradlib.private.hooks import BACKWARD_HOOKS, FORWARD_HOOKS
from gradlib.private.modes import no_function_modes
from gradlib.private.modules import (
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    own_buffers,
    own_parameters,
)
from gradlib.recording.attributes import Copies, fill_slots, in_slots
from gradlib.values import keep, same_values


@contextmanager
def state_kept(fn: Callable[..., Any]) -> Generator[None]:
    """Have what a function changes in its modules forgotten."""
    written: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def kept(parameter: nn.Parameter) -> nn.Parameter:
        written[id(parameter)] = parameter, keep(parameter)
        return parameter

    try:
        with own_state(fn, copied, kept):
            yield
    finally:
        for parameter, value in written.values():
            if not same_values(parameter, value):
                parameter.data.copy_(value)


@contextmanager
def own_state(
    fn: Callable[..., Any],
    change: Callable[[Tensor], Tensor],
    parameter_of: Callable[[nn.Parameter], nn.Parameter],
) -> Generator[None]:
    """Give every module that runs a state of its own, and take it away afterwards.

    One thread after the other, and only the modules that this thread runs: those of
    another are none of ours, and what two had exchanged at once nobody could put back.

    Args:
        fn: What calls them.
        change: Gives what takes the place of a tensor that is no parameter.
        parameter_of: Gives what takes the place of a parameter.
    """
    here = threading.get_ident()
    states = _States(change, parameter_of)

    def before_forward(module: nn.Module, _args: object) -> None:
        if threading.get_ident() == here:
            with no_function_modes():  # what happens here is not the function's doing
                states.exchange(module)

    never_compiled(before_forward, "gradlib gives each module a state of its own")
    with _EXCHANGING, warnings.catch_warnings():  # which is not for several threads
        # torch.compile says that it meets a global hook: it is ours, and harmless.
        warnings.filterwarnings("ignore", ".*when there are global hooks", UserWarning)
        handle = register_module_forward_pre_hook(before_forward)
        try:
            for module in modules_known_to(fn):
                states.exchange(module)
            yield
        finally:
            handle.remove()
            states.put_back()


_EXCHANGING = threading.RLock()


class _States:
    """What modules had before they were given a state of their own."""

    def __init__(
        self,
        change: Callable[[Tensor], Tensor],
        parameter_of: Callable[[nn.Parameter], nn.Parameter],
    ) -> None:
        self._change = change
        self._parameter_of = parameter_of
        self._copies = Copies(change)
        self._before: dict[nn.Module, dict[str, Any]] = {}
        self._slots: dict[nn.Module, dict[Any, Any]] = {}  # where there are some
        self._scripted: list[tuple[Tensor, Tensor]] = []  # buffers, and what they held

    def exchange(self, module: nn.Module) -> None:
        """Exchange the state of a module and of all inside it, where that is theirs."""
        if module in self._before:
            return
        known = len(self._before)
        for inner in cast(Any, module).modules():
            if inner not in self._before:
                self._exchange_tensors(inner)
        for inner in list(self._before)[known:]:  # they may hold any of the parameters
            if filled := in_slots(inner):
                self._slots[inner] = filled
            self._copies.put_into(inner)

    def put_back(self) -> None:
        """Give every module what it had."""
        for buffer, value in self._scripted:
            buffer.detach().copy_(value)
        for module, state in self._before.items():
            vars(module).clear()
            vars(module).update(state)
        for module, filled in self._slots.items():
            fill_slots(module, filled)

    def _exchange_tensors(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # it lets nobody exchange them
            self._before[module] = dict(vars(module))
            own = cast(Any, module).buffers(recurse=False)
            self._scripted.extend((it, it.detach().clone()) for it in own)
            return
        parameters, buffers = dict(own_parameters(module)), dict(own_buffers(module))
        if any(it is not None and is_lazy(it) for it in parameters.values()):
            return  # the first call makes it, once and for all
        state = vars(module)
        self._before[module] = dict(state)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = self._parameter_of(parameter)
                self._copies.know(parameter, cast(Tensor, parameters[name]))
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = self._change(buffer)
                self._copies.know(buffer, cast(Tensor, buffers[name]))
        state[PARAMETERS], state[BUFFERS] = parameters, buffers
        for kind in FORWARD_HOOKS:
            state[kind] = without_ours(state[kind])
        for kind in (CHILDREN, *BACKWARD_HOOKS):
            state[kind] = copy(state[kind])


MANY = 1000
"""How much a list may hold that is looked through for modules: it may be data."""


def modules_known_to(fn: object) -> list[nn.Module]:
    """Return the modules that a function may call, without calling it."""
    known: list[object] = [fn]
    if isinstance(fn, partial):
        known += [fn.func, *fn.args, *fn.keywords.values()]
    known += [it.__self__ for it in known if isinstance(it, MethodType)]
    for function in list(known):
        if isinstance(function, FunctionType):
            cells = function.__closure__ or ()
            known += [it.cell_contents for it in cells if _is_filled(it)]
            names = function.__code__.co_names
            known += [function.__globals__.get(name) for name in names]
    known += [inner for it in known for inner in _held(it)]
    return [it for it in known if isinstance(it, nn.Module)]


def _held(value: object) -> Iterable[object]:
    """Return what a list, tuple or dict holds, such as the members of an ensemble."""
    if isinstance(value, dict):
        value = [*cast("dict[Any, object]", value).values()]
    if not isinstance(value, list | tuple):
        return ()
    held = cast("Sequence[object]", value)
    return held if len(held) <= MANY else ()


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, without autograd history."""
    return tensor.detach().clone()
