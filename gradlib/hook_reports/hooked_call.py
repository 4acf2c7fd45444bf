"""What is known of a module's call from running copies of it without a hook."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.edges import Edge, edge_of, edges_behind, leaves_at, nodes_behind
from gradlib.hook_reports.first_tensor import first_node
from gradlib.hook_reports.graph import read
from gradlib.hook_reports.hooks import ACCUMULATED, ON_LAST_NODE, SEVERAL, TENSOR, Got
from gradlib.hook_reports.known import TOTAL, KnownGradients, gradients_of_idle
from gradlib.hook_reports.last_node import last_node
from gradlib.hook_reports.tensor_names import (
    Names,
    each_inner_output,
    own_tensors,
    wakened,
    with_gradients,
)
from gradlib.hook_reports.trial import (
    Trial,
    differentiable,
    requires_grad,
    uses_in,
)
from gradlib.private.modules import own_parameters
from gradlib.recording.kept import version_of
from gradlib.tree import Tree, tensors_in


class HookedCall:
    """A module with its inputs, and what is known of its call without a hook.

    Attributes:
        module: The module.
        inputs: Its ``(args, kwargs)``.
        names: The names of all its arguments and parameters.
        arguments: The names of its positional arguments.
        given: The positional arguments, as the forward pre-hooks left them.
        asked: Whether each of these required grad, before the module itself ran.
        keywords: The names of the keyword arguments that then hold tensors.
        output: What the module returned.
        seen: What its hooks see as output, which a ``__call__`` of its own may change.
        runs_hooks: Whether it runs hooks, which a ``__call__`` of its own need not.
        last_node: The node of the first output tensor.
        names_at: For each edge, the names of the tensors whose gradient flows there.
        uses: How often the module uses each value.
        inner: For each edge, the name of the tensor that an inner module returned.
        hooked_at: By name, the edge of each tensor that hooks are tried on.
        several: By name, the tensors that `SEVERAL` is tried on.
        in_several_places: The names of the inputs that are the same tensor as another
            input, or as one of the module's.
        overwritten: The names of each two inputs that are the same tensor, where the
            module overwrites it.
        cut: The names of the inputs and kept tensors that were computed from the
            module's own parameters, each with the names of the parameters.
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
        self.arguments = [self.names.of_argument(i) for i in range(len(args))]
        self.names_at: dict[Edge, set[str]] = defaultdict(set)
        plain = self.trial()
        twice = self._note_inputs(plain)
        self._run(plain)
        self.overwritten = [
            pair for it, version, pair in twice if version_of(it) > version
        ]
        nodes = nodes_behind(differentiable(self.output).values())
        self.cut = [*self._cut_off(plain, nodes)]
        self.last_node = last_node(plain, self.names.ends(plain))
        self.uses = uses_in(differentiable(self.output).values())
        outputs = self.named(TENSOR, plain, self.output)
        self.several = self.named(SEVERAL, plain, self.output)
        hooked = (outputs | self.several).items()
        self.hooked_at = {name: edge_of(tensor) for name, tensor in hooked}
        for name, tensor in outputs.items():
            self.names_at[edge_of(tensor)] |= {name, TOTAL.format(name)}
        given = [self.position("grad_input", i) for i in range(len(self.given))]
        self.graph = read(self.trial(), self.names, given)
        self.known = KnownGradients(self.trial(), self.names)
        self.known.compare(KnownGradients(self.trial(), self.names))
        both = (*plain.warnings, *self.known.warnings)
        self.warnings = tuple(dict.fromkeys(both))  # in order, each once

    def _note_inputs(self, plain: Trial) -> list[tuple[Tensor, int, list[str]]]:
        """Note the names of inputs, before the module may overwrite them.

        Returns:
            Each input that is one tensor with an earlier one, its version, and both
            names.
        """
        for name, tensor in self.names.differentiable_inputs(plain).items():
            self.names_at[edge_of(tensor)].add(name)
        twice = [(it, version_of(it), pair) for it, *pair in self._in_two_places(plain)]
        own = {id(it) for _, it in with_gradients(plain.module)}
        self.in_several_places = {name for *_, pair in twice for name in pair} | {
            self.names.of_input(plain.inputs, place)
            for place, it in enumerate(plain.inputs.leaves)
            if id(it) in own
        }
        return twice

    def _run(self, plain: Trial) -> None:
        """Run a trial; note what the module got, and what inner modules returned."""
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        asked: list[list[bool]] = []
        self.inner: dict[Edge, str] = {}

        def take_given(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            given.append((args, kwargs))
            asked.append([requires_grad(it) for it in args])

        def take_inner(name: str, tensor: Tensor) -> None:
            self.inner[edge_of(tensor)] = name
            self.names_at[edge_of(tensor)].add(name)

        plain.module.register_forward_pre_hook(take_given, with_kwargs=True)
        each_inner_output(plain.module, take_inner)
        self.output = plain.run(backward=False)
        self.seen, self.runs_hooks = plain.seen, plain.runs_hooks
        self._plain_args, _ = plain.given
        # A module may call itself; one with a __call__ of its own may run no pre-hook.
        self.given, kwargs = (*given, plain.given)[0]
        self.asked = (*asked, [*map(requires_grad, self.given)])[0]
        self.keywords = [key for key, value in kwargs.items() if tensors_in(value)]
        made = *with_gradients(plain.module), *wakened(plain, self.names)
        for name, tensor in made:
            self.names_at[edge_of(tensor)].add(name)

    def _in_two_places(self, plain: Trial) -> Iterator[tuple[Tensor, str, str]]:
        """Yield each input that is one tensor with an earlier one, and both names."""
        first: dict[int, str] = {}
        for place, it in enumerate(plain.inputs.leaves):
            if isinstance(it, Tensor):
                name = self.names.of_input(plain.inputs, place)
                other = first.setdefault(id(it), name)
                if other != name:
                    yield it, other, name

    def _cut_off(
        self, plain: Trial, nodes: Collection[Node]
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the names of what was computed from the module's parameters before.

        Yields:
            The name of an input or kept tensor, and the names of the parameters.
        """
        own = {id(it): name for name, it in own_tensors(self.module)}
        given = self.names.differentiable_inputs(plain)
        for name, tensor in (given | dict(with_gradients(plain.module))).items():
            before = plain.stands_for.get(cast(Any, tensor.grad_fn))
            if before is not None and tensor.grad_fn in nodes:
                leaves = leaves_at(edges_behind([(before, 0)]))
                if names := [own[id(it)] for it in leaves if id(it) in own]:
                    yield name, names

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

    def position(self, field: str, i: int) -> tuple[str, Any]:
        """Return the name and value of the argument or output that an entry is for."""
        if field == "grad_input":
            place = self.argument_at(i)
            name = f"args[{i}]" if place is None else self.arguments[place]
            return name, self.given[i]
        name = "output" if self.seen is self.output else "what forward returned"
        output = self.seen.build()
        if isinstance(output, tuple):
            return f"{name}[{i}]", cast("tuple[Any, ...]", output)[i]
        return name, output

    def argument_at(self, i: int) -> int | None:
        """Return which argument of the caller the module got in a place, if any."""
        value = self.given[i]
        places = [j for j, it in enumerate(self._plain_args) if it is value]
        return i if i in places else next(iter(places), None)

    def names_of(self, got: Got) -> Collection[str]:
        """Return the names of the tensor that an entry belongs to, by its place."""
        if got.tensor:
            return {got.tensor, TOTAL.format(got.tensor)}
        if got.kind not in ON_LAST_NODE:
            name, _ = self.position(got.field, got.number)
            return {name, TOTAL.format(name)}
        last = self.last_node
        if got.field == "grad_output":
            node = first_node(self.seen)
            return self.names_at[node, got.number] if node else ()
        way = last.ways[got.number]
        edges = filter(None, (way.edge, way.laid_out))
        return {name for edge in edges for name in self.names_at[edge]}

    @cached_property
    def idle(self) -> dict[str, Tensor]:
        """The gradients that tensors without requires_grad would have, by name."""
        return gradients_of_idle(self.trial(), self.names)
