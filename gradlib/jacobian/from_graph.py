"""The Jacobian of every sample of a batch, from a graph that is there already."""

from contextlib import nullcontext
from typing import Any

from gradlib.jacobian import planning
from gradlib.jacobian.call import as_flag, plain
from gradlib.jacobian.check import may_look
from gradlib.jacobian.compute import compute
from gradlib.jacobian.coupling import require_own_rows
from gradlib.jacobian.graph_of_tensors import of_tensors
from gradlib.jacobian.out import blocks_of, nested, require_no_graph
from gradlib.jacobian.own_backward import require_graphs
from gradlib.jacobian.readable import require_readable, require_values
from gradlib.jacobian.retained import grads_between_kept, grads_kept
from gradlib.private.compiling import as_written
from gradlib.private.hooks import without_hooks
from gradlib.private.modes import always_recorded


@as_written
@always_recorded
def per_sample_jacobian_from_graph(
    outputs: Any,
    inputs: Any,
    *,
    max_bytes: int | None = None,
    out: Any = None,
    check: bool = True,
    create_graph: bool = False,
) -> Any:
    """Return dY/dX for every sample, from a Y that was already computed from X.

    ```python
    import torch
    from torch import nn

    import gradlib

    torch.manual_seed(0)
    x = torch.randn(10, 3, requires_grad=True)
    y = nn.Linear(3, 2)(x).tanh()
    jacobian = gradlib.per_sample_jacobian_from_graph(y, x)
    print(jacobian.shape)
    #> torch.Size([10, 2, 3])
    y.sum().backward()  # the graph is still there
    ```

    The Jacobian is computed row by row, and the graph is kept. There is no function to
    call again, so, unlike `per_sample_jacobian`, this detects neither cut paths nor
    randomness.

    Args:
        outputs: A tensor ``(batch, *out)`` with a graph, or nested ones.
        inputs: The tensor ``(batch, *in)`` it was computed from, or nested ones.
        max_bytes: As for `per_sample_jacobian`.
        out: As for `per_sample_jacobian`.
        check: Whether to test that samples do not influence each other. This takes a
            few backward passes, eight for a batch of 64; another where several rows
            were computed at once; and one that finds the tensors between `inputs` and
            `outputs` that retain their ``.grad``, to leave it as it was. With
            ``check=False`` the ``.grad`` of these tensors means nothing afterwards: set
            it to ``None`` before another backward pass, which would add to it.
        create_graph: Whether gradients flow through the result. Unlike in
            `per_sample_jacobian`, a custom backward that leaves a wrong graph is not
            detected.

    Returns:
        ``(batch, *out, *in)``. If outputs or inputs are nested, the result is nested as
        the outputs and, inside, as the inputs.

    Raises:
        JacobianArgumentError: An argument is not what it must be.
        NotDifferentiableDtypeError: A tensor is not a dense tensor of real floats.
        NotPerSampleError: A tensor does not have one row for each sample.
        IndependentOutputError: An output does not depend on the inputs.
        CoupledSamplesError: With `check`: a sample's output depends on another sample.
        NoSuchWayError: torch cannot go back through the graph.
        OutOfBytesError: The Jacobian does not fit into `max_bytes`.
    """
    check = as_flag("check", check)
    create_graph = as_flag("create_graph", create_graph)
    require_values()
    require_readable("reverse", check=check)
    require_no_graph(out, create_graph=create_graph)
    graph, inner = of_tensors(outputs, inputs)
    check = check and may_look(graph.points)
    plan = planning.make(
        graph,
        "reverse",
        "auto",
        plain(max_bytes),
        has_room=out is not None,
        create_graph=create_graph,
    )
    used = zip(graph.names, graph.points, strict=True)
    given = blocks_of(out, graph, inner, used)
    between = grads_between_kept(graph.roots, graph.points) if check else nullcontext()
    with without_hooks(graph.points), grads_kept(graph.others), between:
        if create_graph and check:
            require_graphs(graph)
        blocks = compute(
            graph,
            plan,
            may_change=False,
            check=check,
            out=given,
            create_graph=create_graph,
        )
        if check:
            require_own_rows(graph)
    return nested(graph, inner, blocks) if out is None else out
