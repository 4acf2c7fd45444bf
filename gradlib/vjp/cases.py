"""The ways an autograd call goes wrong: one entry for each code.

Messages take the rule from here; pages and tests take the programs.
"""

from dataclasses import dataclass, replace
from textwrap import dedent

from gradlib import errors
from gradlib.errors import GradlibError


@dataclass(frozen=True)
class Case:
    """What all calls with one code have in common.

    Attributes:
        error: The class that `gradlib.grad` raises.
        title: The case in a few words.
        cause: The rule that is broken, and why it is one, in one sentence.
        wrong: A program with the mistake, in ``torch.autograd.grad`` or ``backward``.
        right: The program as it was meant.
        torch_refuses: Whether torch raises on `wrong` too; if not, it returns a result.
    """

    error: type[GradlibError]
    title: str
    cause: str
    wrong: str
    right: str
    torch_refuses: bool = True

    @property
    def code(self) -> str:
        """The code, as ``"GL101"``."""
        return self.error.code


# Each program has one more line, "import torch", in front.
_CASES = [
    Case(
        errors.NoGradOutputsError,
        "No grad_outputs for an output of several entries",
        "autograd sums the gradients of the output's entries, each times its "
        "weight in v. Only an output with a single entry needs no v: its weight is "
        "one.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            y = torch.outer(x, x)
            torch.autograd.grad(y, x)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            y = torch.outer(x, x)
            v = torch.ones_like(y)
            (gradient,) = torch.autograd.grad(y, x, v)
            print(gradient)
            """,
    ),
    Case(
        errors.GradOutputsShapeError,
        "A grad_outputs of another shape than its output",
        "v = dL/dy holds one weight for each entry of the output. So it has the "
        "shape of the output, whatever the shape of the input, and it is not "
        "broadcast. Several outputs take a list, with a v for each.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            y = torch.outer(x, x)
            torch.autograd.grad(y, x, torch.ones_like(x))
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            y = torch.outer(x, x)
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
            print(gradient)
            """,
    ),
    Case(
        errors.GradOutputsCountError,
        "More or fewer grad_outputs than outputs",
        "Each output has a v of its own, in the same order; the inputs have none.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            torch.autograd.grad(y, x, [torch.ones_like(y), torch.zeros_like(y)])
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            (gradient,) = torch.autograd.grad(y, x, [torch.ones_like(y)])
            print(gradient)
            """,
        torch_refuses=False,
    ),
    Case(
        errors.GradOutputsTypeError,
        "A number or a list instead of a tensor",
        "Each v is a tensor with the shape of its output, or None.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            loss = (x**2).sum()
            torch.autograd.grad(loss, x, 0.5)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            loss = (x**2).sum()
            (gradient,) = torch.autograd.grad(loss, x, torch.tensor(0.5))
            print(gradient)
            """,
    ),
    Case(
        errors.GradOutputsDtypeError,
        "Integers, booleans or complex numbers where floats belong",
        "v is a gradient with respect to the output: floating-point, or complex "
        "where the output is complex.",
        wrong="""
            x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
            y = x**2
            torch.autograd.grad(y, x, x > 0)
            """,
        right="""
            x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
            y = x**2
            (gradient,) = torch.autograd.grad(y, x, (x > 0).to(y.dtype))
            print(gradient)
            """,
        torch_refuses=False,
    ),
    Case(
        errors.GradOutputsDeviceError,
        "A grad_outputs on another device than its output",
        "The backward pass begins with v, on the device of the output.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            v = torch.ones(3, device="meta")  # "meta" stands for any other device
            torch.autograd.grad(y, x, v)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            v = torch.ones(3, device=y.device)
            (gradient,) = torch.autograd.grad(y, x, v)
            print(gradient)
            """,
    ),
    Case(
        errors.GradsBatchedError,
        "is_grads_batched and the first axis of grad_outputs disagree",
        "With is_grads_batched=True the first axis of each v counts the vectors, "
        "and the rest has the shape of the output. Without it there is no such "
        "axis.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            torch.autograd.grad(y, x, torch.eye(3))
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            y = x**2
            (jacobian,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
            print(jacobian)
            """,
    ),
    Case(
        errors.OutputNeedsNoGradError,
        "An output that does not require grad",
        "Gradients flow back through the graph that was recorded while the output"
        " was computed. An output that does not require grad has none.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            with torch.no_grad():
                loss = (x**2).sum()
            torch.autograd.grad(loss, x)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            loss = (x**2).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient)
            """,
    ),
    Case(
        errors.UnusedInputError,
        "An input that the outputs were not computed from",
        "A gradient reaches only the very tensors that the outputs were computed "
        "from. A slice, a view or a copy of one that is made later is a new "
        "tensor.",
        wrong="""
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            loss = (x**2).sum()
            torch.autograd.grad(loss, x[0])
            """,
        right="""
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            loss = (x**2).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient[0])
            """,
    ),
    Case(
        errors.InputNeedsNoGradError,
        "An input that does not require grad",
        "autograd records what is computed from tensors that require grad, so an "
        "input has to require it before the output is computed.",
        wrong="""
            weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            x = torch.tensor([4.0, 5.0, 6.0])
            loss = (weight * x).sum()
            torch.autograd.grad(loss, x)
            """,
        right="""
            weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            x = torch.tensor([4.0, 5.0, 6.0], requires_grad=True)
            loss = (weight * x).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient)
            """,
    ),
    Case(
        errors.FreedGraphError,
        "A second backward pass through a graph that was freed",
        "A backward pass frees the values that the graph kept for it, so a second"
        " pass through the same part finds none.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            loss = (x**2).sum()
            torch.autograd.grad(loss, x)
            torch.autograd.grad(loss, x)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            loss = (x**2).sum()
            torch.autograd.grad(loss, x, retain_graph=True)
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient)
            """,
    ),
    Case(
        errors.ChangedInPlaceError,
        "A tensor that was changed in place before the backward pass",
        "The backward pass uses values of the forward pass. One of them was "
        "overwritten in between, and the gradient would be wrong.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            h = torch.exp(x)
            loss = (h * h).sum()
            h += 1
            torch.autograd.grad(loss, x)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            h = torch.exp(x)
            loss = (h * h).sum()
            h = h + 1
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient)
            """,
    ),
    Case(
        errors.SeveralLossesError,
        "Several losses in one vector",
        "Without weights, a backward pass needs a single number. Several losses in one "
        "vector, as DataParallel gathers one from each GPU, are made one first.",
        wrong="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            losses = [(half**2).mean() for half in x.chunk(2)]
            loss = torch.stack(losses)  # as DataParallel gathers one from each GPU
            torch.autograd.grad(loss, x)
            """,
        right="""
            x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
            losses = [(half**2).mean() for half in x.chunk(2)]
            loss = torch.stack(losses).mean()
            (gradient,) = torch.autograd.grad(loss, x)
            print(gradient)
            """,
    ),
    Case(
        errors.NotDifferentiableArgumentError,
        "Outputs or inputs that are not tensors",
        "Outputs are a tensor or a flat sequence of tensors, and so are inputs, "
        "which may also be a dict of tensors.",
        wrong="""
            model = torch.nn.Linear(2, 1)
            loss = model(torch.ones(3, 2)).sum()
            torch.autograd.grad(loss, model)
            """,
        right="""
            model = torch.nn.Linear(2, 1)
            loss = model(torch.ones(3, 2)).sum()
            gradients = torch.autograd.grad(loss, tuple(model.parameters()))
            print([tuple(gradient.shape) for gradient in gradients])
            """,
    ),
    Case(
        errors.GradOutputsLayoutError,
        "A grad_outputs of another layout than its output",
        "v is a gradient with respect to the output, and has the output's layout. "
        "torch also takes a v of layout sparse_coo, with which only some operations "
        "can go on, and a strided v for a sparse output.",
        wrong="""
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            y = x**2
            v = torch.eye(2).to_sparse_csr()
            torch.autograd.grad(y, x, v)
            """,
        right="""
            x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            y = x**2
            v = torch.eye(2).to_sparse_csr()
            (gradient,) = torch.autograd.grad(y, x, v.to_dense())
            print(gradient)
            """,
    ),
]


def _with_import(case: Case) -> Case:
    wrong, right = (f"import torch\n{dedent(it)}" for it in (case.wrong, case.right))
    return replace(case, wrong=wrong, right=right)


CASES = {case.code: _with_import(case) for case in _CASES}
"""Every case by its code."""
