"""Trial runs of a copy of a module: the module itself stays untouched."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MethodType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
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
from gradlib.private import (
    FORWARD_HOOKS,
    next_sequence_number,
    sequence_number,
)
from gradlib.recording.attributes import fill_slots, in_slots
from gradlib.recording.kept import Kept
from gradlib.recording.state import random_state_kept
from gradlib.sharded import is_distributed, is_sharded
from gradlib.tree import Tree, tensors_in

SEED = 4_660_211  # unlikely to be anybody else's, so that no cotangent equals an input


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class Trial:
    """A copy of a module and its inputs, to be hooked and run once.

    It keeps forward hooks, which may be part of what the module computes, as those of
    ``weight_norm`` are. Backward hooks are left out: they would change gradients, and
    torch refuses two kinds of them on one module.

    Attributes:
        module: The copy.
        inputs: The copied ``(args, kwargs)``. A leaf stays a leaf, and what was
            computed before stays computed; nothing leads back to the originals.
        made_by: By place, the node that made an input before the module got it.
        stands_for: By the node that stands for it, the node that made a tensor: an
            input, or what the module has kept as an attribute.
        since: autograd's sequence number when the trial began. Nodes with a smaller one
            were there before.
        warnings: What was warned of, as ``"UserWarning: ..."``.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Tree,
        change: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> None:
        """Copy.

        Args:
            module: The module to copy.
            inputs: Its ``(args, kwargs)``.
            change: What to make of each tensor in `inputs`.

        Raises:
            NotCopyableError: The module cannot be copied, or an input is nested, or
                they have no values.
        """
        _none_nested(inputs)
        _must_have_values(module, inputs)
        _must_be_whole(module, inputs)
        self.since = next_sequence_number()
        own = _tensors(module)  # one that is passed to it, too, stays one tensor
        tensors = {id(x): x for x in inputs.leaves if isinstance(x, Tensor)}
        copies = {
            key: _copied(x, change) for key, x in tensors.items() if key not in own
        }
        without_hooks = {id(d): type(d)() for d in backward_hooks(module)}
        attributes = _computed_attributes(module)
        kept = {key: _copied(it, _as_it_is) for key, it in attributes.items()}
        memo: dict[int, Any] = {**kept, **copies, **without_hooks}
        self.module, leaves = _deep_copied((module, inputs.leaves), memo)
        for part in module.modules():  # of which torch's deepcopy forgets the slots
            if filled := in_slots(part):
                values = _deep_copied([*filled.values()], memo)
                fill_slots(memo[id(part)], dict(zip(filled, values, strict=True)))
        for part in self.module.modules():
            _bind_functions(part, memo)
        self.inputs = Tree(leaves, inputs.spec)
        self.made_by = {
            place: tensor.grad_fn
            for place, tensor in differentiable(self.inputs).items()
        }
        made: dict[int, Any] = {**kept, **copies}
        self.stands_for: dict[Node, Node] = {
            made[key].grad_fn: original.grad_fn
            for key, original in (attributes | tensors).items()
            if key in made and original.grad_fn is not None
        }
        self.warnings: list[str] = []
        for part in self.module.modules():
            part._is_full_backward_hook = None  # as torch sets it at first
        if own & _tensors(self.module):
            raise NotCopyableError(
                f"hook_report works on a copy, but a copy of {type(module).__name__} "
                "shares tensors with it: see its __deepcopy__."
            )

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
            NotCopyableError: It returned a nested tensor.
        """
        with random_state_kept(), _recorded(self.warnings):
            args, kwargs = self.inputs.build()
            output = Tree.of(self.module(*args, **kwargs))
            _none_nested(output)
            on_output(output)
            if backward:
                _backward(output, self.since)
            return output


class Before(torch.autograd.Function):
    """What stands for the computations before the module: it copies a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
        """Copy."""
        return _exact_copy(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
        """Hand on the gradient."""
        return grads[0]


def computed(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` that has a node of its own in the graph."""
    return cast(Any, Before).apply(tensor)


def stands_for_another(tensor: Tensor) -> bool:
    """Tell whether a tensor is such a copy."""
    return isinstance(tensor.grad_fn, cast(Any, Before)._backward_cls)


def requires_grad(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a tensor that requires grad."""
    return isinstance(value, Tensor) and value.requires_grad


def differentiable(tree: Tree) -> dict[int, Tensor]:
    """Return the tensors of a tree that require grad, by place."""
    return {place: it for place, it in enumerate(tree.leaves) if requires_grad(it)}


def uses_in(outputs: Iterable[Tensor]) -> Counter[Edge]:
    """Count the uses of each value that `outputs` were computed from, or are.

    A value is named by its edge: where its gradient flows.
    """
    outputs = list(outputs)
    inside = (edge for node in nodes_behind(outputs) for edge in edges_of(node))
    return Counter([*inside, *map(edge_of, outputs)])


def cotangent(place: int, output: Tensor) -> Tensor:
    """Return v for the output at `place`, random: equal values then mean something."""
    generator = torch.Generator("cpu").manual_seed(SEED + place)
    dtype = torch.complex128 if output.is_complex() else torch.float64
    v = torch.randn(output.shape, generator=generator, dtype=dtype, device="cpu")
    return v.to(output.device, output.dtype)


def _backward(output: Tree, since: int) -> None:
    """Run a backward pass that leaves no gradient behind on any leaf.

    Args:
        output: What to begin with.
        since: autograd's sequence number when all began.
    """
    outputs = differentiable(output)
    edges = [*edges_behind(map(edge_of, outputs.values()))]
    # A module may use what was computed outside of it, whose graph is others'. Where
    # it does not, nothing is retained: what torch.compile makes may refuse it.
    is_others = any(sequence_number(node) < since for node, _ in edges)
    leaves = leaves_at(edges)
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None  # or it would be added to in place
        vs = [cotangent(place, tensor) for place, tensor in outputs.items()]
        if outputs:
            torch.autograd.backward(list(outputs.values()), vs, retain_graph=is_others)
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


def _none_nested(tree: Tree) -> None:
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in tree.leaves):
        raise NotCopyableError(
            "hook_report gives each copied tensor an autograd node of its own, which "
            "torch refuses for a nested one. Pass a padded tensor: "
            "torch.nested.to_padded_tensor(x, 0.0)."
        )


def _must_be_whole(module: nn.Module, inputs: Tree) -> None:
    if is_sharded(module) or any(map(is_distributed, inputs.leaves)):
        raise NotCopyableError(
            f"hook_report works on a copy, and of {type(module).__name__} or its inputs"
            " each process holds a part only (FSDP, DTensor). Report on the module "
            "before it is sharded."
        )


def _must_have_values(module: nn.Module, inputs: Tree) -> None:
    every: Iterable[Any] = (*module.parameters(), *module.buffers(), *inputs.leaves)
    if any(isinstance(it, Tensor) and it.is_meta for it in every):
        raise NotCopyableError(
            "hook_report names each gradient by its value, and tensors on the device "
            'meta have none. Give them values: module.to_empty(device="cpu").'
        )


def _deep_copied(source: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(source, memo)
    except Exception as error:
        raise NotCopyableError(
            f"hook_report works on a copy, and {type(source[0]).__name__} with its "
            f"arguments cannot be copied: {type(error).__name__}: {error}"
        ) from error


def _bind_functions(part: nn.Module, memo: dict[int, Any]) -> None:
    """Have functions that stand in a copied module refer to the copy too.

    deepcopy takes a function as it is, with the modules it refers to: a forward that
    was put in calls the one before it, and that is the original's.

    Args:
        part: A module inside of the copy, or the copy.
        memo: What was copied: by the id of the original, the copy.
    """
    own = vars(part)
    for functions in (own, own[FORWARD_HOOKS[0]], own[FORWARD_HOOKS[1]]):
        for key, value in functions.items():
            if isinstance(value, FunctionType):
                functions[key] = _bound(value, memo)


def _bound(value: Any, memo: dict[int, Any]) -> Any:
    """Return what stands for a thing among the copies; the thing, if nothing does."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if isinstance(value, FunctionType):
        return _made_anew(value, memo)
    return value


def _made_anew(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function that refers to copies, in its closure and by global names."""
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(
        function.__code__,
        _with_copies(function, memo),
        function.__name__,
        function.__defaults__,
        cells,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    vars(made).update(vars(function))
    memo[id(function)] = made  # it may refer to itself
    for cell, before in zip(cells, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of one that holds nothing yet
            cell.cell_contents = _bound(before.cell_contents, memo)
    return made


def _with_copies(function: FunctionType, memo: dict[int, Any]) -> dict[str, Any]:
    """Return the globals of a function: its own, unless it refers to the module."""
    everywhere = function.__globals__
    found = {
        name: _bound(everywhere[name], memo)
        for name in everywhere.keys() & {*function.__code__.co_names}
        if not isinstance(everywhere[name], FunctionType)  # which may be anybody's
    }
    if all(it is everywhere[name] for name, it in found.items()):
        return everywhere
    return {**everywhere, **found}


def backward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts that hold the backward hooks of a module and all inside it."""
    kinds = ("_backward_hooks", "_backward_pre_hooks")
    return [getattr(part, kind) for part in module.modules() for kind in kinds]


def _computed_attributes(module: nn.Module) -> dict[int, Tensor]:
    """Return the tensors that were computed and kept as attributes, by their ids.

    deepcopy refuses them: activations, ``weight_norm``'s weight.
    """
    return {
        id(tensor): tensor
        for part in module.modules()
        for value in vars(part).values()
        for tensor in tensors_in(value)
        if not tensor.is_leaf
    }


def _copied(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = _exact_copy(change(tensor.detach()))
    if not tensor.requires_grad:
        return leaf
    leaf.requires_grad_()
    return leaf if tensor.is_leaf else computed(leaf)


def _exact_copy(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides: the operation may depend on them.

    ``clone`` keeps them only where the tensor has no gaps and no overlaps.
    """
    source = tensor.detach()
    if (
        type(tensor) is not Tensor
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        return source.clone()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if tensor.numel():
        whole = source.as_strided((span,), (1,), source.storage_offset())
        made.as_strided((span,), (1,)).copy_(whole)
    return made


def _tensors(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


@contextmanager
def left_as_it_is(module: nn.Module) -> Generator[list[str]]:
    """Set back what trials change of a module itself, and tell the names afterwards.

    A function that refers to the module, and is kept in it, is not copied with it.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    before = [(name, it, it.data, Kept(it)) for name, it in named if not is_lazy(it)]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, tensor, data, kept in before:
            if kept.has_changed(may_wait=True):
                tensor.data = data  # it may show another's memory, or have another size
                data.copy_(kept.value)
                changed.append(name)


@contextmanager
def _recorded(into: list[str]) -> Generator[None]:
    """Record warnings, and those that torch gives only once every time."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(always)
            into += [f"{w.category.__name__}: {w.message}" for w in caught]
