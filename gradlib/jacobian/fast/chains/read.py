"""Reads the real attributes and parts of modules, containers and namespaces."""

from collections.abc import Callable, Sequence, Set
from types import FunctionType
from typing import Any, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.functions import CONSTANTS, TURNING
from gradlib.jacobian.fast.chains.rebound import UnknownError
from gradlib.jacobian.fast.chains.shapes import is_matrix
from gradlib.private.modes import enable_grad, grad_is_enabled
from gradlib.private.modules import (
    is_looked_into_plainly,
    own_buffers,
    own_children,
    own_parameters,
)


def in_space(space: Any, name: str) -> Any:
    """Return the value of a name in a namespace."""
    return cast(Any, vars(space)[name])


def method_of(module: nn.Module, name: str) -> Any:
    """Return a method of a module, as a function that is not bound to it yet."""
    value, is_method = looked_up(module, name)
    return value if is_method else _ELSE


def value_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module that is not a method."""
    value, is_method = looked_up(module, name)
    return _ELSE if is_method else value


_ELSE = object()
"""Returned for an attribute of the other kind."""


def attributes_of(module: nn.Module, names: Set[str]) -> dict[str, Any]:
    """Return the attributes that a module itself holds, by name.

    Args:
        module: The module.
        names: Names that its class must not have: there Python looks first.
    """
    kind = type(module)
    if not is_looked_into_plainly(kind) or any(
        not it.__dict__.keys().isdisjoint(names) for it in kind.__mro__
    ):
        raise UnknownError("its attributes are not what they seem")
    # A later one hides those before, as where a module looks for them.
    tensors = own_buffers(module) | own_parameters(module)
    return {**own_children(module), **tensors, **vars(module)}


def is_of_class(module: nn.Module, name: str) -> bool:
    """Tell whether an attribute is that of the module's class."""
    return any(name in it.__dict__ for it in type(module).__mro__)


def looked_up(module: nn.Module, name: str) -> tuple[Any, bool]:
    """Return a module's attribute, as Python finds it, and whether it is a method."""
    if not is_looked_into_plainly(type(module)):
        raise UnknownError("its attributes are not what they seem")
    own = vars(module)
    if name == "training":
        return bool(own[name]), False
    for kind in type(module).__mro__:
        if name in kind.__dict__:
            value = kind.__dict__[name]
            break
    else:
        # In the order in which a module looks for them.
        for space in (own, own_parameters(module), own_buffers(module)):
            if name in space:
                return space[name], False
        return own_children(module)[name], False
    if type(value) not in (FunctionType, staticmethod, *CONSTANTS):
        raise UnknownError("it is the class's, a property or the like")
    if name in own:
        return own[name], False
    if isinstance(value, staticmethod):
        return value.__func__, False
    return value, type(value) is FunctionType


# torch's own, also where Tensor.mT is replaced later.
_transposed: Callable[[Tensor], Tensor] = cast(Any, Tensor).mT.__get__


def turned(weight: Tensor, _: None = None) -> Tensor:
    """Return a transposed matrix, through which gradients flow."""
    if not is_matrix(weight) or not vars(weight).keys().isdisjoint(TURNING):
        raise UnknownError("it is no matrix, or has a name of its own for that")
    if not weight.requires_grad or grad_is_enabled():
        return _transposed(weight)
    enable_grad(True)
    try:
        return _transposed(weight)
    finally:
        enable_grad(False)


def _gives(kind: Any) -> tuple[Any, ...]:
    return tuple(getattr(kind, name, None) for name in _GIVING)


_GIVING = (
    *("__iter__", "__reversed__", "__len__", "__getitem__"),
    *("_get_abs_string_index", "_get_item_by_idx"),
)


_LIST, _SEQUENTIAL, _MODULE_LIST = map(_gives, (list, nn.Sequential, nn.ModuleList))


def parts_of(real: Any, _: None = None) -> Sequence[Any]:
    """Return the parts of a list, or of torch's containers."""
    gives = _gives(type(real))
    if gives == _LIST:
        return real
    if gives in (_SEQUENTIAL, _MODULE_LIST):
        return [*own_children(real).values()]
    raise UnknownError("nobody knows what is in it")


def part_of(real: Any, key: Any) -> Any:
    """Return one part, or a slice, of a list, dict, or torch's containers."""
    kind = cast(type[Any], type(real))
    if kind is dict and type(key) in CONSTANTS:
        return real[key]
    if kind is nn.ModuleDict:
        return own_children(real)[key]
    if type(key) is int and _gives(kind) == _MODULE_LIST:
        children = own_children(real)
        return children[str(key + len(children) if key < 0 else key)]
    if type(key) is int:
        return parts_of(real)[key]
    if type(key) is slice and kind in (list, nn.ModuleList):
        return list[Any](parts_of(real)[key])
    raise UnknownError("it is a part of something else")
