"""Tensors in attributes of an object, besides the items or fields by which it opens.

A dict class may keep some in attributes that are no keys, and code may give a dataclass
an attribute that is no field.
"""

from collections.abc import Collection
from typing import Any, cast

from gradlib.opaque import is_tensor

OPENED = "_gradlib_opened"
"""The attribute in which a copy of such an object has the names of these attributes:
in the place of a tensor it may hold anything."""


class WithAttributes(dict[Any, Any]):
    """A dict that was read from a file, with the attributes that its class had."""

    def __init__(self, items: dict[Any, Any], attributes: dict[str, Any]) -> None:
        """Take the items and the attributes."""
        super().__init__(items)
        vars(self).update(attributes, **{OPENED: tuple(attributes)})


def more_attributes(source: object, known: Collection[Any]) -> dict[str, Any]:
    """Return the other attributes that hold tensors, by name.

    Args:
        source: A dict of a class of its own, or a dataclass.
        known: Its keys, or the names of its fields.
    """
    attributes: dict[str, Any] = getattr(source, "__dict__", _NONE)
    if attributes is source:
        return {}
    others = attributes.keys() - known
    if not others:
        return {}
    if (names := attributes.get(OPENED)) is not None:
        return {name: attributes[name] for name in names}
    holding = {it for it in others if _holds_tensors(attributes[it])}
    return {name: attributes[name] for name in attributes if name in holding}


def _holds_tensors(value: Any) -> bool:
    if value is None:
        return False
    kind = type(cast(object, value))
    if kind in (list, tuple):
        return any(map(is_tensor, value))
    return any(map(is_tensor, value.values())) if kind is dict else is_tensor(value)


_NONE = dict[str, Any]()
