"""Our hooks on modules, told apart from all others."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from copyreg import dispatch_table
from functools import partial
from itertools import chain, takewhile
from operator import methodcaller
from pickle import DEFAULT_PROTOCOL
from threading import Lock
from typing import Any

from torch import nn

from gradlib.errors import NotScriptableError
from gradlib.private.hooks import (
    FORWARD_HOOKS,
    HOOKS,
    KIND_OF_BACKWARD_HOOKS,
    hook_dicts,
)


class ModuleHook(partial[None]):
    """A hook that records. A copy of the module does not record, nor does a replay."""

    @property
    def __name__(self) -> str:
        """Tell ``torch.jit.script``, which alone asks, why it cannot compile the hook.

        Raises:
            NotScriptableError: Always; to ``hasattr`` there is no such name.
        """
        raise NotScriptableError(
            "torch.jit.script compiles a module with its hooks, and those by which "
            "gradlib.record sees its calls cannot be compiled. Script the module "
            "before the block or after it, or a copy, which has none of them: "
            "torch.jit.script(copy.deepcopy(model))."
        )

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[object]]:
        """Copy and pickle as a hook that does nothing."""
        return ModuleHook, (nothing,)


def stop_all(hooks: Iterable[ModuleHook]) -> None:
    """Make hooks do nothing and hold nothing from now on, wherever they are set."""
    deque(map(_STOP, hooks), maxlen=0)


def without_ours(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return a module's hooks without those that record."""
    others = {key: it for key, it in hooks.items() if not isinstance(it, ModuleHook)}
    return OrderedDict(others)


def copy_without_ours() -> Callable[[], None]:
    """Make ``copy`` and ``pickle`` leave the hooks that record out of modules.

    A module has no say in how its hooks are copied, so this tells Python how to copy
    every ``OrderedDict``, in which torch keeps them.

    Returns:
        A function that ends this.
    """
    user = object()
    with _LOCK:
        if not _users:
            _before[OrderedDict] = dispatch_table.get(OrderedDict)
        _users.add(user)
        dispatch_table[OrderedDict] = _reduced
    return partial(_copy_as_before, user)


def _copy_as_before(user: object) -> None:
    with _LOCK:
        _users.discard(user)
        if _users or dispatch_table.get(OrderedDict) is not _reduced:
            return
        before = _before[OrderedDict]
        if before is None:
            dispatch_table.pop(OrderedDict, None)
        else:
            dispatch_table[OrderedDict] = before


def _reduced(hooks: OrderedDict[Any, Any]) -> Any:
    """Tell ``copy`` and ``pickle`` how to rebuild a dict, without hooks that record."""
    others = without_ours(hooks)
    if len(others) < len(hooks):
        return OrderedDict, (), None, None, iter(others.items())
    before = _before.get(OrderedDict)
    return before(hooks) if before else hooks.__reduce_ex__(DEFAULT_PROTOCOL)


_LOCK = Lock()
_before: dict[type[Any], Any] = {}  # what another library has set there
_users: set[object] = set()  # one for each open block


def hooks_of_others(module: nn.Module) -> dict[str, Any]:
    """Return a module's hooks, by the attributes that hold them, without ours.

    `AHEAD` tells how many forward pre-hooks run before ours.
    """
    own = vars(module)
    kept: dict[str, Any] = {KIND_OF_BACKWARD_HOOKS: own[KIND_OF_BACKWARD_HOOKS]}
    for kind in HOOKS:
        kept[kind] = without_ours(own[kind])
    every, others = own[FORWARD_HOOKS[0]], kept[FORWARD_HOOKS[0]]
    ahead = [*takewhile(others.__contains__, every)]
    kept[AHEAD] = len(ahead) if len(others) < len(every) else 0
    return kept


def remove_stopped(modules: Collection[nn.Module]) -> None:
    """Remove our hooks that `stop_all` has stopped.

    Code that replaces a module by another sets all its hooks on the new one too.
    """
    if not any(hook_dicts(modules)):
        return
    for module in modules:
        every: list[dict[int, Any]] = [getattr(module, kind) for kind in HOOKS]
        stopped = {
            key
            for key, hook in chain.from_iterable(hooks.items() for hooks in every)
            if isinstance(hook, ModuleHook) and hook.func is nothing
        }
        for hooks in every:
            for key in stopped & hooks.keys():
                del hooks[key]


def all_are_ours(modules: Iterable[nn.Module]) -> bool:
    """Tell whether all hooks of several modules are ours, without a Python loop."""
    every = map(methodcaller("values"), filter(None, hook_dicts(modules)))
    return {*map(type, chain.from_iterable(every))} <= {ModuleHook}


AHEAD = "ahead of ours"
"""The key under which `hooks_of_others` counts the forward pre-hooks before ours."""

NO_HOOKS: dict[str, Any] = {
    AHEAD: 0,
    KIND_OF_BACKWARD_HOOKS: None,
    **{kind: OrderedDict[int, Any]() for kind in HOOKS},
}
"""What `hooks_of_others` returns for a module without hooks."""


def nothing(*_: object) -> None:
    """Do nothing, as a stopped hook, or where nothing is kept of a tensor."""


_STOP = methodcaller("__setstate__", (nothing, (), {}, None))
