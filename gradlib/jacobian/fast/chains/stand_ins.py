"""Stand-ins, on which somebody's code is run to see which layers it names.

As torch.fx does it, one stands for x. Here others stand for all else that the code can
reach: its own module, globals, and what it closes over. They know layers and torch's
functions, and nothing can be changed through them: what else the code does is an error.
So its branches are those of this call, and nothing happens that anybody would notice.
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
from gradlib.jacobian.fast.chains.noted import length, note
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
"""How many parts a tuple may have, that code has from outside."""


WEIGHTS = (Tensor, Parameter)
"""The types of tensors that code may have from outside."""


class Method(NamedTuple):
    """A method of a tensor."""

    tensor: Place | Tensor
    name: str


class StandIn:
    """Stands for one object, and lets nobody at it."""

    __slots__ = ("real",)

    def __init__(self, real: Any) -> None:
        """Stand for an object."""
        _set_real(self, real)

    def __getattribute__(self, name: str) -> Any:
        """Return what stands for an attribute."""
        return attribute(real_of(self), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what stands for the result of a call."""
        return called(real_of(self), args, kwargs)

    def __len__(self) -> int:
        """Return how many samples, or parts, there are."""
        real = real_of(self)
        return real.shape[0] if _is_tensor(real, "__len__") else len(_noted_parts(real))

    def __iter__(self) -> Iterator[Any]:
        """Go through what stands for the parts."""
        parts = _noted_parts(real_of(self))
        for number, part in enumerate(parts):
            note(getitem, parts, number, part)
            yield _known(part)

    def __getitem__(self, key: Any) -> Any:
        """Return what stands for a part."""
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

# Past the methods above.
real_of: Callable[[StandIn], Any]
_set_real: Callable[[StandIn, Any], None]
real_of, _set_real = vars(StandIn)["real"].__get__, vars(StandIn)["real"].__set__


def _is_tensor(real: Any, name: str) -> bool:
    """Tell whether it is a tensor, with a method that is torch's."""
    return isinstance(real, Place) and is_own(name)


def called(real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what stands for the result of a call.

    Args:
        real: What is called.
        args: Stand-ins, and what has none as it cannot change.
        kwargs: The same.

    Raises:
        UnknownError: It is not known, as it is for errors of Python's that follow.
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
    """Return the place that a single argument stands for."""
    place = real_of(x)
    if not isinstance(place, Place):
        raise UnknownError("it is called with something else than a tensor")
    return place


def _method(
    place: Place, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what stands for the result of a method, or a function of its name."""
    if name == "squeeze" and not (args or kwargs) and place.shape[0] > 1:
        return _after(place, SQUEEZED)  # a chain if that was its only axis of one entry
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
    """Return what a product with a matrix is; of more axes none is a chain."""
    return _times(place, _weight(_turned(_weight(weight))))


def _linear(place: Place, weight: StandIn, bias: StandIn | None = None) -> StandIn:
    """Return what stands for what a linear layer gives."""
    product = _times(place, _weight(weight))
    return StandIn(product) if bias is None else _biased(product, bias)


def _times(place: Place, matrix: Tensor) -> Place:
    if matrix.dim() != 2:
        raise UnknownError("it is no matrix")
    return place.after([Linear(matrix, None)])


def _biased(place: Place, bias: StandIn) -> StandIn:
    """Return what stands for a product with a matrix to which a vector is added."""
    product, vector = place.layer, _weight(bias)
    # Others are broadcast in some other way.
    if type(product) is not Linear or product.bias is not None or vector.dim() != 1:
        raise UnknownError("it is no bias")
    return StandIn(place.replaced(product._replace(bias=vector)))


def _weight(value: StandIn) -> Tensor:
    """Return the tensor that code has from outside."""
    weight = real_of(value)
    if type(weight) not in WEIGHTS:
        raise UnknownError("it is no tensor from outside")
    return weight


def _turned(weight: Tensor) -> StandIn:
    """Return what stands for a matrix with its axes exchanged."""
    value = turned(weight)
    note(turned, weight, None, value)
    return StandIn(value)


def _getattr(value: StandIn, name: str) -> Any:
    return attribute(real_of(value), name)


def _known(value: Any) -> Any:
    """Return what stands for a value: itself, where it cannot change."""
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
    """Return what stands for an attribute.

    Raises:
        UnknownError: It is not known, as it is for errors of Python's that follow.
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
    """Return what stands for an attribute of a module."""
    value, is_method = looked_up(module, name)
    note(method_of if is_method else value_of, module, name, value)
    return StandIn(MethodType(value, module)) if is_method else _known(value)


def _noted_parts(real: Any) -> Sequence[Any]:
    parts = parts_of(real)
    note(parts_of, real, None, parts)
    note(length, parts, None, len(parts))
    return parts


def _item(real: Any, key: Any) -> Any:
    """Return what stands for a part."""
    if _is_tensor(real, "__getitem__"):
        return _after(real, *taken(real.shape, key))
    part = part_of(real, key)
    note(part_of, real, key, part)
    return StandIn(part) if type(key) is slice else _known(part)


def _gathered(name: str, tensors: Any, dim: object = 0) -> StandIn:
    """Return what stands for vectors one behind the other, or numbers in a row."""
    if type(dim) is not int or dim not in (1, -1) or type(tensors) not in (tuple, list):
        raise UnknownError("it puts together something else")
    places = [*map(_place, tensors)]
    if name == "stack":
        places = [it.after(unsqueezed(it.shape, -1)) for it in places]
    return StandIn(gathered(places))
