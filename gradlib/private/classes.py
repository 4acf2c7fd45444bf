"""What is found out of a class once, for as long as the class lives."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import MemberDescriptorType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

_Found = TypeVar("_Found")


def once_for_each_class(
    find: Callable[[type[Any]], _Found],
) -> Callable[[type[Any]], _Found]:
    """Remember what a function finds of a class, and do not keep the class alive.

    A class may hold a model: ``torch.nn.utils.parametrize`` makes one for each module,
    which knows the module, and one made in a function knows the function's variables.

    Args:
        find: The function. What it returns must not hold the class either.
    """
    known = WeakKeyDictionary[type[Any], _Found]()

    @wraps(find)
    def found(kind: type[Any]) -> _Found:
        try:
            return known[kind]
        except KeyError:
            made = known[kind] = find(kind)
            return made

    return found


def slots_of(kind: type[Any]) -> list[MemberDescriptorType]:
    """Return what finds the values that objects of a class have in ``__slots__``."""
    return [
        cast(MemberDescriptorType, vars(owner)[name])
        for owner in kind.__mro__
        for name in _names_of_slots(owner)
    ]


def in_slots(thing: object) -> dict[MemberDescriptorType, Any]:
    """Return what an object keeps in the ``__slots__`` of its class, not in `vars`."""
    kind, found = type(thing), dict[MemberDescriptorType, Any]()
    for slot in slots_of(kind):
        with suppress(AttributeError):  # it is empty
            found[slot] = slot.__get__(thing, kind)
    return found


@once_for_each_class
def _names_of_slots(owner: type[Any]) -> tuple[str, ...]:
    return tuple(
        name for name, it in vars(owner).items() if isinstance(it, MemberDescriptorType)
    )
