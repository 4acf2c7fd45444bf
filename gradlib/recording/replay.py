"""Computing a recorded call again, and its vector-Jacobian product (VJP)."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.private.compiling import run_eagerly
from gradlib.private.modules import parametrizations_computed_anew
from gradlib.random_state import random_state_kept
from gradlib.recording.difference import shape_of
from gradlib.recording.replayable import require_whole, state_of
from gradlib.recording.scene import Change, Scene, idle, passed_parameters
from gradlib.recording.trace import CallTrace, Key
from gradlib.tree import Tree
from gradlib.values import keep

ONE_AT_A_TIME = RLock()
"""Held during a replay, in which the model has other weights."""


@dataclass(slots=True)
class Replayed:
    """A call computed again."""

    output: Tree
    # This call's share of the gradient of each input and own parameter. None where the
    # recorded gradients no longer fit the output.
    shares: dict[Key, Tensor | None] | None
    # The attributes in which it left tensors that gradients can flow through.
    left_in: tuple[str, ...]
    overwritten: tuple[str, ...]  # the inputs that it overwrote
    written: tuple[str, ...]  # own parameters that it overwrote, unseen by autograd


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
    history, world = state_of(trace)
    require_whole(trace, number)
    with ONE_AT_A_TIME, random_state_kept(), _eagerly():
        scene = Scene(trace, history, change)
        with scene.set():
            begin()
            output = scene.run(world)
            returned = output.map(_as_it_is)  # a backward may write over it
            arrived = trace.gradients("outputs", number)
            grads = {place: change(grad) for place, grad in arrived.items()}
            turn()
            autocast = trace.block.autocast.get(number, {})
            fits = _fit(grads, output)
            shares = scene.pull(output, grads, autocast) if fits else None
            left_in, overwritten = scene.left_in(output), scene.overwritten()
            written = scene.written()
            return Replayed(returned, shares, left_in, overwritten, written)


def forward_again(trace: CallTrace, change: Change) -> Tree:
    """Compute a call's output again, from what `change` makes of the recorded values.

    Raises:
        CannotReplayError: Too little is known of the call.
    """
    history, world = state_of(trace)
    with ONE_AT_A_TIME, random_state_kept(), _eagerly():
        scene = Scene(trace, history, change)
        with scene.set():
            return scene.run(world).map(_as_it_is)


def inputs_of(trace: CallTrace) -> dict[Key, Tensor]:
    """Return the recorded inputs and own parameters that required grad."""
    history, _ = state_of(trace)
    # A parameter that is an input too is one leaf, under its name.
    not_asked = idle(trace) | passed_parameters(trace).keys()
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


def _fit(grads: Mapping[Key, Tensor], output: Tree) -> bool:
    """Tell whether each recorded gradient still fits an output."""
    leaves = dict[Key, Any](enumerate(output.leaves))
    return all(
        isinstance(leaf := leaves.get(place), Tensor)
        and leaf.requires_grad
        and shape_of(leaf) == shape_of(grad)
        for place, grad in grads.items()
    )


def _as_it_is(leaf: object) -> object:
    return keep(leaf) if isinstance(leaf, Tensor) else leaf


@contextmanager
def _eagerly() -> Generator[None]:
    # inference_mode(False) also enables gradients.
    with torch.inference_mode(False), run_eagerly(), parametrizations_computed_anew():
        yield
