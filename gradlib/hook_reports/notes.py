"""Notes on a whole hook report: how its copies differ from the module."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from gradlib.edges import edges_behind, leaves_at, nodes_behind
from gradlib.hook_reports.copying import backward_hooks_inside
from gradlib.hook_reports.hooked_call import HookedCall
from gradlib.hook_reports.tensor_names import own_tensors, with_gradients
from gradlib.hook_reports.trial import differentiable
from gradlib.private.hooks import any_global_backward_hook, every_hook_of
from gradlib.private.modules import modules_in
from gradlib.recorder.tap import Tap
from gradlib.shared_memory import overlap, storage_of
from gradlib.wording import listed


def notes_on(call: HookedCall, changed: list[str]) -> Iterator[str]:
    """Yield what is to be said of a whole report.

    Args:
        call: The call.
        changed: The names of the tensors that its copies have changed in the original.
    """
    if not call.known.repeats:
        yield (
            "Two runs gave different gradients, though torch's random state was the "
            "same. What is another gradient at each run has no name."
        )
    if any(vars(part).get("_compiled_call_impl") for part in modules_in(call.module)):
        yield (
            "The copies are not compiled, as .compile() has compiled the module: "
            "compiled, it has another last node."
        )
    if any_global_backward_hook():
        yield (
            "A backward hook for every module is set. It ran with the copies too, and "
            "may give them another last node."
        )
    if hooks := sum(map(len, backward_hooks_inside(call.module))):
        yield f"Left out of the copies: {hooks} backward hook(s), of it or inside it."
    if hooks := _hooks_left_out(call):
        yield (
            f"Left out of the copies: {hooks} hook(s) of parameters, of tensors in "
            "attributes or of inputs. Entries are what came before such a hook."
        )
    for name, other in _sharing(call):
        yield (
            f"{name} shares memory with {other}, and its copy does not: what is "
            "written to the one does not show in the other."
        )
    for name, other in call.plain.overwritten():
        yield (
            f"{name} and {other} are one tensor, which the module overwrites. Names "
            "were found with a copy for each, where what is written to the one does "
            "not show in the other."
        )
    for name, parameters in _cut_off(call):
        yield (
            f"{name} was computed from {listed(parameters)} before, and its copy is "
            "cut from that: what flows through it is missing there."
        )
    if changed:
        yield (
            f"The copies have changed {', '.join(changed)} of the module itself, which "
            "a function kept in it refers to. That was set back."
        )


def _cut_off(call: HookedCall) -> Iterator[tuple[str, list[str]]]:
    """Yield the names of what was computed from the module's parameters before.

    Yields:
        The name of an input or kept tensor, and the names of the parameters.
    """
    trial, outputs = call.plain.trial, differentiable(call.plain.output)
    nodes = nodes_behind(outputs.values())
    own = {id(it): name for name, it in own_tensors(call.module)}
    given = call.names.differentiable_inputs(trial)
    for name, tensor in (given | dict(with_gradients(trial.module))).items():
        before = trial.stands_for.get(cast(Any, tensor.grad_fn))
        if before is not None and tensor.grad_fn in nodes:
            leaves = leaves_at(edges_behind([(before, 0)]))
            if names := [own[id(it)] for it in leaves if id(it) in own]:
                yield name, names


def _sharing(call: HookedCall) -> Iterator[tuple[str, str]]:
    """Yield the name of each input that shares memory, and of the other tensor."""
    seen: defaultdict[int, list[tuple[Any, Tensor, str]]] = defaultdict(list)
    given = {
        call.names.of_input(call.inputs, place): it
        for place, it in enumerate(call.inputs.leaves)
        if isinstance(it, Tensor)
    }
    for name, tensor in (*own_tensors(call.module), *given.items()):
        memory = storage_of(tensor)
        if memory and name in given:
            for _, known, other in seen[id(memory)]:
                if known is not tensor and overlap(known, tensor):
                    yield name, other
                    break
        seen[id(memory)].append((memory, tensor, name))


def _hooks_left_out(call: HookedCall) -> int:
    """Count the hooks on the tensors of the module and on inputs, without ours."""
    given = (it for it in call.inputs.leaves if isinstance(it, Tensor))
    tensors = {id(it): it for it in given}
    tensors |= {id(it): it for _, it in own_tensors(call.module)}
    hooks = itertools.chain.from_iterable(map(every_hook_of, tensors.values()))
    return sum(not isinstance(hook, Tap) for hook in hooks)
