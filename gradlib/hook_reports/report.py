"""What each kind of backward hook receives for a module, every entry named by value."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from gradlib.errors import NotAModuleError, NotCopyableError, UnknownKindError
from gradlib.hook_reports.graph import CallGraph
from gradlib.hook_reports.hooked_call import HookedCall
from gradlib.hook_reports.hooks import KINDS, Got, hook_set, place
from gradlib.hook_reports.notes import notes_on
from gradlib.hook_reports.trial import differentiable, left_as_it_is
from gradlib.hook_reports.what_it_is import what_it_is
from gradlib.hook_reports.why_so_many import (
    why_never_called,
    why_not_tried,
    why_so_many,
)
from gradlib.private.modes import values_are_fake, values_are_stand_ins
from gradlib.recording.in_words import shape_text
from gradlib.render import Printable, Table
from gradlib.wording import in_brief, no_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = ("entry", "shape", "what it is")

OF_INFERENCE = (
    "Shown as under torch.no_grad(): in torch.inference_mode() nothing that is "
    "computed requires grad, and no hook is called."
)


@dataclass(frozen=True, eq=False)
class HookEntry(Printable):
    """One entry of what a hook received.

    Attributes:
        place: Where the hook got it, as ``"grad_input[0]"``; for a hook on a tensor,
            with the tensor's name, as ``"grad of output"`` or ``"weight.grad"``.
        value: The gradient, of any shape, or ``None``.
        what: What it is, as ``"gradient of weight, transposed"``.
    """

    place: str
    value: Tensor | None
    what: str

    def _table(self) -> Table:
        return Table("HookEntry", COLUMNS, [_row(self)])


@dataclass(frozen=True, eq=False, repr=False)
class HookKind(Printable):
    """What hooks of one kind received.

    Attributes:
        name: The method or function that sets such a hook.
        entries: What the hook received, in order; for a hook on a tensor, what the
            hook on each tensor received. Empty where it was never called.
        why: Why there are that many entries, and what would change it.
        warnings: The warnings given with this hook, and not without it.
        error: The error raised with this hook, and not without it, or ``""``.
    """

    name: str
    entries: tuple[HookEntry, ...]
    why: str
    warnings: tuple[str, ...]
    error: str

    @property
    def grad_input(self) -> tuple[HookEntry, ...]:
        """The entries of ``grad_input``."""
        return tuple(e for e in self.entries if e.place.startswith("grad_input["))

    @property
    def grad_output(self) -> tuple[HookEntry, ...]:
        """The entries of ``grad_output``."""
        return tuple(e for e in self.entries if e.place.startswith("grad_output["))

    def __repr__(self) -> str:
        """Name the kind."""
        return f"<HookKind: {self.name}>"

    def _table(self) -> Table:
        return _table_of(self)


class _Kinds(dict[str, HookKind]):
    """The kinds of hooks, by name; another name is told which there are."""

    def __missing__(self, name: object) -> HookKind:
        known = ", ".join(f'"{it}"' for it in self)
        raise UnknownKindError(
            f"kinds[{in_brief(name)}]: there is no such kind of hook. There are: "
            f"{known}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class HookReport(Printable):
    """What each kind of backward hook receives for one module and its inputs.

    Attributes:
        module_type: The name of the module's class.
        last_node: The autograd node of the first output tensor, as
            ``"AddmmBackward0"``; ``""`` if it has none. The old hook is set on it.
        last_node_inputs: One name for each input of its operation: that of an argument
            or parameter, or else of the node the input comes from; ``"-"`` where the
            input needs no gradient.
        kinds: What each kind of hook received, by the name of the method or function
            that sets the hook.
        notes: Remarks about the whole report.
    """

    module_type: str
    last_node: str
    last_node_inputs: tuple[str, ...]
    kinds: Mapping[str, HookKind]
    notes: tuple[str, ...]
    _graph: CallGraph

    def __repr__(self) -> str:
        """Name the module's class."""
        return f"<HookReport: {self.module_type}>"

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw the autograd graph of the call, with each tuple where its hook gets it.

        Gradients flow upwards, from the output of the module, whose border is dashed,
        to its inputs and parameters. An outlined box is a node, the backward of one
        operation. Grey is an entry that is ``None`` or zeros, and an argument that no
        gradient reaches. A keyword argument has no entry, so no blue box. Of a large
        graph only the nodes next to the outputs, and that of the old hook, are drawn
        one by one.

        Args:
            ax: Where to draw; a new figure if left out.

        Returns:
            The figure drawn on.

        Raises:
            RecordingArgumentError: `ax` is no Axes.
        """
        # Imported only here, as importing matplotlib takes longer than all the rest.
        from gradlib.hook_reports.picture import draw

        received = {
            name: {entry.place: _in_short(entry.value) for entry in kind.entries}
            for name, kind in self.kinds.items()
        }
        return draw(self.module_type, self._graph, received, ax)

    def _tables(self) -> list[Table]:
        inputs = f"({', '.join(self.last_node_inputs)})" if self.last_node else "none"
        head = f"{self.module_type}, last autograd node: {self.last_node}{inputs}"
        return [Table(head, (), [], self.notes), *map(_table_of, self.kinds.values())]


def hook_report(module: nn.Module, /, *args: Any, **kwargs: Any) -> HookReport:
    """Show what each kind of backward hook receives, and what every entry is.

    Each kind runs on its own copy of `module` and of its inputs, from the same random
    state; `module`, the inputs and the random state stay as they are. Every output
    that requires grad is given a random ``v``. Each entry is named by its value: by the
    tensor that stands at its place in the graph, if it equals that tensor's gradient.

    A copy has the forward hooks of `module`, which run with it each time, but no
    backward hook except the one tried and those that hold for every module.

    Args:
        module: The module to call, on any device, in either mode.
        args: Its positional arguments. ``requires_grad`` counts: pass tensors that
            require grad, as they do inside a model. A module that works in place takes
            no leaf that requires grad: pass ``x.clone()``.
        kwargs: Its keyword arguments.

    Returns:
        The report, to print or to ask: ``report.kinds["register_backward_hook"]``.

    Raises:
        NotAModuleError: `module` is not a ``torch.nn.Module``, or a ScriptModule.
        NotCopyableError: The module or an argument cannot be copied, or a tensor is
            nested, or has no values, as on the device ``"meta"``, in a
            ``FakeTensorMode`` or inside of torch.func.
        Exception: What the module itself raises without a hook, unchanged.

    Example:
        ```python
        import torch
        from torch import nn

        import gradlib

        linear = nn.Linear(20, 30)
        x = torch.randn(4, 20, requires_grad=True)
        report = gradlib.hook_report(linear, x)

        print(report.kinds["register_full_backward_hook"])
        #> register_full_backward_hook
        #> entry           shape    what it is
        #> grad_input[0]   [4, 20]  gradient of input
        #> grad_output[0]  [4, 30]  gradient of output
        #> 1 entry in grad_input: one for each positional argument. The operations
        #>   inside do not change that.
        for entry in report.kinds["register_backward_hook"].grad_input:
            print(entry.place, list(entry.value.shape), entry.what)
        #> grad_input[0] [30] gradient of bias
        #> grad_input[1] [4, 20] gradient of input
        #> grad_input[2] [20, 30] gradient of weight, transposed
        ```
    """
    if not isinstance(cast(object, module), nn.Module):
        raise NotAModuleError(
            "hook_report(module, *args): module must be a torch.nn.Module, but "
            + no_module(module, "Pass the module first, then its inputs.")
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise NotAModuleError(
            "hook_report(module, *args): module is a ScriptModule, which takes no "
            "hooks. Pass the module it was made of."
        )
    if values_are_stand_ins() or values_are_fake():
        raise NotCopyableError(
            "hook_report names each gradient by its value, and inside of torch.func "
            "(vmap, grad and so on), torch.jit.trace or a FakeTensorMode tensors only "
            "stand for others. Call it outside."
        )
    of_inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    # Inference mode becomes no_grad, under which tensors can have graphs.
    with torch.inference_mode(False), torch.set_grad_enabled(grad), catch_warnings():
        simplefilter("ignore")  # as attributes are read; those of runs are recorded
        with left_as_it_is(module) as changed:
            call = HookedCall(module, args, kwargs)
            kinds = _Kinds((kind, _tried(call, kind)) for kind in KINDS)
        notes = tuple(notes_on(call, changed))
    if of_inference and differentiable(call.plain.output):
        notes = (*notes, OF_INFERENCE)
    last, name = call.last_node, type(module).__name__
    return HookReport(name, last.name, last.inputs, kinds, notes, call.graph)


def _tried(call: HookedCall, kind: str) -> HookKind:
    """Try one kind of hook on a copy of its own."""
    if why_not := why_not_tried(call, kind):
        return HookKind(kind, (), why_not, (), "")
    trial = call.trial()
    got: list[Got] = []

    def write(entries: list[Got]) -> None:
        got[:] = entries

    error = ""
    try:
        named = partial(call.named, kind, trial)
        with hook_set(kind, trial, named, write) as on_output:
            trial.run(on_output)
    except Exception as raised:
        said = _GUESSES_AND_KERNELS.sub("", str(raised))
        error = f"{type(raised).__name__}: {said}".removesuffix(": ")
    entries = tuple(HookEntry(place(it), it.grad, what_it_is(call, it)) for it in got)
    if got:
        why = why_so_many(call, kind, Counter(it.field for it in got))
    elif error:
        why = (
            "Never called: with this hook there is an error, without it there is none."
        )
    else:
        why = why_never_called(call, kind)
    fresh = dict.fromkeys(w for w in trial.warnings if w not in call.warnings)
    return HookKind(kind, entries, why, tuple(fresh), error)


_GUESSES_AND_KERNELS = re.compile(r"\n\n.*| This could be because .*", re.DOTALL)
"""What torch may add to an error: guesses at the reason, and the kernels that exist."""


def _table_of(kind: HookKind) -> Table:
    rows = [_row(entry) for entry in kind.entries]
    footer = (kind.why, *kind.warnings, kind.error)
    return Table(kind.name, COLUMNS if rows else (), rows, footer)


def _row(entry: HookEntry) -> tuple[str, ...]:
    return entry.place, shape_text(entry.value), entry.what


def _in_short(value: Tensor | None) -> str:
    """Return the shape of an entry, or ``"None"`` or ``"zeros"``."""
    if value is None:
        return "None"
    is_shown = value.is_nested or not value.numel() or value.any()
    return shape_text(value) if is_shown else "zeros"
