"""Recording what goes through modules, forward and backward."""

import itertools
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from operator import methodcaller
from textwrap import shorten
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from gradlib.errors import NotAModuleError, RecordingArgumentError, UnknownFieldError
from gradlib.finishing import finish
from gradlib.module_hook import nothing
from gradlib.private.compiling import forget_compiled
from gradlib.private.modes import no_classes_of_tensors
from gradlib.private.modules import own_buffers, own_parameters
from gradlib.random_state import moving_no_generator
from gradlib.recorder.hooked_modules import HookedModules
from gradlib.recorder.module_calls import ModuleCalls
from gradlib.recorder.passes import Passes
from gradlib.recording.history import History
from gradlib.recording.kept import refuses_to_be_kept
from gradlib.recording.recording import Recording
from gradlib.recording.trace import FIELDS, Block
from gradlib.selection import first_names, modules_of, recorded_names, selector
from gradlib.sharded import is_sharded
from gradlib.stats import tensor_stats
from gradlib.values import Keep, Transfers, keeper
from gradlib.wording import in_brief, no_module


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
    gradients are the same as without recording, but for rounding in
    ``torch.nn.TransformerEncoderLayer``: in evaluation and without gradients it takes
    its ordinary path instead of the fused one.

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


def _without_with(asked: str) -> RecordingArgumentError:
    return RecordingArgumentError(
        f"record(model){asked}: a recording is made by a with block. Call the model "
        "inside of it: with gradlib.record(model) as recording. Then ask "
        f"recording{asked}."
    )


class _Recorder(AbstractContextManager[Recording]):
    """The with block: what its hooks share, and when they are set and removed."""

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
        values = fields & {"args", "output"}
        tensors = fields & {"grad_input", "grad_output"}
        # Adding to a tensor on its way to another device would wait for the copy.
        passes = Passes(
            keep, keep if tensors else nothing, cannot_add=has_reduce or moves
        )
        self._passes = passes
        every = modules_of(model, remove_duplicate=False)
        places, names = first_names(every), recorded_names(every)
        # A replay needs the arguments of the call, and the state it met. FSDP frees the
        # memory of weights, so what is kept of them cannot share it.
        refuses = _refuse(places.keys())
        replayable = "args" in fields and not (
            has_reduce or refuses or is_sharded(model)
        )
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
