"""Nested arguments and outputs, flattened."""

import copy
import dataclasses
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import optree
import torch
from optree import PyTreeSpec
from torch import Tensor, nn

from gradlib.more_attributes import OPENED, more_attributes
from gradlib.opaque import is_tensor

NAMESPACE = "gradlib"  # of the classes that optree opens for us alone
DEEPEST = 100  # levels opened one by one where optree cannot open the whole


@dataclass(slots=True)
class Tree:
    """A nested structure as a list of leaves and the shape of the nesting.

    Opened to any depth: tuples, lists, dicts, named tuples, dataclasses, and subclasses
    of dict, as many models return them; of the last two also other attributes that hold
    tensors. ``None`` is a leaf: an absent argument keeps its place. An object that
    cannot be copied without its values, lacks some of them or contains itself is a leaf
    too.
    """

    leaves: list[Any]
    spec: PyTreeSpec

    @classmethod
    def of(cls, structure: object) -> "Tree":
        """Flatten `structure`."""
        return cls(*flatten(structure))

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell ``pickle`` how to make it again: a spec refers to this process alone."""
        return _made_again, (self.form(), self.leaves)

    def build(self) -> Any:
        """Return the structure."""
        return _built(self.spec, self.leaves)

    def filled(self, values: Mapping[Any, object]) -> Any:
        """Return the structure with `values` by position, and ``None`` elsewhere."""
        return _built(self.spec, [values.get(it) for it in range(len(self.leaves))])

    def form(self) -> Any:
        """Return the structure with each leaf replaced by its position."""
        return self.filled({place: place for place in range(len(self.leaves))})

    def map(self, function: Callable[[Any], object]) -> "Tree":
        """Return the tree with each leaf replaced by `function` of it."""
        return Tree(list(map(function, self.leaves)), self.spec)

    def is_leaf(self) -> bool:
        """Tell whether the structure is one bare leaf."""
        return self.spec.is_leaf()

    def own_order(self) -> list[int]:
        """Return the positions in the order that dicts have, which leaves do not."""
        return [*_positions(self.form())]

    def path(self, position: int) -> str:
        """Return the path to a leaf, written as code: ``[0]['mask'].value``."""
        return written(self.spec.paths()[position])

    def paths(self) -> list[str]:
        """Return the path to each leaf."""
        return [*map(written, self.spec.paths())]


def _made_again(form: Any, leaves: list[Any]) -> Tree:
    places, spec = flatten(form)
    return Tree([leaves[place] for place in places], spec)


def written(steps: Iterable[Any]) -> str:
    """Return the steps to a leaf, as a spec gives them, written as code."""
    return "".join(map(_step, steps))


def _step(step: Any) -> str:
    return f".{step}" if isinstance(step, _Attribute) else f"[{step!r}]"


def flatten(structure: object) -> tuple[list[Any], PyTreeSpec]:
    """Return the leaves and the spec of `structure`, which make a `Tree`."""
    kind, parts = type(structure), cast(Any, structure)
    if kind in _ATOMS:
        return [structure], _BARE
    if kind is tuple and _ATOMS.issuperset(map(type, parts)):
        return [*parts], _flat(len(parts))
    try:
        return _flattened(structure)
    except Exception:  # of a user's class, or as something contains itself
        return _flattened(structure, _found_closed)


def _flattened(
    structure: object, find_closed: Callable[[object], Any] = lambda _: None
) -> tuple[list[Any], PyTreeSpec]:
    tried: set[type[Any]] = {Tensor}
    while True:
        leaves, spec = optree.tree_flatten(
            cast(Any, structure),
            find_closed(structure),
            none_is_leaf=True,
            namespace=NAMESPACE,
        )
        # A class met for the first time is a leaf, once.
        kinds: set[type[Any]] = set(map(type, leaves)) - tried
        if not sum(map(_made_open, kinds)):  # not any(), which stops at the first
            return leaves, spec
        tried |= kinds


def _found_closed(structure: object) -> Callable[[object], bool]:
    """Return a function that tells whether an object in a structure stays closed.

    An object does that its class does not let us open, or that contains itself.
    """
    closed: set[int] = set()
    _find_closed(structure, closed, {}, [])
    return lambda thing: id(thing) in closed


def _find_closed(
    thing: object, closed: set[int], seen: dict[int, object], around: list[object]
) -> None:
    """Add to `closed` the ids of what stays closed in `thing`, nested in `around`."""
    if id(thing) in seen:
        places = [place for place, it in enumerate(around) if it is thing]
        closed.update(id(it) for place in places for it in around[place:])
        return
    seen[id(thing)] = thing
    try:
        parts = _parts(thing) if len(around) < DEEPEST else None
    except Exception:
        parts = None
    if parts is None:
        closed.add(id(thing))
        return
    around.append(thing)
    for part in parts:
        _find_closed(part, closed, seen, around)
    around.pop()


def _parts(thing: Any) -> list[Any]:
    """Return the direct parts of a thing; none for a leaf."""
    are_inside = itertools.chain((False,), itertools.repeat(True))
    parts, spec = optree.tree_flatten(
        thing, lambda _: next(are_inside), none_is_leaf=True, namespace=NAMESPACE
    )
    return [] if spec.is_leaf() else parts


def _positions(form: Any) -> Iterator[int]:
    """Give the leaves of a form, those of a dict in its own order."""
    if type(form) is int:
        yield form
    is_dict = type(form) in _OPEN
    for part in cast(Any, form).values() if is_dict else _parts(form):
        yield from _positions(part)


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], PyTreeSpec]:
    """Return the leaves and the spec of ``(args, kwargs)``, which make a `Tree`."""
    # The arguments of most calls are not nested.
    if not kwargs and _ATOMS.issuperset(map(type, args)):
        return list(args), _flat_call(len(args))
    return flatten((args, kwargs))


# Exact types of what is no structure: most calls take and return nothing else.
_ATOMS = frozenset(
    {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype}
)


def _spec_of(structure: Any) -> PyTreeSpec:
    made = cast(Any, optree).tree_structure
    return made(structure, none_is_leaf=True, namespace=NAMESPACE)


_BARE = _spec_of(0)


@cache
def _flat(count: int) -> PyTreeSpec:
    return _spec_of((0,) * count)


@cache
def _flat_call(count: int) -> PyTreeSpec:
    return _spec_of(((0,) * count, {}))


def tensors_in(structure: object) -> list[Tensor]:
    """Return the tensors of a nested structure, in order."""
    return [leaf for leaf in Tree.of(structure).leaves if is_tensor(leaf)]


def tensors_in_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, also nested, in order."""
    leaves: Iterable[Any] = (*args, *kwargs.values())
    if not _ATOMS.issuperset(map(type, leaves)):
        leaves, _ = flatten((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _built(spec: PyTreeSpec, leaves: Sequence[object]) -> Any:
    """Return a structure of leaves."""
    if spec is _BARE:
        return leaves[0]
    try:
        return spec.unflatten(leaves)
    except Exception:  # a class that checks its values
        return _unchecked(spec, iter(leaves))


def _unchecked(spec: PyTreeSpec, leaves: Iterator[object]) -> Any:
    """Return a structure whose named tuples are made without their own checks.

    A packed sequence refuses to be made of gradients, most of which are ``None``.
    """
    if spec.is_leaf():
        return next(leaves)
    parts = [_unchecked(child, leaves) for child in spec.children()]
    if spec.type is not None and hasattr(spec.type, "_fields"):
        return cast(Any, tuple).__new__(spec.type, parts)
    return cast(Any, spec).one_level().unflatten(parts)


class _Attribute(str):
    """The name of an attribute, in the path to a leaf."""

    __slots__ = ()


_OPEN = frozenset({dict, OrderedDict, defaultdict})
"""The dicts that optree opens by itself."""


@cache
def _made_open(kind: type[Any]) -> bool:
    """Teach optree to open a class, if it is a dataclass or a subclass of dict."""
    if kind in _OPEN:
        return False  # it is a leaf only if it contains itself
    if issubclass(kind, dict):
        flattener = _flatten_dict
    elif dataclasses.is_dataclass(kind):
        flattener = _flatten_dataclass
    else:
        return False
    register = cast(Any, optree).register_pytree_node
    register(kind, flattener, _unflatten, namespace=NAMESPACE)
    return True


def _flatten_dict(
    source: dict[Any, Any],
) -> tuple[list[Any], Any, list[Any]]:
    more = more_attributes(source, source.keys())
    names, values = list(source), list(source.values())
    if more:
        names += map(_Attribute, more)
        values += more.values()
    return values, _emptied(source, names, more), names


def _flatten_dataclass(source: Any) -> tuple[list[Any], Any, list[Any]]:
    names = _fields_of(type(cast(object, source)))
    values = [getattr(source, name) for name in names]
    if more := more_attributes(source, names):
        names = [*names, *map(_Attribute, more)]
        values += more.values()
    return values, _emptied(source, names, more), names


@cache
def _fields_of(kind: type[Any]) -> list[_Attribute]:
    return [_Attribute(it.name) for it in dataclasses.fields(kind)]


@dataclass(slots=True)
class _Form:
    """An object without its values. Two of one class are equal if their names are."""

    template: Any = field(compare=False)  # the user's class may compare in any way
    names: list[Any]


def _emptied(source: Any, names: Iterable[Any], more: Collection[str]) -> _Form:
    """Return the form of `source`, which holds none of its values.

    Args:
        source: The object.
        names: The names of its values.
        more: Those of attributes that it has besides its items or fields.

    Raises:
        Exception: `source` cannot be copied; its class decides what it raises.
    """
    form = _Form(source, list(names))
    nothing = [None] * len(form.names)
    form.template = _unflatten(form, nothing)
    if more:
        vars(form.template)[OPENED] = (*more,)
    _unflatten(form, nothing)  # as `Tree.build` will
    return form


def _unflatten(form: _Form, values: Iterable[Any]) -> Any:
    made = copy.copy(form.template)
    if made is form.template:
        raise TypeError("its copy is the object itself")
    is_dict = issubclass(type(made), dict)
    for name, value in zip(form.names, values, strict=True):
        if not is_dict:
            object.__setattr__(made, name, value)
        elif type(name) is _Attribute:
            vars(made)[name] = value
        else:
            cast(Any, dict).__setitem__(made, name, value)
            # Some subclasses of dict show their keys as attributes too.
            if isinstance(name, str) and name in vars(made):
                vars(made)[name] = value
    return made
