"""The gradients of a module call that have a name, computed without a hook."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import edge_of
from gradlib.hook_reports.copying import computed
from gradlib.hook_reports.naming import apart, name_by_value
from gradlib.hook_reports.tensor_names import (
    Names,
    each_inner_output,
    own_tensors,
    tell_places_apart,
    wakened,
    with_gradients,
)
from gradlib.hook_reports.trial import Trial, cotangent, differentiable, uses_in
from gradlib.plain_tensors import is_inexact
from gradlib.tree import Tree

TOTAL = "{} with its use in other outputs"
"""The name of an output's gradient where other outputs were computed from it."""

MOST_NOISE = 1e-2
"""By how much two runs may differ and still compute the same, except for rounding."""


class KnownGradients:
    """Every gradient of a call that has a name, computed without a backward hook.

    Attributes:
        warnings: The warnings of the run.
        repeats: Whether another run gave the same, except for rounding; True until
            `compare` has looked.
    """

    repeats = True

    def __init__(self, trial: Trial, names: Names) -> None:
        """Run the trial, and listen at every tensor that has a name."""
        self._outputs: dict[str, Tensor] = {}
        self._totals = _Sums()  # of outputs that others are computed from
        self._leaves = _Sums()
        self._inner = _Sums()
        self._noise: dict[str, float] = {}
        makers = self._listen_to_inputs(trial, names)
        each_inner_output(
            trial.module, lambda name, it: _listen(it, self._inner.adder(name))
        )
        trial.run(partial(self._listen_outside, trial, names))
        del makers  # the node of a leaf, with its hook, lives only while it is held
        self.warnings = trial.warnings
        for name, total in self._totals.arrived().items():
            self._outputs[TOTAL.format(name)] = total

    def name(
        self, grad: Tensor, *, outputs_first: bool, among: Collection[str] | None = None
    ) -> str | None:
        """Name a gradient by its value; ``None`` where it has no name.

        Args:
            grad: A gradient of any shape.
            outputs_first: Whether an output goes first where its gradient is equal to
                that of an input.
            among: The names to choose from; all without it.
        """
        groups = (self._outputs, self._leaves.arrived())
        first, second = groups if outputs_first else groups[::-1]
        every = ({**first, **second}, self._inner.arrived())
        if among is not None:
            every = [{it: known[it] for it in known if it in among} for known in every]
        return name_by_value(grad, self._noise, *every, whole=self._outputs.keys())

    def arrives(self, name: str) -> bool:
        """Tell whether a gradient comes to an input or a parameter."""
        return name in self._leaves.arrived()

    def compare(self, again: "KnownGradients") -> None:
        """Learn how far two runs differ: a GPU may add in another order each time."""
        mine, others = self._arrived(), again._arrived()
        for name in mine.keys() & others.keys():
            noise = apart(mine[name], others[name])
            if noise > MOST_NOISE:
                self.repeats = False
            else:
                self._noise[name] = noise

    def _arrived(self) -> dict[str, Tensor]:
        return {**self._outputs, **self._leaves.arrived(), **self._inner.arrived()}

    def _listen_to_inputs(self, trial: Trial, names: Names) -> list[Node]:
        """Listen at each place of the inputs, and return the nodes that are hooked."""
        tell_places_apart(trial)
        nodes: list[Node] = []
        for place, tensor in differentiable(trial.inputs).items():
            add = self._leaves.adder(names.of_input(trial.inputs, place))
            # Not a hook on the tensor: the module may overwrite it.
            nodes.append(edge_of(tensor)[0])
            nodes[-1].register_prehook(add)
        return nodes

    def _listen_outside(self, trial: Trial, names: Names, output: Tree) -> None:
        """Listen at the outputs, and at what the forward may have made.

        These are parameters, and inputs that the forward has made to require grad.
        """
        for sums in (self._leaves, self._inner):
            sums.forget()  # what came of a backward pass inside the forward
        made = *with_gradients(trial.module), *wakened(trial, names)
        for name, tensor in made:
            _listen(tensor, self._leaves.adder(name))
        tensors = differentiable(output)
        uses = uses_in(tensors.values())
        for place, tensor in tensors.items():
            name = f"output{output.path(place)}"
            self._outputs[name] = cotangent(place, tensor)
            if uses[edge_of(tensor)] > 1:
                _listen(tensor, self._totals.adder(name))


def gradients_of_idle(trial: Trial, names: Names) -> dict[str, Tensor]:
    """Return the gradients that tensors without requires_grad would have, by name.

    These are inputs, parameters, buffers and tensors kept as attributes. Nothing is
    returned where the module cannot run with all of them requiring grad.
    """
    sums = _Sums()
    inputs = trial.inputs
    for place, leaf in enumerate(inputs.leaves):
        if _is_idle(leaf):
            alias = inputs.leaves[place] = computed(leaf.requires_grad_())
            _listen(alias, sums.adder(names.of_input(inputs, place)))
    for name, tensor in own_tensors(trial.module):
        if _is_idle(tensor):
            _listen(tensor.requires_grad_(), sums.adder(name))
    try:
        trial.run()
    except Exception:
        return {}  # as where it overwrites a buffer
    return sums.arrived()


def _is_idle(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value could require grad, and does not."""
    return (
        isinstance(value, Tensor)
        and not value.requires_grad
        and is_inexact(value.dtype)
    )


class _Sums:
    """Gradients by name, in the order of the names; parts of one are added up."""

    def __init__(self) -> None:
        self._grads: dict[str, Tensor | None] = {}

    def adder(self, name: str) -> Callable[[Any], None]:
        """Return a hook for a tensor, or a pre-hook for a node with one output."""
        self._grads[name] = None

        def add(grad: Tensor | tuple[Tensor | None]) -> None:
            part = grad[0] if isinstance(grad, tuple) else grad
            # A nested gradient, of an inner tensor, cannot equal that of another.
            if part is not None and not part.is_nested:
                before = self._grads[name]
                self._grads[name] = kept(part) if before is None else before + part

        return add

    def forget(self) -> None:
        """Begin again with the same names."""
        self._grads = dict.fromkeys(self._grads)

    def arrived(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self._grads.items() if grad is not None}


def kept(grad: Tensor) -> Tensor:
    """Return a dense copy of a gradient, which may be overwritten later."""
    value = grad.detach()
    is_dense = grad.layout == torch.strided or grad.is_nested
    return (value if is_dense else value.to_dense()).clone()


def _listen(tensor: Tensor, hook: Callable[[Any], None]) -> None:
    cast(Any, tensor).register_hook(hook)
