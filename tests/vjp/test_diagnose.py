"""Every mistake in an autograd call is found before the graph is used."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.private.tensors import negative_view
from gradlib.tree import tensors_in
from gradlib.vjp.arguments import read_arguments
from gradlib.vjp.cases import CASES
from gradlib.vjp.diagnose import diagnose
from gradlib.vjp.diagnosis import Diagnosis

from .programs import run

HERE = torch.ones(()).device


@dataclass
class Call:
    """A call: y, x and v as they are passed, and f, which computes y from x."""

    y: Any
    x: Any
    v: Any = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    f: Callable[[Any], Any] = lambda x: sum((it**2).sum() for it in tensors_in(x))

    def diagnosis(self) -> Diagnosis | None:
        """Return what is wrong with the call."""
        return diagnose(read_arguments(self.y, self.x, self.v, **self.options))

    def grad(self) -> Any:
        """Make the call."""
        return gradlib.grad(self.y, self.x, self.v, **self.options)


def vector(*, requires_grad: bool = True) -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=requires_grad)


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def outer(v: Any = None, **options: Any) -> Call:
    """A call for the outer product of x and x, of shape (4, 4)."""
    x = vector()
    return Call(torch.outer(x, x), x, v, options, lambda x: torch.outer(x, x))


def square(v: Any = None, **options: Any) -> Call:
    """A call for a single number."""
    x = vector()
    return Call((x**2).sum(), x, v, options)


def two(v: Any = None, **options: Any) -> Call:
    """A call for outputs of shapes (4, 4) and (4,)."""
    x = vector()
    return Call([torch.outer(x, x), x * 2], x, v, options)


def complex_output(v: Any = None) -> Call:
    x = vector()
    return Call(x * 1j, x, v, {}, lambda x: x * 1j)


def gathered(gather: Callable[[list[Tensor]], Tensor]) -> Call:
    x = vector()
    return Call(gather([x.sum(), x.mean()]), x)


class Gather(torch.autograd.Function):
    """Stands for the Gather of torch.nn.parallel, which needs several GPUs."""

    @staticmethod
    def forward(_: Any, *losses: Tensor) -> Tensor:
        return torch.stack(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return tuple(gradients[0])


def without_graph(compute: Callable[[Tensor], Tensor]) -> Call:
    x = vector()
    return Call(compute(x), x)


def under(mode: Any) -> Call:
    x = vector()
    with mode:
        return Call((x**2).sum(), x)


def inference_input() -> Call:
    w = vector()
    with torch.inference_mode():
        x = vector(requires_grad=False)
    return Call((w**2).sum(), x)


def of_another(change: Callable[[Tensor], Any], **options: Any) -> Call:
    """A call whose input is computed from the tensor that the output comes from."""
    w = vector()
    return Call((w**2).sum(), change(w), None, options)


def downstream() -> Call:
    """A call with outputs and inputs swapped."""
    x = torch.tensor(3.0, requires_grad=True)
    return Call(x, x**2, f=lambda x: x**2)


def model_call(x: Callable[[nn.Module], Any]) -> Call:
    model = nn.Linear(4, 1)
    return Call(model(vector()).sum(), x(model), f=model)


def checkpointed() -> Call:
    """A call for a weight that a reentrant checkpoint uses."""
    weight, x = vector(), vector()
    y = checkpoint(lambda x: (weight * x).sum(), x, use_reentrant=True)
    return Call(y, weight, f=lambda weight: (weight * x).sum())


def without_gradients(function: Callable[..., Tensor], *args: Any) -> Tensor:
    with torch.no_grad():
        return function(*args)


def split_sibling() -> Call:
    """A call with respect to the unused one of two outputs of one operation."""
    first, second = vector().split(2)
    return Call((first**2).sum(), second)


def edge_without_zeros() -> Call:
    x = vector()
    unused = get_gradient_edge(vector())
    return Call((x**2).sum(), [x, unused], None, {"materialize_grads": True})


def meta_output() -> Call:
    x = ones(3, device="meta", requires_grad=True)
    return Call(x, x, ones(3))


def no_rows() -> Call:
    x = vector()
    return Call([torch.outer(x, x)], x, [ones(2, 8)], {"is_grads_batched": True})


BAD: dict[str, tuple[Callable[[], Call], str, str, str]] = {
    # code, argument, and words of the message
    "non-scalar": (outer, "GL101", "outputs[0]", "[4, 4], and no grad_outputs"),
    "None for the second": (
        lambda: two([ones(4, 4), None]),
        "GL101",
        "grad_outputs[1]",
        "outputs[1] has shape [4], and grad_outputs[1] is None",
    ),
    "None for all": (two, "GL101", "outputs[0]", "no grad_outputs was given"),
    "complex number": (
        lambda: Call((c := complex_output()).y.sum(), c.x, f=lambda x: (x * 1j).sum()),
        "GL101",
        "outputs[0]",
        "outputs[0] is complex",
    ),
    "empty output": (
        lambda: Call((x := vector())[:0], x, f=lambda x: x[:0]),
        "GL101",
        "outputs[0]",
        "has shape [0]",
    ),
    "a stack of vectors": (
        lambda: Call(torch.stack([(x := vector()), x]), x),
        "GL101",
        "outputs[0]",
        "has shape [2, 4]",
    ),
    "shape of the input": (
        lambda: outer(ones(4)),
        "GL102",
        "grad_outputs[0]",
        "has shape [4], and outputs[0] has [4, 4] [4] is the shape of inputs[0]",
    ),
    "a weight for each sample of a loss": (
        lambda: Call((x := vector()).sum(), x, ones(7), f=lambda x: x.sum()),
        "GL102",
        "grad_outputs[0]",
        "has shape [7], and outputs[0] has []. Weights of one",
    ),
    "shape of a dict's input": (
        lambda: Call((c := outer()).y, {"w": c.x}, ones(4)),
        "GL102",
        "grad_outputs[0]",
        '[4] is the shape of inputs["w"]',
    ),
    "second, as torch reports least": (
        lambda: two([ones(4, 4), ones(4, 4)]),
        "GL102",
        "grad_outputs[1]",
        "has [4]. [4, 4] is the shape of outputs[0]",
    ),
    "second, of no size that fits": (
        lambda: two([ones(4, 4), ones(3)]),
        "GL102",
        "grad_outputs[1]",
        "has shape [3], and outputs[1] has [4] Weights of one",
    ),
    "third": (
        lambda: Call(
            [*(c := two()).y, c.x.sum()],
            c.x,
            [ones(4, 4), ones(4), ones(1)],
        ),
        "GL102",
        "grad_outputs[2]",
        "has shape [1], and outputs[2] has [] right number of entries",
    ),
    "exchanged": (
        lambda: two([ones(4), ones(4, 4)]),
        "GL102",
        "grad_outputs[0]",
        "It fits outputs[1]",
    ),
    "a number": (
        lambda: outer(ones()),
        "GL102",
        "grad_outputs[0]",
        "Only broadcasting this weight for every entry",
    ),
    "a row": (
        lambda: outer(ones(1, 4)),
        "GL102",
        "grad_outputs[0]",
        "Only broadcasting these weights, repeated",
    ),
    "transposed": (
        lambda: Call(
            (c := outer()).y[:, :3], c.x, ones(3, 4), {}, lambda _: outer().y[:, :3]
        ),
        "GL102",
        "grad_outputs[0]",
        "It is transposed",
    ),
    "flat": (
        lambda: outer(ones(16)),
        "GL102",
        "grad_outputs[0]",
        "right number of entries",
    ),
    "one for each sample": (
        lambda: Call((x := ones(3, 5, requires_grad=True)) ** 2, x, ones(3)),
        "GL102",
        "grad_outputs[0]",
        "one weight for each [i, :]",
    ),
    "shape of the input that looks like a batch": (
        lambda: Call(
            (x := ones(4, 3, requires_grad=True)).sum(0),
            x,
            ones(4, 3),
            {},
            lambda x: x.sum(0),
        ),
        "GL102",
        "grad_outputs[0]",
        "[4, 3] is the shape of inputs[0]",
    ),
    "single tensor for two outputs": (
        lambda: two(ones(4, 4)),
        "GL103",
        "grad_outputs",
        "grad_outputs is one tensor, and outputs has 2 entries",
    ),
    "too few": (
        lambda: two([ones(4, 4)]),
        "GL103",
        "grad_outputs",
        "grad_outputs has 1 entry, and outputs has 2 entries",
    ),
    "none of them": (
        lambda: square([]),
        "GL103",
        "grad_outputs",
        "grad_outputs has 0 entries, and outputs is one tensor",
    ),
    "too many": (
        lambda: two([ones(4, 4), ones(4), ones(4)]),
        "GL103",
        "grad_outputs",
        "3 entries, and outputs has 2 entries torch drops",
    ),
    "rows of a batch": (
        lambda: outer([ones(4, 4), ones(4, 4)]),
        "GL103",
        "grad_outputs",
        "a result for each, as is_grads_batched gives it",
    ),
    "float": (lambda: square(1.5), "GL104", "grad_outputs", "is of type float"),
    "float for two": (lambda: two(1.5), "GL104", "grad_outputs", "weights of its own"),
    "an option by position": (
        lambda: outer(True),
        "GL104",
        "grad_outputs",
        "grad_outputs is of type bool retain_graph or create_graph, by its name",
    ),
    "float in a list": (
        lambda: square([0.5]),
        "GL104",
        "grad_outputs[0]",
        "grad_outputs[0] is of type float",
    ),
    "int for the second": (
        lambda: two([ones(4, 4), 2]),
        "GL104",
        "grad_outputs[1]",
        "grad_outputs[1] is of type int",
    ),
    "list of numbers": (
        lambda: outer([[1.0, 0.0, 0.0, 0.0]] * 4),
        "GL104",
        "grad_outputs",
        "is a list of numbers",
    ),
    "array": (
        lambda: outer(ones(4, 4).cpu().numpy()),
        "GL104",
        "grad_outputs",
        "is of type ndarray",
    ),
    "list for the second": (
        lambda: two([ones(4, 4), [1, 2, 3, 4]]),
        "GL104",
        "grad_outputs[1]",
        "is of type list, not a tensor",
    ),
    "float too many": (
        lambda: square([ones(), 2.0]),
        "GL103",
        "grad_outputs",
        "grad_outputs has 2 entries, and outputs is one tensor",
    ),
    "dict": (
        lambda: outer({"y": ones(4, 4)}),
        "GL104",
        "grad_outputs",
        "grad_outputs is of type dict",
    ),
    "integers": (
        lambda: outer(ones(4, 4, dtype=torch.int64)),
        "GL105",
        "grad_outputs[0]",
        "is int64, and outputs[0] is float32",
    ),
    "booleans, second": (
        lambda: two([ones(4, 4), ones(4, dtype=torch.bool)]),
        "GL105",
        "grad_outputs[1]",
        "is bool, and outputs[1] is float32",
    ),
    "a single integer": (
        lambda: square(torch.tensor(1)),
        "GL105",
        "grad_outputs[0]",
        "is int64",
    ),
    "complex for a float": (
        lambda: outer(ones(4, 4, dtype=torch.complex64)),
        "GL105",
        "grad_outputs[0]",
        "is complex64, and outputs[0] is float32",
    ),
    "float for complex": (
        lambda: complex_output(ones(4)),
        "GL105",
        "grad_outputs[0]",
        "is float32, and outputs[0] is complex64",
    ),
    "integers of a batch": (
        lambda: outer(ones(2, 4, 4, dtype=torch.int32), is_grads_batched=True),
        "GL105",
        "grad_outputs[0]",
        "is int32",
    ),
    "meta": (
        lambda: outer(ones(4, 4, device="meta")),
        "GL106",
        "grad_outputs[0]",
        f"is on meta, and outputs[0] is on {HERE}",
    ),
    "a single meta number": (
        lambda: square(ones(device="meta")),
        "GL106",
        "grad_outputs[0]",
        "is on meta",
    ),
    "output on meta": (
        meta_output,
        "GL106",
        "grad_outputs[0]",
        f"is on {HERE}, and outputs[0] is on meta",
    ),
    "no batch axis": (
        lambda: outer(ones(4, 4), is_grads_batched=True),
        "GL107",
        "grad_outputs[0]",
        "This is one vector",
    ),
    "batch axis unasked": (
        lambda: outer(ones(2, 4, 4)),
        "GL107",
        "grad_outputs[0]",
        "has shape [2, 4, 4], and outputs[0] has [4, 4] each of 2 vectors",
    ),
    "batched, another shape": (
        lambda: outer(ones(2, 8), is_grads_batched=True),
        "GL107",
        "grad_outputs[0]",
        "[2, 8], and outputs[0] has [4, 4] its Jacobian",
    ),
    "batched, another shape in a list": (
        no_rows,
        "GL107",
        "grad_outputs[0]",
        "[2, 8], and outputs[0] has [4, 4]",
    ),
    "batched, a number": (
        lambda: square(ones(), is_grads_batched=True),
        "GL107",
        "grad_outputs[0]",
        "has shape [], and outputs[0] has []",
    ),
    "batch of none": (
        lambda: outer(ones(0, 4, 4), is_grads_batched=True),
        "GL107",
        "grad_outputs[0]",
        "has shape [0, 4, 4]",
    ),
    "batched without": (
        lambda: square(is_grads_batched=True),
        "GL107",
        "grad_outputs[0]",
        "With is_grads_batched there is no grad_outputs[0]",
    ),
    "one of two batched": (
        lambda: two([ones(2, 4, 4), ones(4)], is_grads_batched=True),
        "GL107",
        "grad_outputs[1]",
        "has shape [4], and outputs[1] has [4]",
    ),
    "one vector beside a batch": (
        lambda: two([ones(2, 4, 4), ones(4)], is_grads_batched=True),
        "GL107",
        "grad_outputs[1]",
        "Of the others there are 2. Likely meant: this one each time",
    ),
    "another shape beside a batch": (
        lambda: two([ones(2, 4, 4), ones(3)], is_grads_batched=True),
        "GL107",
        "grad_outputs[1]",
        "has shape [3], and outputs[1] has [4] Unit vectors",
    ),
    "none beside a batch": (
        lambda: two([ones(2, 4, 4), None], is_grads_batched=True),
        "GL107",
        "grad_outputs[1]",
        "there is no grad_outputs[1] Of the others there are 2. Weights of one",
    ),
    "batches of two sizes": (
        lambda: two([ones(2, 4, 4), ones(3, 4)], is_grads_batched=True),
        "GL107",
        "grad_outputs[1]",
        "holds 3 vectors, and grad_outputs[0] holds 2",
    ),
    "detached": (
        lambda: without_graph(lambda x: (x**2).sum().detach()),
        "GL108",
        "outputs[0]",
        "outputs[0] does not require grad Something cut the graph",
    ),
    "second is detached, and None does not help": (
        lambda: Call(
            [(c := square()).y, c.y.detach()],
            c.x,
            [None, None],
            f=lambda x: [x.sum(), x.mean()],
        ),
        "GL108",
        "outputs[1]",
        "outputs[1] does not require grad",
    ),
    "no_grad": (lambda: under(torch.no_grad()), "GL108", "outputs[0]", "no_grad"),
    "inference mode": (
        lambda: under(torch.inference_mode()),
        "GL108",
        "outputs[0]",
        "was computed under torch.inference_mode()",
    ),
    "integer output": (
        lambda: without_graph(lambda x: x.argmax()),
        "GL108",
        "outputs[0]",
        "has dtype int64, and only floats have gradients",
    ),
    "nothing requires grad": (
        lambda: Call((x := vector(requires_grad=False)).sum(), x),
        "GL108",
        "outputs[0]",
        "and neither does inputs[0]",
    ),
    "slice": (
        lambda: of_another(lambda w: w[:2]),
        "GL109",
        "inputs[0]",
        "It was made (by SliceBackward0) from a leaf of shape [4], which is",
    ),
    "slice of a slice in a dict": (
        lambda: of_another(lambda w: {"w": w, "part": w[:2][1:]}),
        "GL109",
        'inputs["part"]',
        'inputs["part"] is not part of the graph It was made',
    ),
    "copy by to()": (
        lambda: of_another(lambda w: w.to(torch.float64)),
        "GL109",
        "inputs[0]",
        "(by ToCopyBackward0)",
    ),
    "detached twin": (
        lambda: of_another(lambda w: w.detach().requires_grad_()),
        "GL109",
        "inputs[0]",
        "has the memory of a leaf of shape [4], which is",
    ),
    "unused": (
        lambda: of_another(lambda w: [w, vector()]),
        "GL109",
        "inputs[1]",
        "is not part of the graph of outputs Was its layer called",
    ),
    "hidden by a checkpoint": (
        checkpointed,
        "GL109",
        "inputs[0]",
        "is not part of the graph of outputs A checkpoint Pass use_reentrant=False",
    ),
    "the other part of a split": (
        split_sibling,
        "GL109",
        "inputs[0]",
        "is not part of the graph",
    ),
    "wrong way round": (
        downstream,
        "GL109",
        "inputs[0]",
        "stand in the wrong order: inputs[0] was computed from outputs[0]",
    ),
    "unused edge, which cannot be zeros": (
        edge_without_zeros,
        "GL109",
        "inputs[1]",
        "inputs[1] is not part of the graph torch makes no zeros",
    ),
    "input without grad": (
        lambda: of_another(lambda _: vector(requires_grad=False)),
        "GL110",
        "inputs[0]",
        "inputs[0] does not require grad",
    ),
    "input without grad, allowed to be unused": (
        lambda: of_another(lambda w: [w, w.detach() * 2], allow_unused=True),
        "GL110",
        "inputs[1]",
        "inputs[1] does not require grad",
    ),
    "integer input": (
        lambda: of_another(lambda w: w.long()),
        "GL110",
        "inputs[0]",
        "has dtype int64",
    ),
    "input made in inference mode": (
        inference_input,
        "GL110",
        "inputs[0]",
        "was made under torch.inference_mode()",
    ),
    "stack": (
        lambda: gathered(torch.stack),
        "GL113",
        "outputs[0]",
        "has shape [2], and no grad_outputs put together from single numbers",
    ),
    "cat": (
        lambda: gathered(lambda it: torch.cat([loss[None] for loss in it])),
        "GL113",
        "outputs[0]",
        "has shape [2]",
    ),
    "DataParallel": (
        lambda: gathered(lambda it: Gather.apply(*it)),
        "GL113",
        "outputs[0]",
        "several GPUs",
    ),
    "number as output": (
        lambda: Call(3.0, vector()),
        "GL114",
        "outputs",
        "outputs is of type float .item()",
    ),
    "no output": (
        lambda: Call(None, vector()),
        "GL114",
        "outputs",
        "outputs is None Does the function that computes it lack a return",
    ),
    "nested outputs": (
        lambda: Call([(c := outer()).y.sum(), [c.y.mean()]], c.x),
        "GL114",
        "outputs[1]",
        "outputs[1] is of type list Nested outputs are passed flat",
    ),
    "numbers as outputs, nested": (
        lambda: Call([[3.0, 2.0], [1.0, 0.0]], vector()),
        "GL114",
        "outputs[0]",
        "outputs[0] is of type list Numbers and arrays have no graph .tolist()",
    ),
    "nested outputs alone": (
        lambda: Call([[(c := outer()).y.sum()], (c.y.mean(),)], c.x),
        "GL114",
        "outputs[0]",
        "outputs[0] is of type list Nested outputs are passed flat",
    ),
    "dict of outputs": (
        lambda: Call({"y": (c := square()).y}, c.x),
        "GL114",
        "outputs",
        "outputs is of type dict",
    ),
    "module as output": (
        lambda: Call((m := nn.Linear(4, 1)), ones(4, requires_grad=True), f=m),
        "GL114",
        "outputs",
        "outputs is of type Linear The output is what the module returns",
    ),
    "no outputs": (
        lambda: Call([], vector()),
        "GL114",
        "outputs",
        "outputs is empty",
    ),
    "module as input": (
        lambda: model_call(lambda model: model),
        "GL114",
        "inputs",
        "inputs is of type Linear those of its parameters",
    ),
    "modules as inputs": (
        lambda: model_call(lambda model: [model]),
        "GL114",
        "inputs[0]",
        "inputs[0] is of type Linear",
    ),
    "another mapping": (
        lambda: model_call(lambda model: nn.ParameterDict(model.named_parameters())),
        "GL114",
        "inputs",
        "inputs is of type ParameterDict",
    ),
    "ordered dict": (
        lambda: model_call(lambda model: model.state_dict(keep_vars=True)),
        "GL114",
        "inputs",
        "inputs is of type OrderedDict",
    ),
    "names and parameters": (
        lambda: model_call(lambda model: list(model.named_parameters())),
        "GL114",
        "inputs[0]",
        "inputs[0] is of type tuple A dict of tensors gives a dict",
    ),
    "detached parameters": (
        lambda: model_call(lambda model: model.state_dict()),
        "GL114",
        "inputs",
        "inputs is of type OrderedDict A state_dict() holds detached tensors",
    ),
    "None among inputs": (
        lambda: of_another(lambda w: [w, None]),
        "GL114",
        "inputs[1]",
        "inputs[1] is None Pass the very tensors",
    ),
    "None as input": (
        lambda: model_call(lambda _: None),
        "GL114",
        "inputs",
        "inputs is None",
    ),
    "number as input": (
        lambda: of_another(lambda _: 2.0),
        "GL114",
        "inputs",
        "inputs is of type float",
    ),
    "nested inputs": (
        lambda: of_another(lambda w: [[w]]),
        "GL114",
        "inputs[0]",
        "Nested inputs are passed flat",
    ),
    "None among inputs by name": (
        lambda: of_another(lambda w: {"a": w, "b": None}),
        "GL114",
        'inputs["b"]',
        'inputs["b"] is None Pass the very tensors',
    ),
    "numbers as inputs": (
        lambda: of_another(lambda w: w.tolist()),
        "GL114",
        "inputs[0]",
        "inputs[0] is of type float",
    ),
    "method as input": (
        lambda: model_call(lambda model: model.parameters),
        "GL114",
        "inputs",
        "inputs is of type method",
    ),
    "optimizer": (
        lambda: model_call(lambda m: torch.optim.SGD(m.parameters())),
        "GL114",
        "inputs",
        "inputs is of type SGD an optimizer stand in the lists",
    ),
    "groups of an optimizer": (
        lambda: model_call(lambda m: torch.optim.SGD(m.parameters()).param_groups),
        "GL114",
        "inputs[0]",
        "inputs[0] is of type dict an optimizer stand in the lists",
    ),
    "group of an optimizer": (
        lambda: model_call(lambda m: torch.optim.SGD(m.parameters()).param_groups[0]),
        "GL114",
        "inputs",
        "The parameters of an optimizer",
    ),
    "nested inputs by name": (
        lambda: of_another(lambda w: {"a": w, "b": [w]}),
        "GL114",
        'inputs["b"]',
        "Nested inputs are passed flat",
    ),
    "function as output": (
        lambda: Call((m := nn.Linear(4, 1)).forward, vector(), f=m),
        "GL114",
        "outputs",
        "outputs is of type method It is a function. Call it",
    ),
    "outputs and vectors by name": (
        lambda: Call(
            {"a": (c := square()).x * 2, "b": c.y}, c.x, {"b": None, "a": ones(4)}
        ),
        "GL114",
        "outputs",
        "outputs is of type dict",
    ),
    "outputs by name in a list": (
        lambda: Call([{"a": (c := square()).y}], c.x, []),
        "GL114",
        "outputs[0]",
        "outputs[0] is of type dict",
    ),
    "array of words": (
        lambda: outer(np.array(["one"])),
        "GL104",
        "grad_outputs",
        "is of type ndarray",
    ),
    "number and array": (
        lambda: model_call(lambda _: [1.0, np.ones(3)]),
        "GL114",
        "inputs[0]",
        "inputs[0] is of type float",
    ),
    "too few numbers": (
        lambda: outer([1.0, 1.0]),
        "GL104",
        "grad_outputs[0]",
        "Each output needs weights of its own",
    ),
    "too many numbers": (
        lambda: two([1, 2, 3]),
        "GL104",
        "grad_outputs[0]",
        "Each output needs weights of its own",
    ),
    "imaginary number": (
        lambda: outer(1j),
        "GL104",
        "grad_outputs",
        "is of type complex The gradient of a real output is real",
    ),
    "array of another shape": (
        lambda: outer(np.ones((2, 2))),
        "GL104",
        "grad_outputs",
        "and has shape [2, 2], where the output has [4, 4] Weights of one",
    ),
    "class": (lambda: outer(Tensor), "GL104", "grad_outputs", "is the class Tensor"),
    "leaf made anew as output": (
        lambda: Call(torch.tensor(3.0, requires_grad=True), vector()),
        "GL109",
        "inputs[0]",
        "outputs[0] is a leaf torch.stack(losses) keeps their graph",
    ),
    "view made under no_grad as output": (
        lambda: Call(without_gradients(Tensor.view, vector() * 2, 2, 2), vector()),
        "GL109",
        "inputs[0]",
        "outputs[0] is a leaf A view made under torch.no_grad()",
    ),
    "leaves made anew as output": (
        lambda: Call(torch.tensor([3.0, 4.0], requires_grad=True), vector()),
        "GL109",
        "inputs[0]",
        "outputs[0] is a leaf torch.stack(losses) keeps their graph",
    ),
    "iterator that was used": (
        lambda: model_call(lambda _: iter(())),
        "GL114",
        "inputs",
        "inputs is empty an iterator",
    ),
}


@pytest.fixture(params=BAD.values(), ids=list(BAD))
def bad(request: pytest.FixtureRequest) -> tuple[Call, str, str, str]:
    """A bad call, its code, the argument that it names, and words of the message."""
    build, *expected = request.param
    return build(), *expected


def test_the_code_and_the_argument(bad: tuple[Call, str, str, str]) -> None:
    call, code, argument, _ = bad
    found = call.diagnosis()
    assert found is not None
    assert found.code == code
    assert argument in found.what


def test_the_words(bad: tuple[Call, str, str, str]) -> None:
    call, code, _, words = bad
    found = call.diagnosis()
    assert found is not None
    text = re.sub(r"\s+", " ", f"{found.what} {found.intent}")
    place = 0
    for word in words.split():
        place = text.find(word, place)
        assert place >= 0, f"{word!r} is not in {text!r}, or too early"
    assert found.why == CASES[code].cause
    assert str(found).startswith(f"[{code}] ")
    page = f"docs/errors/{code}.md"
    assert str(found).endswith(f"\n\nMore in gradlib's documentation: {page}")


def test_lines_fit_a_terminal(bad: tuple[Call, str, str, str]) -> None:
    lines = str(bad[0].diagnosis()).splitlines()
    assert max(map(len, lines)) <= 80
    assert "" in lines[1:-2]  # before the code


def test_the_fix_runs_as_printed(bad: tuple[Call, str, str, str]) -> None:
    call = bad[0]
    found = call.diagnosis()
    assert found is not None
    assert 1 <= len(found.fix.splitlines()) <= 4
    if call.v is None and "v = " not in found.fix:
        assert "v" not in re.findall(r"\w+", found.fix)
    names = {"y": call.y, "x": call.x, "v": call.v, "f": call.f}
    exec(found.fix, names | {"torch": torch, "gradlib": gradlib})


def test_grad_raises_it(bad: tuple[Call, str, str, str]) -> None:
    call, code, _, _ = bad
    with pytest.raises(RuntimeError) as caught:
        call.grad()
    assert isinstance(caught.value, gradlib.GradlibError)
    assert type(caught.value) is CASES[code].error
    assert caught.value.code == code
    assert caught.value.__cause__ is None  # torch was not asked


@pytest.mark.parametrize("named", [False, True])
def test_where_gradients_are_switched_off(named: bool) -> None:
    x = vector()
    with torch.no_grad():
        found = Call((x**2).sum(), {"x": x} if named else x).diagnosis()
    assert found is not None
    assert found.code == "GL108"
    assert "gradients are switched off here" in found.what
    assert found.fix.startswith("with torch.enable_grad():\n    y = f(x)\n")


@pytest.mark.parametrize("form", ["one", "several", "by name"])
def test_inputs_that_were_made_in_inference_mode(form: str) -> None:
    f: Any = {"one": torch.sum, "several": sum, "by name": lambda x: sum(x.values())}
    with torch.inference_mode():
        a, b = ones(2), ones(2)
        x: Any = {"one": a, "several": [a, b], "by name": {"a": a, "b": b}}[form]
        y = f[form](x).sum()
    found = Call(y, x).diagnosis()
    assert found is not None
    exec(found.fix, {"x": x, "f": lambda x: f[form](x).sum(), "gradlib": gradlib})


def test_what_backward_goes_through_in_inference_mode() -> None:
    x = vector()
    with torch.inference_mode():
        y = x.dot(x)
        with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
            y.backward()
        lines = caught.value.__notes__[0].splitlines()
        fix = dedent("\n".join(it for it in lines if it.startswith("    ")))
        exec(fix, {"x": x, "f": lambda x: x.dot(x), "torch": torch})
    assert x.grad is not None


def test_integers_beside_others() -> None:
    x, labels = vector(), torch.tensor([0, 1])
    found = Call(x.dot(x), [labels, get_gradient_edge(x)]).diagnosis()
    assert found is not None
    assert "has dtype int64" in found.what
    named = {"x": x, "labels": labels}
    found = Call(x.dot(x), named).diagnosis()
    assert found is not None
    names = {"x": named, "y": x.dot(x), "gradlib": gradlib}
    exec(found.fix, names)
    assert [*names["x"]] == ["x"]


def outputs_of(x: Tensor) -> Tensor:
    return x**2


TRANSFORMED: dict[str, dict[str, Any]] = {
    "weights": {"v": ones(4) * 3},
    "none, of several entries": {},
    "none, of several outputs": {"f": lambda x: (x**2, x.sin())},
    "of a list": {"f": lambda x: [x**2], "v": [ones(4)]},
    "several inputs": {"f": lambda x: x[0] * x[1], "several": True},
    "a batch": {"v": torch.eye(4), "is_grads_batched": True},
}


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_is_advised_under_a_transform_runs_there(
    name: str, transform: str
) -> None:
    options = dict(TRANSFORMED[name])
    f, v = options.pop("f", outputs_of), options.pop("v", None)
    several = options.pop("several", False)
    texts: list[str] = []

    def advised(x: Tensor) -> Tensor:
        inputs = [x, x.cos()] if several else x
        y = f(inputs)
        found = Call(y, inputs, v, options).diagnosis()
        assert found is not None
        texts.append(str(found))
        *lines, last = found.fix.splitlines()
        names = {"torch": torch, "x": inputs, "y": y, "v": v, "f": f}
        exec("\n".join(lines), names)
        (gradient,) = eval(last, names)
        return gradient[0] if several else gradient

    def wanted(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        inputs = [x, x.detach().cos()] if several else x
        y = f(inputs)
        weights = v
        if v is None:
            weights = [*map(torch.ones_like, y)] if isinstance(y, tuple) else ones(4)
        return torch.autograd.grad(y, x, weights, **options)[0]

    x = torch.randn(3, 4)
    if transform == "vmap":
        found = torch.vmap(advised)(x)
    else:
        found = torch.stack([torch.func.jvp(advised, (it,), (it,))[0] for it in x])
    torch.testing.assert_close(found, torch.stack([wanted(it) for it in x]))
    assert all(it.startswith("[GL108] outputs[0") for it in texts)
    assert all("that torch.vmap or" in it.replace("\n", " ") for it in texts)


def test_where_only_a_gradient_is_taken_tensors_require_grad() -> None:
    def of_a_constant(x: Tensor) -> Tensor:
        gradlib.grad(x.detach().sum(), x)
        return x.sum()

    with pytest.raises(gradlib.OutputNeedsNoGradError) as caught:
        torch.func.grad(of_a_constant)(vector(requires_grad=False))
    assert "vmap" not in str(caught.value)


SAME_START: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda it: it.T,
    "other entries": lambda it: it.as_strided((2, 2), (1, 1)),
    "conjugate": lambda it: it.conj(),
    "with another sign": negative_view,
}


@pytest.mark.parametrize("way", SAME_START)
def test_what_begins_in_the_same_memory_is_another_tensor(way: str) -> None:
    square = ones(2, 2, dtype=torch.complex64, requires_grad=True)
    other = SAME_START[way](square.detach())
    v = ones(2, 2, dtype=torch.complex64)
    meaning = gradlib.explain_vjp(other, square, v).meaning
    assert meaning.startswith("outputs[0] (`other`) does not require grad")
    assert "it is `square`" not in meaning
    other.requires_grad_()
    meaning = gradlib.explain_vjp(square.abs().sum(), other).meaning
    assert "It ends in `square`." in meaning.split("\n\n")[0].replace("\n", " ")


def test_of_many_leaves_some_are_named_and_the_rest_counted() -> None:
    a, b, c, d, e, f, unused = (ones(1, requires_grad=True) for _ in range(7))
    meaning = gradlib.explain_vjp(a + b + c + d + e + f, unused).meaning
    said = meaning.split("\n\n")[0].replace("\n", " ")
    assert said.endswith("It ends in `a`, `b`, `c`, `d` and 2 more.")


def several(v: Any, **options: Any) -> Call:
    """A call for three outputs, of shapes (4,), (4,) and ()."""
    x = vector()
    return Call([x * 2, x.exp(), x.sum()], x, v, options)


def edges(v: Any = None, **options: Any) -> Call:
    """A call for gradient edges of shapes (4, 4), (4,) and (), the second complex."""
    x = vector()
    outputs = (torch.outer(x, x), x * 1j, x.double().sum())
    return Call([*map(get_gradient_edge, outputs)], x, v, options)


def edge(v: Any = None, **options: Any) -> Call:
    """A call for a gradient edge of shape (4, 4)."""
    x = vector()
    return Call(get_gradient_edge(torch.outer(x, x)), x, v, options)


def sparse(v: Any = None, **options: Any) -> Call:
    """A call for a sparse output of shape (4, 4)."""
    x = vector()
    return Call(torch.outer(x, x).to_sparse(), x, v, options)


def without_grad(x: Any) -> Call:
    return Call(vector().sum(), x)


BATCHED = {"is_grads_batched": True}
META, LONG = {"device": "meta"}, {"dtype": torch.int64}
MENDED: dict[str, Callable[[], Call]] = {
    "two numbers": lambda: several([1.0, ones(4), 2]),
    "three numbers": lambda: several([1.0, 0.5, 2.0]),
    "numbers and others": lambda: several([1.0, "a", {}]),
    "two of integers": lambda: several([ones(4, **LONG), ones(4, **LONG), None]),
    "three of integers": lambda: several([ones(4, **LONG)] * 2 + [ones(**LONG)]),
    "two shapes": lambda: several([ones(2), ones(3), ones()]),
    "three shapes": lambda: several([ones(2), ones(2), ones(2)]),
    "two exchanges": lambda: Call(
        [*(c := two()).y, *c.y], c.x, [ones(4), ones(4, 4)] * 2
    ),
    "two exchanged, and another": lambda: Call(
        [*(c := two()).y, c.x.sum()], c.x, [ones(4), ones(4, 4), ones(3)]
    ),
    "two on meta": lambda: several([ones(4, **META), ones(4, **META), None]),
    "two complex": lambda: several([vector() * 1j, vector() * 1j, None]),
    "two without": lambda: several([None, None, ones()]),
    "the first and the last": lambda: Call(
        [*(c := several(None)).y, c.x.exp()], c.x, [None, ones(4), None, None]
    ),
    "many": lambda: Call(
        [(x := vector()).exp() for _ in range(99)], x, [ones(4), None, None] * 33
    ),
    "two of a sparse layout": lambda: Call(
        [*map(torch.diag, (c := several(None)).y[:2])],
        c.x,
        [torch.eye(4).to_sparse_csr()] * 2,
    ),
    "a sparse number, no weights": lambda: Call(
        [vector().sum().to_sparse(), (x := vector()).sum()], x
    ),
    "two inputs": lambda: without_grad([vector(requires_grad=False) for _ in "ab"]),
    "four inputs": lambda: without_grad([vector(requires_grad=False) for _ in "abcd"]),
    "four by name": lambda: without_grad(
        {name: vector(requires_grad=False) for name in "abcd"}
    ),
    "an integer and another": lambda: without_grad(
        [ones(4, **LONG), vector(requires_grad=False)]
    ),
    "no input of the output": lambda: Call(
        (x := [ones(4, **LONG), ones(4)])[1].sum(), x
    ),
    "edge": edge,
    "edge, a number": lambda: edge(2),
    "edge, a list": lambda: edge([[1.0] * 4] * 4),
    "edge, broadcast": lambda: edge(ones(1, 4)),
    "edge, flat": lambda: edge(ones(16)),
    "edge, another shape": lambda: edge(ones(3)),
    "edge, integers": lambda: edge(ones(4, 4, **LONG)),
    "edge, meta": lambda: edge(ones(4, 4, **META)),
    "edge, batched without": lambda: edge(**BATCHED),
    "edges": edges,
    "edges, too few": lambda: edges([ones(4, 4)]),
    "edges, one for all": lambda: edges(ones(4, 4)),
    "edges, numbers": lambda: edges([1, 2, 3]),
    "edges, all but one": lambda: edges([None, None, ones()]),
    "edges, batched without": lambda: edges(**BATCHED),
    "sparse": sparse,
    "sparse, a number": lambda: sparse(2),
    "sparse, broadcast": lambda: sparse(ones(1, 4)),
    "sparse, another shape": lambda: sparse(ones(3)),
    "sparse, too few": lambda: Call([(c := sparse()).y, c.x], c.x, [ones(4, 4)]),
    "sparse vectors, broadcast": lambda: outer(ones(1, 4).to_sparse()),
    "batched, a number": lambda: outer(2.0, **BATCHED),
    "batched, no numbers": lambda: outer("v", **BATCHED),
    "batched, one list": lambda: outer([[1.0] * 4] * 4, **BATCHED),
    "batched, lists": lambda: outer([[[1.0] * 4] * 4] * 2, **BATCHED),
    "batched, meta": lambda: outer(ones(3, 4, 4, **META), **BATCHED),
    "batched, too few": lambda: two([ones(3, 4, 4)], **BATCHED),
    "batched, empty": lambda: Call((x := vector())[:0], x, None, BATCHED),
    "a list of vectors": lambda: several([[ones(2), ones(2)], ones(4), None]),
}


@pytest.mark.parametrize("name", MENDED)
def test_the_fix_mends_every_entry_that_is_wrong_in_the_same_way(name: str) -> None:
    call = MENDED[name]()
    found = call.diagnosis()
    assert found is not None
    assert max(map(len, found.fix.splitlines())) <= 76
    names = {"y": call.y, "x": call.x, "v": call.v, "f": call.f}
    exec(found.fix, names | {"torch": torch, "gradlib": gradlib})


def test_backward_takes_no_batch_of_vectors() -> None:
    x = ones(3, requires_grad=True)
    names: dict[str, Any] = {"x": x, "torch": torch}
    program = "v = torch.ones(2, 3)\ny = x * 2\ntorch.autograd.backward(y, v)"
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        run(program, names)
    lines = caught.value.__notes__[0].splitlines()
    run("\n".join(it[4:] for it in lines if it.startswith("    ")), names)
    assert x.grad is not None
    assert torch.equal(x.grad, ones(3) * 4)
