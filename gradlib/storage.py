"""Files: plain values and tensors, written as one safetensors file with a checksum.

Never pickle: reading a file runs none of its contents. The file holds each tensor once,
however often it occurs, and everything else as JSON. The JSON is in a tensor of bytes:
the header of a safetensors file has no room for a long recording.
"""

import copyreg
import dataclasses
import hashlib
import json
import math
import os
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeAlias, cast

import numpy as np
import optree
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from gradlib.errors import BrokenFileError, NotStorableError
from gradlib.private.modes import no_transforms
from gradlib.stats import UnknownToClassError, if_known

FORMAT = "gradlib recording"
VERSION = "1"

BLANK = "0" * 64  # stands for the checksum while it is computed
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_JSON = "json"  # the name of the tensor that holds the JSON; the others have numbers

Class: TypeAlias = tuple[type[Any], Callable[[Any], Any], Callable[[Any], Any]]
"""A class, the function that makes an object plain, and the one that reverses that."""


class NotSaved:
    """Stands for a value that a recording, or its file, cannot hold.

    Attributes:
        text: The name of the value's class, or its ``repr``.
    """

    # Not a dataclass: those are opened like tuples, and this is one value.

    def __init__(self, text: str) -> None:
        """Take the text that describes the value."""
        self.text = text

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is a `NotSaved` with the same `text`."""
        return isinstance(other, NotSaved) and other.text == self.text

    def __hash__(self) -> int:
        """Agree with ``==``, so that a `NotSaved` can be a key."""
        return hash(self.text)

    def __repr__(self) -> str:
        """Show the text that describes the value."""
        return f"NotSaved({self.text})"


def save(
    path: str | os.PathLike[str], content: object, classes: Mapping[str, Class]
) -> None:
    """Write `content` into a file, whole or not at all.

    Args:
        path: Where to write. A file already there stays as it was until the new one is
            complete.
        content: Plain values and tensors, nested to any depth.
        classes: The other classes to be stored, each by the name the file gives it.

    Raises:
        NotStorableError: A tensor is of a kind that a file cannot hold, a value is
            nested too deep, or what is at `path` is no regular file.
    """
    writer = _Writer(classes)
    try:
        with no_transforms():
            written = writer.written(content)
        text = json.dumps(written, allow_nan=False).encode()
    except RecursionError as error:
        raise NotStorableError(
            "A list, tuple or dict in this holds others, hundreds of levels deep, and "
            "a file cannot. Leave it out with record(..., modules=...) or "
            "record(..., keep=...)."
        ) from error
    writer.tensors[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    metadata = {"format": FORMAT, "version": VERSION, "sha256": BLANK}
    data = safetensors.torch.save(writer.tensors, metadata)
    _replace(Path(path).resolve(), _sealed(data))


def load(path: str | os.PathLike[str], classes: Mapping[str, Class]) -> Any:
    """Return what was saved in a file, with tensors on the CPU.

    Args:
        path: The file.
        classes: As they were given to `save`.

    Raises:
        BrokenFileError: The file has another format, or is not as it was written.
    """
    data = Path(path).read_bytes()
    _check(path, data)
    try:
        with no_transforms():
            tensors = safetensors.torch.load(data)
            text = tensors.pop(_JSON).numpy().tobytes()
            return _Reader(tensors, classes).read(json.loads(text))
    except Exception as error:  # a forged file may lead to anything
        raise BrokenFileError(
            f"{path} has the checksum of a recording and not its contents "
            f"({type(error).__name__}: {error}). Record again, and save again."
        ) from error


class _Writer:
    """Turns values into JSON, and gathers the tensors in them.

    A value that JSON has no form for becomes an object with one key: what it is.
    """

    def __init__(self, classes: Mapping[str, Class]) -> None:
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
        return {tag: [self._all(pair) for pair in value.items()]}

    def _object(self, value: Any) -> dict[str, Any]:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            values = [getattr(value, name) for name in names]
            return self._named("dataclass", value, names, values)
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


class _Reader:
    """Turns JSON back into values; the inverse of `_Writer`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], classes: Mapping[str, Class]
    ) -> None:
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
    """Return a NumPy array as a tensor, whatever its byte order."""
    return torch.tensor(array.astype(array.dtype.newbyteorder("=")))


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
    values = tensor.detach().cpu()
    values = values if values.layout == torch.strided else values.to_dense()
    values = values.resolve_conj()
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


def _sealed(data: bytes) -> list[bytes | memoryview]:
    """Put the checksum of `data` into its header, in place of `BLANK`."""
    digest = hashlib.sha256(data).hexdigest().encode()
    found = _CHECKSUM.search(data)
    assert found is not None
    at = found.start(1)
    return [data[:at], digest, memoryview(data)[at + len(digest) :]]


def _replace(path: Path, parts: list[bytes | memoryview]) -> None:
    """Write a temporary file beside `path`, then move it there."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise NotStorableError(
            f"{path} is no regular file, and would be replaced by one. Give the path "
            "of a file, which need not be there."
        )
    beside = path.with_name(f".gradlib-{token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            if path.exists():
                beside.chmod(path.stat().st_mode)
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        if error.filename is None:
            raise
        # The error names the temporary file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def _check(path: str | os.PathLike[str], data: bytes) -> None:
    """Raise unless `data` is our format, this version, and as it was written."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    metadata = _metadata(header)
    if metadata is None:
        raise BrokenFileError(
            f"{path} is no safetensors file, or its beginning is damaged. Give "
            "load_recording() a file that Recording.save() wrote."
        )
    if metadata.get("format") != FORMAT:
        raise BrokenFileError(
            f"{path} is a safetensors file, but holds no recording. Give "
            "load_recording() a file that Recording.save() wrote."
        )
    if metadata.get("version") != VERSION:
        raise BrokenFileError(
            f"{path} has version {metadata.get('version')} of the format, and this "
            f"gradlib reads version {VERSION}. Load it with the gradlib that saved it."
        )
    found = _CHECKSUM.search(header)
    blank = hashlib.sha256(data[:8])
    if found is not None:
        blank.update(header[: found.start(1)] + BLANK.encode() + header[found.end(1) :])
        blank.update(memoryview(data)[8 + size :])
    if found is None or found[1].decode() != blank.hexdigest():
        raise BrokenFileError(
            f"{path} was cut off or changed after it was saved: its checksum does not "
            "fit. Copy it again from where it was saved, or record again."
        )


def _metadata(header: bytes) -> dict[str, str] | None:
    """Return what a safetensors header says of the file; ``None`` if it is none."""
    try:
        return dict(json.loads(header).get("__metadata__", {}))
    except (ValueError, AttributeError, TypeError):
        return None
