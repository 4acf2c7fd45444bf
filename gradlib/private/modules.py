"""What gradlib uses of modules."""

# Private names are what this folder is for, and torch's stubs leave some of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import itertools
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.private.hooks import hook_dicts


def put_in_for_one_call() -> set[int]:
    """Return the ids of the tensors that a running `functional_call` has put in.

    `functional_call` itself puts back the tensors that were there before.
    """
    found: set[int] = set()
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            given = frame.f_locals["parameters_and_buffers"]
            found.update(map(id, given.values()))
        frame = frame.f_back
    return found


_FUNCTIONAL_CALL = cast(Any, nn.utils.stateless)._functional_call.__code__


def is_replica(module: nn.Module) -> bool:
    """Tell whether a module is a copy that `nn.DataParallel` runs on one GPU."""
    return vars(module).get("_is_replica", False)


_PLAIN = (
    *(BuiltinFunctionType, MethodDescriptorType),
    *(WrapperDescriptorType, GetSetDescriptorType),
)
_WHERE = str(Path(torch.__file__).parent)


def torchs_own(value: Any) -> Any:
    """Return a function or class if it is torch's own, else a new object.

    Another library may have replaced torch's own before gradlib was imported.
    """
    if isinstance(value, FunctionType):
        is_own = value.__code__.co_filename.startswith(_WHERE)
    elif isinstance(value, type):
        is_own = value.__module__.partition(".")[0] == "torch"
    else:
        is_own = isinstance(value, _PLAIN)
    return value if is_own else object()


# The attributes that hold what a module uses when it is called.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"

# A module's own parameters, buffers and children by name. The public
# ``named_parameters(recurse=False)`` is too slow for a hook that runs at every call.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]]
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]]
own_children: Callable[[nn.Module], dict[str, nn.Module | None]]
own_parameters, own_buffers, own_children = map(
    attrgetter, (PARAMETERS, BUFFERS, CHILDREN)
)


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return a module and all inside it, each once, the outer ones first.

    In a third of the time of ``module.modules()``, as calls of containers ask for it.
    """
    found, seen = [module], {module}
    for it in found:
        for child in own_children(it).values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def what_stands_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the numbers of several modules' children, their names, and their ids.

    There is no Python loop: this runs at each forward, and its answer rarely changes.
    By ids, as a class may have an ``__eq__``.
    """
    children = [*map(own_children, modules)]
    inside = [*filter(None, children)]
    names = itertools.chain.from_iterable(map(methodcaller("keys"), inside))
    standing = itertools.chain.from_iterable(map(methodcaller("values"), inside))
    return [*map(len, children), *names, *map(id, standing)]


def parameters_at_call(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters, or what it has in their place at a call.

    A replica that ``nn.DataParallel`` makes for a device has plain tensors instead.
    """
    return own_parameters(module) or vars(module).get("_former_parameters", {})


@contextmanager
def parametrizations_computed_anew() -> Generator[None]:
    """Neither use nor change what ``torch.nn.utils.parametrize.cached()`` keeps."""
    module: Any = sys.modules.get("torch.nn.utils.parametrize")
    if not getattr(module, "_cache_enabled", 0):
        yield
        return
    before, module._cache = module._cache, {}
    try:
        yield
    finally:
        module._cache = before


def is_of_torch(kind: type[nn.Module]) -> bool:
    """Tell whether a class of modules is torch's own."""
    return kind.__module__.startswith("torch.nn.modules.")


def is_plain_module(module: nn.Module) -> bool:
    """Tell whether calling a module runs its class's ``forward`` and nothing else."""
    own = vars(module)
    return not (
        type(module).__call__ is not _CALL
        or any(hook_dicts((module,)))
        or not own.keys().isdisjoint(_CALLED)
        or own.get("_compiled_call_impl")
    )


_CALLED = frozenset(("forward", "_call_impl", "_conv_forward", "weight", "bias"))
"""What a call looks for in the class, or among parameters, and would find here."""


def is_looked_into_plainly(kind: type[nn.Module]) -> bool:
    """Tell whether a class looks up attributes, and is called, as ``nn.Module`` is."""
    return (
        kind.__getattr__ is _GETATTR
        and kind.__getattribute__ is object.__getattribute__
        and cast(Any, kind)._call_impl is _CALL_IMPL
    )


def calls_are_torchs() -> bool:
    """Tell whether ``nn.Module._call_impl`` is torch's own, and was not replaced."""
    return _MODULE._call_impl is _CALL_IMPL


# torch's own functions, as they were when this was imported.
_MODULE: Any = nn.Module
_CALL, _GETATTR, _CALL_IMPL = map(
    torchs_own, (_MODULE.__call__, _MODULE.__getattr__, _MODULE._call_impl)
)
