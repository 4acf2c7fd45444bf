"""The tensors that a Jacobian is with respect to, as argnums names them."""

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.call import Argnums
from gradlib.jacobian.real import is_real, require_real
from gradlib.opaque import is_tensor
from gradlib.tree import Tree, written
from gradlib.wording import in_brief

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


def asked_for(
    fn: Callable[..., Any],
    inputs: tuple[Any, ...],
    tree: Tree,
    argnums: Argnums,
    shared: Sequence[bool],
) -> tuple[list[Asked], Tree]:
    """Return the tensors that argnums names, and the structure that they are asked in.

    Args:
        fn: The function, or module.
        inputs: Its inputs.
        tree: The same, opened.
        argnums: As the caller gave it.
        shared: For each leaf of the inputs, whether all samples share it.

    Returns:
        The tensors, and the structure with their positions as leaves.

    Raises:
        JacobianArgumentError: `argnums` names no such tensors.
        NotDifferentiableDtypeError: A tensor asked for is not real floating.
    """
    if isinstance(argnums, str):
        asked = _parameters(fn, argnums)
        inner = Tree.of({it.name: i for i, it in enumerate(asked)})
    else:
        asked, inner = _inputs(inputs, tree, argnums, shared)
    for it in asked:
        if not is_real(it.value):
            require_real(it.value, it.name, _instead(tree, it))
    return asked, inner


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


def _inputs(
    inputs: tuple[Any, ...], tree: Tree, argnums: object, shared: Sequence[bool]
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
