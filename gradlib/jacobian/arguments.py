"""The arguments of ``per_sample_jacobian``, read and validated."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.argnums import Asked, asked_for, input_path
from gradlib.jacobian.call import Argnums
from gradlib.jacobian.in_dims import batch_of, shared_of
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.opaque import is_tensor
from gradlib.tree import Tree
from gradlib.wording import no_module


class Arguments(NamedTuple):
    """The arguments of a call of ``per_sample_jacobian``, validated.

    Attributes:
        fn: The function, or module.
        inputs: Its positional arguments.
        shared: For each leaf of `inputs`, whether all samples share it.
        asked: The tensors that the Jacobian is with respect to.
        inner: The structure of what is asked for, with positions in `asked` as leaves.
        batch: The number of samples.
    """

    fn: Callable[..., Any]
    inputs: Tree
    shared: tuple[bool, ...]
    asked: tuple[Asked, ...]
    inner: Tree
    batch: int

    @property
    def of_parameters(self) -> bool:
        """Whether the Jacobian is with respect to parameters."""
        return any(it.place is None for it in self.asked)

    def used(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the inputs, parameters and buffers, with names."""
        for place, leaf in enumerate(self.inputs.leaves):
            if is_tensor(leaf):
                yield input_path(self.inputs, place), leaf
        yield from self.held()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers that the function may use, with names."""
        for module in modules_known_to(self.fn):
            yield from module.named_parameters()
            yield from module.named_buffers()

    def batched(self) -> list[int]:
        """Return the places of the input tensors that have a batch axis."""
        return [
            place
            for place, leaf in enumerate(self.inputs.leaves)
            if is_tensor(leaf) and not self.shared[place]
        ]

    def tracked(self) -> set[int]:
        """Return the places of the inputs that require grad in the check's calls."""
        leaves = self.inputs.leaves
        return {
            *(it.place for it in self.asked if it.place is not None),
            *(it for it in self.batched() if leaves[it].is_floating_point()),
            *(i for i, it in enumerate(leaves) if is_tensor(it) and it.requires_grad),
        }


def read(
    fn: Callable[..., Any], inputs: tuple[Any, ...], argnums: Argnums, in_dims: Any
) -> Arguments:
    """Validate the arguments.

    Raises:
        JacobianArgumentError: An argument is not what it must be.
        NotDifferentiableDtypeError: A tensor asked for is not real floating.
    """
    if not callable(fn) or _is_class_of_modules(fn):
        raise JacobianArgumentError(
            "fn must be a module or a function, but "
            + no_module(
                fn,
                "For outputs that are computed already there is "
                "per_sample_jacobian_from_graph.",
            )
        )
    if not inputs:
        raise JacobianArgumentError(
            "There are no inputs: pass what fn takes, as per_sample_jacobian(fn, x)."
        )
    tree = Tree.of(inputs)
    shared = shared_of(tree, inputs, in_dims)
    batch = batch_of(tree, shared)
    asked, inner = asked_for(fn, inputs, tree, argnums, shared)
    return Arguments(fn, tree, shared, tuple(asked), inner, batch)


def _is_class_of_modules(fn: object) -> bool:
    """Tell whether `fn` is a class of modules: callable, but not on inputs."""
    return isinstance(fn, type) and issubclass(fn, nn.Module)
