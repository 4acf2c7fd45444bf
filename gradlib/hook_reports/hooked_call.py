"""What is known of a module's call from running copies of it without a hook."""

from collections.abc import Collection
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from gradlib.edges import edge_of
from gradlib.hook_reports.call_graph import read
from gradlib.hook_reports.first_tensor import first_node
from gradlib.hook_reports.hooks import ACCUMULATED, ON_LAST_NODE, SEVERAL, TENSOR, Got
from gradlib.hook_reports.known import TOTAL, KnownGradients, gradients_of_idle
from gradlib.hook_reports.last_node import last_node
from gradlib.hook_reports.plain_run import PlainRun
from gradlib.hook_reports.tensor_names import Names
from gradlib.hook_reports.trial import Trial, differentiable, uses_in
from gradlib.private.modules import own_parameters
from gradlib.tree import Tree


class HookedCall:
    """A module with its inputs, and what is known of its call without a hook.

    Attributes:
        module: The module.
        inputs: Its ``(args, kwargs)``.
        names: The names of all its arguments and parameters.
        plain: One run: what the module got and returned.
        last_node: The node of the first output tensor.
        uses: How often the module uses each value.
        hooked_at: By name, the edge of each tensor that hooks are tried on.
        several: By name, the tensors that `SEVERAL` is tried on.
        known: Every gradient that has a name.
        graph: The autograd graph.
        warnings: The warnings.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Run the module without a hook; what it raises comes through."""
        self.module = module
        self.inputs = Tree.of((args, kwargs))
        self.names = Names(module, args, kwargs)
        trial = self.trial()
        plain = self.plain = PlainRun(trial, self.names)
        self.last_node = last_node(trial, self.names.ends(trial))
        self.uses = uses_in(differentiable(plain.output).values())
        outputs = self.named(TENSOR, trial, plain.output)
        self.several = self.named(SEVERAL, trial, plain.output)
        hooked = (outputs | self.several).items()
        self.hooked_at = {name: edge_of(tensor) for name, tensor in hooked}
        for name, tensor in outputs.items():
            plain.names_at[edge_of(tensor)] |= {name, TOTAL.format(name)}
        given = [plain.position("grad_input", i) for i in range(len(plain.given))]
        self.graph = read(self.trial(), self.names, given)
        self.known = KnownGradients(self.trial(), self.names)
        self.known.compare(KnownGradients(self.trial(), self.names))
        both = (*trial.warnings, *self.known.warnings)
        self.warnings = tuple(dict.fromkeys(both))  # in order, each once

    def trial(self) -> Trial:
        """Return a fresh copy of the module and its inputs."""
        return Trial(self.module, self.inputs)

    def named(self, kind: str, trial: Trial, output: Tree) -> dict[str, Tensor]:
        """Return the tensors that a kind of hook is tried on, by their names.

        Args:
            kind: One of `ON_TENSORS`.
            trial: The copy that has run.
            output: What it returned.
        """
        outputs = {
            f"output{output.path(i)}": it for i, it in differentiable(output).items()
        }
        if kind == TENSOR or not outputs:
            return outputs
        own = {
            name: it
            for name, it in own_parameters(trial.module).items()
            if it is not None and it.requires_grad
        }
        named = self.names.differentiable_inputs(trial) | own
        if kind == ACCUMULATED:
            return {name: it for name, it in named.items() if it.is_leaf}
        return named

    def names_of(self, got: Got) -> Collection[str]:
        """Return the names of the tensor that an entry belongs to, by its place."""
        if got.tensor:
            return {got.tensor, TOTAL.format(got.tensor)}
        if got.kind not in ON_LAST_NODE:
            name, _ = self.plain.position(got.field, got.number)
            return {name, TOTAL.format(name)}
        names_at = self.plain.names_at
        if got.field == "grad_output":
            node = first_node(self.plain.seen)
            return names_at[node, got.number] if node else ()
        way = self.last_node.ways[got.number]
        edges = filter(None, (way.edge, way.laid_out))
        return {name for edge in edges for name in names_at[edge]}

    @cached_property
    def idle(self) -> dict[str, Tensor]:
        """The gradients that tensors without requires_grad would have, by name."""
        return gradients_of_idle(self.trial(), self.names)
