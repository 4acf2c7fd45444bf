"""What gradlib uses of hooks."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import itertools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

# The attributes that hold, by a hook's number, a module's hooks.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
KIND_OF_BACKWARD_HOOKS = "_is_full_backward_hook"

# The same with those that say how to call a hook.
_HOOKS_AROUND_FORWARD = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
HOOKS = (*_HOOKS_AROUND_FORWARD, *BACKWARD_HOOKS)

_hooks_around_forward: Callable[[dict[str, Any]], tuple[Any, ...]]
_hooks_around_forward = itemgetter(*_HOOKS_AROUND_FORWARD)

# How many hooks with a RemovableHandle torch has set in this process, on anything.
hooks_set: Callable[[], int] = partial(getattr, cast(Any, RemovableHandle), "next_id")


def hook_tensor(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Set a hook as ``tensor.register_hook`` does, at a third of the cost.

    The hook is its own key.
    """
    hooks_of(tensor)[hook] = hook


def hooks_of(tensor: Tensor) -> dict[Any, Any]:
    """Return the dict of a tensor's hooks, by key and in order; others may be added."""
    place: Any = tensor
    hooks: dict[Any, Any] | None = place._backward_hooks
    if hooks is None:
        hooks = OrderedDict()
        place._backward_hooks = hooks
        if place.grad_fn is not None:
            place.grad_fn._register_hook_dict(place)
    return hooks


def every_hook_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's hooks, then those that run after ``.grad`` is accumulated."""
    place: Any = tensor
    kinds = place._backward_hooks, place._post_accumulate_grad_hooks
    return tuple(hook for hooks in kinds if hooks for hook in hooks.values())


def hook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Set on each module a forward pre-hook before all others, a forward hook after.

    Both get keyword arguments, and the second runs even if the call raises. This does
    what ``register_forward_pre_hook`` and ``register_forward_hook`` do, at a fifth of
    their cost. A hook that is still set keeps its place.

    Args:
        hooks: The two hooks of each module.
    """
    for module, (before, after) in hooks.items():
        every = _hooks_around_forward(vars(module))
        pre_hooks, with_kwargs, forward_hooks, also_with_kwargs, always_called = every
        first, last = id(before), id(after)  # torch's own keys are small numbers
        is_new = first not in pre_hooks
        pre_hooks[first] = with_kwargs[first] = before
        forward_hooks[last] = also_with_kwargs[last] = always_called[last] = after
        if is_new and len(pre_hooks) > 1:
            pre_hooks.move_to_end(first, last=False)


def unhook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Remove the hooks that `hook_modules` has set."""
    for module, both in hooks.items():
        for known in _hooks_around_forward(vars(module)):
            for hook in both:
                known.pop(id(hook), None)


def without_hooks(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Take the hooks off tensors for a block, so that they change no gradient in it."""
    every = [cast(Any, tensor)._backward_hooks for tensor in tensors]
    return _emptied(every) if any(every) else nullcontext()


def count_node_hooks(node: Node) -> int:
    """Return how many hooks a node of the graph has, but for those of tensors."""
    handles: list[Any] = [node.register_hook(_ignore), node.register_prehook(_ignore)]
    every = [len(it.hooks_dict_ref()) - 1 for it in handles]
    for it in handles:
        it.remove()
    return sum(every)


def _ignore(*_: object) -> None: ...


@contextmanager
def _emptied(every: Iterable[dict[Any, Any] | None]) -> Generator[None]:
    before = [(hooks, dict(hooks)) for hooks in every if hooks]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.update(items)


# The pair of saved-tensors hooks that autograd uses now; None if there is none.
saved_tensors_hooks: Callable[[], Any] = partial(
    cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks, False
)

# A module's backward pre-hooks and its backward hooks, by their numbers.
backward_hooks: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]]
backward_hooks = attrgetter(*BACKWARD_HOOKS)

# The method that gives a call's backward pre-hooks: the global ones, and the module's
# own. torch calls it by this name (in 2.8, 2.13 and 2.14; 2.15 was not read).
BACKWARD_PRE_HOOKS_OF = "_get_backward_pre_hooks"

backward_pre_hooks: Callable[[nn.Module], list[Any]] = getattr(
    nn.Module, BACKWARD_PRE_HOOKS_OF
)

# A module's forward pre-hooks and its forward hooks, by their numbers.
forward_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]]
forward_hooks: Callable[[nn.Module], OrderedDict[int, Any]]
forward_pre_hooks, forward_hooks = map(attrgetter, FORWARD_HOOKS)


def hook_dicts(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return the dicts in which several modules keep their hooks."""
    return [*itertools.chain.from_iterable(map(_hook_dicts, modules))]


_hook_dicts: Callable[[nn.Module], tuple[dict[int, Any], ...]]
_hook_dicts = attrgetter(*FORWARD_HOOKS, *BACKWARD_HOOKS)


def hook_numbers(hooks: Sequence[dict[int, Any]]) -> list[int]:
    """Return how many hooks each dict holds, and the numbers of all hooks."""
    return [*map(len, hooks), *itertools.chain.from_iterable(hooks)]


def put_before_others(module: nn.Module, number: int) -> None:
    """Put a forward pre-hook of ours before those of others."""
    _put_outside(forward_pre_hooks(module), number, last=False)


def put_after_others(module: nn.Module, number: int) -> None:
    """Put a forward hook of ours after those of others."""
    _put_outside(forward_hooks(module), number, last=True)


def _put_outside(hooks: OrderedDict[int, Any], number: int, *, last: bool) -> None:
    if len(hooks) < 2:
        return
    inwards = reversed(hooks) if last else iter(hooks)
    outside = [*itertools.takewhile(number.__ne__, inwards)]
    if number in hooks and any(it != id(hooks[it]) for it in outside):  # not ours
        hooks.move_to_end(number, last=last)


# The hooks that hold for every module, in dicts that torch never replaces.
_GLOBAL_HOOKS: list[dict[int, Any]] = [
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]


def any_global_hook() -> bool:
    """Tell whether some hook holds for every module."""
    return any(_GLOBAL_HOOKS)


def any_global_backward_hook() -> bool:
    """Tell whether some backward hook holds for every module."""
    return any(_GLOBAL_HOOKS[2:])
