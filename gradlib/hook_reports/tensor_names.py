"""The names of the tensors of a module call."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.hook_reports.copying import computed, stands_for_another
from gradlib.hook_reports.trial import Trial, differentiable
from gradlib.node_order import leads_to_newer
from gradlib.opaque import is_tensor
from gradlib.private.modules import own_buffers, own_parameters
from gradlib.private.nodes import leaf_of, sequence_number
from gradlib.private.tensors import is_stand_in
from gradlib.recording.past_attributes import OF_TORCH
from gradlib.selection import COMPILED
from gradlib.tree import Tree

OUTSIDE = "a leaf that is itself no argument or attribute"
COMPUTED = "a tensor that was computed outside"


class NamedEnd(NamedTuple):
    """A tensor where gradients end.

    Attributes:
        kind: ``"input"``, ``"parameter"``, or ``"outside"`` of the module.
        name: The name of an input or a parameter, or else `OUTSIDE` or `COMPUTED`.
        tensor: The tensor, ``None`` where it was computed outside.
    """

    kind: str
    name: str
    tensor: Tensor | None


EndAt: TypeAlias = Callable[[Node], NamedEnd | None]
"""Tells the tensor whose gradient a node receives, if it is an end."""


class Names:
    """The names of the arguments and parameters of one call.

    Attributes:
        arguments: Those of the positional arguments.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take the names of the arguments from the signature of `forward`."""
        taken = {name for name, _ in own_tensors(module)} | {"output"}
        positional = enumerate(_positional_names(module, args))
        # A function kept in the module may use the original module, past the copy.
        self._originals = {id(it): name for name, it in with_gradients(module)}
        by_path = {f"[0][{i}]": name for i, name in positional}
        by_path |= {f"[1][{name!r}]": name for name in kwargs}
        self._by_path = by_path
        inputs = Tree.of((args, kwargs))
        names = {*map(self._of_path, inputs.paths())}
        for path, name in by_path.items():
            begins = f"{name}[", f"{name}."
            if name in taken or any(it.startswith(begins) for it in names & taken):
                by_path[path] = f"argument {name}"
        self.arguments = [by_path[f"[0][{i}]"] for i in range(len(args))]

    def of_input(self, inputs: Tree, place: int) -> str:
        """Return the name of a leaf of the inputs: ``x['mask']``."""
        return self._of_path(inputs.path(place))

    def _of_path(self, path: str) -> str:
        start = next(start for start in self._by_path if path.startswith(start))
        return self._by_path[start] + path.removeprefix(start)

    def differentiable_inputs(self, trial: Trial) -> dict[str, Tensor]:
        """Return the inputs of a trial that gradients can flow to, by their names.

        An input that did not require grad, and that the module has overwritten with a
        tensor that does, is left out: its gradient belongs to that tensor alone.
        """
        return {
            self.of_input(trial.inputs, place): it
            for place, it in differentiable(trial.inputs).items()
            if place in trial.made_by or it.is_leaf
        }

    def ends(self, trial: Trial) -> EndAt:
        """Return the function that tells the tensor whose gradient a node receives.

        It knows inputs and parameters: what the module itself computes has no name.
        """
        by_node: dict[Node, NamedEnd] = {}
        by_leaf: dict[int, NamedEnd] = {}
        for place, made_by in trial.made_by.items():
            tensor = trial.inputs.leaves[place]
            end = NamedEnd("input", self.of_input(trial.inputs, place), tensor)
            by_leaf.setdefault(id(tensor), end)
            if made_by:
                by_node.setdefault(made_by, end)
        for name, tensor in wakened(trial, self):
            by_leaf.setdefault(id(tensor), NamedEnd("input", name, tensor))
        for name, tensor in with_gradients(trial.module):
            end = NamedEnd("parameter", name, tensor)
            by_leaf.setdefault(id(tensor), end)
            if tensor.grad_fn:
                by_node.setdefault(tensor.grad_fn, end)

        def end_at(node: Node) -> NamedEnd | None:
            if node in by_node:
                return by_node[node]
            leaf = leaf_of(node)
            if leaf is None:
                since = trial.since
                older = sequence_number(node) < since
                if older and not leads_to_newer([node], since):
                    return NamedEnd("outside", COMPUTED, None)
                return None
            if id(leaf) in by_leaf:
                return by_leaf[id(leaf)]
            name = self._originals.get(id(leaf))
            return NamedEnd("parameter" if name else "outside", name or OUTSIDE, leaf)

        return end_at


def wakened(trial: Trial, names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yield the inputs that the forward has made to require grad, as for forces."""
    for place, tensor in differentiable(trial.inputs).items():
        if place not in trial.made_by and tensor.is_leaf:
            yield names.of_input(trial.inputs, place), tensor


def tell_places_apart(trial: Trial) -> None:
    """Put a copy into each place of an input that is in several places.

    Any other input stays as it is: the module may ask whether it is a leaf.
    """
    own = {id(it) for _, it in with_gradients(trial.module)}
    many = Counter([*map(id, trial.inputs.leaves), *own])
    for place, tensor in differentiable(trial.inputs).items():
        if many[id(tensor)] > 1:
            alias = trial.inputs.leaves[place] = computed(tensor)
            trial.made_by[place] = alias.grad_fn


def each_inner_output(module: nn.Module, made: Callable[[str, Tensor], None]) -> None:
    """Have `made` called with the name and value of what each inner module returns.

    This is for tensors that require grad, and once for each: for the innermost module
    that returns it. Compiled modules are left out, as the hooks would be compiled too.
    """
    calls: Counter[str] = Counter()
    seen: dict[tuple[int, int], Tensor] = {}

    def hook(name: str, _module: object, _args: object, output: object) -> None:
        outputs = Tree.of(output)
        call = f", call {calls[name]}" if calls[name] else ""
        calls[name] += 1
        for place, tensor in differentiable(outputs).items():
            key = id(tensor), tensor._version
            if key not in seen and not is_stand_in(tensor):
                seen[key] = tensor
                made(f"output{outputs.path(place)} of {name}{call}", tensor)

    for name, part in cast(Any, module).named_modules():
        takes_no_hooks = isinstance(part, torch.jit.ScriptModule)
        if name and not takes_no_hooks and COMPILED not in name.split("."):
            part.register_forward_hook(partial(hook, name))


def with_gradients(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what can get a gradient: parameters, and tensors kept as attributes."""
    for name, tensor in own_tensors(module):
        if tensor.requires_grad and (tensor.is_leaf or stands_for_another(tensor)):
            yield name, tensor


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, the buffers, and the tensors in attributes, with names."""
    seen: set[int] = set()
    held: list[tuple[str, Tree]] = []
    for name, part in cast(Any, module).named_modules():
        own: dict[str, Any] = {
            **own_parameters(part),
            **own_buffers(part),
            **vars(part),
        }
        for key, value in own.items():
            path = f"{name}.{key}".removeprefix(".")
            if is_tensor(value):
                seen.add(id(value))
                yield "self.output" if path == "output" else path, value
            elif key not in OF_TORCH:
                held.append((path, Tree.of(value)))
    for path, tree in held:
        for place, leaf in enumerate(tree.leaves):
            if is_tensor(leaf) and id(leaf) not in seen:
                yield path + tree.path(place), leaf


def _positional_names(module: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """Return what `forward` calls its positional arguments."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a builtin function of torch's, which has no signature
        parameters = ()
    named = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    return [*named, *(f"args[{i}]" for i in range(len(named), len(args)))][: len(args)]
