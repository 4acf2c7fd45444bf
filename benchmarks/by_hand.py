"""Recorders as people write them by hand: few lines, references and no copies.

A reference shows the value of the tensor when it is read, even if the model has
overwritten that in place. None of these records keyword arguments.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks.contender import as_tuple

Gradients = dict[int, Tensor]


@dataclass(slots=True)
class Call:
    """One call of one module."""

    name: str
    args: tuple[Any, ...]
    output: Any
    grad_input: Gradients = field(default_factory=dict)
    grad_output: Gradients = field(default_factory=dict)


@dataclass(slots=True)
class Calls:
    """What was recorded."""

    calls: list[Call] = field(default_factory=list)
    param_grads: dict[str, list[Tensor]] = field(default_factory=dict)


@contextmanager
def tensor_hooks(model: nn.Module) -> Generator[Calls]:
    """Record with hooks on the tensors that go into and come out of each module.

    ``grad_input`` is the gradient of the tensor itself, all its uses together.
    """
    recorded = Calls()

    def after_forward(name: str, _module: object, args: Any, output: Any) -> None:
        call = Call(name, args, output)
        recorded.calls.append(call)
        _hook_each(args, call.grad_input)
        _hook_each(as_tuple(output), call.grad_output)

    handles = [
        module.register_forward_hook(partial(after_forward, name))
        for name, module in model.named_modules()
    ]
    handles += _hook_parameters(model, recorded)
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def tensor_hooks_on_aliases(model: nn.Module) -> Generator[Calls]:
    """Record with hooks on tensors, giving each module aliases of its inputs.

    ``grad_input`` is this call's share, as only this call uses the alias. The module
    must not overwrite its inputs, which are now aliases.
    """
    recorded = Calls()
    begun: list[Call] = []

    def before_forward(name: str, _module: object, args: Any) -> Any:
        call = Call(name, args, None)
        begun.append(call)
        aliases = tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in args)
        _hook_each(aliases, call.grad_input)
        return aliases

    def after_forward(_module: object, _args: object, output: Any) -> None:
        call = begun.pop()
        call.output = output
        recorded.calls.append(call)
        _hook_each(as_tuple(output), call.grad_output)

    handles = _hook_parameters(model, recorded)
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(partial(before_forward, name)),
            module.register_forward_hook(after_forward),
        ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def full_backward_hooks(model: nn.Module) -> Generator[Calls]:
    """Record with the full backward hooks of modules.

    ``grad_input`` is this call's share.
    """
    recorded = Calls()
    awaited: dict[str, list[Call]] = {}

    def after_forward(name: str, _module: object, args: Any, output: Any) -> None:
        call = Call(name, args, output)
        recorded.calls.append(call)
        awaited.setdefault(name, []).append(call)

    def after_backward(name: str, _module: object, grad_in: Any, grad_out: Any) -> None:
        call = awaited[name].pop()
        call.grad_input.update(enumerate(grad_in))
        call.grad_output.update(enumerate(grad_out))

    handles = _hook_parameters(model, recorded)
    for name, module in model.named_modules():
        handles += [
            module.register_forward_hook(partial(after_forward, name)),
            module.register_full_backward_hook(partial(after_backward, name)),
        ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _hook_each(tensors: tuple[Any, ...], grads: Gradients) -> None:
    # The hook holds a dict of gradients, not the call, which holds its output: that
    # would be a cycle through autograd's graph, unseen by the garbage collector.
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(grads.__setitem__, i))


def _hook_parameters(model: nn.Module, recorded: Calls) -> list[Any]:
    def keep(grads: list[Tensor], grad: Tensor) -> None:
        # autograd makes a gradient the parameter's .grad, and copies it first only if
        # something else holds it. A detached tensor just shares its memory.
        grads.append(grad.detach())

    return [
        parameter.register_hook(
            partial(keep, recorded.param_grads.setdefault(name, []))
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
