"""What gradlib uses of hooks."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import itertools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# How many hooks torch has set in this process, on whatever, with a handle to remove it.
hooks_set: Callable[[], int] = partial(getattr, cast(Any, RemovableHandle), "next_id")


def hook_tensor(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Set a hook as ``tensor.register_hook`` does, at a third of its price.

    It has itself as its key.
    """
    hooks_of(tensor)[hook] = hook


def hooks_of(tensor: Tensor) -> dict[Any, Any]:
    """Return the hooks of a tensor in their order, by their keys, to add to."""
    place: Any = tensor
    hooks: dict[Any, Any] | None = place._backward_hooks
    if hooks is None:
        hooks = OrderedDict()
        place._backward_hooks = hooks
        if place.grad_fn is not None:
            place.grad_fn._register_hook_dict(place)
    return hooks


def every_hook_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's hooks, and those that run once ``.grad`` was added to."""
    place: Any = tensor
    kinds = place._backward_hooks, place._post_accumulate_grad_hooks
    return tuple(hook for hooks in kinds if hooks for hook in hooks.values())


def hook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Set a hook before all others of each module, and one after them.

    Both get keyword arguments, and the second runs also where the call raises: as
    ``register_forward_pre_hook`` and ``register_forward_hook`` do it, at a fifth of
    their price. One that still stands there stays in its place.

    Args:
        hooks: The two hooks of each module.
    """
    for module, (before, after) in hooks.items():
        every = _HOOKS_AROUND_FORWARD(vars(module))
        pre_hooks, with_kwargs, forward_hooks, also_with_kwargs, always_called = every
        first, last = id(before), id(after)  # torch's own keys are small numbers
        is_new = first not in pre_hooks
        pre_hooks[first] = with_kwargs[first] = before
        forward_hooks[last] = also_with_kwargs[last] = always_called[last] = after
        if is_new and len(pre_hooks) > 1:
            pre_hooks.move_to_end(first, last=False)


def unhook_modules(hooks: Mapping[nn.Module, tuple[Any, Any]]) -> None:
    """Take away what `hook_modules` has set."""
    for module, (before, after) in hooks.items():
        every = _HOOKS_AROUND_FORWARD(vars(module))
        pre_hooks, with_kwargs, forward_hooks, also_with_kwargs, always_called = every
        first, last = id(before), id(after)
        pre_hooks.pop(first, None)
        with_kwargs.pop(first, None)
        forward_hooks.pop(last, None)
        also_with_kwargs.pop(last, None)
        always_called.pop(last, None)


# Where a module keeps its hooks, and what it shall do with them.
_BEFORE_FORWARD = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_AFTER_FORWARD = (
    *("_forward_hooks", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
)
_HOOKS_AROUND_FORWARD: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(
    *_BEFORE_FORWARD, *_AFTER_FORWARD
)


@contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Generator[None]:
    """Keep the hooks of tensors from changing what gradients are taken of them."""
    every = [cast(Any, tensor)._backward_hooks for tensor in tensors]
    before = [(hooks, dict(hooks)) for hooks in every if hooks]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.update(items)


# The pair of functions through which what autograd saves now goes; None for none.
saved_tensors_hooks: Callable[[], Any] = partial(
    cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks, False
)

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_PRE_HOOKS = "_backward_pre_hooks"
BACKWARD_HOOKS = (BACKWARD_PRE_HOOKS, "_backward_hooks")

# A module's hooks that may change gradients, by their numbers: before and after.
backward_hooks: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]]
backward_hooks = attrgetter(*BACKWARD_HOOKS)

# All of a module's hooks, and what it shall do with them, each by the number of a hook.
HOOKS = (*_BEFORE_FORWARD, *_AFTER_FORWARD, *BACKWARD_HOOKS)
KIND_OF_BACKWARD_HOOKS = "_is_full_backward_hook"

# The backward pre-hooks that a call of a module sets: those of every module, and its
# own. torch asks for them under this name (in 2.8, 2.13 and 2.14; 2.15 was not read).
BACKWARD_PRE_HOOKS_OF = "_get_backward_pre_hooks"

backward_pre_hooks: Callable[[nn.Module], list[Any]] = getattr(
    nn.Module, BACKWARD_PRE_HOOKS_OF
)

# A module's hooks that run before its forward, and after it, by their numbers.
forward_pre_hooks: Callable[[nn.Module], OrderedDict[int, Any]]
forward_hooks: Callable[[nn.Module], OrderedDict[int, Any]]
forward_pre_hooks, forward_hooks = map(attrgetter, FORWARD_HOOKS)


def hook_dicts(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return where several modules keep their hooks."""
    kinds = attrgetter(*FORWARD_HOOKS, *BACKWARD_HOOKS)
    return [*itertools.chain.from_iterable(map(kinds, modules))]


def hook_numbers(hooks: Sequence[dict[int, Any]]) -> list[int]:
    """Return how many hooks stand in each place, and the numbers of all."""
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


# The hooks that hold for every module, as torch keeps them for good.
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
