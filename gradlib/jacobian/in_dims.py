"""Which inputs have a batch axis, as in_dims says, and how many samples they hold."""

from collections.abc import Sequence
from operator import index
from typing import Any, cast

import optree
from torch.utils.data import DataLoader, Dataset

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.argnums import AS_TENSOR, input_path
from gradlib.opaque import is_tensor
from gradlib.tree import NAMESPACE, Tree
from gradlib.wording import in_brief


def shared_of(tree: Tree, inputs: tuple[Any, ...], in_dims: Any) -> tuple[bool, ...]:
    """Return for each leaf of the inputs whether all samples share it.

    Raises:
        JacobianArgumentError: `in_dims` holds something else than 0 and ``None``, or
            is not nested as the inputs are.
    """
    if in_dims is None or (type(in_dims) is int and in_dims == 0):
        return (in_dims is None,) * len(tree.leaves)
    dims: Any = in_dims
    if isinstance(dims, int):
        dims = (dims,) * len(inputs)
    if not isinstance(dims, (tuple, list)) or len(cast(Any, dims)) != len(inputs):
        raise JacobianArgumentError(
            "in_dims must be 0, None, or a tuple with one of them for each input "
            f"({len(inputs)} here); it is {in_brief(in_dims)}."
        )
    try:
        each: list[Any] = cast(Any, optree).broadcast_prefix(
            tuple(cast(Any, dims)),
            tree.form(),  # not the inputs: one that is no structure may not be opened
            none_is_leaf=True,
            namespace=NAMESPACE,
        )
    except ValueError as error:
        raise JacobianArgumentError(
            f"in_dims is {in_brief(in_dims)}, which is not nested as the inputs are. "
            "It has 0 or None for each input, or for each tensor in it, in a structure "
            "like that of the input."
        ) from error
    for dim in each:
        if dim is not None and not _is_zero(dim):
            axis = dim if type(dim) is int else 1
            raise JacobianArgumentError(
                f"in_dims holds {in_brief(dim)}. It is 0 for an input whose first axis "
                "is the batch, None for one that all samples share. For another axis "
                f"wrap fn: lambda x: fn(x.movedim(0, {axis})), and pass "
                f"x.movedim({axis}, 0)."
            )
    return tuple(dim is None for dim in each)


def _is_zero(dim: object) -> bool:
    """Tell whether a dim is the integer 0, of any integer type."""
    try:
        return not isinstance(dim, bool) and index(cast(Any, dim)) == 0
    except TypeError:
        return False


def batch_of(tree: Tree, shared: Sequence[bool]) -> int:
    """Return the number of samples.

    Raises:
        JacobianArgumentError: The inputs have none, or disagree.
    """
    sizes: dict[int, int] = {}
    for place, leaf in enumerate(tree.leaves):
        if not is_tensor(leaf) or shared[place]:
            continue
        if leaf.is_nested:
            raise JacobianArgumentError(
                f"{input_path(tree, place)} is a nested tensor. Pass a padded one: "
                "torch.nested.to_padded_tensor makes it."
            )
        if leaf.dim() == 0:
            raise JacobianArgumentError(
                f"{input_path(tree, place)} is a single number and has no batch axis. "
                "Give it one, or say in_dims=None for it: all samples share it."
            )
        sizes[place] = leaf.shape[0]
    if not sizes and not any(is_tensor(leaf) for leaf in tree.leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in tree.leaves}))
        is_data = any(isinstance(it, DataLoader | Dataset) for it in tree.leaves)
        instead = "pass a batch of the data, as next(iter(loader)) gives it."
        raise JacobianArgumentError(
            f"There is no tensor among the inputs, which hold {kinds or 'nothing'}: "
            f"{instead if is_data else AS_TENSOR}"
        )
    if not sizes:
        raise JacobianArgumentError(
            "No input has a batch axis, so there are no samples. Give one input's "
            "in_dims as 0; the Jacobian of a single sample is that of a batch of one."
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(
            f"{input_path(tree, place)} has {size}" for place, size in sizes.items()
        )
        raise JacobianArgumentError(
            f"The inputs disagree on the number of samples: {found}. What all samples "
            "share gets in_dims=None."
        )
    return next(iter(sizes.values()))
