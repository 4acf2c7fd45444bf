"""What the tensors of a module call are called, and the gradients they get."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.edges import edge_of
from gradlib.hook_reports.naming import apart, name_by_value
from gradlib.hook_reports.trial import (
    Trial,
    computed,
    cotangent,
    differentiable,
    stands_for_another,
    uses_in,
)
from gradlib.private import (
    is_stand_in,
    leaf_of,
    own_buffers,
    own_parameters,
    sequence_number,
)
from gradlib.recorder.graph import leads_to_newer
from gradlib.selection import COMPILED
from gradlib.tree import Tree

OUTSIDE = "a leaf that is itself no argument or attribute"
COMPUTED = "a tensor that was computed outside"
MOST_NOISE = 1e-2
"""How far apart two runs may be, and still compute the same but for rounding."""

TORCHS = frozenset(vars(nn.Module()))
"""The attributes that every module has, where parameters stand for example."""

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class End(NamedTuple):
    """A tensor where gradients end.

    Attributes:
        kind: ``"input"``, ``"parameter"``, or ``"outside"`` of the module.
        name: That of an input or a parameter, or else `OUTSIDE` or `COMPUTED`.
        tensor: The tensor, ``None`` where it was computed outside.
    """

    kind: str
    name: str
    tensor: Tensor | None


EndAt: TypeAlias = Callable[[Node], End | None]
"""Tells the tensor whose gradient a node takes on, if there is one."""


class Names:
    """What the arguments and parameters of one call are called."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Take the names of the arguments from the signature of `forward`."""
        taken = {name for name, _ in _own_tensors(module)} | {"output"}
        positional = enumerate(_positional_names(module, args))
        # A function kept in the module may lead to the module itself, past the copy.
        self._originals = {id(it): name for name, it in _parameters(module)}
        by_path = {f"[0][{i}]": name for i, name in positional}
        by_path |= {f"[1][{name!r}]": name for name in kwargs}
        self._by_path = {
            path: f"argument {name}" if name in taken else name
            for path, name in by_path.items()
        }

    def of_argument(self, i: int) -> str:
        """Return the name of a positional argument."""
        return self._by_path[f"[0][{i}]"]

    def of_input(self, inputs: Tree, place: int) -> str:
        """Return the name of a leaf of the inputs: ``x['mask']``."""
        path = inputs.path(place)
        start = next(start for start in self._by_path if path.startswith(start))
        return self._by_path[start] + path.removeprefix(start)

    def ends(self, trial: Trial) -> EndAt:
        """Return what tells the tensor whose gradient a node takes on.

        That is an input or parameter: what the module computes has no name.
        """
        by_node: dict[Node, End] = {}
        by_leaf: dict[int, End] = {}
        for place, made_by in trial.made_by.items():
            tensor = trial.inputs.leaves[place]
            end = End("input", self.of_input(trial.inputs, place), tensor)
            by_leaf.setdefault(id(tensor), end)
            if made_by:
                by_node.setdefault(made_by, end)
        for name, tensor in _parameters(trial.module):
            end = End("parameter", name, tensor)
            by_leaf.setdefault(id(tensor), end)
            if tensor.grad_fn:
                by_node.setdefault(tensor.grad_fn, end)

        def end_at(node: Node) -> End | None:
            if node in by_node:
                return by_node[node]
            leaf = leaf_of(node)
            if leaf is None:
                since = trial.since
                older = sequence_number(node) < since
                if older and not leads_to_newer([node], since):
                    return End("outside", COMPUTED, None)
                return None
            if id(leaf) in by_leaf:
                return by_leaf[id(leaf)]
            name = self._originals.get(id(leaf))
            return End("parameter" if name else "outside", name or OUTSIDE, leaf)

        return end_at


class KnownGradients:
    """Every gradient of a call that has a name, computed without a backward hook.

    Attributes:
        warnings: What was warned of meanwhile.
        repeats: Whether another run gave the same, but for rounding; until
            `compare`, as if.
    """

    repeats = True

    def __init__(self, trial: Trial, names: Names) -> None:
        """Run the trial, and listen at every tensor that has a name."""
        self._outputs: dict[str, Tensor] = {}
        self._totals = _Sums()  # of outputs that others use, too
        self._leaves = _Sums()
        self._inner = _Sums()
        self._noise: dict[str, float] = {}
        self._listen_to_inputs(trial, names)
        each_inner_output(
            trial.module, lambda name, it: _listen(it, self._inner.adder(name))
        )
        trial.run(partial(self._listen_outside, trial.module))
        self.warnings = trial.warnings
        for name, total in self._totals.arrived().items():
            self._outputs[f"{name} with its use in other outputs"] = total

    def name(self, grad: Tensor, *, outputs_first: bool) -> str | None:
        """Name a gradient by its value; ``None`` where it has no name.

        Args:
            grad: A gradient of any shape.
            outputs_first: Which goes first where an output's is equal to an input's.
        """
        groups = (self._outputs, self._leaves.arrived())
        first, second = groups if outputs_first else groups[::-1]
        named = {**first, **second}
        inner, whole = self._inner.arrived(), self._outputs.keys()
        return name_by_value(grad, self._noise, named, inner, whole=whole)

    def arrives(self, name: str) -> bool:
        """Tell whether a gradient comes to an input or a parameter."""
        return name in self._leaves.arrived()

    def compare(self, again: "KnownGradients") -> None:
        """Learn how far two runs are apart: a GPU may add in another order each time.

        Args:
            again: The gradients of another run.
        """
        mine, others = self._arrived(), again._arrived()
        for name in mine.keys() & others.keys():
            if mine[name].shape != others[name].shape:
                continue
            noise = apart(mine[name], others[name])
            if noise > MOST_NOISE:
                self.repeats = False
            else:
                self._noise[name] = noise

    def _arrived(self) -> dict[str, Tensor]:
        return {**self._outputs, **self._leaves.arrived(), **self._inner.arrived()}

    def _listen_to_inputs(self, trial: Trial, names: Names) -> None:
        """Listen at each place of its own, as one tensor may stand in several."""
        for place, tensor in differentiable(trial.inputs).items():
            alias = trial.inputs.leaves[place] = computed(tensor)
            if alias.grad_fn is not None:
                add = self._leaves.adder(names.of_input(trial.inputs, place))
                # Not a hook on the alias: the module may overwrite it.
                alias.grad_fn.register_prehook(add)

    def _listen_outside(self, module: nn.Module, output: Tree) -> None:
        """Listen to the outputs and, as a forward may make them, the parameters."""
        for sums in (self._leaves, self._inner):
            sums.forget()  # what a pass has given that the forward itself ran
        for name, tensor in _parameters(module):
            _listen(tensor, self._leaves.adder(name))
        tensors = differentiable(output)
        uses = uses_in(tensors.values())
        for place, tensor in tensors.items():
            name = f"output{output.path(place)}"
            self._outputs[name] = cotangent(place, tensor)
            if uses[edge_of(tensor)] > 1:
                _listen(tensor, self._totals.adder(name))


def gradients_of_idle(trial: Trial, names: Names) -> dict[str, Tensor]:
    """Return the gradients there would be of what requires none, by name.

    That is inputs, parameters, buffers and tensors kept as attributes. None are
    returned where the module cannot run with all of these requiring grad.
    """
    sums = _Sums()
    inputs = trial.inputs
    for place, leaf in enumerate(inputs.leaves):
        if _is_idle(leaf):
            alias = inputs.leaves[place] = computed(leaf.requires_grad_())
            _listen(alias, sums.adder(names.of_input(inputs, place)))
    for name, tensor in _own_tensors(trial.module):
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
        and (value.is_floating_point() or value.is_complex())
    )


def each_inner_output(module: nn.Module, made: Callable[[str, Tensor], None]) -> None:
    """Have `made` called with each tensor that a module inside returns, and its name.

    Only with those that require grad, and once: by the innermost module. What is
    compiled would be compiled with the hooks in it.
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
        takes_none = isinstance(part, torch.jit.ScriptModule)
        if name and not takes_none and COMPILED not in name.split("."):
            part.register_forward_hook(partial(hook, name))


class _Sums:
    """Gradients by name, in the order of the names; what comes in parts is added up."""

    def __init__(self) -> None:
        self._grads: dict[str, Tensor | None] = {}

    def adder(self, name: str) -> Callable[[Any], None]:
        """Return a hook for a tensor, or for before a node with one output."""
        self._grads[name] = None

        def add(grad: Tensor | tuple[Tensor | None]) -> None:
            part = grad[0] if isinstance(grad, tuple) else grad
            # What is nested, inside of a module, has no value that another could have.
            if part is not None and not part.is_nested:
                before = self._grads[name]
                self._grads[name] = kept(part) if before is None else before + part

        return add

    def forget(self) -> None:
        """Begin anew, with the same names."""
        self._grads = dict.fromkeys(self._grads)

    def arrived(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self._grads.items() if grad is not None}


def kept(grad: Tensor) -> Tensor:
    """Return a copy of a gradient, which may be overwritten later: a dense one."""
    value = grad.detach()
    is_dense = grad.layout == torch.strided or grad.is_nested
    return (value if is_dense else value.to_dense()).clone()


def _listen(tensor: Tensor, hook: Callable[[Any], None]) -> None:
    cast(Any, tensor).register_hook(hook)


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name what can get a gradient: parameters, and tensors kept as attributes."""
    for name, tensor in _own_tensors(module):
        if tensor.requires_grad and (tensor.is_leaf or stands_for_another(tensor)):
            yield name, tensor


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name the parameters, the buffers, and the tensors that attributes are or hold."""
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
            if isinstance(value, Tensor):
                seen.add(id(value))
                yield "self.output" if path == "output" else path, value
            elif key not in TORCHS:
                held.append((path, Tree.of(value)))
    for path, tree in held:
        for place, leaf in enumerate(tree.leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                yield path + tree.path(place), leaf


def _positional_names(module: nn.Module, args: tuple[Any, ...]) -> list[str]:
    """Return what `forward` calls its positional arguments."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a function of torch's that says nothing of it
        parameters = ()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, POSITIONAL)]
    return [*named, *(f"args[{i}]" for i in range(len(named), len(args)))][: len(args)]
