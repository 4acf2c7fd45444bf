"""Recording what goes through modules, forward and backward.

The only file of the recorder that attaches hooks to modules. It builds on hooks of
tensors and of graph nodes, not on full backward hooks: those raise on in-place
operations and see only tensors and tuples of tensors.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import methodcaller
from textwrap import shorten
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradlib.errors import NotAModuleError, RecordingArgumentError, UnknownFieldError
from gradlib.finishing import finish
from gradlib.module_hook import (
    ModuleHook,
    copy_without_ours,
    nothing,
    remove_stopped,
    stop_all,
)
from gradlib.private.compiling import forget_compiled
from gradlib.private.hooks import (
    hook_dicts,
    hook_modules,
    hook_numbers,
    put_after_others,
    put_before_others,
    unhook_modules,
)
from gradlib.private.modes import no_classes_of_tensors
from gradlib.private.modules import (
    modules_in,
    own_buffers,
    own_parameters,
    what_stands_in,
)
from gradlib.random_state import moving_no_generator
from gradlib.recorder.hooked import Hooked
from gradlib.recorder.module_calls import ModuleCalls
from gradlib.recorder.passes import Passes
from gradlib.recording.kept import refuses_to_be_kept
from gradlib.recording.recording import Recording
from gradlib.recording.state import History
from gradlib.recording.trace import FIELDS, NOT_CHOSEN, Block
from gradlib.selection import (
    COMPILED,
    first_names,
    has_own_call,
    modules_of,
    recorded_names,
    selector,
    uncompiled,
)
from gradlib.sharded import flattened, is_sharded, swaps_parameters
from gradlib.stats import tensor_stats
from gradlib.values import Keep, Transfers, keeper
from gradlib.wording import in_brief, listed, no_module


def record(
    model: nn.Module,
    *,
    modules: str | Iterable[str] | Callable[[str, nn.Module], bool] | None = None,
    keep: str | Iterable[str] = (
        "args",
        "output",
        "grad_input",
        "grad_output",
        "param_grads",
    ),
    reduce: Callable[[Tensor], Any] | None = None,
    device: torch.device | str | int | None = None,
) -> AbstractContextManager[Recording]:
    """Record every module call in the block, forward and backward.

    Call ``backward()`` inside the block too: no hook is left after it. Results and
    gradients are the same as without recording.

    Args:
        model: The module to record, with all modules inside it, on any device.
        modules: Which of these modules to record: names as in ``named_modules()``,
            patterns such as ``"layers.*"``, or a function ``(name, module) -> bool``.
            Default: all.
        keep: Which fields of a call to keep: one or several of ``"args"``,
            ``"output"``, ``"grad_input"``, ``"grad_output"`` and ``"param_grads"``.
            ``"args"`` includes keyword arguments, and each share its total.
        reduce: A function of a tensor, such as `tensor_stats`. What it returns is kept
            instead of the tensor. It gets each tensor detached, on its own device. If
            it draws torch's random numbers, the model still draws the same as without.
        device: Where to put the kept tensors, such as ``"cpu"`` to save a GPU's memory.
            The end of the block, or reading a value, waits for the copies.

    Returns:
        A context manager that gives the recording, which grows as the block runs.

    Raises:
        NotAModuleError: `model` is not a ``torch.nn.Module``.
        NoSuchModuleError: A name or pattern in `modules` fits no module, or it is a
            class or a module, or a function that does not take a name and a module.
        UnknownFieldError: `keep` names something that no call has.
        RecordingArgumentError: `reduce` is not a function, tensors cannot be put on
            `device`, or the block is begun a second time.

    Example:
        ```python
        import torch
        from torch import nn

        import gradlib

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        x = torch.ones(4, 3)
        with gradlib.record(model) as recording:
            model(x).sum().backward()

        print(recording)
        #> Recording: 4 calls, 1 forward, 1 backward pass
        #> module  type        output  grad_output  grad_input  param_grads
        #> (root)  Sequential  [4, 2]  2.83         -           -
        #> 0       Linear      [4, 5]  1.01         -           4.06
        #> 1       ReLU        [4, 5]  1.94         1.01        -
        #> 2       Linear      [4, 2]  2.83         1.94        7.04
        #> output: shape; gradients: norm over all entries, - where there is none
        print(recording["2"].grad_output[0])
        #> tensor([[1., 1.],
        #>         [1., 1.],
        #>         [1., 1.],
        #>         [1., 1.]])
        print(recording["0"].note)
        #> args[0] does not require grad
        ```
    """
    if not isinstance(cast(object, model), nn.Module):
        of_function = "Put a function into the forward() of a module."
        raise NotAModuleError(
            "record(model): model must be a torch.nn.Module, but "
            + no_module(model, of_function if callable(model) else "Pass the model.")
        )
    _require_usable(reduce, device)
    is_reduced = reduce is not None and reduce is not tensor_stats
    if reduce and is_reduced:
        reduce = moving_no_generator(reduce)  # which tensor_stats does not
    copies = Transfers()
    return _Recorder(
        model,
        selector(model, modules),
        _fields(keep),
        keeper(reduce, device, copies),
        copies,
        has_reduce=reduce is not None,
        is_reduced=is_reduced,
        moves=device is not None,
    )


def _refuse(modules: Collection[nn.Module]) -> bool:
    """Tell whether the class of a parameter or buffer refuses to have it kept."""
    held = (*map(own_parameters, modules), *map(own_buffers, modules))
    tensors = [*itertools.chain.from_iterable(map(methodcaller("values"), held))]
    if {*map(type, tensors)} <= {Tensor, nn.Parameter, type(None)}:
        return False
    return any(it is not None and refuses_to_be_kept(it) for it in tensors)


def _require_usable(reduce: object, device: Any) -> None:
    """Raise for a bad argument here, and not in the middle of the model."""
    if not (reduce is None or callable(reduce)):
        raise RecordingArgumentError(
            "record(reduce=...): reduce must be a function of a tensor, as "
            f"gradlib.tensor_stats, but it is {in_brief(reduce)}, of type "
            f"{type(reduce).__name__}."
        )
    try:
        if device is not None:
            torch.empty(0, device=device)
    except Exception as error:
        # For an unknown device torch lists all that it knows.
        said = shorten(str(error), 240, placeholder=" ...")
        raise RecordingArgumentError(
            f"record(device=...): no tensor can be put on {in_brief(device)}. Give "
            f'what tensor.to(device) takes, as "cpu". torch says: {said}'
        ) from error


def _fields(keep: object) -> frozenset[Any]:
    several = isinstance(keep, Iterable) and not isinstance(keep, str)
    fields: list[Any] = list(cast(Any, keep if several else [keep]))
    for name in fields:
        if name not in FIELDS:
            known = ", ".join(f'"{field}"' for field in FIELDS)
            raise UnknownFieldError(
                f'record(keep=...): "{name}" is no field that can be kept. There are: '
                f"{known}."
            )
    return frozenset(fields)


def _why_no_call(module: nn.Module) -> str:
    """Say why no call was seen of a module whose class has its own ``__call__``."""
    kind = type(module)
    if kind in (nn.ParameterList, nn.ParameterDict):  # theirs only raises
        return (
            f"a {kind.__name__} is never called, and its parameters are in no "
            "param_grads: read their .grad"
        )
    return (
        f"{kind.__name__} has a __call__ of its own, and where that does not call "
        "nn.Module's, no hook sees it"
    )


def _used_directly(names: Sequence[str]) -> str:
    """Say that parameters with these names got gradients which no call shows."""
    gradients = "a gradient" if len(names) == 1 else "gradients"
    return (
        f"it was not called, and yet its {listed(names)} got {gradients}, as where a "
        "parent uses its weights directly, or calls module.forward(x). No param_grads "
        "has this: read .grad"
    )


def _without_with(asked: str) -> RecordingArgumentError:
    return RecordingArgumentError(
        f"record(model){asked}: a recording is made by a with block. Call the model "
        "inside of it: with gradlib.record(model) as recording. Then ask "
        f"recording{asked}."
    )


class _Recorder(AbstractContextManager[Recording]):
    """The hooks of one block and what they share."""

    def __init__(
        self,
        model: nn.Module,
        chosen: Callable[[str, nn.Module], bool],
        fields: frozenset[str],
        keep: Keep,
        copies: Transfers,
        *,
        has_reduce: bool,
        is_reduced: bool,
        moves: bool,
    ) -> None:
        self._chosen = chosen
        values = fields & {"args", "output"}
        tensors = fields & {"grad_input", "grad_output"}
        # Adding to a tensor on its way to another device would wait for the copy.
        passes = Passes(
            keep, keep if tensors else nothing, cannot_add=has_reduce or moves
        )
        self._passes = passes
        every = modules_of(model, remove_duplicate=False)
        # The modules in the model, each with its place: the name it has now.
        self._places = first_names(every)
        self._names = recorded_names(every)
        self._hooked: dict[nn.Module, Hooked] = {}
        # By name, which several modules may have one after the other. No two threads
        # get the same index.
        self._calls_of: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        # A replay needs the arguments of the call, and the state it met. FSDP frees the
        # memory of weights, so what is kept of them cannot share it.
        refuses = _refuse(self._places.keys())
        replayable = "args" in fields and not (
            has_reduce or refuses or is_sharded(model)
        )
        self._block = Block(
            fields,
            passes.numbered.numbers,
            passes.numbered.with_graph,
            passes.numbered.batched,
            passes.numbered.captured,
            History(self._places.keys()) if replayable else None,
            is_reduced=is_reduced,
            copies=copies,
        )
        self._calls = ModuleCalls(
            self._block,
            passes,
            keep if values else nothing,
            self._look_for_new,
            refuses=refuses,
        )
        self._flattened = flattened(model)
        self._model = model
        self._hook_dicts: list[dict[int, Any]] = []  # of all modules in the model
        self._seen: tuple[Any, Any] = None, None  # what stood there at the last look
        self._hooks: dict[nn.Module, tuple[ModuleHook, ModuleHook]] = {}
        self._undo: list[Callable[[], None]] = []
        self._has_begun = False
        self.recording = Recording(self._block, self._names, self._calls.traces)

    def __repr__(self) -> str:
        """Say that it is for a with block."""
        return f"<record({type(self._model).__name__}), for a with block>"

    def __getattr__(self, name: str) -> NoReturn:
        """Say that this is no recording yet, if a recording has that attribute."""
        if name.startswith("_") or not hasattr(Recording, name):
            raise AttributeError(f"record(model) has no attribute {name!r}")
        raise _without_with(f".{name}")

    def __getitem__(self, key: object) -> NoReturn:
        """Say that this is no recording yet."""
        raise _without_with(f"[{in_brief(key)}]")

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
                self._attach_hooks()
        except BaseException:
            self._remove_hooks()
            raise
        return self.recording

    def __exit__(self, *_: object) -> None:
        """End the block."""
        finish((self._calls.end, self._remove_hooks))

    def _attach_hooks(self) -> None:
        """Hook every module, and those that are added later."""
        for module, name in self._places.items():
            self._attach(name, name, module)
        hook_modules(self._hooks)
        self._undo.append(copy_without_ours())
        self._hook_dicts = hook_dicts(self._places)
        self._seen = self._what_stands()
        added = register_module_module_registration_hook(self._added)
        self._undo.append(added.remove)
        if (history := self._block.history) is not None:
            learned = register_optimizer_step_post_hook(history.stepped)
            self._undo.append(learned.remove)
        self._passes.attached.are_last()
        forget_compiled()

    def _remove_hooks(self) -> None:
        """Remove every hook, those on tensors and graph nodes still alive included."""
        finish(
            (
                partial(self._detach, self._hooks),
                *self._undo,
                self._undo.clear,
                self._let_go,
                self._passes.remove_hooks,
                self._note_used_directly,
                self._block.copies.wait,
                self._remove_stopped,
                forget_compiled,
            )
        )

    def _let_go(self) -> None:
        self._calls.when_forward_begins = nothing  # else a reference cycle keeps all

    def _note_used_directly(self) -> None:
        """Say which modules got gradients for their parameters and were not called.

        A parameter that a module which was called has too is in that one's totals.
        """
        every = self._hooked.values()
        others = [hooked for hooked in every if not hooked.was_called]
        if not others:
            return
        shown = {
            id(total)
            for hooked in every
            if hooked.was_called
            for _, _, total in hooked.parameters.values()
        }
        for hooked in others:
            names = [
                name
                for name, (_, _, total) in hooked.parameters.items()
                if total and id(total) not in shown
            ]
            if names:
                why = _used_directly(names)
                self._block.left_out.setdefault(hooked.name, why)

    def _remove_stopped(self) -> None:
        with suppress(RuntimeError):  # another thread changes the model
            remove_stopped(self._standing())

    def _standing(self) -> Collection[nn.Module]:
        """Return the modules that were in the model, and those that are now."""
        if self._seen[0] == what_stands_in(self._places):
            return self._places.keys()
        return {*self._places, *modules_in(self._model)}

    def _attach(self, name: str, place: str, module: nn.Module) -> None:
        """Make the hooks of a module that was chosen, which `hook_modules` sets.

        Args:
            name: The name under which its calls are recorded.
            place: The name it has in the model now.
            module: The module.
        """
        if isinstance(module, torch.jit.ScriptModule):
            self._block.left_out[name] = "a ScriptModule takes no hooks"
            return
        is_left_out = not self._is_chosen(name, place, module)
        if is_left_out and place:
            return  # the model itself is hooked all the same, to count the forwards
        if has_own_call(module):  # said only where no call was seen
            self._block.left_out[name] = _why_no_call(module)
        calls = self._calls
        hooked = Hooked(name, module, self._calls_of[name], is_left_out=is_left_out)
        self._hooked[module] = hooked
        if own := own_parameters(module):
            calls.parameters.meet(hooked, own)
        before = ModuleHook(calls.before, hooked)
        after = ModuleHook(calls.after, hooked)
        hooked.before_id, hooked.after_id = id(before), id(after)
        self._hooks[module] = before, after
        views = self._flattened.get(module)
        if views is not None or swaps_parameters(module):
            swapped = ModuleHook(calls.swapped, views)
            self._undo.append(module.register_forward_pre_hook(swapped).remove)

    def _detach(self, hooks: dict[nn.Module, tuple[ModuleHook, ModuleHook]]) -> None:
        """Take away hooks again, and stop them wherever they stand."""
        unhook_modules(hooks)
        stop_all(itertools.chain.from_iterable(hooks.values()))
        hooks.clear()

    def _is_chosen(self, name: str, place: str, module: nn.Module) -> bool:
        if self._chosen(place, module):
            self._block.left_out.pop(name, None)  # an earlier module there may be
            return True
        self._block.left_out[name] = NOT_CHOSEN
        return False

    def _added(self, parent: nn.Module, key: str, module: nn.Module | None) -> None:
        """Hook what is added to a module while the block runs."""
        history = self._block.history
        if module is None or (history is not None and history.is_set_back):
            return
        place = self._places.get(parent)
        if place is None:
            return
        hooked_before = len(self._hooks)
        for path, inner in modules_of(module).items():
            if inner not in self._places:
                name = ".".join(it for it in (place, key, path) if it)
                self._places[inner] = name
                self._name_place(name, name)
                if inner not in self._hooked:
                    self._attach(name, name, inner)
        new = itertools.islice(self._hooks.items(), hooked_before, None)
        hook_modules(dict(new))

    def _look_for_new(self) -> None:
        """Look for new modules and new hooks in the model as a forward begins.

        ``Sequential.insert`` does not call the hook that tells of a new module.
        """
        if self._seen == self._what_stands():
            return
        try:
            every = modules_of(self._model, remove_duplicate=False)
        except RuntimeError:  # another thread changes the model: wait for the next look
            return
        self._name_all(every)
        hook_modules(self._hooks)  # new ones, and those that others took away
        for module in self._places:
            if (hooked := self._hooked.get(module)) is not None:
                put_before_others(module, hooked.before_id)
                put_after_others(module, hooked.after_id)
        if self._block.history is not None:
            self._block.history.has_changed = True
        self._hook_dicts = hook_dicts(self._places)
        self._seen = self._what_stands()

    def _what_stands(self) -> tuple[Any, Any]:
        return what_stands_in(self._places), hook_numbers(self._hook_dicts)

    def _name_all(self, every: dict[str, nn.Module]) -> None:
        """Name modules after their places now, and hook the new ones.

        A module that was called keeps the name of its calls. Another module that is now
        in its old place gets a name of its own.

        Args:
            every: The modules of the model, by each of their places.
        """
        standing = first_names(every)
        called = {it.name for it in self._hooked.values() if it.was_called}
        kept = {
            hooked.name
            for module in standing
            if (hooked := self._hooked.get(module)) is not None and hooked.was_called
        }
        self._places.clear()
        for module, place in standing.items():
            self._places[module] = place
            hooked, name = self._hooked.get(module), place
            while name in kept:
                name += " (new)"
            if hooked is None:
                self._attach(name, place, module)
            elif not hooked.was_called:
                hooked.rename(name, self._calls_of[name])
                if not self._is_chosen(name, place, module) and place:
                    self._detach({module: self._hooks.pop(module)})
                    del self._hooked[module]
        for place, module in every.items():
            hooked = self._hooked.get(module)
            if hooked is None or place in called:
                self._name_place(place, place)
            else:
                self._name_place(place, hooked.name)
                self._names[hooked.name] = hooked.name

    def _name_place(self, place: str, name: str) -> None:
        """Note the name under which the calls of the module in a place are found."""
        self._names[place] = name
        if COMPILED in place:
            self._names.setdefault(uncompiled(place), name)
