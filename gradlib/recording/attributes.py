"""What modules keep in their attributes, of which a call computed again gets copies.

Copied are tensors, lists, dicts and the like, arrays and generators of random numbers.
Who would say what another object holds: of it there is one.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import is_not
from types import MemberDescriptorType
from typing import Any, cast

import optree
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributions import Distribution

from gradlib.private.classes import slots_of
from gradlib.private.modules import own_buffers
from gradlib.private.tensors import referent
from gradlib.recording.past_attributes import (
    CONTAINERS,
    DEPTH,
    MANY,
    OF_TORCH,
    Held,
    Was,
    may_hold,
)
from gradlib.recording.stateful import copied, is_stateful
from gradlib.values import clone


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that are tensors, or may hold some."""
    return [
        (name, value)
        for name, value in vars(module).copy().items()
        if name not in OF_TORCH and _is_copied(value)
    ]


def in_slots(module: nn.Module) -> dict[MemberDescriptorType, Any]:
    """Return what a module keeps in the ``__slots__`` of its class, not in `vars`."""
    found: dict[MemberDescriptorType, Any] = {}
    for slot in slots_of(type(module)):
        with suppress(AttributeError):  # it is empty
            found[slot] = slot.__get__(module, type(module))
    return found


def fill_slots(module: nn.Module, values: Mapping[MemberDescriptorType, Any]) -> None:
    """Put values into the slots of a module, and nothing into the others."""
    for slot in slots_of(type(module)):
        if slot in values:
            slot.__set__(module, values[slot])
        else:
            with suppress(AttributeError):  # it is empty
                slot.__delete__(module)


def left_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return what gradients can flow through in attributes and buffers, with names."""
    own = vars(module).copy().items()
    kept = [(name, it) for name, it in own if name not in OF_TORCH]
    for name, value in [*kept, *own_buffers(module).copy().items()]:
        for tensor in _with_graph([value], DEPTH):
            yield name, tensor


def nodes_left_in(module: nn.Module, given: Iterable[Any]) -> list[Node]:
    """Return the nodes of tensors that a call made and left, to be used later.

    In attributes, buffers and arguments, and in lists, dicts, distributions and the
    like there and in these: not in one of more than `MANY` things, since this is asked
    at every call.

    Args:
        module: Whose call it was.
        given: Its arguments.
    """
    own = vars(module)  # other threads may change it, and what is in it
    attributes = map(own.get, own.keys() - OF_TORCH)
    every = *attributes, *own_buffers(module).copy().values(), *given
    return [cast(Node, it.grad_fn) for it in _with_graph(every, DEPTH)]


def _with_graph(entries: Collection[Any], depth: int) -> list[Tensor]:
    """Return the tensors among some things, and in them, that were computed."""
    found: list[Tensor] = []
    for kind in filter(may_hold, set(map(type, entries))):
        for entry in entries:
            if type(entry) is not kind:
                continue
            if isinstance(entry, Tensor):
                try:
                    found += [entry] if entry.grad_fn is not None else []
                except Exception:  # a class of tensors may refuse to tell
                    continue
            elif depth > 1 and len(held := _held_by(entry)) <= MANY:
                found += _with_graph([*held], depth - 1)
    return found


def _held_by(container: Any) -> Collection[Any]:
    if isinstance(container, Distribution):
        return vars(container).values()
    is_dict = isinstance(container, dict)
    return cast(Any, container).values() if is_dict else container


class Copies:
    """Copies of what stands in attributes: of what stands in two places, one.

    Of a tensor that shows a part of what was copied before, the same part of the copy.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        """Begin with none; `change` gives what to copy instead of a tensor."""
        self._change = change
        # The original is held too: its id is its own only while it lives.
        self._made: dict[int, tuple[Any, Any]] = {}
        # The tensors among them by their memory, each with its copy.
        self._in_memory: dict[torch.UntypedStorage, list[tuple[Tensor, Tensor]]] = {}

    def know(self, original: Tensor | None, made: Tensor) -> None:
        """Take what was made of a parameter or buffer: an attribute may hold it too."""
        if original is not None:
            self._made[id(original)] = original, made
            memory = storage_of(original)
            if memory is not None:
                self._in_memory.setdefault(memory, []).append((original, made))

    def part_of(self, tensor: Tensor | None) -> Tensor | None:
        """Return what a tensor shows of one that was copied, seen in the copy."""
        memory = None if tensor is None else storage_of(tensor)
        if tensor is None or memory is None:
            return None
        for whole, made in self._in_memory.get(memory, ()):
            if whole is tensor:
                return made
            if _covers(whole, tensor) and _lies_like(made, whole):
                shift = tensor.storage_offset() - whole.storage_offset()
                return made.detach().as_strided(
                    tensor.size(), tensor.stride(), made.storage_offset() + shift
                )
        return None

    def of(self, value: Any) -> Any:
        """Return the copy of a tensor, of what it was, or of a container of these."""
        if not _is_copied(value):
            return value
        original = _original(value)
        if id(original) not in self._made:
            self._made[id(original)] = original, self._copied(value)
        return self._made[id(original)][1]

    def put_on_tensors(self) -> None:
        """Give the copies of parameters and buffers copies of what is kept on these."""
        for _, made in [*self._made.values()]:
            if isinstance(made, Tensor) and (state := vars(made)):
                state.update([(name, self.of(it)) for name, it in state.items()])

    def put_into(self, module: nn.Module) -> None:
        """Give a module copies of what its attributes and slots hold."""
        state, filled = vars(module), in_slots(module)
        for name, value in attributes(module):
            state[name] = self.of(value)
        fill_slots(module, {slot: self.of(value) for slot, value in filled.items()})

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
        """Return a container like another, of copies of what is in that."""
        if not isinstance(container, dict | set):
            return cast(Any, optree).tree_map(
                self.of,
                container,
                is_leaf=partial(is_not, container),
                none_is_leaf=True,
            )
        # Not by optree, which would have the keys in order, and tensors have none.
        made: Any = copy.copy(cast(Any, container))
        made.clear()
        if isinstance(container, set):
            made.update(map(self.of, cast(set[Any], container)))
        else:
            items = cast(dict[Any, Any], container).items()
            made.update((self.of(key), self.of(it)) for key, it in items)
        return made

    def _copy_of(self, value: Tensor | Was) -> Tensor:
        kept = value.value if isinstance(value, Was) else value.detach()
        # Memory shared lazily would not do: it may be the module's own, and to whoever
        # gives such a tensor another size torch raises an error.
        made = self._change(kept).clone()
        # No leaf: torch lets nobody write to one that requires grad.
        return clone(made.requires_grad_()) if value.requires_grad else made


def _is_copied(value: object) -> bool:
    if isinstance(value, Tensor | Was | Held) or type(value) in CONTAINERS:
        return True
    named: Any = optree.is_namedtuple_instance(value)
    return named or optree.is_structseq_instance(value) or is_stateful(value)


def _original(value: Any) -> Any:
    """Return what a copy is one of; of a tensor that is gone, what stands for it."""
    if isinstance(value, Held):
        return value.original
    if not isinstance(value, Was):
        return value
    tensor = referent(value.original)
    return value.original if tensor is None else tensor


def be_like(made: Tensor, original: Tensor) -> None:
    """Give a copy the class of a parameter, and the attributes that a tensor has."""
    vars(made).update(vars(original))
    is_parameter = issubclass(type(original), nn.Parameter)
    if is_parameter and type(made) in (Tensor, nn.Parameter):
        cast(Any, made).__class__ = type(original)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor, one object for all that share it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, ValueError):  # it has none, or is lazy
        return None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether some entry of one tensor is in the memory of one of another's.

    Args:
        a: A tensor.
        b: One with the same storage.
    """
    if a.dtype != b.dtype:  # their entries lie between each other's
        return True
    far = max(it.storage_offset() + extent(it) for it in (a, b))
    met = torch.zeros(far, dtype=torch.bool, device="cpu")
    met.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(met.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def _covers(whole: Tensor, part: Tensor) -> bool:
    """Tell whether all that a tensor shows of a memory is in another one too."""
    shift = part.storage_offset() - whole.storage_offset()
    return (
        whole.dtype == part.dtype
        and not (part.is_conj() or part.is_neg())
        and whole.numel() == extent(whole)  # it has no gaps
        and 0 <= shift <= extent(whole) - extent(part)
    )


def _lies_like(made: Tensor, whole: Tensor) -> bool:
    return made.size() == whole.size() and made.stride() == whole.stride()


def extent(tensor: Tensor) -> int:
    """Return from its first to its last entry how many there are in memory."""
    sizes = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in sizes) if tensor.numel() else 0
