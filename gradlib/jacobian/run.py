"""Runs a function once, so that autograd records the graph of its outputs."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from gradlib.edges import Edge, edge_of
from gradlib.errors import JacobianArgumentError
from gradlib.jacobian.argnums import input_path
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.outputs import require_connection, require_outputs
from gradlib.jacobian.retained import retaining_noted
from gradlib.opaque import is_tensor
from gradlib.private.hooks import hooks_set
from gradlib.private.nodes import CloneNode
from gradlib.private.tensors import tangent_of
from gradlib.tree import Tree
from gradlib.vjp.connection import unconnected
from gradlib.wording import listed


def run(
    arguments: Arguments, *, create_graph: bool = False, track_inputs: bool = False
) -> tuple[Graph, dict[int, Tensor]]:
    """Call the function once, so that autograd records it.

    Args:
        arguments: The call.
        create_graph: Whether gradients flow on into the graph of the caller's inputs.
        track_inputs: Whether autograd follows every batched input, asked for or not.

    Returns:
        The graph, and by place the tensor that stands there for each leaf of the inputs
        that autograd follows.

    Raises:
        NotPerSampleError: An output is no tensor, or has not one row for each sample.
        NotDifferentiableDtypeError: An output is integer or complex.
        IndependentOutputError: An output or input is not part of the graph.
        JacobianArgumentError: The function froze a parameter that is asked for, or
            uses a tensor made under ``torch.inference_mode()``.
    """
    points, given = _points(
        arguments, create_graph=create_graph, track_inputs=track_inputs
    )
    if create_graph and arguments.of_parameters:
        _require_apart(arguments)
    ends = [_copied(given, it.place) for it in arguments.asked]  # before fn changes it
    hooks_before = hooks_set()
    with retaining_noted() as others:
        outputs = Tree.of(_called(arguments, given))
    places = require_outputs(outputs, arguments.batch)
    chosen = tuple(
        it.value if it.place is None else points[it.place] for it in arguments.asked
    )
    _require_unfrozen(arguments, chosen)
    graph = Graph(
        outputs,
        places,
        chosen,
        tuple(known or edge_of(it) for known, it in zip(ends, chosen, strict=True)),
        tuple(it.shared for it in arguments.asked),
        tuple(it.name for it in arguments.asked),
        arguments.batch,
        tuple(others),
        may_have_hooks=hooks_set() != hooks_before,
    )
    require_connection(graph, arguments)
    return graph, points


def _points(
    arguments: Arguments, *, create_graph: bool, track_inputs: bool
) -> tuple[dict[int, Tensor], list[Any]]:
    """Return what stands for the leaves of the inputs, and what the function gets."""
    asked = {it.place for it in arguments.asked}
    batched = set(arguments.batched()) if track_inputs else set[int]()
    points: dict[int, Tensor] = {}
    given: list[Any] = list(arguments.inputs.leaves)
    for place, leaf in enumerate(given):
        if not is_tensor(leaf):
            continue
        if create_graph and (leaf.requires_grad or tangent_of(leaf) is not None):
            # A node of its own: fn may get the same tensor by another way too. Not
            # view_as(): for one sample that gives strides of channels_last, for which
            # batch norm's second derivative is wrong.
            point = leaf.expand_as(leaf)
        else:
            point = (leaf.clone() if leaf.is_inference() else leaf).detach()
        if place in asked or (place in batched and leaf.is_floating_point()):
            points[place] = point.requires_grad_()
        elif leaf.requires_grad:  # fn may differentiate by it
            point.requires_grad_()
        # The function may overwrite its inputs, but not the caller's tensors.
        given[place] = point.clone()
    return points, given


def _copied(given: Sequence[Any], place: int | None) -> Edge | None:
    """Return the edge of what an input is a copy of, or ``None`` for a parameter.

    `edge_of` takes ten times as long for a leaf.
    """
    if place is None or type(given[place]) is not Tensor:
        return None  # a subclass may copy in another way
    node = given[place].grad_fn
    return cast(Any, node).next_functions[0] if type(node) is CloneNode else None


def _called(arguments: Arguments, given: list[Any]) -> Any:
    """Call the function.

    Raises:
        JacobianArgumentError: It uses a tensor made under ``torch.inference_mode()``.
    """
    passed = Tree(given, arguments.inputs.spec).build()
    try:
        return arguments.fn(*passed)
    except TypeError as error:
        _say_what_is_nested(error, passed)
        raise
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        names = [name for name, it in arguments.held() if it.is_inference()]
        what = f"{listed(names)} of a module" if names else "a tensor"
        raise JacobianArgumentError(
            f"fn computes with {what} made under torch.inference_mode(), which "
            "autograd does not record. Make it outside of that mode; copy.deepcopy() "
            "of it, outside too, is a normal one."
        ) from error


def _say_what_is_nested(error: TypeError, passed: Sequence[Any]) -> None:
    """Add to an error of the function that it was given a batch as a whole."""
    for i, it in enumerate(passed):
        if type(it) in (list, tuple, dict):
            error.add_note(
                f"fn was given inputs[{i}] as it is: a {type(it).__name__}. Of a batch "
                "with labels, pass only what fn takes: per_sample_jacobian(fn, x)."
            )


def _require_unfrozen(arguments: Arguments, points: Sequence[Tensor]) -> None:
    frozen = [
        it.name
        for it, point in zip(arguments.asked, points, strict=True)
        if not point.requires_grad
    ]
    if frozen:
        raise JacobianArgumentError(
            f"fn froze {listed(frozen)} in the call, as with "
            "requires_grad_(False). Freeze what is to be left out before the call, and "
            "nothing in it."
        )


def _require_apart(arguments: Arguments) -> None:
    """Raise where an input was computed from the parameters that are asked for."""
    parameters = [it.value for it in arguments.asked]
    for place, leaf in enumerate(arguments.inputs.leaves):
        if is_tensor(leaf) and leaf.requires_grad:
            missing = unconnected([leaf], parameters)
            if len(missing) < len(parameters):
                name = input_path(arguments.inputs, place)
                raise JacobianArgumentError(
                    f"{name} was computed from the parameters it is differentiated "
                    "for, and with create_graph=True that way would count too. Pass "
                    "its .detach()."
                )
