"""The Jacobian of every sample of a batch, and how it would be computed."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gradlib.errors import JacobianArgumentError, NoSuchWayError, OutOfBytesError
from gradlib.jacobian import planning, work
from gradlib.jacobian.arguments import (
    Argnums,
    Arguments,
    Call,
    as_flag,
    read,
)
from gradlib.jacobian.check import (
    Seen,
    bytes_of_check,
    may_look,
    require_loss,
    require_truth,
    see,
)
from gradlib.jacobian.compute import compute, explained
from gradlib.jacobian.coupling import require_own_rows
from gradlib.jacobian.faster import find_in_call, find_in_graph
from gradlib.jacobian.finite import are_finite
from gradlib.jacobian.generators import RandomState, generators_kept
from gradlib.jacobian.graph import Graph, of_tensors, run
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.memory import is_out_of_memory, room_on
from gradlib.jacobian.out import blocks_of, nested, require_no_graph
from gradlib.jacobian.own_backward import require_graphs
from gradlib.jacobian.own_state import state_kept
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.plan import JacobianPlan
from gradlib.jacobian.retained import grads_between_kept, grads_kept
from gradlib.private.hooks import without_hooks
from gradlib.private.modes import (
    always_recorded,
    graph_is_captured,
    values_are_stand_ins,
)
from gradlib.random_state import random_state_kept


def per_sample_jacobian(
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
) -> Any:
    """Return dY/dX for every sample of a batch.

    ```python
    import torch
    from torch import nn

    import gradlib

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 2))
    x = torch.randn(10, 3)
    jacobian = gradlib.per_sample_jacobian(model, x)
    print(jacobian.shape)
    #> torch.Size([10, 2, 3])
    ```

    The Jacobian comes from one call of the model, with the whole batch: autograd goes
    back through that one graph. Dropout has one mask for each sample, the same for all
    of its rows.
    A chain of known layers is not called and needs no graph: its layers are read from
    the module, or from the code of a function or of a module's own ``forward``. The
    reference of per-sample Jacobians lists what a chain may have, under "What a chain
    is".

    **In a loss.** With `create_graph`, ``"forward"`` and ``"split"`` differentiate
    twice, and the loss's backward pass a third time. Where torch's third derivative is
    wrong, as LayerNorm's is, both are refused, and ``"auto"`` takes neither. Where its
    second derivative is wrong, as for the parameters of weight_norm, every mode is
    refused. Where torch has no second derivative, as for ``torch.cdist`` before torch
    2.14 and the fused kernels of attention, the loss's backward pass raises;
    ``sdpa_kernel(SDPBackend.MATH)`` of ``torch.nn.attention`` avoids these kernels.

    Also refused with `create_graph`:

    - a LayerNorm in a `fn` that takes derivatives itself, as for forces
    - a custom backward marked with ``once_differentiable``
    - with `check`, a custom backward that leaves no graph, as one that uses NumPy
    - with `check`, a custom backward that leaves a wrong graph, which finite
      differences in float64 show: whatever the forward of a
      ``torch.autograd.Function`` saved, other than its inputs and outputs, is a
      constant to the loss

    Args:
        fn: A module or a function of `inputs` that returns a tensor ``(batch, *out)``,
            or tensors nested in tuples, lists, dicts and dataclasses.
        inputs: The arguments of `fn`: tensors ``(batch, *in)``, also nested. Integer
            tensors and other objects are passed on as they are.
        argnums: Which input to differentiate with respect to, an ``int`` or a tuple of
            them; or ``"parameters"``, those of the module that require grad. A tensor
            that all samples share, as a parameter, costs a row for each sample and
            output entry, each through the graph of the whole batch, so pass large
            batches in parts. With ``mode="auto"``, parameters of known layers that are
            used once cost a row for each output entry only, where that is faster.
        in_dims: For each input 0 if its first axis is the batch, or ``None`` if all
            samples share it; one value for all inputs, or nested as they are.
        mode: ``"reverse"`` goes row by row, ``"forward"`` column by column, ``"split"``
            both ways from the narrowest tensor in the middle, and ``"loop"`` one row at
            a time, as a reference. ``"auto"`` takes the mode with the cheapest passes
            or, where the Jacobians of layers and operations are known, multiplies
            these; several rows of known operations go in one pass, as if they were more
            samples. All modes give the same result, up to rounding. Where a weight or
            slope is infinite or NaN, they may differ in which entries are NaN; with
            `check`, ``"auto"`` then gives the result of ``"loop"``, and takes as long.
        chunk_size: How many rows (reverse) or columns (forward) one pass computes.
            ``"auto"``: as many as fit into `max_bytes` and make it faster, and fewer if
            memory runs out; one at a time where torch gets several wrong, as with
            ``torch.cdist``.
        max_bytes: How many bytes may be held at once on top of the forward pass, the
            result included; ``None``: half of what is free on the device. Only tensors
            are counted. Those of the check's calls are too; if they do not fit beside
            the result, the check runs first. With ``None``, a GPU also keeps up to 512
            MiB for known layers that are called again, in a CUDA graph that launches
            all kernels at once, until the module is deleted.
        out: Tensors to write the result into, nested as the result is.
        check: Whether to test that the result is right, which takes at least two more
            calls and a backward pass; a chain of known layers needs none. The reference
            says under "What the check does" what it sees and what it does not.
        create_graph: Whether gradients flow through the result, for a loss computed
            from it: see "In a loss" above. What autograd keeps for that comes on top of
            `max_bytes`.
        progress: Whether to show the progress of long work on the terminal.

    Returns:
        ``(batch, *out, *in)``, or ``(batch, *out, *param)`` by name. If outputs or
        inputs are nested, the result is nested as the outputs and, inside, as
        `argnums`. Dtype and device are those of the input or parameter. A tensor that
        all samples share has a batch axis in the result too. The result shares no
        memory with inputs or weights. It may be laid out by columns: where ``view``
        raises, use ``reshape``.

    Raises:
        JacobianArgumentError: An argument is not what it must be.
        NotDifferentiableDtypeError: An output, or an input that `argnums` names, is not
            a dense tensor of real floats.
        NotPerSampleError: An output is not a tensor with a row for each sample.
        IndependentOutputError: An output does not depend on what `argnums` names.
        CoupledSamplesError: With `check`: a sample's output depends on another sample.
        DetachedPathError: With `check`: the output changes with the input in a way that
            autograd does not see.
        NotRepeatableError: With `check`: two calls with the same inputs, and the same
            random numbers of torch, give different outputs.
        NoSuchWayError: The Jacobian cannot be computed in this mode, or not with
            `create_graph`.
        OutOfBytesError: The Jacobian or the check does not fit into `max_bytes`.
    """
    check = as_flag("check", check)
    create_graph = as_flag("create_graph", create_graph)
    asked = argnums, in_dims, mode, chunk_size, max_bytes, out, create_graph
    call = Call(fn, inputs, *asked)
    chain = find_in_call(call)
    if chain is not None:
        try:
            jacobian = chain.jacobian()
        except RuntimeError as error:  # free memory may have been taken meanwhile
            if not is_out_of_memory(error):
                raise
        else:
            # While a CUDA graph is captured no number can be read.
            if (
                not check
                or graph_is_captured()
                or are_finite((jacobian, *chain.may_hide))
            ):
                return jacobian
            call = call._replace(mode="loop")
    return _from_one_graph(call, check, progress)


@always_recorded
def _from_one_graph(call: Call, check: bool, progress: bool) -> Any:
    """Compute the Jacobian from the graph of one forward pass, and check it."""
    mode, out, create_graph = call.mode, call.out, call.create_graph
    _require_values()
    _require_not_captured(mode, check=check)
    require_no_graph(out, create_graph=create_graph)
    arguments = read(call.fn, call.inputs, call.argnums, call.in_dims)
    leaves = arguments.inputs.leaves
    check = check and may_look((*leaves, *modules_known_to(arguments.fn)))
    random = RandomState.now() if check else None
    graph, points = run(arguments, create_graph=create_graph, track_inputs=check)
    plan = _plan(arguments, graph, call, check=check)
    given = blocks_of(out, graph, arguments.inner, arguments.used())
    with without_hooks(graph.points), grads_kept(graph.others):
        if create_graph and check:
            require_graphs(graph)
        # With "auto" `compute` proves columns, or has taken rows.
        look = random and partial(see, arguments, graph, points, random, mode=mode)
        seen = look() if look and plan.check_first else None
        carried_out = partial(
            compute, graph, out=given, create_graph=create_graph, progress=progress
        )
        blocks = carried_out(
            plan,
            may_change=mode == "auto",
            may_shorten=mode == call.chunk_size == "auto",
            check=check,
        )

        def row_by_row() -> dict[Block, Tensor]:
            loop = _plan(arguments, graph, call._replace(mode="loop"), check=True)
            return carried_out(loop, may_change=False)

        if check and mode == "auto" and not are_finite(blocks.values()):
            # Zero times infinity is NaN, so the order of products decides where NaN is.
            blocks = row_by_row()
        if look and not plan.check_first:
            seen = look()
        if seen is not None:
            blocks = _proven(seen, blocks, row_by_row if mode == "auto" else None)
            if create_graph:
                require_loss(seen)
    return nested(graph, arguments.inner, blocks) if out is None else out


def _proven(
    seen: Seen,
    blocks: dict[Block, Tensor],
    row_by_row: Callable[[], dict[Block, Tensor]] | None,
) -> dict[Block, Tensor]:
    """Return the blocks that say the truth: these, or else those computed row by row.

    Raises:
        GradlibError: Neither do, or there is no other way as the mode was asked for.
    """
    try:
        require_truth(seen, blocks)
    except NoSuchWayError:
        if row_by_row is None:
            raise
        blocks = row_by_row()
        require_truth(replace(seen, mode="loop"), blocks)
    return blocks


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
    _require_values()
    _require_not_captured("reverse", check=check)
    require_no_graph(out, create_graph=create_graph)
    graph, inner = of_tensors(outputs, inputs)
    check = check and may_look(graph.points)
    plan = planning.make(
        graph,
        "reverse",
        "auto",
        max_bytes,
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
    del progress
    check = as_flag("check", check)
    create_graph = as_flag("create_graph", create_graph)
    _require_values()
    require_no_graph(out, create_graph=create_graph)
    arguments = read(fn, inputs, argnums, in_dims)
    asked = argnums, in_dims, mode, chunk_size, max_bytes, out, create_graph
    call = Call(fn, inputs, *asked)
    chain = find_in_call(call)
    if max_bytes is None:  # the plan's table shows a number
        max_bytes = room_on(arguments.asked[0].value.device)
        call = call._replace(max_bytes=max_bytes)
    with random_state_kept(), generators_kept(), state_kept(fn):
        try:
            graph, _ = run(arguments, create_graph=create_graph, track_inputs=check)
        except JacobianArgumentError:  # of weights made in inference mode
            if chain is None:
                raise
            plan = planning.without_graph(
                chain.shape,
                arguments.asked[0].value,
                max_bytes,
                has_room=out is not None,
            )
        else:
            # A chain needs no check, and may fit where no mode does.
            alone = chain is None
            plan = _plan_of_graph(
                arguments, graph, call, check=check and alone, must_fit=alone
            )
    return plan if chain is None else chain.planned(plan)


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
        plan = _plan(arguments, graph, call, check=check)
    except OutOfBytesError:
        if must_fit:
            raise
        unlimited = call._replace(max_bytes=sys.maxsize)
        plan = _plan(arguments, graph, unlimited, check=check)
        plan = replace(plan, max_bytes=call.max_bytes)
    try:
        with grads_kept(graph.others):
            # A copy of the counts: the user may change them.
            counts = dict(plan.counts)
            plan = replace(plan, counts=counts, work=work.count(graph, counts))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise NoSuchWayError(explained(error)) from error
    is_open = call.mode == call.chunk_size == "auto" and not call.create_graph
    shorter = find_in_graph(graph, plan) if is_open and not plan.settled else None
    return plan if shorter is None else shorter.planned(plan)


def _require_values() -> None:
    """Raise inside a transform or a trace, where inputs only stand for tensors."""
    if values_are_stand_ins():
        raise JacobianArgumentError(
            "This is called inside of torch.func (vmap, grad, jvp and so on) or "
            "torch.jit.trace, where inputs only stand for tensors. Call it outside, "
            "with the whole batch; create_graph=True lets gradients flow through the "
            "result. Inside of torch.func, vmap(jacrev(fn)) gives such Jacobians."
        )


def _require_not_captured(mode: str, *, check: bool) -> None:
    """Raise where a number would be read while a CUDA graph is captured."""
    if graph_is_captured() and (check or mode not in ("reverse", "loop")):
        raise JacobianArgumentError(
            "While a CUDA graph is captured no number can be read, which a check and "
            'most ways do. Pass check=False, mode="reverse" and max_bytes=, and check '
            "the function once before."
        )


def _plan(
    arguments: Arguments, graph: Graph, call: Call, *, check: bool
) -> JacobianPlan:
    return planning.make(
        graph,
        call.mode,
        call.chunk_size,
        call.max_bytes,
        has_room=call.out is not None,
        check_bytes=bytes_of_check(arguments, graph) if check else 0,
        create_graph=call.create_graph,
    )
