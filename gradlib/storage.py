"""Files: values and tensors, written as one safetensors file with a checksum.

Never pickle: reading a file runs none of its contents. The file holds each tensor once,
however often it occurs, and everything else as JSON. The JSON is in a tensor of bytes:
the header of a safetensors file has no room for a long recording.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import safetensors.torch
import torch

from gradlib.errors import BrokenFileError, NotStorableError
from gradlib.plain_values import Class, Reader, Writer
from gradlib.private.modes import no_transforms

FORMAT = "gradlib recording"
VERSION = "1"

BLANK = "0" * 64  # stands for the checksum while it is computed
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_JSON = "json"  # the name of the tensor that holds the JSON; the others have numbers


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
    writer = Writer(classes)
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
            return Reader(tensors, classes).read(json.loads(text))
    except Exception as error:  # a forged file may lead to anything
        raise BrokenFileError(
            f"{path} has the checksum of a recording and not its contents "
            f"({type(error).__name__}: {error}). Record again, and save again."
        ) from error


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
