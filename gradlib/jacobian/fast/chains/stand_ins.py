"""Stand-ins, on which somebody's code is run to see which layers it names.

As torch.fx does it, one stands for x. Here others stand for all else that the code can
reach: its own module, globals, and what it closes over. They know layers and torch's
functions, and nothing can be changed through them: what else the code does is an error.
So its branches are those of this call, and nothing happens that anybody would notice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from opcode import opmap
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn, cast

from torch import nn

from gradlib.jacobian.fast.chains.functions import (
    CONSTANTS,
    FUNCTIONS,
    METHODS,
    NAMESPACES,
    OPERATORS,
    Made,
    is_of_torch,
    layer,
)
from gradlib.jacobian.fast.chains.layers import SQUEEZED
from gradlib.private import is_looked_into_plainly, own_children

BUILTINS = {
    it.__name__: it for it in (abs, enumerate, len, max, min, range, reversed, zip)
}
"""What code finds of those: they do nothing but compute."""

VIEWED = nn.Flatten()
"""Stands where a tensor is viewed as flat, which torch refuses in some layouts."""


class UnknownError(Exception):
    """Code does something that stand-ins do not know."""


class Place(NamedTuple):
    """A tensor on the way of x: what it has become, after some layers.

    Attributes:
        line: The layers that x has gone through so far.
        number: How many of them come before this place.
        samples: The length of its first axis.
        layers_of: Of a module and that length: the layers it goes through.
    """

    line: list[Any]
    number: int
    samples: int
    layers_of: Callable[[nn.Module, int], list[Any]]

    def after(self, layers: Sequence[Any]) -> "StandIn":
        """Return what stands for the tensor after some layers more."""
        self.require_last()
        for it in layers:
            if it is None:
                raise UnknownError("it is random, or known for other numbers only")
            if type(it) is not nn.Identity:
                self.line.append(it)
        return StandIn(self._replace(number=len(self.line)))

    def require_last(self) -> None:
        """Raise unless the line ends here: two ways from one tensor are no line."""
        if self.number != len(self.line):
            raise UnknownError("it goes on from a tensor twice")


class _Shape(NamedTuple):
    """The shape of a tensor."""

    samples: int


class _Method(NamedTuple):
    """A method of a tensor."""

    place: Place
    name: str


class StandIn:
    """Stands for one object, and lets nobody at it."""

    __slots__ = ("real",)

    def __init__(self, real: Any) -> None:
        """Stand for an object."""
        _set_real(self, real)

    def __getattribute__(self, name: str) -> Any:
        """Return what stands for an attribute."""
        return _attribute(real_of(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what stands for the result of a call."""
        return called(real_of(self), args, kwargs)

    def __len__(self) -> int:
        """Return how many samples, or parts, there are."""
        real = real_of(self)
        return real.samples if isinstance(real, Place) else len(_parts(real))

    def __iter__(self) -> Iterator[Any]:
        """Go through what stands for the parts."""
        return iter(_parts(real_of(self)))

    def __getitem__(self, key: Any) -> Any:
        """Return what stands for a part."""
        return _item(real_of(self), key)

    def _refuse(self, *_: object) -> NoReturn:
        raise UnknownError("nobody knows what the real one would say, or do")

    __setattr__ = __delattr__ = __eq__ = __bool__ = _refuse
    __format__ = __repr__ = __str__ = _refuse
    __hash__ = None  # pyright: ignore[reportAssignmentType] (it may equal others)


def _operator(make: Made) -> Callable[..., StandIn]:
    def operate(x: StandIn, *number: Any) -> StandIn:
        return _place(x).after([layer(make, number)])

    return operate


for _name, _make in OPERATORS.items():
    setattr(StandIn, _name, _operator(_make))

# Past the methods above.
real_of: Callable[[StandIn], Any]
_set_real: Callable[[StandIn, Any], None]
real_of, _set_real = vars(StandIn)["real"].__get__, vars(StandIn)["real"].__set__


def called(real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what stands for the result of a call.

    Args:
        real: What is called.
        args: Stand-ins, and what has none as it cannot change.
        kwargs: The same.

    Raises:
        Exception: Of any kind: it is not known.
    """
    if isinstance(real, nn.Module):
        place = _place(*args, **kwargs)
        return place.after(place.layers_of(real, place.samples))
    if is_of_torch(real):
        return _place(args[0]).after([layer(FUNCTIONS[real], args[1:], **kwargs)])
    if type(real) is FunctionType:
        return _run(real, args, kwargs)
    if type(real) is MethodType and isinstance(real.__self__, nn.Module):
        return _run(cast(Any, real.__func__), (StandIn(real.__self__), *args), kwargs)
    if isinstance(real, _Method):
        return _method(*real, args, kwargs)
    raise UnknownError("it is no layer")


def _place(x: Any, /) -> Place:
    """Return the place that a single argument stands for."""
    place = real_of(x)
    if not isinstance(place, Place):
        raise UnknownError("it is called with something else than a tensor")
    return place


def _method(
    place: Place, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what stands for the result of a tensor's method."""
    make: Made | None = METHODS.get(name)
    if make is not None:
        return place.after([layer(make, args, **kwargs)])
    if name == "size" and args == (0,) and not kwargs:
        return place.samples
    if name in ("view", "reshape") and args == (place.samples, -1) and not kwargs:
        return place.after([VIEWED if name == "view" else layer(nn.Flatten, ())])
    raise UnknownError(name)


_IS = opmap["IS_OP"]


def _run(function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function's code on stand-ins only, and return what it returns."""
    code = function.__code__
    # As in a module: what has the name of a builtin function hides that.
    builtins = {k: v for k, v in BUILTINS.items() if k not in function.__globals__}
    scope: dict[str, Any] = {"__builtins__": builtins}
    for name in _names(code):
        if name in function.__globals__:
            with suppress(UnknownError):  # who needs it finds nothing
                scope[name] = _known(function.__globals__[name])
    cells = tuple(map(_cell, function.__closure__ or ()))
    were = dict(scope), [*map(_content, cells)]
    defaults = tuple(map(_known, function.__defaults__ or ()))
    ours = FunctionType(code, scope, argdefs=defaults, closure=cells)
    given = function.__kwdefaults__ or {}
    ours.__kwdefaults__ = {name: _known(it) for name, it in given.items()}
    made = ours(*args, **kwargs)
    if were != (scope, [*map(_content, cells)]):
        raise UnknownError("it assigns to variables that are not its own")
    return made


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that code, and what it defines, may take from outside."""
    if code.co_exceptiontable:
        raise UnknownError("it handles errors, and ours are none of its")
    if _IS in code.co_code[::2]:
        raise UnknownError("it asks whether objects are one, and stand-ins are two")
    inner = [_names(it) for it in code.co_consts if isinstance(it, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _cell(cell: CellType) -> CellType:
    with suppress(UnknownError, ValueError):  # nothing is in it yet
        return CellType(_known(cell.cell_contents))
    return CellType()


def _content(cell: CellType) -> Any:
    with suppress(ValueError):
        return cell.cell_contents


def _known(value: Any) -> Any:
    """Return what stands for a value: itself, where it cannot change."""
    kind = cast(type[Any], type(value))
    if kind in CONSTANTS:
        return value
    if kind is tuple:
        return tuple(map(_known, value))
    if kind in (FunctionType, MethodType, list) or issubclass(kind, nn.Module):
        return StandIn(value)
    if is_of_torch(value):
        return StandIn(value)
    raise UnknownError(f"it needs a {kind.__name__}")


def _attribute(real: Any, name: str) -> Any:
    if isinstance(real, nn.Module):
        return _of_module(real, name)
    if isinstance(real, Place):
        return StandIn(_Shape(real.samples) if name == "shape" else _Method(real, name))
    if any(real is it for it in NAMESPACES):
        value = cast(Any, vars(real)[name])
        if is_of_torch(value):
            return StandIn(value)
    raise UnknownError(name)


def _of_module(module: nn.Module, name: str) -> Any:
    """Return what stands for an attribute of a module, found as Python does."""
    if not is_looked_into_plainly(type(module)):
        raise UnknownError("its attributes are not what they seem")
    own = vars(module)
    if name == "training":
        return bool(own[name])
    kind = next((it for it in type(module).__mro__ if name in vars(it)), None)
    if kind is None:
        return _known(own[name] if name in own else own_children(module)[name])
    found = vars(kind)[name]
    if type(found) is not FunctionType:
        raise UnknownError("it is the class's, a property or the like")
    return _known(own[name]) if name in own else StandIn(MethodType(found, module))


def _gives(kind: Any) -> tuple[Any, ...]:
    return kind.__iter__, kind.__len__, kind.__getitem__


_CONTAINERS = [_gives(kind) for kind in (list, nn.Sequential, nn.ModuleList)]


def _parts(real: Any) -> list[Any]:
    """Return what stands for all that is in a list, or a container of torch's."""
    if _gives(type(real)) not in _CONTAINERS:
        raise UnknownError("nobody knows what is in it")
    if type(real) is list:
        return [*map(_known, cast(list[Any], real))]
    return [*map(_known, own_children(real).values())]


def _item(real: Any, key: Any) -> Any:
    if isinstance(real, _Shape) and key == 0:
        return real.samples
    if isinstance(real, Place) and key in ((slice(None), 0), (..., 0)):
        return real.after([SQUEEZED])
    if type(real) is nn.ModuleDict:
        return _known(own_children(real)[key])
    if type(key) is int or type(real) in (list, nn.ModuleList):
        return _parts(real)[key]
    raise UnknownError("it is a part of something else")
