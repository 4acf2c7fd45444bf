"""Running each kind of backward hook on a module, and naming every entry it gets."""

import re
from collections import Counter
from functools import partial
from typing import Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import nn

from gradlib.errors import NotAModuleError, NotCopyableError
from gradlib.hook_reports.hooked_call import HookedCall
from gradlib.hook_reports.hooks import KINDS, Got, hook_set, place
from gradlib.hook_reports.notes import notes_on
from gradlib.hook_reports.report import HookEntry, HookKind, HookReport, Kinds
from gradlib.hook_reports.trial import differentiable, left_as_it_is
from gradlib.hook_reports.what_it_is import what_it_is
from gradlib.hook_reports.why_so_many import (
    why_never_called,
    why_not_tried,
    why_so_many,
)
from gradlib.private.compiling import as_written
from gradlib.private.modes import values_are_fake, values_are_stand_ins
from gradlib.wording import no_module

OF_INFERENCE = (
    "Shown as under torch.no_grad(): in torch.inference_mode() nothing that is "
    "computed requires grad, and no hook is called."
)


@as_written
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
            kinds = Kinds((kind, _tried(call, kind)) for kind in KINDS)
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
