"""The backward passes of a block: each gradient goes to the call it belongs to."""

import itertools

from torch import Tensor

from gradlib.private import backward_pass_id
from gradlib.trace import CallTrace, Gradients, PassTrace, Place
from gradlib.values import keep


class Passes:
    """Hooks for tensors and graph nodes. autograd calls them while a pass runs.

    They only keep the gradient they are given, and never change it.
    """

    def __init__(self) -> None:
        """Begin with no pass seen."""
        self._numbers: dict[int, int] = {}  # torch's number of a pass -> ours
        self._next = itertools.count()
        self._totals: dict[tuple[str, str, int], Tensor] = {}
        self._of_module: dict[tuple[str, int], list[PassTrace]] = {}

    def _running(self, call: CallTrace) -> PassTrace:
        """Return what the running backward pass gave `call`, begun if need be."""
        number = self._number(backward_pass_id(), call.recomputed_in)
        found = call.passes.get(number)
        if found is None:
            found = call.passes[number] = PassTrace(number)
            self._of_module.setdefault((call.name, number), []).append(found)
        return found

    def _number(self, running: int, recomputed_in: int | None) -> int:
        """Return our number of a pass.

        A checkpoint of the reentrant kind runs a pass of its own inside the pass that
        recomputes: it is part of that one.
        """
        if running not in self._numbers:
            if recomputed_in is None or recomputed_in == running:
                self._numbers[running] = next(self._next)
            else:
                self._numbers[running] = self._number(recomputed_in, None)
        return self._numbers[running]

    def on_node(
        self,
        call: CallTrace,
        receivers: list[tuple[int, Place]],
        grads_in: tuple[Tensor | None, ...],
        _grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Add what a graph node computed to where it belongs: it comes in parts."""
        trace = self._running(call)
        for entry, place in receivers:
            grad = grads_in[entry]
            if grad is not None:
                gradients: Gradients = getattr(trace, place.field)
                _add(gradients, place.keys, place.of(grad))

    def on_output(self, call: CallTrace, key: int, grad: Tensor) -> None:
        """Take the gradient of an output, less what the call itself gave to it."""
        trace = self._running(call)
        inner = trace.inner.get(key)
        trace.outputs[key] = keep(grad) if inner is None else grad.detach() - inner

    def on_returned_input(self, call: CallTrace, keys: list[int], grad: Tensor) -> None:
        """Take the gradient of an input that the call returned as it was.

        It is that of all uses of the tensor, those inside the call included.
        """
        trace = self._running(call)
        trace.input_shares.update(dict.fromkeys(keys, keep(grad)))

    def on_total(self, call: CallTrace, places: list[int], grad: Tensor) -> None:
        """Take the whole gradient of an input, if the pass came through the call."""
        trace = call.passes.get(self._numbers.get(backward_pass_id(), -1))
        if trace is not None:
            trace.input_totals.update(dict.fromkeys(places, keep(grad)))

    def on_parameter(self, name: str, own: str, grad: Tensor) -> None:
        """Take the whole gradient of a parameter, for each call the pass reached."""
        running = self._numbers.get(backward_pass_id(), -1)
        reached = self._of_module.get((name, running))
        if reached is None:
            return
        known = self._totals.get((name, own, running))
        total = keep(grad) if known is None else known + grad.detach()
        self._totals[name, own, running] = total
        for trace in reached:
            trace.param_totals[own] = total


def _add(gradients: Gradients, keys: list[int] | list[str], part: Tensor) -> None:
    kept = keep(part)
    for key in keys:
        gradients[key] = gradients[key] + kept if key in gradients else kept
