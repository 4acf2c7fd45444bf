"""Runs a function once, so that autograd records the graph of its outputs."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from gradlib.edges import Edge, edge_of
from gradlib.errors import (
    IndependentOutputError,
    JacobianArgumentError,
    NotPerSampleError,
)
from gradlib.jacobian.arguments import Arguments, input_path, set_apart
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.real import is_real, require_real
from gradlib.jacobian.retained import retaining_noted
from gradlib.opaque import is_tensor
from gradlib.private.hooks import hooks_set
from gradlib.private.nodes import CloneNode
from gradlib.private.tensors import tangent_of
from gradlib.tree import Tree
from gradlib.vjp.connection import unconnected
from gradlib.wording import in_brief, listed


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
    _require_connection(graph, arguments)
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


def of_tensors(outputs: Any, inputs: Any) -> tuple[Graph, Tree]:
    """Return the graph between tensors that were computed already.

    Returns:
        The graph, and the structure of `inputs` with positions as leaves.

    Raises:
        JacobianArgumentError: There is no tensor among `inputs`, or a tensor has no
            graph.
        NotPerSampleError: A tensor does not have one row for each sample.
        NotDifferentiableDtypeError: A tensor is integer or complex.
        IndependentOutputError: An output or input is not part of the graph.
    """
    given, made = Tree.of(inputs), Tree.of(outputs)
    places = [i for i, it in enumerate(given.leaves) if is_tensor(it)]
    names = tuple(input_path(given, place) for place in places)
    points: tuple[Tensor, ...] = tuple(given.leaves[place] for place in places)
    if not points:
        raise JacobianArgumentError(
            f"inputs must be a tensor, or hold some; it is {in_brief(inputs)}. Pass "
            f"what outputs were computed from. {_BY_PARAMETERS}"
        )
    for name, point in zip(names, points, strict=True):
        require_real(point, name, "Leave it out.")
        if point.dim() == 0 or point.shape[0] != points[0].shape[0]:
            raise NotPerSampleError(
                f"{name} has shape {list(point.shape)}, and must have the batch as its "
                f"first axis, as {names[0]} has, of shape {list(points[0].shape)}. For "
                "what all samples share use per_sample_jacobian with in_dims."
            )
        if not point.requires_grad:
            raise JacobianArgumentError(
                f"{name} does not require grad, so outputs have no graph that leads to "
                f"it. Call {name}.requires_grad_() before outputs are computed."
            )
    batch = len(points[0])
    by = _BY_PARAMETERS if isinstance(points[0], nn.Parameter) else ""
    roots = require_outputs(made, batch, f" in {names[0]}", by)
    shared = (False,) * len(points)
    others = (*points, *(made.leaves[place] for place in roots))
    ends = tuple(map(edge_of, points))
    graph = Graph(made, roots, points, ends, shared, names, batch, others)
    _require_connection(graph, None)
    inner = [places.index(i) if i in places else None for i in range(len(given.leaves))]
    return graph, Tree(inner, given.spec)


def _batch_first(name: str, output: Tensor, batch: int) -> str:
    """Return advice on how to have the batch on the first axis."""
    moved = ""
    if batch in output.shape:
        axis = output.shape.index(batch)
        moved = f"If its axis {axis} is the batch, return {name}.movedim({axis}, 0). "
    return moved + (
        "A mean or sum over the batch mixes samples: return the loss of each "
        "(reduction='none'). A single sample is passed as a batch of one: x[None]."
    )


_BY_PARAMETERS = (
    "The Jacobian by parameters is that of per_sample_jacobian(model, x, "
    'argnums="parameters").'
)


def require_outputs(
    outputs: Tree, batch: int, where: str = "", otherwise: str = ""
) -> tuple[int, ...]:
    """Return the places of the output tensors, which must have a row for each sample.

    Args:
        outputs: What was computed.
        batch: How many samples there are.
        where: Where there are as many, as messages say it.
        otherwise: What a message says if an output has another number of rows.

    Raises:
        NotPerSampleError: A leaf is no tensor with a row for each sample, or there is
            none.
        NotDifferentiableDtypeError: An output is integer or complex.
    """
    places: list[int] = []
    for place, leaf in enumerate(outputs.leaves):
        if leaf is None:
            continue
        if not is_tensor(leaf):
            raise NotPerSampleError(
                f"{output_path(outputs, place)} is {in_brief(leaf)} of type "
                f"{type(leaf).__name__}, no tensor. Return tensors only: "
                "lambda x: model(x).logits picks one."
            )
        if not is_real(leaf):
            require_real(leaf, output_path(outputs, place), "Return the others only.")
        if leaf.dim() == 0 or leaf.shape[0] != batch:
            name = output_path(outputs, place)
            raise NotPerSampleError(
                f"{name} has shape {list(leaf.shape)}, and there are {batch} samples"
                f"{where}: its first axis must be the batch, [{batch}, ...]. "
                + (otherwise or _batch_first(name, leaf, batch))
            )
        places.append(place)
    if not places:
        raise NotPerSampleError(
            "There is no tensor among the outputs. Does fn lack a return?"
        )
    return tuple(places)


def _require_connection(graph: Graph, arguments: Arguments | None) -> None:
    """Raise where an output leads to no point, or a point is reached from no output.

    Args:
        graph: The graph.
        arguments: The call that it comes from, if there was one.
    """
    drawing = graph.drawing
    if not drawing.lost and None not in drawing.ends:
        return
    changed = _changed(graph) if arguments is None else ""
    if drawing.lost:
        number = drawing.lost[0]
        path = output_path(graph.outputs, graph.places[number])
        raise IndependentOutputError(
            f"{path}, of shape {list(graph.roots[number].shape)}, does not depend on "
            f"{listed(graph.names)}: autograd knows no way from the one to the other. "
            "Either it was not computed from it, or a .detach(), torch.no_grad(), "
            "NumPy, .item() or an integer cast lies on every way, or it is a gradient "
            "that was computed without create_graph=True. If a zero is what you want, "
            f"leave that output out.{changed}"
        )
    missing = [i for i, end in enumerate(drawing.ends) if end is None]
    if arguments is None or not arguments.of_parameters:
        names = listed(graph.names[i] for i in missing)
        fix = "Leave it out, or see whether it is used at all."
        if arguments is not None:
            apart = set_apart(arguments.inputs, arguments.asked[missing[0]])
            fix = f"See whether it is used at all. {apart}" if apart else fix
        raise IndependentOutputError(
            f"No output was computed from {names}. {fix}{changed}"
        )


def _changed(graph: Graph) -> str:
    """Return which inputs were changed in place, maybe after the outputs, in words."""
    names = [
        name
        for name, point in zip(graph.names, graph.points, strict=True)
        if point._version
    ]
    if not names:
        return ""
    return (
        f" {listed(names)} {'was' if len(names) == 1 else 'were'} changed in place, "
        "maybe after the outputs were computed: to autograd that makes another tensor. "
        "Change a clone() of it."
    )
