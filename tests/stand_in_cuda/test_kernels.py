"""Kernels that only a GPU has compute what a CPU's others do, on the stand-in too."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.gpu

FUSED: dict[str, Callable[[bool], nn.Module]] = {
    "ThnnFusedLstmCellBackward0": lambda bias: nn.LSTMCell(4, 5, bias=bias),
    "ThnnFusedGruCellBackward0": lambda bias: nn.GRUCell(4, 5, bias=bias),
    "FusedRmsNormBackward0": lambda weight: nn.RMSNorm(4, elementwise_affine=weight),
}
"""What leaves a node of that name, with weights of a kind or without."""


def results_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return its output, and the gradients of one pass and of a pass of that pass."""
    x = x.detach().requires_grad_()
    found = module(x)
    outputs = found if isinstance(found, tuple) else (found,)
    asked = [x, *module.parameters()]
    loss = torch.cat(outputs).square().sum()
    plain = torch.autograd.grad(loss, asked, retain_graph=True)
    grads = torch.autograd.grad(loss, asked, create_graph=True)
    again = torch.autograd.grad(grads[0].square().sum(), asked, allow_unused=True)
    every = [*outputs, *plain, *grads, *(it for it in again if it is not None)]
    return [it.detach().cpu() for it in every]


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel(name: str, has_weights: bool) -> None:
    if name == "FusedRmsNormBackward0" and torch.__version__ < "2.9":
        pytest.skip("this torch has no node of its own for an RMS norm")
    with torch.device("cpu"):
        module, x = FUSED[name](has_weights).double(), torch.randn(3, 4).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    expected = results_of(module, x)
    there = deepcopy(module).cuda()
    found = there(x.cuda().requires_grad_())
    output = found[0] if isinstance(found, tuple) else found
    assert output.grad_fn.name() == name
    torch.testing.assert_close(results_of(there, x.cuda()), expected)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors(layout: torch.layout) -> None:
    dense = torch.eye(3, device="cuda") * torch.arange(3.0, device="cuda")
    x = torch.randn(3, 2, device="cuda", requires_grad=True)
    sparse = dense.to_sparse(layout=layout)
    assert sparse.device == dense.device
    assert torch.equal(sparse.to_dense(), dense)
    y = torch.sparse.mm(sparse, x)
    torch.testing.assert_close(y, dense @ x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dense.sum(0)[:, None].expand(3, 2))


def test_gradients_of_an_embedding_are_sparse_there() -> None:
    embedding = nn.Embedding(4, 2, sparse=True, device="cuda")
    embedding(torch.tensor([1, 1, 3], device="cuda")).sum().backward()
    grad = embedding.weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert grad.device == embedding.weight.device
    assert grad.to_dense()[:, 0].tolist() == [0, 2, 0, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    x = torch.randn(2, 3, device="cuda", requires_grad=True)
    nested = torch.nested.as_nested_tensor([x, x[:1]], layout=layout)
    assert nested.device == x.device
    (nested * 2).to_padded_tensor(0.0).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [4, 2]
