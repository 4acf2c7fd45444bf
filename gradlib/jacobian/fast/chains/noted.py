"""Where it is noted what is read to find a chain, while somebody wants that."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

Read: TypeAlias = Callable[[Any, Any], Any]
"""Of what was read before, and a name or the like: what is read."""

Found: TypeAlias = tuple[tuple[Any, str, Any], ...]
"""Where things are, by which name, and what was there."""


class Notes(Protocol):
    """Takes down what is read."""

    def add(self, read: Read, owner: Any, name: Any, value: Any) -> None:
        """Take down a reading."""
        ...

    def add_own(self, found: Found) -> None:
        """Take down what has to be torch's own, or Python's."""
        ...


class _Thread(threading.local):
    notes: Notes | None = None


_thread = _Thread()


@contextmanager
def noting(notes: Notes) -> Generator[None]:
    """Have notes take down what this thread reads."""
    before, _thread.notes = _thread.notes, notes
    try:
        yield
    finally:
        _thread.notes = before


def note(read: Read, owner: Any, name: Any, value: Any) -> None:
    """Note that something was read, which reads it again.

    Args:
        read: How.
        owner: Of what: something that was read before.
        name: By which name, or the like.
        value: What it gave.
    """
    notes = _thread.notes
    if notes is not None:
        notes.add(read, owner, name, value)


def note_own(found: Found) -> None:
    """Note that something had to be torch's own, or Python's."""
    notes = _thread.notes
    if notes is not None:
        notes.add_own(found)


def length(value: Any, _: None = None) -> int:
    """Return how many parts there are."""
    return len(value)
