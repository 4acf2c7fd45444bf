"""The Jacobian of every sample of a batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.arguments import read
from gradlib.jacobian.call import Argnums, Call, as_flag, plain
from gradlib.jacobian.check import Seen, may_look, require_loss, require_truth, see
from gradlib.jacobian.compute import compute
from gradlib.jacobian.faster import find_in_call
from gradlib.jacobian.finite import are_finite
from gradlib.jacobian.generators import RandomState
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.out import blocks_of, nested, require_no_graph
from gradlib.jacobian.own_backward import require_graphs
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.plan_jacobian import plan_of
from gradlib.jacobian.readable import require_readable, require_values
from gradlib.jacobian.retained import grads_kept
from gradlib.jacobian.run import run
from gradlib.private.compiling import as_written
from gradlib.private.hooks import without_hooks
from gradlib.private.modes import always_recorded, graph_is_captured


@as_written
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
    progress = as_flag("progress", progress)
    asked = map(plain, (argnums, in_dims, mode, chunk_size, max_bytes))
    call = Call(fn, inputs, *asked, out=out, create_graph=create_graph)
    shorter = find_in_call(call)
    if shorter is not None:
        try:
            jacobian = shorter.jacobian()
        except RuntimeError as error:  # free memory may have been taken meanwhile
            if not is_out_of_memory(error):
                raise
        else:
            # While a CUDA graph is captured no number can be read.
            if (
                not check
                or graph_is_captured()
                or are_finite((jacobian, *shorter.may_hide))
            ):
                return jacobian
            call = call._replace(mode="loop")
    return _from_one_graph(call, check, progress)


@always_recorded
def _from_one_graph(call: Call, check: bool, progress: bool) -> Any:
    """Compute the Jacobian from the graph of one forward pass, and check it."""
    mode, out, create_graph = call.mode, call.out, call.create_graph
    require_values()
    require_readable(mode, check=check)
    require_no_graph(out, create_graph=create_graph)
    arguments = read(call.fn, call.inputs, call.argnums, call.in_dims)
    leaves = arguments.inputs.leaves
    check = check and may_look((*leaves, *modules_known_to(arguments.fn)))
    random = RandomState.now() if check else None
    graph, points = run(arguments, create_graph=create_graph, track_inputs=check)
    plan = plan_of(arguments, graph, call, check=check)
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
            loop = plan_of(arguments, graph, call._replace(mode="loop"), check=True)
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
