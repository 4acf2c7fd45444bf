"""Notes what is read to find a chain, in a thread that has asked for notes."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

Read: TypeAlias = Callable[[Any, Any], Any]
"""Reads something of an owner, which was read before, by a name or the like."""

Found: TypeAlias = tuple[tuple[Any, str, Any], ...]
"""Attributes that must stay torch's own, or Python's: the namespace, name and value."""


class Notes(Protocol):
    """Takes notes of what is read.

    Attributes:
        complete: Whether all readings could be noted.
    """

    complete: bool

    def add(self, read: Read, owner: Any, name: Any, value: Any) -> None:
        """Note a reading."""
        ...

    def add_own(self, found: Found) -> None:
        """Note attributes that must stay torch's own, or Python's."""
        ...


class _Thread(threading.local):
    notes: Notes | None = None


_thread = _Thread()


@contextmanager
def noting(notes: Notes) -> Generator[None]:
    """Have `notes` note what this thread reads in the block."""
    before, _thread.notes = _thread.notes, notes
    try:
        yield
    finally:
        _thread.notes = before


def note(read: Read, owner: Any, name: Any, value: Any) -> None:
    """Note a reading, so that it can be repeated: ``read(owner, name)`` gave `value`.

    Args:
        read: The function that reads.
        owner: The object read from, itself read before.
        name: The name, or the like, that was read.
        value: The result.
    """
    notes = _thread.notes
    if notes is not None:
        notes.add(read, owner, name, value)


def note_missing() -> None:
    """Note that something was not there: later it may be, and no reading tells."""
    notes = _thread.notes
    if notes is not None:
        notes.complete = False


def note_own(found: Found) -> None:
    """Note attributes that must stay torch's own, or Python's."""
    notes = _thread.notes
    if notes is not None:
        notes.add_own(found)


def length(value: Any, _: None = None) -> int:
    """Return the length of a value, as a `Read`."""
    return len(value)
