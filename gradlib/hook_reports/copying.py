"""A copy of a module and its inputs, from which nothing leads to the originals."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from gradlib.errors import NotCopyableError
from gradlib.hook_reports.bound import bind_functions
from gradlib.opaque import is_tensor
from gradlib.private.classes import in_slots
from gradlib.private.hooks import backward_hooks
from gradlib.private.modules import modules_in
from gradlib.private.tensors import has_values
from gradlib.recording.attributes import be_like, fill_slots
from gradlib.recording.past_attributes import OF_TORCH
from gradlib.sharded import is_distributed, is_sharded
from gradlib.shared_memory import extent
from gradlib.tree import Tree, tensors_in


class CopiedCall(NamedTuple):
    """A copy of a module and of its inputs.

    Attributes:
        module: The copied module.
        inputs: The copied ``(args, kwargs)``.
        stands_for: For each stand-in node in the copy, the original node, which made an
            input or a tensor that the module keeps.
    """

    module: nn.Module
    inputs: Tree
    stands_for: dict[Node, Node]


def copies_of(
    module: nn.Module, inputs: Tree, change: Callable[[Tensor], Tensor]
) -> CopiedCall:
    """Copy a module together with its inputs: what both hold stays one object.

    Forward hooks are kept: they may be part of what the module computes, as those of
    ``weight_norm`` are. Backward hooks are left out: they would change gradients, and
    torch refuses two kinds of them on one module.

    Args:
        module: The module to copy.
        inputs: Its ``(args, kwargs)``.
        change: Applied to each tensor in `inputs`.

    Raises:
        NotCopyableError: The module cannot be copied, an input is nested, or a tensor
            has no values.
    """
    require_none_nested(inputs, "Pass")
    _require_values(module, inputs)
    _require_whole(module, inputs)
    own = _tensors(module)  # a parameter that is also an input stays one tensor
    given = {id(it): it for it in inputs.leaves if is_tensor(it)}
    copies = {key: _copied(it, change) for key, it in given.items() if key not in own}
    attributes = _computed_attributes(module)
    kept = {key: _copied(it, as_it_is) for key, it in attributes.items()}
    sparse = {  # torch's deepcopy makes no sparse parameter
        id(it): nn.Parameter(it.detach().clone(), it.requires_grad)
        for it in module.parameters()
        if it.layout != torch.strided
    }
    made: dict[int, Any] = kept | copies | sparse
    copied, leaves = _whole(module, inputs.leaves, made)
    if own & _tensors(copied):
        raise NotCopyableError(
            f"hook_report works on a copy, but a copy of {type(module).__name__} "
            "shares tensors with it: see its __deepcopy__."
        )
    stands_for: dict[Node, Node] = {
        made[key].grad_fn: original.grad_fn
        for key, original in (attributes | given).items()
        if key in made and original.grad_fn is not None
    }
    return CopiedCall(copied, Tree(leaves, inputs.spec), stands_for)


def _whole(
    module: nn.Module, leaves: list[Any], made: dict[int, Tensor]
) -> tuple[nn.Module, list[Any]]:
    """Copy a module and the leaves of its inputs.

    Args:
        module: The module to copy.
        leaves: The leaves of its inputs.
        made: The copies of tensors made already, by the ids of the originals.
    """
    without_hooks = {id(it): type(it)() for it in backward_hooks_inside(module)}
    memo: dict[int, Any] = {**made, **without_hooks}
    given = [it for it in leaves if is_tensor(it)]
    copied, leaves = _deep_copied((module, leaves), module, memo)
    for tensor in (*module.parameters(), *module.buffers(), *given):
        if id(tensor) in memo:  # torch's deepcopy forgets the attributes of a tensor
            be_like(memo[id(tensor)], tensor)
    for part in modules_in(module):  # and the slots of a module
        if filled := in_slots(part):
            values = _deep_copied([*filled.values()], module, memo)
            fill_slots(memo[id(part)], dict(zip(filled, values, strict=True)))
    for copied_object in [*memo.values()]:
        bind_functions(copied_object, memo)
    part: Any
    for part in modules_in(copied):
        part._is_full_backward_hook = None  # as in a new module
    return copied, leaves


def backward_hooks_inside(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of the backward hooks of a module and of all inside it."""
    return [hooks for part in modules_in(module) for hooks in backward_hooks(part)]


def _deep_copied(source: Any, module: nn.Module, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(source, memo)
    except Exception as error:
        raise NotCopyableError(
            f"hook_report works on a copy, and {type(module).__name__} with its "
            f"arguments cannot be copied: {type(error).__name__}: {error}. "
            f"{_what_to_do(module, memo)}"
        ) from error


def _what_to_do(module: Any, memo: dict[int, Any]) -> str:
    """Name the attribute that cannot be copied, and say how to go on without it."""
    modules: dict[str, nn.Module] = dict(module.named_modules())
    for path, part in modules.items():
        for name in vars(part).keys() - OF_TORCH:
            try:
                copy.deepcopy(vars(part)[name], {**memo})
            except Exception:
                where = f"{path}.{name}".removeprefix(".")
                return f"It is the attribute {where}: take it away for the report."
    return "Report on it without what cannot."


def as_it_is(tensor: Tensor) -> Tensor:
    """Return a tensor unchanged."""
    return tensor


def _computed_attributes(module: nn.Module) -> dict[int, Tensor]:
    """Return the computed tensors that are kept as attributes, by their ids.

    deepcopy refuses them. Examples are activations, and ``weight_norm``'s weight.
    """
    return {
        id(tensor): tensor
        for part in modules_in(module)
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
    """Return a detached copy with the same strides, as operations may depend on them.

    ``clone`` keeps the strides only where the tensor has no gaps and no overlaps.
    """
    source = tensor.detach()
    if (
        type(tensor) is not Tensor
        or tensor.layout != torch.strided
        or tensor.is_quantized
    ):
        return source.clone()
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if span := extent(tensor):
        whole = source.as_strided((span,), (1,), source.storage_offset())
        made.as_strided((span,), (1,)).copy_(whole)
    return made


def _tensors(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())}


class Before(torch.autograd.Function):
    """Stands for the computations before the module: it copies a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
        """Copy."""
        return _exact_copy(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004 (torch's form)
        """Return the gradient as it is."""
        return grads[0]


def computed(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` that has a node of its own in the graph.

    Gradients are enabled for it, even where the module is called without them.
    """
    with torch.enable_grad():
        made = cast(Any, Before).apply(tensor)
    be_like(made, tensor)
    return made


def stands_for_another(tensor: Tensor) -> bool:
    """Tell whether a tensor is a copy that `computed` made."""
    return isinstance(tensor.grad_fn, cast(Any, Before)._backward_cls)


def require_none_nested(tree: Tree, do: str) -> None:
    """Refuse a nested tensor, and say what to do with a padded one."""
    if any(is_tensor(leaf) and leaf.is_nested for leaf in tree.leaves):
        raise NotCopyableError(
            "hook_report gives each tensor that goes in or comes out an autograd node "
            f"of its own, which torch refuses for a nested one. {do} a padded tensor: "
            "torch.nested.to_padded_tensor(x, 0.0)."
        )


def _require_whole(module: nn.Module, inputs: Tree) -> None:
    if is_sharded(module) or any(map(is_distributed, inputs.leaves)):
        raise NotCopyableError(
            f"hook_report works on a copy, and of {type(module).__name__} or its inputs"
            " each process holds a part only (FSDP, DTensor). Report on the module "
            "before it is sharded."
        )


def _require_values(module: nn.Module, inputs: Tree) -> None:
    if any(map(is_lazy, module.buffers())):  # a lazy parameter can be copied
        raise NotCopyableError(
            "hook_report works on a copy, and torch copies no buffer that a lazy "
            f"module makes in its first call, as {type(module).__name__} does. Call "
            "the module once before."
        )
    every: Iterable[Any] = (*module.parameters(), *module.buffers(), *inputs.leaves)
    if all(has_values(it) for it in every if is_tensor(it)):
        return
    raise NotCopyableError(
        "hook_report names each gradient by its value, and tensors on the device meta, "
        "or made in a FakeTensorMode, have none. Give them values: "
        'module.to_empty(device="cpu").'
    )
