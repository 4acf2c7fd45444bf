"""The arguments of ``per_sample_jacobian``, read and validated."""

from collections.abc import Callable, Iterator, Sequence
from keyword import iskeyword
from operator import index
from typing import Any, NamedTuple, cast

import optree
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.call import Argnums
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.real import is_real, require_real
from gradlib.opaque import is_tensor
from gradlib.tree import NAMESPACE, Tree, written
from gradlib.wording import in_brief, no_module

AS_TENSOR = "torch.as_tensor makes one of a list or a NumPy array."


class Asked(NamedTuple):
    """A tensor that the Jacobian is with respect to.

    Attributes:
        name: What messages call it: ``inputs[0]['mask']``, or a parameter's name.
        value: The tensor, as the caller gave it.
        shared: Whether all samples share it: then it has no batch axis.
        place: Its place among the inputs' leaves; ``None`` for a parameter.
    """

    name: str
    value: Tensor
    shared: bool
    place: int | None = None

    @property
    def key(self) -> int | str:
        """What it is known by among the inputs, by place, and parameters, by name."""
        return self.name if self.place is None else self.place


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
    shared = _shared(tree, inputs, in_dims)
    batch = _batch(tree, shared)
    if isinstance(argnums, str):
        asked = _parameters(fn, argnums)
        inner = Tree.of({it.name: i for i, it in enumerate(asked)})
    else:
        asked, inner = _arguments(tree, inputs, argnums, shared)
    for it in asked:
        if not is_real(it.value):
            require_real(it.value, it.name, _instead(tree, it))
    return Arguments(fn, tree, shared, tuple(asked), inner, batch)


def _instead(tree: Tree, asked: Asked) -> str:
    """Return advice on what to ask for in place of an integer input."""
    if any(map(_is_floating, tree.leaves)):
        return set_apart(tree, asked) or "Leave it out of argnums."
    return (
        "Pass what is computed from it, such as its embedding, or ask for "
        'argnums="parameters".'
    )


def set_apart(tree: Tree, asked: Asked) -> str:
    """Return advice on how to leave out a tensor but not those in the same input.

    Returns:
        A sentence; ``""`` where the whole input may be left out.
    """
    if asked.place is None:
        return ""
    paths = tree.spec.paths()
    number, *inside = paths[asked.place]
    others = [i for i, it in enumerate(paths) if it[0] == number and i != asked.place]
    if not any(_is_floating(tree.leaves[it]) for it in others):
        return ""
    return (
        "argnums names whole inputs, so pass it as an input of its own: "
        f"{_taken_apart(tree.build(), number, inside)}."
    )


def _taken_apart(inputs: tuple[Any, ...], number: int, inside: Sequence[Any]) -> str:
    """Return code for a function that takes part of an input, and the rest, apart."""
    whole, key = inputs[number], inside[0]
    if type(whole) is not dict or len(inside) > 1 or number:
        return "lambda rest, it: fn(...), which puts the two together"
    given = [it for it in cast("dict[Any, Any]", whole) if it != key]
    part = _as_name(key, "it")
    rest = _as_name(given[0], "rest") if len(given) == 1 else "rest"
    known = f"{given[0]!r}: {rest}" if len(given) == 1 else f"**{rest}"
    more = ", *others" if len(inputs) > 1 else ""
    return f"lambda {rest}, {part}{more}: fn({{{known}, {key!r}: {part}}}{more})"


def _as_name(key: object, otherwise: str) -> str:
    """Return a key as a parameter name in code, or `otherwise` where it cannot be."""
    is_name = isinstance(key, str) and key.isidentifier() and not iskeyword(key)
    return str(key) if is_name and key not in ("fn", "others") else otherwise


def _is_floating(leaf: object) -> bool:
    return is_tensor(leaf) and leaf.is_floating_point()


def input_path(tree: Tree, place: int) -> str:
    """Return what messages call an input: ``inputs[0]['mask']``."""
    return _path_of(tree.spec.paths()[place])


def _path_of(steps: Sequence[Any]) -> str:
    return "inputs" + written(steps)


def _shared(tree: Tree, inputs: tuple[Any, ...], in_dims: Any) -> tuple[bool, ...]:
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


def _batch(tree: Tree, shared: Sequence[bool]) -> int:
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


def _is_class_of_modules(fn: object) -> bool:
    """Tell whether `fn` is a class of modules: callable, but not on inputs."""
    return isinstance(fn, type) and issubclass(fn, nn.Module)


def _parameters(fn: Callable[..., Any], argnums: str) -> list[Asked]:
    if argnums != "parameters":
        raise JacobianArgumentError(
            f"argnums is {in_brief(argnums)}: it is an int, a tuple of ints, or "
            '"parameters".'
        )
    if not isinstance(fn, nn.Module):
        raise JacobianArgumentError(
            f'argnums="parameters" needs fn to be a module, not {_name(fn)}. Pass the '
            "module itself; wrap what happens around it into a module's forward."
        )
    asked = [
        Asked(name, parameter, shared=True)
        for name, parameter in fn.named_parameters()
        if parameter.requires_grad
    ]
    if not asked:
        raise JacobianArgumentError(
            f"No parameter of {type(fn).__name__} requires grad, so there is nothing "
            "to differentiate for: call .requires_grad_() on the module, or on some."
        )
    return asked


def _arguments(
    tree: Tree, inputs: tuple[Any, ...], argnums: object, shared: Sequence[bool]
) -> tuple[list[Asked], Tree]:
    given: Any = argnums
    if isinstance(argnums, tuple) and not given:
        raise JacobianArgumentError(
            "argnums is (), which asks for nothing. Name an input, as argnums=0."
        )
    places: dict[int, list[int]] = {}
    paths = tree.spec.paths()  # each begins with the number of its input
    for number in given if isinstance(argnums, tuple) else (given,):
        if type(number) is not int or not -len(inputs) <= number < len(inputs):
            raise JacobianArgumentError(
                f"argnums is {in_brief(given)}: it is an int, the number of an input, "
                f"{_from_0_to(len(inputs) - 1)}, a tuple of such, or "
                '"parameters".'
            )
        number %= len(inputs)
        if number in places:
            raise JacobianArgumentError(
                f"argnums {argnums!r} names an input twice. Name each one once."
            )
        places[number] = [i for i, path in enumerate(paths) if path[0] == number]
    asked: list[Asked] = []
    parts: list[Any] = []
    for number, inside in places.items():
        tensors = [i for i in inside if is_tensor(tree.leaves[i])]
        if not tensors:
            raise JacobianArgumentError(
                f"inputs[{number}] is asked for by argnums and holds no tensor: it is "
                f"{in_brief(inputs[number])}. Name inputs that hold one; {AS_TENSOR}"
            )
        part = Tree.of(inputs[number])
        first, start = inside[0], len(asked)
        parts.append(part.filled({i - first: start + k for k, i in enumerate(tensors)}))
        asked += [
            Asked(_path_of(paths[i]), tree.leaves[i], shared[i], i) for i in tensors
        ]
    return asked, Tree.of(parts[0] if isinstance(argnums, int) else tuple(parts))


def _from_0_to(last: int) -> str:
    return f"from 0 to {last}" if last else "here only 0"


def _name(fn: object) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
