"""Attributes that are objects with a state of their own: generators, arrays.

Their state is kept at each call, and a replayed call gets copies.
"""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable
from operator import eq
from typing import Any, cast

import numpy
import torch

LARGE = 2**20
"""An array of more bytes than this is not kept for each call."""


def is_stateful(value: Any) -> bool:
    """Tell whether an object has a state that can be copied and compared."""
    if type(value) is numpy.ndarray:
        return not cast(Any, value).dtype.hasobject
    return type(value) in _KINDS


def is_large(value: Any) -> bool:
    """Tell whether copying an object at each call would take too long."""
    return type(value) is numpy.ndarray and value.nbytes > LARGE


def copied(value: Any) -> Any:
    """Return a copy with a state of its own."""
    return _KINDS[type(value)][0](value)


def are_alike(a: Any, b: Any) -> bool:
    """Tell whether two objects of one class are in the same state."""
    return _KINDS[type(a)][1](a, b)


def _same_bytes(a: Any, b: Any) -> bool:
    return pickle.dumps(a) == pickle.dumps(b)


def _same_array(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _same_state(a: torch.Generator, b: torch.Generator) -> bool:
    return a.device == b.device and torch.equal(a.get_state(), b.get_state())


_KINDS: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any, Any], bool]]] = {
    torch.Generator: (cast(Any, torch.Generator).clone_state, _same_state),
    random.Random: (copy.copy, lambda a, b: a.getstate() == b.getstate()),
    numpy.random.Generator: (copy.deepcopy, _same_bytes),
    numpy.random.RandomState: (copy.deepcopy, _same_bytes),
    numpy.ndarray: (numpy.copy, _same_array),
    bytearray: (copy.copy, eq),
    Counter: (copy.copy, eq),
}
