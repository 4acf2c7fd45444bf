"""The with block of a recording: what its hooks share, and how long they are set."""

import itertools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gradlib.errors import RecordingArgumentError
from gradlib.finishing import finish
from gradlib.module_hook import nothing
from gradlib.private.compiling import forget_compiled
from gradlib.private.modes import no_classes_of_tensors
from gradlib.private.modules import own_buffers, own_parameters
from gradlib.random_state import moving_no_generator
from gradlib.recorder.attached import kept_from_compile
from gradlib.recorder.hooked_modules import HookedModules
from gradlib.recorder.module_calls import ModuleCalls
from gradlib.recorder.passes import Passes
from gradlib.recording.history import History
from gradlib.recording.kept import refuses_to_be_kept
from gradlib.recording.recording import Recording
from gradlib.recording.trace import Block
from gradlib.selection import first_names, modules_of, recorded_names, require_apart
from gradlib.sharded import is_sharded
from gradlib.stats import tensor_stats
from gradlib.values import Transfers, keeper
from gradlib.wording import in_brief


class WithBlock(AbstractContextManager[Recording]):
    """The with block: what its hooks share, and when they are set and removed."""

    def __init__(
        self,
        model: nn.Module,
        chosen: Callable[[str, nn.Module], bool],
        fields: frozenset[str],
        reduce: Callable[[Tensor], Any] | None,
        device: torch.device | str | int | None,
    ) -> None:
        """Set no hook yet.

        Args:
            model: The model.
            chosen: Tells whether to record a module, by the name of its place.
            fields: The fields of a call to keep.
            reduce: A function of a tensor, whose result is kept instead.
            device: Where kept tensors go.
        """
        is_reduced = reduce is not None and reduce is not tensor_stats
        if reduce is not None and is_reduced:
            reduce = moving_no_generator(reduce)  # which tensor_stats does not
        copies = Transfers()
        keep = keeper(reduce, device, copies)
        values = fields & {"args", "output"}
        tensors = fields & {"grad_input", "grad_output"}
        # Adding to a tensor on its way to another device would wait for the copy.
        cannot_add = reduce is not None or device is not None
        passes = Passes(keep, keep if tensors else nothing, cannot_add=cannot_add)
        self._passes = passes
        every = modules_of(model, remove_duplicate=False)
        require_apart(every)
        places, names = first_names(every), recorded_names(every)
        refuses = _refuse(places.keys())
        # A replay needs the arguments of the call, and the state it met. FSDP frees the
        # memory of weights, so what is kept of them cannot share it.
        is_whole = "args" in fields and reduce is None
        replayable = is_whole and not (refuses or is_sharded(model))
        self._block = Block(
            fields,
            passes.numbered.numbers,
            passes.numbered.with_graph,
            passes.numbered.batched,
            passes.numbered.captured,
            History(places.keys()) if replayable else None,
            is_reduced=is_reduced,
            copies=copies,
        )
        self._calls = ModuleCalls(
            self._block, passes, keep if values else nothing, refuses=refuses
        )
        self._modules = HookedModules(
            model, chosen, self._block, self._calls, places, names
        )
        self._kind = type(model).__name__
        self._has_begun = False
        self.recording = Recording(self._block, names, self._calls.traces)

    def __repr__(self) -> str:
        """Say that it is for a with block."""
        return f"<record({self._kind}), for a with block>"

    def __getattr__(self, name: str) -> NoReturn:
        """Say that this is no recording yet, if a recording has that attribute."""
        if name.startswith("_") or not hasattr(Recording, name):
            raise AttributeError(f"record(model) has no attribute {name!r}")
        raise _without_with(f".{name}")

    def __getitem__(self, key: object) -> NoReturn:
        """Say that this is no recording yet."""
        raise _without_with(f"[{in_brief(key)}]")

    @kept_from_compile
    def __enter__(self) -> Recording:
        """Begin the block."""
        if self._has_begun:
            raise RecordingArgumentError(
                "This block was begun before, and a recording is of one block. Call "
                "record(model) once for each: with gradlib.record(model) as recording."
            )
        self._has_begun = True
        try:
            with no_classes_of_tensors():  # they may refuse to tell `requires_grad`
                self._modules.attach()
            self._passes.attached.are_last()
            forget_compiled()
        except BaseException:
            self._remove_hooks()
            raise
        return self.recording

    @kept_from_compile
    def __exit__(self, *_: object) -> None:
        """End the block."""
        finish((self._calls.end, self._remove_hooks))

    def _remove_hooks(self) -> None:
        """Remove every hook, those on tensors and graph nodes still alive included."""
        finish(
            (
                self._modules.detach,
                self._passes.remove_hooks,
                self._modules.note_used_directly,
                self._block.copies.wait,
                self._modules.remove_stopped,
                forget_compiled,
            )
        )


def _refuse(modules: Collection[nn.Module]) -> bool:
    """Tell whether the class of a parameter or buffer refuses to have it kept."""
    held = (*map(own_parameters, modules), *map(own_buffers, modules))
    tensors = [*itertools.chain.from_iterable(map(methodcaller("values"), held))]
    if {*map(type, tensors)} <= {Tensor, nn.Parameter, type(None)}:
        return False
    return any(it is not None and refuses_to_be_kept(it) for it in tensors)


def _without_with(asked: str) -> RecordingArgumentError:
    return RecordingArgumentError(
        f"record(model){asked}: a recording is made by a with block. Call the model "
        "inside of it: with gradlib.record(model) as recording. Then ask "
        f"recording{asked}."
    )
