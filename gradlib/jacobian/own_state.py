"""Modules that run on a state of their own, and have theirs again afterwards."""

import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gradlib.jacobian.known_modules import modules_known_to
from gradlib.module_hook import without_ours
from gradlib.private.compiling import never_compiled
from gradlib.private.hooks import BACKWARD_HOOKS, FORWARD_HOOKS
from gradlib.private.modes import no_function_modes, no_transforms
from gradlib.private.modules import (
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    own_buffers,
    own_parameters,
    put_in_for_one_call,
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
            # What happens here is not the function's doing.
            with no_function_modes(), no_transforms(), torch.inference_mode(False):
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
        # What `functional_call` puts back itself: in which module, of what kind.
        self._put_in: list[tuple[nn.Module, str, str]] = []

    def exchange(self, module: nn.Module) -> None:
        """Exchange the state of a module and of all inside it, where that is theirs."""
        if module in self._before:
            return
        known = len(self._before)
        put_in = put_in_for_one_call()
        for inner in cast(Any, module).modules():
            if inner not in self._before:
                self._exchange_tensors(inner, put_in)
        for inner in list(self._before)[known:]:  # they may hold any of the parameters
            if filled := in_slots(inner):
                self._slots[inner] = filled
            self._copies.put_into(inner)

    def put_back(self) -> None:
        """Give every module what it had."""
        for buffer, value in self._scripted:
            buffer.detach().copy_(value)
        for module, kind, name in self._put_in:
            self._before[module][kind][name] = vars(module)[kind].get(name)
        for module, state in self._before.items():
            vars(module).clear()
            vars(module).update(state)
        for module, filled in self._slots.items():
            fill_slots(module, filled)

    def _exchange_tensors(self, module: nn.Module, put_in: set[int]) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # it lets nobody exchange them
            self._before[module] = dict(vars(module))
            own = cast(Any, module).buffers(recurse=False)
            self._scripted.extend((it, it.detach().clone()) for it in own)
            return
        parameters: dict[str, Any] = dict(own_parameters(module))
        if any(it is not None and is_lazy(it) for it in parameters.values()):
            return  # the first call makes it, once and for all
        state = vars(module)
        self._before[module] = dict(state)
        buffers: dict[str, Any] = dict(own_buffers(module))
        for kind, tensors, own_of in (
            (PARAMETERS, parameters, self._parameter_of),
            (BUFFERS, buffers, self._change),
        ):
            for name, tensor in tensors.items():
                if id(tensor) in put_in:
                    self._put_in.append((module, kind, name))
                elif tensor is not None:
                    tensors[name] = own_of(tensor)
                    self._copies.know(tensor, tensors[name])
            state[kind] = tensors
        for kind in FORWARD_HOOKS:
            state[kind] = without_ours(state[kind])
        for kind in (CHILDREN, *BACKWARD_HOOKS):
            state[kind] = copy(state[kind])


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, without autograd history."""
    return tensor.detach().clone()
