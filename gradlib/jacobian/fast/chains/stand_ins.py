"""Stand-ins, on which the user's code is run to see which layers it applies.

As in torch.fx, one stands for x. Here others stand for all else that the code can
reach: its module, globals and closure. They know layers and torch's functions, and
nothing can be changed through them: anything else that the code does is an error. So
the code takes the branches of this call, and the run has no effect that the user could
notice.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from types import FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gradlib.jacobian.fast.chains.axes import (
    VIEWED,
    flattened,
    parted,
    summed,
    taken,
    unsqueezed,
)
from gradlib.jacobian.fast.chains.functions import (
    CASTS,
    CONSTANTS,
    FUNCTIONS,
    GATHERING,
    JOINING,
    METHODS,
    MULTIPLYING,
    NAMED,
    NAMESPACES,
    OPERATORS,
    TURNING,
    Made,
    is_own,
    is_torchs_function,
    layer,
)
from gradlib.jacobian.fast.chains.layers import SQUEEZED, Linear
from gradlib.jacobian.fast.chains.noted import length, note, note_missing
from gradlib.jacobian.fast.chains.place import Place, gathered, joined
from gradlib.jacobian.fast.chains.read import (
    in_space,
    looked_up,
    method_of,
    part_of,
    parts_of,
    turned,
    value_of,
)
from gradlib.jacobian.fast.chains.rebound import UnknownError, rebound

MANY = 256
"""How many parts a tuple from outside of the code may have."""


WEIGHTS = (Tensor, Parameter)
"""The types of tensors from outside of the code, other than x."""


class Method(NamedTuple):
    """A method of a tensor, not called yet."""

    tensor: Place | Tensor
    name: str


class StandIn:
    """Stands for an object, without giving access to it."""

    __slots__ = ("real",)

    def __init__(self, real: Any) -> None:
        """Stand for an object."""
        _set_real(self, real)

    def __getattribute__(self, name: str) -> Any:
        """Return the stand-in of an attribute."""
        return attribute(real_of(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the stand-in of a call's result."""
        return called(real_of(self), args, kwargs)

    def __len__(self) -> int:
        """Return the number of samples, or parts."""
        real = real_of(self)
        return real.shape[0] if _is_tensor(real, "__len__") else len(_noted_parts(real))

    def __iter__(self) -> Iterator[Any]:
        """Yield the stand-ins of the parts."""
        parts = _noted_parts(real_of(self))
        for number, part in enumerate(parts):
            note(getitem, parts, number, part)
            yield _known(part)

    def __getitem__(self, key: Any) -> Any:
        """Return the stand-in of a part."""
        return _item(real_of(self), key)

    def _refuse(self, *_: object) -> NoReturn:
        raise UnknownError("nobody knows what the real one would say, or do")

    __setattr__ = __delattr__ = __eq__ = __bool__ = _refuse
    __format__ = __repr__ = __str__ = _refuse
    __isub__ = __imul__ = __itruediv__ = __ipow__ = _refuse
    __hash__ = None  # pyright: ignore[reportAssignmentType] (it may equal others)


def _operator(name: str, make: Made | None) -> Callable[..., StandIn]:
    def operate(x: StandIn, *others: Any) -> StandIn:
        real = real_of(x)
        if not _is_tensor(real, name):
            raise UnknownError(name)
        if name in MULTIPLYING:
            return StandIn(_product(real, *others))
        if name in JOINING and type(others[0]) is StandIn:
            if name == "__add__" and type(real_of(others[0])) in WEIGHTS:
                return _biased(real, *others)
            other = _place(*others)
            inplace = name == "__iadd__"
            return StandIn(joined(real, other, JOINING[name], inplace=inplace))
        if make is None:
            raise UnknownError(name)
        return _after(real, layer(make, *others))

    return operate


def _after(place: Place, *layers: Any) -> StandIn:
    return StandIn(place.after(layers))


for _name in (*OPERATORS, *JOINING, "__matmul__"):
    setattr(StandIn, _name, _operator(_name, OPERATORS.get(_name)))

# Slot access, past the methods above.
real_of: Callable[[StandIn], Any]
_set_real: Callable[[StandIn, Any], None]
real_of, _set_real = vars(StandIn)["real"].__get__, vars(StandIn)["real"].__set__


def _is_tensor(real: Any, name: str) -> bool:
    """Tell whether an object is a tensor, and its method of that name torch's own."""
    return isinstance(real, Place) and is_own(name)


def called(real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the stand-in of a call's result.

    Args:
        real: The object that is called.
        args: Stand-ins, and constants, which stand for themselves.
        kwargs: The same, by name.

    Raises:
        UnknownError: The call is not known. Python's own errors mean the same.
    """
    if isinstance(real, nn.Module):
        place = _place(*args, **kwargs)
        return _after(place, *place.layers_of(real, place.shape, place.dtype))
    if is_torchs_function(real):
        if real in GATHERING:
            return _gathered(GATHERING[real], *args, **kwargs)
        if real in NAMED:
            return _method(_place(args[0]), NAMED[real], args[1:], kwargs)
        return _after(_place(args[0]), layer(FUNCTIONS[real], *args[1:], **kwargs))
    if type(real) is FunctionType:
        return rebound(real, _known, _getattr)(*args, **kwargs)
    if type(real) is MethodType and isinstance(real.__self__, nn.Module):
        run = rebound(cast(FunctionType, real.__func__), _known, _getattr)
        return run(StandIn(real.__self__), *args, **kwargs)
    if isinstance(real, Method):
        if isinstance(real.tensor, Place):
            return _method(real.tensor, real.name, args, kwargs)
        if not (args or kwargs):
            return _turned(real.tensor)
    raise UnknownError("it is no layer")


def _place(x: Any, /) -> Place:
    """Return the place of the tensor that is the only argument."""
    place = real_of(x)
    if not isinstance(place, Place):
        raise UnknownError("it is called with something else than a tensor")
    return place


def _method(
    place: Place, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the stand-in of the result of a method, or a function of its name."""
    if name == "squeeze" and not (args or kwargs) and place.shape[0] > 1:
        return _after(place, SQUEEZED)  # known for ``(batch, 1)`` alone
    if name == "linear":
        return _linear(place, *args, **kwargs)
    if name in MULTIPLYING and not kwargs:
        return StandIn(_product(place, *args))
    make: Made | None = METHODS.get(name)
    if make is not None:
        return _after(place, layer(make, *args, **kwargs))
    if CASTS.get(name) == place.dtype and not (args or kwargs):
        return _after(place)
    if name == "dim" and not (args or kwargs):
        return len(place.shape)
    if name == "size" and len(args) < 2 and not kwargs:
        size: Any = torch.Size(place.shape)
        return size[args[0]] if args else size
    if name in ("chunk", "split", "unbind"):
        parts = parted(place.shape, name, *args, **kwargs)
        return tuple(_after(place, *it) for it in parts)
    if name == "unsqueeze":
        return _after(place, *unsqueezed(place.shape, *args, **kwargs))
    if name in ("sum", "mean"):
        return _after(place, *summed(place.shape, name, *args, **kwargs))
    if name in ("view", "reshape") and not kwargs:
        flat = VIEWED if name == "view" else layer(nn.Flatten)
        return _after(place, *[flat] * flattened(place.shape, args))
    raise UnknownError(name)


def _product(place: Place, weight: StandIn) -> Place:
    """Return the place after a product with a matrix."""
    return _times(place, _turned(real_of(weight)))


def _linear(place: Place, weight: StandIn, bias: StandIn | None = None) -> StandIn:
    """Return the stand-in of a linear layer's output."""
    product = _times(place, weight)
    return StandIn(product) if bias is None else _biased(product, bias)


def _times(place: Place, weight: StandIn) -> Place:
    return place.after([Linear(real_of(weight), None)])


def _biased(place: Place, bias: StandIn) -> StandIn:
    """Return the stand-in of a product with a matrix plus a bias."""
    product = place.layer
    if type(product) is not Linear or product.bias is not None:
        raise UnknownError("it is no bias")
    return StandIn(place.replaced(product._replace(bias=real_of(bias))))


def _turned(weight: Tensor) -> StandIn:
    """Return the stand-in of a transposed matrix."""
    value = turned(weight)
    note(turned, weight, None, value)
    return StandIn(value)


def _getattr(value: StandIn, name: str) -> Any:
    return attribute(real_of(value), name)


def _known(value: Any) -> Any:
    """Return the stand-in of a value; a constant stands for itself."""
    kind = cast(type[Any], type(value))
    if kind in CONSTANTS:
        return value
    if kind is tuple and len(value) <= MANY:
        return tuple(map(_known, value))
    if kind in (FunctionType, MethodType, list, dict) or issubclass(kind, nn.Module):
        return StandIn(value)
    if is_torchs_function(value) or kind in WEIGHTS:
        return StandIn(value)
    raise UnknownError(f"it needs a {kind.__name__}")


def attribute(real: Any, name: str) -> Any:
    """Return the stand-in of an attribute.

    Raises:
        UnknownError: The attribute is not known. Python's own errors mean the same.
    """
    if isinstance(real, nn.Module):
        return _of_module(real, name)
    if type(real) in WEIGHTS and name in TURNING and is_own(name):
        return StandIn(Method(real, name)) if name == "t" else _turned(real)
    if _is_tensor(real, name) and name not in TURNING:
        if name == "shape":
            return torch.Size(real.shape)
        return len(real.shape) if name == "ndim" else StandIn(Method(real, name))
    if any(real is it for it in NAMESPACES):
        value = in_space(real, name)
        if is_torchs_function(value):
            note(in_space, real, name, value)
            return StandIn(value)
    raise UnknownError(name)


def _of_module(module: nn.Module, name: str) -> Any:
    """Return the stand-in of a module's attribute."""
    try:
        value, is_method = looked_up(module, name)
    except LookupError:
        note_missing()
        raise
    note(method_of if is_method else value_of, module, name, value)
    return StandIn(MethodType(value, module)) if is_method else _known(value)


def _noted_parts(real: Any) -> Sequence[Any]:
    parts = parts_of(real)
    note(parts_of, real, None, parts)
    note(length, parts, None, len(parts))
    return parts


def _item(real: Any, key: Any) -> Any:
    """Return the stand-in of a part."""
    if _is_tensor(real, "__getitem__"):
        return _after(real, *taken(real.shape, key))
    try:
        part = part_of(real, key)
    except LookupError:
        note_missing()
        raise
    note(part_of, real, key, part)
    return StandIn(part) if type(key) is slice else _known(part)


def _gathered(name: str, tensors: Any, dim: object = 0) -> StandIn:
    """Return the stand-in of concatenated vectors, or stacked numbers."""
    if type(dim) is not int or dim not in (1, -1) or type(tensors) not in (tuple, list):
        raise UnknownError("it puts together something else")
    places = [*map(_place, tensors)]
    if name == "stack":
        places = [it.after(unsqueezed(it.shape, -1)) for it in places]
    return StandIn(gathered(places))
