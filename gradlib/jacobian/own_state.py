"""Gives modules a copy of their state while they run, and the original afterwards."""

import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
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
from gradlib.recording.attributes import Copies, fill_slots
from gradlib.values import keep, same_values


@contextmanager
def state_kept(fn: Callable[..., Any]) -> Generator[None]:
    """Undo at the end of the block what a function changes in its modules."""
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
    """Give every module that runs in the block a stand-in state.

    Afterwards each has its original state back. Only modules that run in this thread
    are changed, and one thread at a time may do so: what two threads exchange at once
    could not be put back.

    Args:
        fn: The function that calls the modules.
        change: Makes the stand-in of a tensor that is no parameter.
        parameter_of: Makes the stand-in of a parameter.
    """
    here = threading.get_ident()
    states = _States(change, parameter_of)

    def before_forward(module: nn.Module, _args: object) -> None:
        if module not in states and threading.get_ident() == here:
            # The modes and transforms that fn has entered must not see this.
            with no_function_modes(), no_transforms(), torch.inference_mode(False):
                states.exchange(module)

    never_compiled(before_forward, "gradlib gives each module a state of its own")
    with _EXCHANGING, warnings.catch_warnings():  # both are for one thread at a time
        # torch.compile warns of global hooks: this one is ours, and harmless.
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
    """The original states of modules that have a stand-in state."""

    def __init__(
        self,
        change: Callable[[Tensor], Tensor],
        parameter_of: Callable[[nn.Parameter], nn.Parameter],
    ) -> None:
        self._change = change
        self._parameter_of = parameter_of
        self._copies = Copies(change)
        self._before: dict[nn.Module, dict[str, Any]] = {}
        self._slots: dict[nn.Module, dict[Any, Any]] = {}  # of modules with __slots__
        self._scripted: list[tuple[Tensor, Tensor]] = []  # buffers and their values
        # Module, kind and name of tensors that `functional_call` puts back itself.
        self._put_in: list[tuple[nn.Module, str, str]] = []

    def __contains__(self, module: nn.Module) -> bool:
        """Tell whether a module has a stand-in state."""
        return module in self._before

    def exchange(self, module: nn.Module) -> None:
        """Give a module and all inside it a stand-in state, unless they have one."""
        known = len(self._before)
        put_in = put_in_for_one_call()
        for inner in cast(Any, module).modules():
            if inner not in self._before:
                self._exchange_tensors(inner, put_in)
        for inner in list(self._before)[known:]:  # after all parameters are known
            if filled := self._copies.put_into(inner):
                self._slots[inner] = filled

    def put_back(self) -> None:
        """Give every module its original state back."""
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
        # Its tensors cannot be exchanged.
        if isinstance(module, torch.jit.ScriptModule):
            self._before[module] = dict(vars(module))
            own = cast(Any, module).buffers(recurse=False)
            self._scripted.extend((it, it.detach().clone()) for it in own)
            return
        parameters: dict[str, Any] = dict(own_parameters(module))
        if any(map(is_lazy, parameters.values())):
            return  # the first call makes its parameters for good
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
            state[kind] = state[kind].copy()


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, without autograd history."""
    return tensor.detach().clone()
