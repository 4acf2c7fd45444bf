"""How far the values of two calls are apart."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradlib.opaque import NotSaved
from gradlib.plain_tensors import wide, widest
from gradlib.plain_values import tensor_of
from gradlib.private.modes import no_function_modes
from gradlib.recording.difference import Gap, Tolerance, rtol_of
from gradlib.recording.flow import Key
from gradlib.stats import TensorStats, root_mean_square, tensor_stats
from gradlib.subclasses import UnknownToClassError, if_known
from gradlib.tree import Tree
from gradlib.values import same_values

T = TypeVar("T")


def gaps(a: object, b: object) -> Iterator[tuple[str, Gap]]:
    """Return how far the leaves of two nested values are apart, with their places."""
    return _gaps(a, b, gap)


def agree(a: object, b: object) -> bool:
    """Tell whether two nested values are equal but for rounding."""
    return all(Tolerance().allows(it) for _, it in gaps(a, b))


def gaps_of_recorded(a: object, b: object) -> Iterator[tuple[str, Gap]]:
    """Return how far the gradients of two recordings are apart.

    As `gap_of_gradients`, with a reason where only one of the two has a gradient.
    """
    return _gaps(a, b, _gap_of_recorded)


def in_one_scale(found: Iterable[tuple[T, Gap]]) -> list[tuple[T, Gap]]:
    """Measure all gaps against the largest size.

    The gradients of one module's parameters belong together: that of a bias may be only
    rounding, as before BatchNorm, too small to measure its own gap against.
    """
    found = list(found)
    size = max((it.size for _, it in found), default=0.0)
    return [(key, replace(it, size=size)) for key, it in found]


def gaps_of_shares(
    some: Mapping[Key, Any], others: Mapping[Key, Any]
) -> list[tuple[Key, Gap]]:
    """Return how far `some` of a call's shares are from the others with their keys.

    Only the keys in `some` count: a pass may have been asked for one weight only.
    """
    found = {key: gap_of_gradients(grad, others.get(key)) for key, grad in some.items()}
    inputs = [(key, it) for key, it in found.items() if isinstance(key, int)]
    own = [(key, it) for key, it in found.items() if isinstance(key, str)]
    return [*inputs, *in_one_scale(own)]


def shape_of(tensor: Tensor) -> list[Any]:
    """Return the shape of a tensor; of a nested one, that of each of its parts."""
    if tensor.is_nested:
        return [list(part.shape) for part in tensor.unbind()]
    return list(tensor.shape)


def gap(x: Any, y: Any) -> Gap:
    """Return how far two leaves are apart."""
    if _is(x, TensorStats) or _is(y, TensorStats):
        return _gap_of_stats(_stats(x), _stats(y))
    if _is(x, Tensor) and _is(y, Tensor):
        return _gap_of_tensors(x.detach(), y.detach())
    if _is(x, np.ndarray) and _is(y, np.ndarray):
        return _gap_of_arrays(x, y)
    if _is(x, _PLAIN) and _is(y, _PLAIN):
        if x == y:
            return _NONE
        try:
            number = partial(torch.tensor, device="cpu")
            return _gap_of_tensors(number(x), number(y))
        except (TypeError, ValueError, RuntimeError):  # no numbers, or too large ones
            return _incomparable(f"{x!r} and {y!r}")
    if _is(x, Tensor) or _is(y, Tensor):
        return _incomparable("only one of the two is a tensor")
    if (x is None) != (y is None) and _is(y if x is None else x, NotSaved):
        return _incomparable("only one of the two is there")
    if _is(x, _KNOWN) and _is(y, _KNOWN):
        return _incomparable("only one of the two is an array")
    return _NONE  # it is unknown when two other objects are equal


def _is(value: object, kinds: Any) -> bool:
    """Tell whether a value is of a class, by its type, as `is_tensor` does."""
    return issubclass(type(value), kinds)


_PLAIN = (int, float, complex, str, type(None), np.number, np.bool_)
_PLAIN_KEYS = (*_PLAIN, tuple, NotSaved)
_KNOWN = (np.ndarray, *_PLAIN)
_NONE = Gap(0.0, 0.0, 0.0)


def _incomparable(reason: str) -> Gap:
    return Gap(math.inf, 1.0, 0.0, reason)


def _gaps(
    a: object, b: object, measure: Callable[[Any, Any], Gap]
) -> Iterator[tuple[str, Gap]]:
    one, other = Tree.of(a), Tree.of(b)
    leaves = other.leaves
    if len(one.leaves) != len(leaves):
        yield "", _incomparable(f"{len(one.leaves)} and {len(leaves)} values")
        return
    if _differ(one, other):  # leaves may be in the order of keys, or in a dict's own
        places = _as_saved(one.spec.paths())
        known = dict(zip(_as_saved(other.spec.paths()), leaves, strict=True))
        # Where some keys look alike, in the one or the other, their order has to do.
        alike = len(known) < len(leaves) or len({*places}) < len(places)
        if not alike and known.keys() == set(places):
            leaves = [known[place] for place in places]
        elif not alike and (reason := _other_names(places, known)):
            yield "", _incomparable(reason)
            return
    paths = one.paths()
    for place in one.own_order():
        yield paths[place], measure(one.leaves[place], leaves[place])


def _differ(one: Tree, other: Tree) -> bool:
    try:
        return one.spec != other.spec
    except Exception:  # of the class of a key: a tensor compares its entries
        return True


def _as_saved(paths: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return paths in which keys that a file cannot hold are as after loading."""
    return [
        tuple(it if _is_saved(it) else NotSaved(repr(it)) for it in path)
        for path in paths
    ]


def _is_saved(key: object) -> bool:
    return isinstance(key, _PLAIN_KEYS)


def _other_names(some: Collection[Any], others: Collection[Any]) -> str:
    """Return a name only in the one structure, and one only in the other, or ``""``.

    It is empty unless both have names: a named tuple and a tuple, or a list, have their
    leaves in the same order.
    """
    one = next(it for it in some if it not in others)[-1:]
    other = next(it for it in others if it not in some)[-1:]
    named = all(isinstance(step, str | NotSaved) for step in (*one, *other))
    return f"{one[0]!r} and {other[0]!r}" if one and other and named else ""


def _zeros(x: Any, other: Any) -> Any:
    """Return `x`, or zeros like `other` if `x` is ``None``."""
    if x is not None:
        return x
    if isinstance(other, TensorStats):
        zeros = torch.zeros(other.shape, dtype=other.dtype, device="cpu")
        return tensor_stats(zeros)
    return torch.zeros_like(other) if isinstance(other, Tensor) else x


def gap_of_gradients(x: Any, y: Any) -> Gap:
    """Return how far two gradients are apart; ``None`` stands for zeros.

    autograd returns either where there is no gradient.
    """
    return gap(_zeros(x, y), _zeros(y, x))


def _gap_of_recorded(x: Any, y: Any) -> Gap:
    found = gap_of_gradients(x, y)
    if (x is None) == (y is None) or not found.difference:
        return found
    which = "this" if x is None else "the other"
    return replace(found, reason=f"None in {which} recording")


def _stats(x: Any) -> Any:
    return tensor_stats(x) if isinstance(x, Tensor) else x


def _gap_of_tensors(x: Tensor, y: Tensor) -> Gap:
    # Two classes of tensors may not know each other.
    with nullcontext() if type(x) is type(y) else no_function_modes():
        try:
            return if_known(lambda: _gap_of_values(x, y), [x, y])
        except UnknownToClassError as error:
            kinds = " and ".join({type(it).__name__: None for it in (x, y)})
            why = type(error.__cause__).__name__
            return _incomparable(f"no differences of class {kinds}: {why}")


def _gap_of_values(x: Tensor, y: Tensor) -> Gap:
    if shape_of(x) != shape_of(y):
        return _incomparable(f"shapes {shape_of(x)} and {shape_of(y)}")
    if x.is_meta or y.is_meta:
        return _NONE
    rtol = rtol_of((x.dtype, y.dtype))
    # Most that are computed again are equal, and need no difference.
    if type(x) is type(y) is Tensor and same_values(x, y):
        return Gap(0.0, _size(_wide(x)), rtol)
    given = x, y.to(x.device)
    x, y = map(_wide, given)
    # Infinite entries of the same sign agree, and so do two that are NaN.
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).masked_fill(same, 0)
    if all(map(_has_64_bits, given)):  # of which float64 holds 53
        apart = apart.masked_fill(same & (given[0] != given[1]), 1)
    difference = root_mean_square(apart)
    size = max(map(_size, (x, y)))
    if not math.isfinite(difference):
        return Gap(math.inf, 1.0, rtol, "NaN or inf in one of the two")
    return Gap(difference, size, rtol)


def _gap_of_arrays(x: Any, y: Any) -> Gap:
    """Return how far two arrays of NumPy are apart."""
    try:
        return _gap_of_tensors(tensor_of(x), tensor_of(y))
    except TypeError:  # of text or times; those of objects were not kept
        times = x.dtype.kind in "mM"  # some may be NaT, which equals itself here
        same = np.array_equal(x, y, equal_nan=times)
        return _NONE if same else _incomparable("other entries")


def _gap_of_stats(x: Any, y: Any) -> Gap:
    if not (isinstance(x, TensorStats) and isinstance(y, TensorStats)):
        return _incomparable("only one of the two is a tensor")
    if x.shape != y.shape:
        return _incomparable(f"shapes {list(x.shape)} and {list(y.shape)}")
    if math.isnan(x.nonfinite) or math.isnan(y.nonfinite):
        return _NONE  # on the meta device, where there are no values
    if x.nonfinite or y.nonfinite:
        same = x.nonfinite == y.nonfinite
        return _NONE if same else _incomparable("NaN or inf in one of the two")
    count = math.sqrt(max(x.shape.numel(), 1))
    rtol = rtol_of((x.dtype, y.dtype))
    differences = [abs(x.norm - y.norm) / count]
    if x.shape.numel():
        differences += [abs(x.mean - y.mean), abs(x.std - y.std)]
    return Gap(max(differences), max(x.norm, y.norm) / count, rtol)


def _has_64_bits(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_nested
    return is_plain and tensor.dtype in (torch.int64, torch.uint64)


def _wide(tensor: Tensor) -> Tensor:
    dense = wide(tensor)
    return dense.to(widest(dense))


def _size(tensor: Tensor) -> float:
    """Return the root mean square of the finite entries."""
    size = root_mean_square(tensor)
    is_known = math.isfinite(size)
    return (
        size
        if is_known
        else root_mean_square(tensor.masked_fill(~tensor.isfinite(), 0))
    )
