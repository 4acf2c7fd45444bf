"""The graph between tensors that were computed already."""

from typing import Any

from torch import Tensor, nn

from gradlib.edges import edge_of
from gradlib.errors import JacobianArgumentError, NotPerSampleError
from gradlib.jacobian.argnums import input_path
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.outputs import require_connection, require_outputs
from gradlib.jacobian.real import require_real
from gradlib.opaque import is_tensor
from gradlib.tree import Tree
from gradlib.wording import in_brief


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
    require_connection(graph, None)
    inner = [places.index(i) if i in places else None for i in range(len(given.leaves))]
    return graph, Tree(inner, given.spec)


_BY_PARAMETERS = (
    "The Jacobian by parameters is that of per_sample_jacobian(model, x, "
    'argnums="parameters").'
)
