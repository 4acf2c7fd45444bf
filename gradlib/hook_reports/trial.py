"""Trial runs of a copy of a module: the module itself stays untouched."""

import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.parameter import is_lazy

from gradlib.edges import (
    Edge,
    edge_of,
    edges_behind,
    edges_of,
    leaves_at,
    nodes_behind,
)
from gradlib.errors import NotCopyableError
from gradlib.hook_reports.copying import as_it_is, copies_of, require_none_nested
from gradlib.plain_tensors import widest
from gradlib.private.modes import any_autocast
from gradlib.private.nodes import (
    GroupNorm,
    ends_the_process,
    next_sequence_number,
    sequence_number,
)
from gradlib.private.tensors import has_values
from gradlib.random_state import random_state_kept
from gradlib.recording.kept import Kept
from gradlib.selection import has_own_call
from gradlib.tree import Tree

SEED = 4_660_211  # unlikely to be the user's too: no cotangent may equal an input


class Trial:
    """A copy of a module and its inputs, to be hooked and run once.

    It has the forward hooks of the module, and no backward hook.

    Attributes:
        module: The copy.
        inputs: The copied ``(args, kwargs)``. A leaf stays a leaf, and a computed
            tensor stays computed; nothing leads back to the originals.
        given: The ``(args, kwargs)`` that it was called with, once it has run.
        made_by: By place, the node that made an input before the module got it.
        stands_for: As in `CopiedCall`.
        seen: The output as hooks of the module see it: a class with a ``__call__`` of
            its own may return something else.
        runs_hooks: Whether the class runs hooks at all.
        since: autograd's sequence number when the trial began. Nodes with a smaller one
            are older.
        warnings: The warnings, as ``"UserWarning: ..."``.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Tree,
        change: Callable[[Tensor], Tensor] = as_it_is,
    ) -> None:
        """Copy.

        Args:
            module: The module to copy.
            inputs: Its ``(args, kwargs)``.
            change: Applied to each tensor in `inputs`.

        Raises:
            NotCopyableError: The module cannot be copied, an input is nested, or a
                tensor has no values.
        """
        self.since = next_sequence_number()
        self.warnings: list[str] = []
        with _recorded(self.warnings):  # a copy may warn of its class, too
            copies = copies_of(module, inputs, change)
        self.module, self.inputs, self.stands_for = copies
        self.made_by = {
            place: tensor.grad_fn
            for place, tensor in differentiable(self.inputs).items()
        }
        self.given: tuple[Any, Any] = (), {}
        self.seen = Tree.of(None)
        self.runs_hooks = True

    def run(
        self,
        on_output: Callable[[Tree], None] = lambda _: None,
        *,
        backward: bool = True,
    ) -> Tree:
        """Run the copy forward and backward, each trial from the same random state.

        Args:
            on_output: Called between the two.
            backward: Whether to run a backward pass, from every output at once.

        Returns:
            What the forward returned.

        Raises:
            NotCopyableError: The forward returned a nested tensor, or torch would not
                survive the backward pass.
        """
        with random_state_kept(), _recorded(self.warnings), _casts_let_go():
            self.given = args, kwargs = self.inputs.build()
            seen: list[object] = []

            def see(_module: object, _args: object, returned: object) -> None:
                seen.append(returned)

            if has_own_call(self.module):
                self.module.register_forward_hook(see)
            returned = self.module(*args, **kwargs)
            output = self.seen = Tree.of(returned)
            if seen and seen[-1] is not returned:
                self.seen = Tree.of(seen[-1])
            self.runs_hooks = bool(seen) or not has_own_call(self.module)
            require_none_nested(output, "Return")
            on_output(output)
            if backward:
                _backward(output, self.since)
            return output


def requires_grad(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a tensor that requires grad."""
    return isinstance(value, Tensor) and value.requires_grad


def differentiable(tree: Tree) -> dict[int, Tensor]:
    """Return the tensors of a tree that require grad, by place, in a dict's order."""
    each = ((place, tree.leaves[place]) for place in tree.own_order())
    return {place: it for place, it in each if requires_grad(it)}


def uses_in(outputs: Iterable[Tensor]) -> Counter[Edge]:
    """Count the uses of `outputs` and of each value they were computed from.

    A value is known by its edge: where its gradient flows.
    """
    outputs = list(outputs)
    inside = (edge for node in nodes_behind(outputs) for edge in edges_of(node))
    return Counter([*inside, *map(edge_of, outputs)])


def cotangent(place: int, output: Tensor) -> Tensor:
    """Return v for the output at `place`: random, so that no values agree by chance."""
    generator = torch.Generator("cpu").manual_seed(SEED + place)
    v = torch.randn(
        output.shape, generator=generator, dtype=widest(output), device="cpu"
    )
    return v.to(output.device, output.dtype)


def _backward(output: Tree, since: int) -> None:
    """Run a backward pass that leaves no gradient behind on any leaf.

    Args:
        output: The output to begin with.
        since: autograd's sequence number when the trial began.
    """
    outputs = differentiable(output)
    edges = [*edges_behind(map(edge_of, outputs.values()))]
    _require_survivable(node for node, _ in edges)
    # A module may use tensors computed outside of it, whose graph the user may still
    # need. If not, no graph is retained: one by torch.compile may refuse that.
    has_outer_nodes = any(sequence_number(node) < since for node, _ in edges)
    leaves = leaves_at(edges)
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None  # or it would be added to in place
        vs = [cotangent(place, tensor) for place, tensor in outputs.items()]
        # torch begins at no view made under no_grad(), but at its edge.
        starts: list[Any] = [
            GradientEdge(*edge_of(it)) if it.grad_fn is None else it
            for it in outputs.values()
        ]
        if outputs:
            torch.autograd.backward(starts, vs, retain_graph=has_outer_nodes)
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _require_survivable(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if type(node) is not GroupNorm or node.next_functions[0][0] is not None:
            continue
        if ends_the_process(node):
            raise NotCopyableError(
                "hook_report runs a backward pass, and on a CPU torch ends the process "
                "in that of a GroupNorm whose input requires no grad and has its "
                "channels last in memory. Pass x.contiguous(), or x.requires_grad_()."
            )


@contextmanager
def left_as_it_is(module: nn.Module) -> Generator[list[str]]:
    """Undo what trials change in the original module, and list the names afterwards.

    A function kept in the module may refer to it, and is not always copied with it.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    before = [
        (name, it, it.data, Kept(it))
        for name, it in named
        if not is_lazy(it) and has_values(it)
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, tensor, data, kept in before:
            if kept.has_changed(may_wait=True):
                tensor.data = data  # it may show other memory, or have another size
                data.copy_(kept.value)
                changed.append(name)


@contextmanager
def _casts_let_go() -> Generator[None]:
    """Keep an outer autocast from caching casts: each would keep its copy alive."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and not any_autocast())
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _recorded(into: list[str]) -> Generator[None]:
    """Record warnings, including those that torch otherwise gives only once."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(always)
            into += [f"{w.category.__name__}: {w.message}" for w in caught]
