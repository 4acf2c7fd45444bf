"""Sparse, nested and other tensors as outputs and as grad_outputs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import gradlib
from gradlib.vjp.arguments import read_arguments
from gradlib.vjp.diagnose import diagnose

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.cpu,  # the layout mkldnn is there alone
]


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    """Return the rows of a matrix as a nested tensor."""
    return torch.nested.as_nested_tensor(list(x.unbind()), layout=layout)


MAKE: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda x: x * 1,
    "sparse_coo": Tensor.to_sparse,
    "hybrid": lambda x: x.to_sparse(1),
    "sparse_csr": Tensor.to_sparse_csr,
    "sparse_csc": Tensor.to_sparse_csc,
    "sparse_bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda x: x.to_sparse_bsc((2, 2)),
    **({"mkldnn": Tensor.to_mkldnn} if torch.backends.mkldnn.is_available() else {}),
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
}
REFUSED = "expected layout|nested|Nested|Mismatch in shape: .* j"


def matrix() -> Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)


def pair(output: str, vector: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, inputs and grad_outputs of the same shape."""
    x = matrix()
    y = MAKE[output](x)
    is_jagged = output == vector == "jagged"  # another one has another shape
    v = torch.ones_like(y.detach()) if is_jagged else MAKE[vector](torch.ones(2, 2))
    return y, x, v


@pytest.mark.parametrize("vector", MAKE)
@pytest.mark.parametrize("output", MAKE)
def test_what_torch_refuses_at_once_is_found_before(output: str, vector: str) -> None:
    y, x, v = pair(output, vector)
    raised = ""
    try:
        torch.autograd.grad(y, x, v, retain_graph=True)
    except (RuntimeError, ValueError) as error:
        raised = str(error)
    found = diagnose(read_arguments(y, x, v))
    if not re.search(REFUSED, raised):
        assert found is None, raised
        return
    assert found is not None, raised
    assert found.code == "GL115"
    assert found.what.startswith("grad_outputs[0] is ")
    words = f"is {vector}, and outputs[0] is {output}."
    assert found.what.endswith(words.replace("hybrid", "sparse_coo"))
    exec(found.fix, {"y": y, "x": x, "v": v, "torch": torch, "gradlib": gradlib})


@pytest.mark.parametrize("vector", MAKE)
@pytest.mark.parametrize("output", MAKE)
def test_a_call_is_explained_or_its_result_shown(output: str, vector: str) -> None:
    y, x, v = pair(output, vector)
    explanation = gradlib.explain_vjp(y, x, v)
    assert str(explanation)
    if explanation.ok:
        (expected,) = torch.autograd.grad(y, x, v)
        assert torch.equal(explanation.result.to_dense(), expected.to_dense())
    else:
        assert explanation.code == "GL115"


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "expand is unsupported": lambda x: x.sum(0, keepdim=True),
    "reshape is not implemented": lambda x: x.reshape(1, 4),
}


@pytest.mark.parametrize("said", SPARSE)
def test_an_operation_that_takes_no_sparse_gradient(said: str) -> None:
    x = matrix()
    y = SPARSE[said](x)
    v = torch.ones_like(y.detach()).to_sparse()
    with pytest.raises(gradlib.GradOutputsLayoutError, match=said) as caught:
        gradlib.grad(y, x, v)
    text = str(caught.value)
    assert said in str(caught.value.__cause__)
    assert "grad_outputs[0] is sparse_coo, and outputs[0] is strided." in text
    assert "    v = v.to_dense()\n" in text
    explanation = gradlib.explain_vjp(y, x, v)
    assert str(explanation) == text
    edge = get_gradient_edge(y)
    with pytest.raises(gradlib.GradOutputsLayoutError) as of_an_edge:
        gradlib.grad(edge, x, v)
    assert str(of_an_edge.value) == text.replace("(y, ", "(edge, ")
    with pytest.raises(RuntimeError) as raised, gradlib.explain_errors():
        y.backward(v, inputs=[x])
    (note,) = raised.value.__notes__
    assert "[GL115] gradient is sparse_coo, and the output is strided." in note
    assert "    y.backward(v, inputs=[x])\n" in note


class Fails(torch.autograd.Function):
    """A custom function, whose backward raises."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"mine, not {type(ctx).__name__}")


def test_what_a_function_of_the_users_raises_is_not_laid_to_the_layout() -> None:
    x = matrix()
    y = Fails.apply(x)
    v = torch.eye(2).to_sparse()
    for call in (gradlib.grad, gradlib.explain_vjp):
        with pytest.raises(RuntimeError, match=r"^mine, not") as caught:
            call(y, x, v)
        assert type(caught.value) is RuntimeError
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        torch.autograd.grad(y, x, v)
    assert not hasattr(caught.value, "__notes__")


def test_what_torch_raises_for_another_reason_passes() -> None:
    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0]], requires_grad=True)
    loss = torch.linalg.eig(x)[1].imag.sum()
    for call in (gradlib.grad, gradlib.explain_vjp):
        with pytest.raises(RuntimeError, match="linalg_eig_backward") as caught:
            call(loss, x)
        assert type(caught.value) is RuntimeError


def test_the_second_of_two() -> None:
    x = matrix()
    v = [torch.ones(2, 2), torch.eye(2).to_sparse_csr()]
    with pytest.raises(gradlib.GradOutputsLayoutError) as caught:
        gradlib.grad([x * 2, x.exp()], x, v)
    assert "grad_outputs[1] is sparse_csr, and outputs[1] is strided." in str(
        caught.value
    )


def test_of_a_gradient_edge_torch_tells() -> None:
    x = matrix()
    edge = get_gradient_edge(x.exp())
    v = torch.eye(2).to_sparse_csr()
    with pytest.raises(gradlib.GradOutputsLayoutError) as caught:
        gradlib.grad(edge, x, v)
    text = str(caught.value)
    assert "grad_outputs[0] is sparse_csr, and outputs[0] is strided. torch" in text
    assert "    v = v.to_dense()\n" in text


def test_a_sparse_vector_of_a_dense_output() -> None:
    x = matrix()
    explanation = gradlib.explain_vjp(x.exp(), x, torch.eye(2).to_sparse())
    assert explanation.ok
    assert "its v is sparse" in explanation.note


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_weights() -> None:
    x = matrix()
    y = x.exp()
    v = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, x, v, retain_graph=True)
    found = diagnose(read_arguments(y, x, v))
    assert found is not None
    assert found.code == "GL105"
    assert "silently" not in found.intent
    names = {"y": y, "x": x, "v": v, "gradlib": gradlib}
    exec(found.fix, names)


ONE = [name for name in MAKE if name not in ("strided", "nested", "jagged")]


@pytest.mark.parametrize("layout", ONE)
def test_a_single_entry_that_torch_gives_no_weight(layout: str) -> None:
    x = torch.full((1, 1), 2.0, requires_grad=True)
    size = {"sparse_bsr": Tensor.to_sparse_bsr, "sparse_bsc": Tensor.to_sparse_bsc}
    y = size[layout](x, (1, 1)) if layout in size else MAKE[layout](x)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, x, retain_graph=True)
    found = diagnose(read_arguments(y, x))
    assert found is not None
    assert found.code == "GL115"
    exec(found.fix, {"y": y, "x": x, "torch": torch, "gradlib": gradlib})
    assert gradlib.explain_vjp(y, x).code == "GL115"


def test_odd_calls_with_nested_tensors() -> None:
    x = matrix()
    y, v = nested(x * 2, torch.strided), nested(torch.ones(2, 2), torch.strided)
    edge, of_nested = get_gradient_edge(x * 2), get_gradient_edge(y)
    calls: list[tuple[str, Any, Any, bool]] = [
        ("GL107", y, v, True),
        ("GL107", y, None, True),
        ("GL107", [x * 2, y], [torch.ones(1, 2, 2), v], True),
        ("GL115", edge, v, False),
        ("GL115", of_nested, torch.ones(2, 2), False),
        ("GL104", x * 2, [2, v], False),
    ]
    for code, outputs, vectors, batched in calls:
        with pytest.raises(gradlib.GradlibError) as caught:
            gradlib.grad(outputs, x, vectors, is_grads_batched=batched)
        assert caught.value.code == code
        assert "torch has" not in str(caught.value)  # it was found before
        if not batched:
            assert gradlib.explain_vjp(outputs, x, vectors).code == code
