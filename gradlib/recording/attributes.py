"""Copies of what modules keep in their attributes, for a replayed call.

Tensors, lists, dicts and the like, arrays and random generators are copied. What any
other object holds is unknown, so the replayed call gets that object itself.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from gradlib.private.classes import in_slots, slots_of
from gradlib.private.tensors import referent
from gradlib.recording.past_attributes import (
    OF_TORCH,
    Held,
    Was,
    filled,
    is_container,
    things_in,
)
from gradlib.recording.stateful import copied, is_stateful
from gradlib.shared_memory import same_part, storage_of
from gradlib.values import clone

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Maps a recorded tensor to the one that a replay uses, which is copied first."""


def fill_slots(module: nn.Module, values: Mapping[MemberDescriptorType, Any]) -> None:
    """Fill slots of a module with values, and empty its others."""
    for slot in slots_of(type(module)):
        if slot in values:
            slot.__set__(module, values[slot])
        else:
            with suppress(AttributeError):  # it is empty
                slot.__delete__(module)


class Copies:
    """Copies of what stands in attributes; an object in two places has one copy.

    A tensor that shows a part of one copied before becomes the same part of that copy.
    """

    def __init__(self, change: Change) -> None:
        """Begin with none; `change` maps a recorded tensor to the one to copy."""
        self._change = change
        # By id: the original and its copy. An id is unique only while its object lives.
        self._made: dict[int, tuple[Any, Any]] = {}
        # The tensors among them by their memory, each with its copy.
        self._in_memory: dict[torch.UntypedStorage, list[tuple[Tensor, Tensor]]] = {}

    def know(self, original: Tensor | None, made: Tensor) -> None:
        """Note the copy of a parameter or buffer: an attribute may hold that too."""
        if original is not None:
            self._made[id(original)] = original, made
            memory = storage_of(original)
            if memory is not None:
                self._in_memory.setdefault(memory, []).append((original, made))

    def know_given(self, original: weakref.ref[Tensor], given: Tensor) -> None:
        """Note what a call is given for a tensor in an attribute, which may be gone."""
        tensor = referent(original)
        known = original if tensor is None else tensor
        self._made[id(known)] = known, given

    def part_of(self, tensor: Tensor | None) -> Tensor | None:
        """Return the part of a copy that a tensor shows of the original, if any."""
        memory = None if tensor is None else storage_of(tensor)
        if tensor is None or memory is None:
            return None
        for whole, made in self._in_memory.get(memory, ()):
            if whole is tensor:
                return made
            if (part := same_part(made, whole, tensor)) is not None:
                return part
        return None

    def of(self, value: Any) -> Any:
        """Return the copy of a value, or the value itself if its kind is not copied."""
        if not _is_copied(value):
            return value
        original = _original(value)
        if id(original) not in self._made:
            self._made[id(original)] = original, self._copied(value)
        return self._made[id(original)][1]

    def put_on_tensors(self) -> None:
        """Give the copies of parameters and buffers copies of the attributes too."""
        for _, made in [*self._made.values()]:
            if isinstance(made, Tensor) and (state := vars(made)):
                state.update([(name, self.of(it)) for name, it in state.items()])

    def put_into(self, module: nn.Module) -> dict[MemberDescriptorType, Any]:
        """Give a module copies of what its attributes and slots hold.

        Returns:
            What its slots held.
        """
        state = vars(module)
        own = {name: it for name, it in state.items() if name not in OF_TORCH}
        state.update((name, self.of(it)) for name, it in own.items())
        if filled := in_slots(module):
            fill_slots(module, {slot: self.of(it) for slot, it in filled.items()})
        return filled

    def __contains__(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the copies."""
        return any(made is tensor for _, made in self._made.values())

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Held):
            value = value.value
        if is_stateful(value):
            return copied(value)
        if not isinstance(value, Tensor | Was):
            return self._filled(value)
        original = _original(value)
        if not isinstance(original, Tensor) or value.requires_grad:
            return self._copy_of(value)
        made = self.part_of(original)
        if made is None:
            made = self._copy_of(value)
            self.know(original, made)
        return made

    def _filled(self, container: Any) -> Any:
        """Return a container of the same kind, with copies of what is in this one."""
        made = copy.copy(container)
        if not isinstance(container, dict | set):
            return filled(made, [*map(self.of, things_in(container))])
        made.clear()
        if isinstance(container, set):
            made.update(map(self.of, cast(set[Any], container)))
        else:
            items = cast(dict[Any, Any], container).items()
            made.update((self.of(key), self.of(it)) for key, it in items)
        return made

    def _copy_of(self, value: Tensor | Was) -> Tensor:
        kept = value.value if isinstance(value, Was) else value.detach()
        # Not shared lazily: the memory may be the module's own, and torch raises an
        # error when such a tensor is resized.
        made = self._change(kept).clone()
        # Not a leaf: torch refuses in-place writes to a leaf that requires grad.
        return clone(made.requires_grad_()) if value.requires_grad else made


def _is_copied(value: object) -> bool:
    kind = type(value)  # not __class__, which raises in a weak proxy of what is gone
    if kind in _PLAIN:  # as nearly all attributes
        return False
    if issubclass(kind, (Tensor, Was, Held)) or is_container(kind):
        return True
    return is_stateful(value)


_PLAIN = frozenset({bool, int, float, str, type(None)})


def _original(value: Any) -> Any:
    """Return the original of a value; of a tensor that is gone, the reference to it."""
    if isinstance(value, Held):
        return value.original
    if not isinstance(value, Was):
        return value
    tensor = referent(value.original)
    return value.original if tensor is None else tensor


def be_like(made: Tensor, original: Tensor) -> None:
    """Give a copy the attributes of its original, and its class if a parameter's."""
    vars(made).update(vars(original))
    is_parameter = issubclass(type(original), nn.Parameter)
    if is_parameter and type(made) in (Tensor, nn.Parameter):
        cast(Any, made).__class__ = type(original)
