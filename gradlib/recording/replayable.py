"""Whether a recorded call can be replayed, and why not."""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from gradlib.errors import CannotReplayError
from gradlib.opaque import NotSaved, keep_opaque
from gradlib.plain_tensors import wide
from gradlib.private.modes import values_are_stand_ins
from gradlib.recording.history import History
from gradlib.recording.in_words import quoted
from gradlib.recording.places import input_name
from gradlib.recording.trace import BATCHED_PASS, Block, CallTrace
from gradlib.recording.world import World
from gradlib.subclasses import is_of_other_class


def label(trace: CallTrace) -> str:
    """Return how a message names a call."""
    return f"call {trace.index} of {quoted(trace.name)}"


@contextmanager
def explained(trace: CallTrace, what: str) -> Generator[None]:
    """Say of what a replay raises that it is a replay: `what` was done with a call."""
    try:
        yield
    except Exception as error:
        # contextlib would take the new error for a StopIteration that caused it.
        cause = None if isinstance(error, StopIteration) else error
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise CannotReplayError(f"{what.format(label(trace))} raised {said}") from cause


def require_replayable(block: Block) -> History:
    """Return the history of the model in a block.

    Raises:
        CannotReplayError: What a replay starts from was not kept.
    """
    for field in ("args", "grad_output"):
        if field not in block.fields:
            raise CannotReplayError(
                f'A replay needs "{field}", and record(keep=...) left it out. Record '
                'with keep=("args", "grad_output", ...).'
            )
    if block.history is None:
        raise CannotReplayError(
            "Nothing is left of the model's state at that call: the recording was made "
            "with reduce=, or loaded from a file. Replay where you record, without "
            "reduce=. Nor is there of weights that FSDP has sharded, or DTensors: "
            "replay a model that is whole. Nor where the class of a weight or buffer "
            "refuses to have it kept."
        )
    return block.history


def modules_of_call(trace: CallTrace, history: History) -> list[nn.Module]:
    """Return the called module, those among its arguments, and all inside them."""
    both = (cast(nn.Module, trace.module), *trace.given_modules.values())
    inside = [history.inside(module, trace.moment) for module in both]
    return [*dict.fromkeys(itertools.chain.from_iterable(inside))]


def state_of(trace: CallTrace) -> tuple[History, World]:
    """Return what a replay of a call needs.

    Raises:
        CannotReplayError: The call cannot be replayed; the message says why.
    """
    history = require_replayable(trace.block)
    if values_are_stand_ins():
        raise CannotReplayError(
            "A call is computed again from values, and inside of torch.func (vmap, "
            "grad, jvp and so on) or torch.jit.trace tensors only stand for others: "
            "ask outside of it."
        )
    world, called = trace.world, trace.module
    assert world is not None, "it is kept with every history"
    assert called is not None, "it is kept with every history"
    if world.is_dual:
        raise CannotReplayError(
            f"{label(trace)} ran inside torch.autograd.forward_ad.dual_level(): its "
            "tensors may have carried tangents, which are not kept."
        )
    if history.has_twin(called, trace.moment):
        raise CannotReplayError(
            f"{label(trace)} contains a module that equals another by the __eq__ of "
            "its class: which state it had was not kept. Compare modules by identity."
        )
    for module in modules_of_call(trace, history):
        _require_module(trace, history, module)
    _require_inputs(trace)
    if any(isinstance(it, Tensor) and it.is_meta for it in trace.inputs.leaves):
        raise CannotReplayError(
            f"{label(trace)} was given tensors without values, or they were kept on "
            'the device "meta". Record with another device.'
        )
    _require_differences(trace)
    return history, world


def require_whole(trace: CallTrace, number: int) -> None:
    """Raise unless a pass gave a call its whole VJP, and no more."""
    before = trace.graph_before(number)
    if before is not None:
        fix = (
            "Without is_grads_batched, the first of its rows can be computed again"
            if before == BATCHED_PASS
            else f"{before.capitalize()} can be computed again"
        )
        raise CannotReplayError(
            f"The backward pass may have gone through the graph of {before}, which had "
            "create_graph=True: then what it gave this call is more than the VJP of "
            f"the forward. {fix}."
        )
    if number in trace.block.unfinished:
        raise CannotReplayError(
            "The backward pass raised, or has not ended yet: what it gave this call "
            "may be a part."
        )


def _require_module(trace: CallTrace, history: History, module: nn.Module) -> None:
    """Raise unless a module can run as it did inside of a call."""
    kind = history.kind(module, trace.moment)
    if kind is not type(module) and not issubclass(kind, LazyModuleMixin):
        raise CannotReplayError(
            f"{label(trace)} contains what was a {kind.__name__} then and is a "
            f"{type(module).__name__} now, whose forward may be another. Replay "
            "before you give a module another class, as "
            "torch.nn.utils.parametrize does."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CannotReplayError(
            f"{label(trace)} contains a ScriptModule, whose weights cannot be "
            "replaced for a replay. Record the module it was made of."
        )
    if isinstance(module, DistributedDataParallel):
        raise CannotReplayError(
            f"{label(trace)} goes through DistributedDataParallel, which talks to "
            "other processes when it is called. Replay the module that it wraps, "
            'as recording["module"].replay().'
        )
    if _draws_by_itself(module, history.training(module, trace.moment)):
        raise CannotReplayError(
            f"{label(trace)} contains an {type(module).__name__} with dropout, "
            "whose random numbers cuDNN draws from a state of its own. Record and "
            "replay it under torch.backends.cudnn.flags(enabled=False), or without "
            "dropout."
        )


def _require_differences(trace: CallTrace) -> None:
    """Raise where a class refuses the difference that tells whether a call repeats."""
    for leaf in trace.leaves():
        if not (isinstance(leaf, Tensor) and is_of_other_class(leaf)):
            continue
        try:
            wide(leaf).double()
        except Exception as error:
            name, why = type(leaf).__name__, type(error).__name__
            raise CannotReplayError(
                f"{label(trace)} was given or returned a {name}. Whether it repeats "
                f"nobody can tell: as a difference is computed, {name} raises {why}."
            ) from error


def _require_inputs(trace: CallTrace) -> None:
    """Raise unless every input of the call can be given again."""
    for place, leaf in enumerate(trace.inputs.leaves):
        kept = None if isinstance(leaf, Tensor) else keep_opaque(leaf)
        if isinstance(kept, NotSaved) and place not in trace.given_modules:
            raise CannotReplayError(
                f"{input_name(trace, place)} is of type {kept.text}, which cannot be "
                "kept as it was. A call can be computed again where it is given "
                "tensors, plain values, modules of the recorded model and structures "
                "of these."
            )


def _draws_by_itself(module: nn.Module, training: bool) -> bool:
    """Tell whether a call draws random numbers that no generator of torch gives.

    cuDNN draws the dropout of an RNN from a state of its own, made when a generator was
    set and used from then on: see get_dropout_state() in
    https://github.com/pytorch/pytorch/blob/357b8267a5eb930eeb73ebd3bc18b841a7c1f03b/aten/src/ATen/native/cudnn/RNN.cpp
    """
    return (
        isinstance(module, nn.RNNBase)
        and training
        and module.dropout > 0
        and module.num_layers > 1
        and cast(Any, torch.backends.cudnn).is_acceptable(module.weight_ih_l0)
    )
