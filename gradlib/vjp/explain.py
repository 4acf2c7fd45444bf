"""`explain_vjp`: what a call of torch.autograd.grad computes, or why it cannot."""

from typing import Any

from gradlib.private.compiling import as_written
from gradlib.vjp.arguments import read_arguments
from gradlib.vjp.diagnose import diagnose
from gradlib.vjp.explanation import VJPExplanation, explained
from gradlib.vjp.product import multiply
from gradlib.vjp.raised import explain_own
from gradlib.vjp.source import site_of_caller

_DONATED = "This backward function was compiled with non-empty donated buffers"
_COMPILED = """
explain_vjp retains the graph, as J takes a pass for each of its rows. A backward
pass that torch.compile has made may overwrite what it reads, and works only once.
Compute the outputs inside `with torch.compiler.set_stance("force_eager"):`, or set
torch._functorch.config.donated_buffer = False before anything is compiled."""


@as_written
def explain_vjp(outputs: Any, inputs: Any, grad_outputs: Any = None) -> VJPExplanation:
    """Show what a call of ``torch.autograd.grad`` computes: v, the Jacobian J, and vᵀJ.

    The call is made, and the Jacobian is computed by one backward pass for each of its
    rows, if it has at most 10,000 entries in 1,000 rows, all outputs and inputs
    together. It is not computed for complex outputs.

    The graph is retained, so it can be used again, and no ``.grad`` changes. The
    tensors of the result have no graph. Hooks on the graph run in each pass, and a
    recording made meanwhile has all passes.

    Args:
        outputs: One or several tensors, of any shapes, as ``torch.autograd.grad`` takes
            them.
        inputs: One or several tensors, or a dict of them, of any shapes.
        grad_outputs: v for each output, of the output's shape. It may be ``None`` for
            an output with one entry.

    Returns:
        The explanation, to print, to plot, or to read by attribute. A bad call raises
        nothing: its explanation says what is wrong, and what was probably meant.

    Raises:
        Exception: What hooks and custom backward functions raise, unchanged.
        RuntimeError: torch's own, where an operation has no derivative at this point,
            such as ``torch.linalg.eig`` for a loss that depends on a phase; where a
            checkpoint has ``use_reentrant=True``, which torch does not support in
            ``autograd.grad``; and where ``torch.compile`` has made a backward pass that
            works only once, with a note that says what to do.

    Example:
        ```python
        import torch

        import gradlib

        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = torch.outer(x, x)
        explanation = gradlib.explain_vjp(y, x, torch.ones_like(y))

        print(explanation)
        #> The gradient of y.sum(): each entry is the sum of a column of J, not dy/dx.
        #>      shape      what
        #> y    [2, 2]     outputs
        #> x    [2]        inputs
        #> v    [2, 2]     grad_outputs: all ones
        #> J    [2, 2, 2]  dy/dx
        #> vᵀJ  [2]        einsum("jk,jki->i", v, J)
        #> Computed twice, by einsum and by one call of autograd: the same.
        #>
        #> J, with v in front of its rows and vᵀJ below its columns
        #>          v  x[0]  x[1]
        #> y[0, 0]  1  2     0
        #> y[0, 1]  1  2     1
        #> y[1, 0]  1  2     1
        #> y[1, 1]  1  0     4
        #> vᵀJ         6     6
        print(explanation.equation, explanation.jacobian.shape)
        #> jk,jki->i torch.Size([2, 2, 2])
        print(gradlib.explain_vjp(y, x, torch.ones_like(x)).code)
        #> GL102
        ```
    """
    site = site_of_caller()
    arguments = read_arguments(outputs, inputs, grad_outputs, site=site)
    found = diagnose(arguments)
    if found is None:
        try:
            return explained(multiply(arguments))
        except RuntimeError as error:
            found = explain_own(error, arguments)
            if found is None:
                if str(error).startswith(_DONATED):
                    error.add_note(_COMPILED)
                raise
    return VJPExplanation(ok=False, code=found.code, meaning=found.text)
