"""The backward passes of a block: each gradient goes to the call it belongs to."""

from typing import TypeAlias

from torch import Tensor

from gradlib.private import backward_pass_id
from gradlib.trace import CallTrace, Gradients, PassTrace, Place
from gradlib.values import keep

Receiver: TypeAlias = tuple[CallTrace, Place]
"""A call, and where in its `PassTrace` a gradient goes."""


class Passes:
    """Hooks for tensors and graph nodes. autograd calls them while a pass runs.

    They only keep the gradient they are given, and never change it.
    """

    def __init__(self) -> None:
        """Begin with no pass seen."""
        self._numbers: dict[int, int] = {}  # torch's number of a pass -> ours
        self._of_module: dict[tuple[str, int], list[PassTrace]] = {}

    def _running(self, call: CallTrace) -> PassTrace:
        """Return what the running backward pass gave `call`, begun if need be."""
        number = self._numbers.setdefault(backward_pass_id(), len(self._numbers))
        if number not in call.passes:
            call.passes[number] = PassTrace(number)
            self._of_module.setdefault((call.name, number), []).append(
                call.passes[number]
            )
        return call.passes[number]

    def on_share(self, call: CallTrace, place: Place, grad: Tensor) -> None:
        """Add a gradient to what the call has in that place: shares come in parts."""
        gradients: Gradients = getattr(self._running(call), place.field)
        part = keep(grad if place.region is None else place.region.of(grad))
        for key in place.keys:
            gradients[key] = gradients[key] + part if key in gradients else part

    def on_output(self, call: CallTrace, key: int, grad: Tensor) -> None:
        """Take the gradient of an output."""
        self._running(call).outputs[key] = keep(grad)

    def on_node(
        self,
        entry: int,
        fed: list[Receiver],
        grads_in: tuple[Tensor | None, ...],
        _grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Take one entry of what a graph node computed."""
        grad = grads_in[entry]
        if grad is None:
            return
        if len(fed) == 1:
            self.on_share(*fed[0], grad)
            return
        for call, place in fed:
            self._running(call).mixed.update(map(str, place.keys))

    def on_total(self, call: CallTrace, places: list[int], grad: Tensor) -> None:
        """Take the whole gradient of an input, if the pass came through the call."""
        running = self._numbers.get(backward_pass_id())
        if running in call.passes:
            total = keep(grad)
            call.passes[running].input_totals.update(dict.fromkeys(places, total))

    def on_parameter(self, name: str, own: str, grad: Tensor) -> None:
        """Take the whole gradient of a parameter, for each call the pass reached."""
        running = self._numbers.get(backward_pass_id(), -1)
        total = keep(grad)
        for trace in self._of_module.get((name, running), ()):
            trace.param_totals[own] = total
