"""`torch.autograd.grad`, its arguments checked before the call."""

from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.errors import RecordingArgumentError
from gradlib.flags import as_flag
from gradlib.private.compiling import as_written
from gradlib.vjp.arguments import read_arguments
from gradlib.vjp.diagnose import diagnose
from gradlib.vjp.raised import explain_own
from gradlib.vjp.source import site_of_caller

Key = TypeVar("Key")
Tensors: TypeAlias = Tensor | GradientEdge | Iterable[Tensor | GradientEdge]
Vectors: TypeAlias = Tensor | Iterable[Tensor | None] | None


@overload
def grad(
    outputs: Tensors,
    inputs: dict[Key, Tensor],
    grad_outputs: Vectors = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> dict[Key, Tensor]: ...


@overload
def grad(
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Vectors = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...]: ...


@as_written
def grad(
    outputs: Tensors,
    inputs: Tensors | dict[Any, Tensor],
    grad_outputs: Vectors = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...] | dict[Any, Tensor]:
    """Compute gradients as ``torch.autograd.grad`` does, and explain a wrong call.

    The result is that of ``torch.autograd.grad``, bit for bit. A wrong call raises
    before the graph is used, so that you can correct it and call again; only a freed
    graph, a tensor changed in place, and an operation that takes no sparse gradient are
    found while the gradients are computed.
    Calls that torch silently accepts raise here: with a `grad_outputs` of integers or
    booleans, with more `grad_outputs` than outputs, and with an option that is neither
    true nor false.

    Args:
        outputs: One tensor or gradient edge, or several, of any shapes.
        inputs: What to differentiate with respect to: one tensor or gradient edge,
            several, or a dict of tensors.
        grad_outputs: ``v = dL/dy`` for each output, of the shape of that output; with
            `is_grads_batched` of shape ``(vectors, *output)``. ``None`` stands for 1 if
            the output is a single number.
        retain_graph: Whether the graph can be used again. Default: `create_graph`.
        create_graph: Whether the gradients can be differentiated themselves.
        only_inputs: Has no effect, as in torch, which warns of ``False``.
        allow_unused: Whether an input may be unused; its gradient is then ``None``.
            Default: `materialize_grads`.
        is_grads_batched: Whether the first axis of each `grad_outputs` counts vectors.
        materialize_grads: Whether an unused input gets zeros.

    Returns:
        vᵀJ for each input, summed over the outputs, of the input's shape; with
        `is_grads_batched` of shape ``(vectors, *input)``. A tuple, or a dict with the
        same keys if `inputs` is a dict.

    Raises:
        GradOutputsError: `grad_outputs` does not fit the outputs. Its subclasses, and
            their codes, say in which way.
        OutputNeedsNoGradError: An output does not require grad.
        UnusedInputError: An input is not part of the graph.
        InputNeedsNoGradError: An input does not require grad.
        FreedGraphError: An earlier backward pass freed the graph.
        ChangedInPlaceError: A tensor that is needed was changed in place.
        NotDifferentiableArgumentError: `outputs` or `inputs` is empty, or holds
            something other than tensors.
        RecordingArgumentError: An option is neither true nor false.
        ValueError: torch's own, for ``materialize_grads=True`` with
            ``allow_unused=False``.
        RuntimeError: torch's own, where an operation has no derivative at this point,
            such as ``torch.linalg.eig`` for a loss that depends on a phase; where a
            checkpoint has ``use_reentrant=True``, which torch does not support in
            ``autograd.grad``; and where `is_grads_batched` meets what vmap does not
            take, such as sparse gradients or nested tensors.

    Example:
        ```python
        import torch

        import gradlib

        x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        y = torch.outer(x, x)
        try:
            gradlib.grad(y, x, torch.ones_like(x))
        except gradlib.GradOutputsError as error:
            explanation = str(error)
        print(explanation)
        #> [GL102] grad_outputs[0] has shape [4], and outputs[0] (`y`) has [4, 4].
        #>
        #> v = dL/dy holds one weight for each entry of the output. So it has the shape
        #> of the output, whatever the shape of the input, and it is not broadcast.
        #> Several outputs take a list, with a v for each.
        #>
        #> Only broadcasting would make it fit. [4] is the shape of inputs[0]. Weights
        #> of one give the gradient of the output's sum.
        #>
        #>     v = torch.ones_like(y)
        #>     gradlib.grad(y, x, v)
        #>
        #> More in gradlib's documentation: docs/errors/GL102.md
        print(gradlib.grad(y, x, torch.ones_like(y)))
        #> (tensor([20., 20., 20., 20.]),)
        ```
    """
    site = site_of_caller()
    only_inputs = as_flag("only_inputs", only_inputs, RecordingArgumentError)
    arguments = read_arguments(
        outputs,
        inputs,
        grad_outputs,
        retain_graph=_option("retain_graph", retain_graph, None),
        create_graph=_option("create_graph", create_graph, False),
        allow_unused=_option("allow_unused", allow_unused, None),
        is_grads_batched=_option("is_grads_batched", is_grads_batched, False),
        materialize_grads=_option("materialize_grads", materialize_grads, False),
        site=site,
    )
    found = diagnose(arguments)
    if found is not None:
        raise found.error()
    vectors: Any = grad_outputs
    if grad_outputs is not None and arguments.grad_outputs.several:
        vectors = arguments.grad_outputs.values  # an iterator is used up
    try:
        gradients = torch.autograd.grad(
            arguments.outputs.values,
            arguments.inputs.values,
            vectors,
            only_inputs=only_inputs,
            **arguments.options,
        )
    except RuntimeError as error:
        found = explain_own(error, arguments)
        if found is None:
            raise
        raise found.error() from error
    keys = arguments.inputs.keys
    return gradients if keys is None else dict(zip(keys, gradients, strict=True))


def _option(name: str, given: Any, default: bool | None) -> Any:
    """Return an option as a bool, or as its default; leave a tensor to `diagnose`."""
    if given is default or isinstance(given, Tensor):
        return given
    return as_flag(name, given, RecordingArgumentError)
