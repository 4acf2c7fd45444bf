"""Computing a recorded call again, and its vector-Jacobian product (VJP)."""

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from gradlib.double import Double
from gradlib.errors import CannotReplayError
from gradlib.opaque import is_tensor
from gradlib.private.compiling import run_eagerly
from gradlib.private.modules import parametrizations_computed_anew
from gradlib.random_state import random_state_kept
from gradlib.recording.attributes import Change
from gradlib.recording.flow import ARGUMENT, Key, Left
from gradlib.recording.gaps import shape_of
from gradlib.recording.replayable import require_whole, state_of
from gradlib.recording.scene import Scene
from gradlib.recording.trace import CallTrace
from gradlib.tree import Tree
from gradlib.values import keep

ONE_AT_A_TIME = RLock()
"""Held during a replay, in which the model has other weights."""

_IN_FLOAT64 = (
    "Finite differences compute it in float64; as it was recorded, verify() without "
    "numerical=True compares it"
)

Ends: TypeAlias = dict[Key | Left, Any]
"""What a call returned, by place, and the tensors that it left in its module."""


@dataclass(slots=True)
class Replayed:
    """A call computed again."""

    output: Tree
    # This call's share of the gradient of each input and own parameter. None where the
    # recorded gradients no longer fit the output.
    shares: dict[Key, Tensor | None] | None
    # The attributes in which it left tensors that gradients can flow through, and those
    # whose recorded gradients no longer fit what it left there.
    left_in: tuple[str, ...]
    lost: tuple[str, ...]
    overwritten: tuple[str, ...]  # the inputs that it overwrote
    written: tuple[str, ...]  # own parameters that it overwrote, unseen by autograd


@contextmanager
def in_float64() -> Generator[None]:
    """Widen what is computed to float64, and say so of a call that raises then."""
    try:
        with Double():
            yield
    except CannotReplayError as error:
        raise CannotReplayError(f"{error.args[0]}. {_IN_FLOAT64}") from error


def replay(
    trace: CallTrace,
    number: int,
    change: Change = lambda kept: kept,
    begin: Callable[[], None] = lambda: None,
    turn: Callable[[], None] = lambda: None,
) -> Replayed:
    """Compute a call again, and its VJP with the ``grad_output`` of a pass.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        change: Maps a recorded tensor to the one to use.
        begin: Called before the module. The hooks that it sets are removed afterwards.
        turn: Called between the forward and the backward.

    Raises:
        CannotReplayError: Too little is known of the call, or it raised.
    """
    with _set(trace, change) as scene:
        require_whole(trace, number)
        begin()
        output = scene.run()
        returned = output.map(_kept)  # a backward may write over it
        grads = {key: change(it) for key, it in trace.arrived(number).items()}
        turn()
        left = scene.left()
        scene.require_copies(
            it for it in (*output.leaves, *left.values()) if is_tensor(it)
        )
        unfit = _unfit(grads, _ends(output, left))
        shares = None
        if all(isinstance(key, tuple) for key in unfit):
            fit = {key: it for key, it in grads.items() if key not in unfit}
            shares = scene.pull(output, left, fit, number)
        known = {key for flow in trace.flows for key in flow.alone}
        return Replayed(
            returned,
            shares,
            _names(trace, left.keys() - known),
            _names(trace, unfit),
            scene.leaves.overwritten(),
            scene.leaves.written(),
        )


def forward_again(trace: CallTrace, change: Change) -> Ends:
    """Compute again what a call returned and left, from changed values.

    Raises:
        CannotReplayError: Too little is known of the call.
    """
    with _set(trace, change) as scene:
        found = _ends(scene.run(), scene.left())
        return {key: _kept(it) for key, it in found.items()}


@contextmanager
def _set(trace: CallTrace, change: Change) -> Generator[Scene]:
    """Set the scene of a call."""
    scene = Scene(trace, *state_of(trace), change)
    with (
        ONE_AT_A_TIME,
        random_state_kept(),
        torch.inference_mode(False),  # which also enables gradients
        run_eagerly(),
        parametrizations_computed_anew(),
        scene.set(),
    ):
        yield scene


def inputs_of(trace: CallTrace) -> dict[Key, Tensor]:
    """Return the recorded inputs and own parameters that required grad."""
    history, _ = state_of(trace)
    # A parameter that is an input too is one leaf, under its name.
    not_asked = trace.never_asked() | trace.passed_parameters().keys()
    found: dict[Key, Tensor] = {
        place: leaf
        for place, leaf in enumerate(trace.inputs.leaves)
        if isinstance(leaf, Tensor) and place not in not_asked
    }
    own = history.at(cast(nn.Module, trace.module), trace.moment)
    found.update(
        (name, own[name].value)
        for name in trace.parameters
        if name in own and name not in not_asked
    )
    return found


def _ends(output: Tree, left: Mapping[Left, Tensor]) -> Ends:
    return {**dict(enumerate(output.leaves)), **left}


def _unfit(grads: Mapping[Key | Left, Tensor], ends: Ends) -> set[Key | Left]:
    """Return where a recorded gradient no longer fits what the call gave."""
    return {
        key
        for key, grad in grads.items()
        if not isinstance(leaf := ends.get(key), Tensor)
        or not leaf.requires_grad
        or shape_of(leaf) != shape_of(grad)
    }


def _names(trace: CallTrace, left: Collection[Key | Left]) -> tuple[str, ...]:
    """Return the names of attributes: ``state``, or ``0.state`` in a module inside."""
    prefixes = {it: path for path, it in cast(Any, trace.module).named_modules()}
    found = {
        f"{prefixes[key[0]]}.{key[1]}".removeprefix(".")
        for key in left
        if isinstance(key, tuple) and key[0] in prefixes and key[1] != ARGUMENT
    }
    return (*sorted(found),)


def _kept(leaf: object) -> object:
    return keep(leaf) if is_tensor(leaf) else leaf
