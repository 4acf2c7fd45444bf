"""Values as JSON and plain tensors, and back. Nothing that is read back is run."""

import copyreg
import dataclasses
import hashlib
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
import optree
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gradlib.errors import NotStorableError
from gradlib.more_attributes import WithAttributes, more_attributes
from gradlib.opaque import NotSaved
from gradlib.subclasses import UnknownToClassError, if_known

Class: TypeAlias = tuple[type[Any], Callable[[Any], Any], Callable[[Any], Any]]
"""A class, the function that makes an object plain, and the one that reverses that."""


class Writer:
    """Turns values into JSON, and gathers the tensors in them.

    A value that JSON has no form for becomes an object with one key: what it is.
    """

    def __init__(self, classes: Mapping[str, Class]) -> None:
        """Begin with no tensor; `classes` are the other ones that can be written."""
        self._classes = classes
        self.tensors: dict[str, Tensor] = {}
        # The tensor is held too: its id is unique only while it lives.
        self._by_id: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        self._by_content: dict[Any, str] = {}

    def written(self, value: Any) -> Any:
        """Return the JSON form of a value."""
        for name, (kind, plain, _) in self._classes.items():
            if isinstance(value, kind):
                return {name: self.written(plain(value))}
        match value:
            case None | bool() | str():
                return value
            case int():  # Python writes no decimal number of thousands of digits
                is_short = value.bit_length() <= 64
                return value if is_short else {"int": hex(value)}
            case float():
                return value if math.isfinite(value) else {"float": repr(float(value))}
            case complex():
                return {"complex": self._all([value.real, value.imag])}
            case Tensor():
                if id(value) not in self._by_id:
                    self._by_id[id(value)] = value, self._tensor(value)
                return self._by_id[id(value)][1]
            case NotSaved():
                return {"not saved": value.text}
            case list():
                return self._all(value)
            case dict():
                return self._dict(cast(dict[Any, Any], value))
            case tuple():
                return self._tuple(cast(tuple[Any, ...], value))
            case np.generic() if isinstance(value.item(), bool | int | float | complex):
                return self.written(value.item())
            case np.ndarray() if cast(Any, value).dtype.kind in "biufc":
                return self._array(value)
            case _:
                return self._object(value)

    def _array(self, value: Any) -> dict[str, Any]:
        try:
            return {"ndarray": self.written(tensor_of(value))}
        except TypeError:  # long doubles, which torch does not have
            return {"not saved": repr(value)}

    def _all(self, values: Any) -> list[Any]:
        return [self.written(value) for value in values]

    def _tuple(self, value: tuple[Any, ...]) -> dict[str, Any]:
        if optree.is_namedtuple(value):
            fields = cast(Any, optree).namedtuple_fields(value)
        elif optree.is_structseq(value):  # as torch.max(x, dim=0) returns
            fields = cast(Any, optree).structseq_fields(value)
        else:
            tag = "size" if isinstance(value, torch.Size) else "tuple"
            return {tag: self._all(value)}
        return self._named("namedtuple", value, fields, value)

    def _dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        tag = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        items = {tag: [self._all(pair) for pair in value.items()]}
        more = more_attributes(value, value.keys())
        return {"with attributes": [items, self._dict(more)]} if more else items

    def _object(self, value: Any) -> dict[str, Any]:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            values = [getattr(value, name) for name in names]
            more = more_attributes(value, names)
            both = [*names, *more], [*values, *more.values()]
            return self._named("dataclass", value, *both)
        untyped = cast(Any, optree)
        if untyped.tree_is_leaf(value, none_is_leaf=True):
            return {"not saved": repr(value)}
        children = untyped.tree_flatten_one_level(value, none_is_leaf=True)[0]
        return {"tuple": self._all(children)}

    def _named(self, tag: str, value: Any, names: Any, values: Any) -> dict[str, Any]:
        return {tag: [type(value).__name__, list(names), self._all(values)]}

    def _tensor(self, tensor: Tensor) -> dict[str, Any]:
        if tensor.is_meta:
            return {"meta": [str(tensor.dtype), list(tensor.shape)]}
        plain, digest = _plain(tensor)
        key = plain.dtype, plain.shape, digest
        if key not in self._by_content:
            self._by_content[key] = str(len(self._by_content))
            self.tensors[self._by_content[key]] = plain
        tag = "complex tensor" if tensor.is_complex() else "tensor"
        return {tag: self._by_content[key]}


class Reader:
    """Turns JSON back into values; the inverse of `Writer`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], classes: Mapping[str, Class]
    ) -> None:
        """Take the tensors, by number, and the classes, as they were given to write."""
        self._tensors = tensors
        self._classes = classes
        self._complex = cache(self._complex_tensor)

    def read(self, written: Any) -> Any:
        """Return the value of a JSON form."""
        if isinstance(written, list):
            return [self.read(part) for part in cast(list[Any], written)]
        if not isinstance(written, dict):
            return written
        ((tag, body),) = cast(dict[str, Any], written).items()
        if tag in self._classes:
            return self._classes[tag][2](self.read(body))
        match tag:
            case "tensor":
                return self._tensors[body]
            case "complex tensor":
                return self._complex(body)
            case "meta":
                return torch.empty(body[1], dtype=dtype_named(body[0]), device="meta")
            case "ndarray":
                return self.read(body).numpy()
            case "int":
                return int(body, 16)
            case "float":
                return float(body)
            case "complex":
                return complex(*self.read(body))
            case "tuple":
                return tuple(self.read(body))
            case "size":
                return torch.Size(self.read(body))
            case "dict":
                return dict(_distinct(self.read(body)))
            case "OrderedDict":
                return OrderedDict(_distinct(self.read(body)))
            case "with attributes":
                return WithAttributes(*self.read(body))
            case "namedtuple" | "dataclass":
                name, fields, values = body
                return _class(tag, name, tuple(fields))(*self.read(values))
            case "not saved":
                return NotSaved(body)
            case _:
                raise ValueError(f"nothing is written as {tag!r}")

    def _complex_tensor(self, number: str) -> Tensor:
        return torch.view_as_complex(self._tensors[number])


def _distinct(pairs: list[Any]) -> list[tuple[Any, Any]]:
    """Return a dict's pairs; keys that the file no longer tells apart get numbers."""
    distinct: dict[Any, Any] = {}
    for key, value in pairs:
        own, count = key, 1
        while own in distinct:
            count += 1
            own = NotSaved(f"{getattr(key, 'text', repr(key))} ({count})")
        distinct[own] = value
    return [*distinct.items()]


class _Made(type):
    """The type of a class that is made from its description in a file.

    No module has the class, so ``pickle`` is told how to make it again.
    """

    made_of: tuple[str, str, tuple[str, ...]]


@cache  # the same class each time, so that values of two recordings are comparable
def _class(tag: str, name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    if tag == "namedtuple":
        # Not typing.NamedTuple: the fields are known only now.
        made = cast(Any, namedtuple)(name, fields, rename=True)
    else:
        # They may have been keys of a dict: then their class was hashable too.
        made = dataclasses.make_dataclass(name, fields, unsafe_hash=True)
    kind = _Made(name, (made,), {"__doc__": made.__doc__})
    kind.made_of = tag, name, fields
    return kind


copyreg.pickle(cast(Any, _Made), lambda kind: (_class, kind.made_of))


def tensor_of(array: Any) -> Tensor:
    """Return a NumPy array as a tensor of the CPU, whatever its byte order."""
    return torch.tensor(array.astype(array.dtype.newbyteorder("=")), device="cpu")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that prints as `name`: ``torch.float32``."""
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _plain(tensor: Tensor) -> tuple[Tensor, bytes]:
    """Return a dense copy on the CPU, complex numbers as two parts, and its digest.

    Always a copy: reading the memory of a recorded tensor that shares it copy-on-write
    would end the sharing for good.
    """
    try:
        values, content = if_known(lambda: _dense(tensor), [tensor])
    except (RuntimeError, TypeError, UnknownToClassError) as error:
        raise _not_storable(tensor) from error
    if not _is_read_back(values.dtype):
        raise _not_storable(tensor)
    return values, hashlib.sha256(content).digest()


def _dense(tensor: Tensor) -> tuple[Tensor, Any]:
    """Return the values of a tensor, and the same values as bytes of NumPy."""
    values = tensor.detach().cpu().to_dense().resolve_conj()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.clone(memory_format=torch.contiguous_format)
    return values, values.reshape(-1).view(torch.uint8).numpy()


@cache
def _is_read_back(dtype: torch.dtype) -> bool:
    """Tell whether safetensors reads a dtype: it writes some that it does not read."""
    try:
        written = safetensors.torch.save(
            {"one": torch.empty(1, dtype=dtype, device="cpu")}
        )
        return safetensors.torch.load(written)["one"].dtype == dtype
    except (SafetensorError, KeyError, ValueError):
        return False


def _not_storable(tensor: Tensor) -> NotStorableError:
    nested = "nested " * tensor.is_nested
    return NotStorableError(
        f"A {nested}tensor of type {type(tensor).__name__}, layout {tensor.layout} and "
        f"dtype {tensor.dtype} cannot be written to a file. Leave it out with "
        "record(..., modules=...) or record(..., keep=...), or turn it into a plain "
        "tensor with record(..., reduce=...)."
    )
