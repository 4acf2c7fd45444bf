"""Parts of messages: names, counts and values in a few words."""

import reprlib
from collections.abc import Iterable, Mapping
from os import PathLike


def in_brief(given: object) -> str:
    """Return a short repr of anything, even of a model, in one line for a message."""
    return " ".join(reprlib.repr(given).split())  # a user's own __repr__ may raise


def listed(names: Iterable[object], most: int = 3) -> str:
    """Return the first `most` names, and how many more there are."""
    every = [*map(str, names)]
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def in_bytes(size: int) -> str:
    """Return a number of bytes in words, as ``"1.5 MiB"``."""
    units = "bytes", "KiB", "MiB", "GiB", "TiB"
    power = max(it for it in range(len(units)) if size >= 1024**it or not it)
    return f"{size / 1024**power:.4g} {units[power]}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return how many of something there are: ``1 call``, ``2 calls``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def with_article(kind: str) -> str:
    """Return the name of a class with its spoken article: ``a Linear``, ``an LSTM``."""
    is_spelled = kind[:2].isupper()
    spoken_as_vowels = "AEFHILMNORSX" if is_spelled else "AEIOU"
    return f"{'an' if kind[:1].upper() in spoken_as_vowels else 'a'} {kind}"


_OF_WEIGHTS: tuple[type, ...] = (str, PathLike, Mapping)


def no_module(given: object, otherwise: str) -> str:
    """Return the part of a message on why `given` is no module, and what to do."""
    if isinstance(given, type):
        name = given.__name__
        return f"it is the class {name}, not an instance: make one, as {name}(...)."
    if isinstance(given, _OF_WEIGHTS):
        otherwise = (
            "A file or a state_dict() holds weights alone: make the module, and load "
            "them into it by load_state_dict()."
        )
    return f"it is of type {type(given).__name__}. {otherwise}"
