"""An explanation where tensors are on several devices."""

import pytest
import torch

import gradlib
from gradlib import GradOutputsError

pytestmark = pytest.mark.gpu


def test_a_vector_on_the_cpu_for_an_output_on_the_gpu() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    y, v = 2 * x, torch.ones(3, device="cpu")
    with pytest.raises(
        GradOutputsError, match=r"is on cpu, and .* on cuda:0"
    ) as caught:
        gradlib.grad(y, x, v)
    assert ".to(y.device)" in str(caught.value)
    assert not gradlib.explain_vjp(y, x, v).ok
    (found,) = gradlib.grad(y, x, v.to(y.device))
    assert found.is_cuda


def test_a_good_call_is_explained_on_its_device() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda", requires_grad=True)
    v = torch.tensor([1.0, 0.0, 1.0], device="cuda")
    explanation = gradlib.explain_vjp(x.square(), x, v)
    assert explanation.ok
    assert explanation.result.is_cuda
    assert explanation.result.tolist() == [2.0, 0.0, 6.0]
    assert explanation.by_einsum.tolist() == [2.0, 0.0, 6.0]
    assert "J is diagonal" in str(explanation)
