"""How the Jacobian of every sample would be computed."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradlib.errors import JacobianArgumentError, OutOfBytesError
from gradlib.jacobian import planning, work
from gradlib.jacobian.arguments import Arguments, read
from gradlib.jacobian.call import Argnums, Call, as_flag, plain
from gradlib.jacobian.cannot_go_back import refuse
from gradlib.jacobian.check import bytes_of_check
from gradlib.jacobian.faster import find_in_call, find_in_graph
from gradlib.jacobian.generators import generators_kept
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import room_on
from gradlib.jacobian.out import blocks_of, require_no_graph
from gradlib.jacobian.own_state import state_kept
from gradlib.jacobian.plan import JacobianPlan
from gradlib.jacobian.readable import require_values
from gradlib.jacobian.retained import grads_kept
from gradlib.jacobian.run import run
from gradlib.private.compiling import as_written
from gradlib.private.modes import always_recorded
from gradlib.random_state import random_state_kept


def plan_of(
    arguments: Arguments, graph: Graph, call: Call, *, check: bool
) -> JacobianPlan:
    """Return the plan of a call, without shorter ways.

    Args:
        arguments: The call.
        graph: The graph of its forward pass.
        call: The call as it was made.
        check: Whether the check's memory counts.
    """
    return planning.make(
        graph,
        call.mode,
        call.chunk_size,
        call.max_bytes,
        has_room=call.out is not None,
        check_bytes=bytes_of_check(arguments, graph) if check else 0,
        create_graph=call.create_graph,
    )


@as_written
@always_recorded
def plan_jacobian(
    fn: Callable[..., Any],
    *inputs: Any,
    argnums: Argnums = 0,
    in_dims: Any = 0,
    mode: str = "auto",
    chunk_size: int | str = "auto",
    max_bytes: int | None = None,
    out: Any = None,
    check: bool = True,
    create_graph: bool = False,
    progress: bool = False,
) -> JacobianPlan:
    """Return how `per_sample_jacobian` would compute the Jacobian, and why.

    ```python
    import torch
    from torch import nn

    import gradlib

    autoencoder = nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 64))
    print(gradlib.plan_jacobian(autoencoder, torch.randn(8, 64), max_bytes=2**20))
    #> Jacobian [8, 64, 64], 128 KiB: mode='chain', as the Jacobian of each of its
    #>   layers is known.
    #> mode     passes  multiply-adds  rows or columns
    #> reverse  16      2.62e+05       64
    #> forward  16      2.62e+05       64
    #> split    2       1.47e+05       4
    #> loop     64      2.62e+05       64
    #> chain            1.31e+05       products in the order 2 1
    #> Held at once, on top of the forward pass: 136.1 KiB, of 1 MiB.
    ```

    The function is called once, and one to three backward passes count multiply-adds.
    The function's parameters and buffers, and torch's random state, are left as they
    were.

    The arguments are those of `per_sample_jacobian`. `check` says whether to count the
    check's memory; a plan itself checks nothing. `progress` is ignored.

    Returns:
        The plan. Printing it shows the way taken and why, its passes, multiply-adds and
        bytes, and what the other ways would cost.

    Raises:
        JacobianArgumentError: An argument is not what it must be.
        NotDifferentiableDtypeError: An output, or an input that `argnums` names, is not
            a dense tensor of real floats.
        NotPerSampleError: An output is not a tensor with a row for each sample.
        IndependentOutputError: An output does not depend on what `argnums` names.
        NoSuchWayError: The Jacobian cannot be computed in this mode, or in any.
        OutOfBytesError: The Jacobian does not fit into `max_bytes`.
    """
    as_flag("progress", progress)
    check = as_flag("check", check)
    create_graph = as_flag("create_graph", create_graph)
    require_values()
    require_no_graph(out, create_graph=create_graph)
    asked = map(plain, (argnums, in_dims, mode, chunk_size, max_bytes))
    call = Call(fn, inputs, *asked, out=out, create_graph=create_graph)
    arguments = read(fn, inputs, call.argnums, call.in_dims)
    shorter = find_in_call(call)
    if max_bytes is None:  # the plan's table shows a number
        max_bytes = room_on(arguments.asked[0].value.device)
        call = call._replace(max_bytes=max_bytes)
    with random_state_kept(), generators_kept(), state_kept(fn):
        try:
            graph, _ = run(arguments, create_graph=create_graph, track_inputs=check)
        except JacobianArgumentError:  # of weights made in inference mode
            if shorter is None:
                raise
            plan = planning.without_graph(
                shorter.shape,
                arguments.asked[0].value,
                max_bytes,
                has_room=out is not None,
            )
        else:
            # A way found in the call needs no check, and may fit where no mode does.
            alone = shorter is None
            plan = _plan_of_graph(
                arguments, graph, call, check=check and alone, must_fit=alone
            )
    return plan if shorter is None else shorter.planned(plan)


def _plan_of_graph(
    arguments: Arguments, graph: Graph, call: Call, *, check: bool, must_fit: bool
) -> JacobianPlan:
    """Return the plan of a graph, with the work of each mode.

    Args:
        arguments: The call.
        graph: The graph of its forward pass.
        call: The call as it was made.
        check: Whether the check's memory counts.
        must_fit: Whether to raise where no mode fits.
    """
    blocks_of(call.out, graph, arguments.inner, arguments.used())  # which may raise
    try:
        plan = plan_of(arguments, graph, call, check=check)
    except OutOfBytesError:
        if must_fit:
            raise
        unlimited = call._replace(max_bytes=sys.maxsize)
        plan = plan_of(arguments, graph, unlimited, check=check)
        plan = replace(plan, max_bytes=call.max_bytes)
    counts = dict(plan.counts)  # a copy: the user may change them
    try:
        with grads_kept(graph.others):
            plan = replace(plan, counts=counts, work=work.count(graph, counts))
    except RuntimeError as error:
        refuse(error)
    is_open = call.mode == call.chunk_size == "auto" and not call.create_graph
    shorter = find_in_graph(graph, plan) if is_open and not plan.settled else None
    return plan if shorter is None else shorter.planned(plan)
