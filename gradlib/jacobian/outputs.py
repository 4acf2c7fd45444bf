"""What outputs must be: tensors with a row for each sample, made of the inputs."""

from torch import Tensor

from gradlib.errors import IndependentOutputError, NotPerSampleError
from gradlib.jacobian.argnums import set_apart
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.real import is_real, require_real
from gradlib.opaque import is_tensor
from gradlib.tree import Tree
from gradlib.wording import in_brief, listed


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


def require_connection(graph: Graph, arguments: Arguments | None) -> None:
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
