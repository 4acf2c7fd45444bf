"""With create_graph=True gradients flow through a Jacobian, and never without."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jacrev, vmap

import gradlib

from .samples_alone import MODES, require_close, smooth_net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_gradients_flow_through_the_jacobian(mode: str, chunk: int | str) -> None:
    model = smooth_net(3, 2, 3)
    names = [name for name, _ in model.named_parameters()]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def jacobian(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return gradlib.per_sample_jacobian(
            lambda x: functional_call(model, given, (x,)),
            x,
            mode=mode,
            chunk_size=chunk,
            create_graph=True,
            check=False,
        )

    weights = [it.detach().clone().requires_grad_() for it in model.parameters()]
    assert torch.autograd.gradcheck(jacobian, (x, *weights))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_tangents_flow_through_the_jacobian(mode: str, requires_grad: bool) -> None:
    model = smooth_net(3, 2, 3)
    x, along = torch.randn(2, 2, 3, dtype=torch.float64).unbind()

    def jacobian(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian(model, x, mode=mode, create_graph=True)

    plain = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(jacobian(plain).sin().sum(), plain)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(requires_grad), along)
        found: Any = forward_ad.unpack_dual(jacobian(dual).sin().sum())
        assert found.tangent is not None
        torch.testing.assert_close(found.tangent.detach(), (wanted * along).sum())


@pytest.mark.parametrize(
    ("mode", "argnums"),
    [
        *((it, 0) for it in MODES),
        *((it, "parameters") for it in MODES if it != "split"),
    ],
)
def test_a_loss_of_the_jacobian(mode: str, argnums: int | str) -> None:
    model, x = smooth_net(3, 2, 4), torch.randn(5, 3, dtype=torch.float64)

    def loss(jacobian: Any) -> Tensor:
        parts = jacobian.values() if isinstance(jacobian, dict) else [jacobian]
        return torch.stack([it.square().sum() for it in parts]).sum()

    ours = gradlib.per_sample_jacobian(
        model, x, mode=mode, argnums=argnums, create_graph=True
    )
    grads = torch.autograd.grad(loss(ours), list(model.parameters()), allow_unused=True)

    def one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row,))

    theirs = cast(Any, vmap)(
        jacrev(one, 0 if argnums == "parameters" else 1), (None, 0)
    )(dict(model.named_parameters()), x)
    others = torch.autograd.grad(
        loss(theirs), list(model.parameters()), allow_unused=True
    )
    for grad, other in zip(grads, others, strict=True):
        # The last bias has no part in it.
        if grad is None or other is None:
            assert not any(it is not None and it.any() for it in (grad, other))
        else:
            require_close(grad, other)


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop"])
def test_a_loss_of_a_jacobian_by_parameters_in_chunks(mode: str) -> None:
    model, x = smooth_net(3, 2, 4), torch.randn(5, 3, dtype=torch.float64)
    how: dict[str, Any] = {"argnums": "parameters", "mode": mode}
    whole = gradlib.per_sample_jacobian(model, x, **how)
    parts = gradlib.per_sample_jacobian(
        model, x, chunk_size=4, create_graph=True, check=False, **how
    )
    assert parts["0.weight"].requires_grad
    for name, block in whole.items():
        require_close(parts[name], block)


def test_a_loss_of_a_product_that_comes_in_parts() -> None:
    wide = 700  # two samples' are as much as is computed at once
    first, last = nn.Linear(wide, 2).double(), nn.Linear(2, wide).double()
    x = torch.arange(4).double()[:, None].expand(4, wide) / wide
    ours = gradlib.per_sample_jacobian(
        nn.Sequential(first, nn.Tanh(), last),
        x,
        mode="split",
        create_graph=True,
        check=False,
    )
    assert ours.requires_grad
    bends = 1 - first(x).detach().tanh().square()
    factors = last.weight.detach() * bends[:, None]
    require_close(ours, factors @ first.weight.detach())


def test_a_loss_of_the_jacobian_reaches_what_the_input_was_made_of() -> None:
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    x = z.square()
    ours = gradlib.per_sample_jacobian(torch.sin, x, create_graph=True)
    [grad] = torch.autograd.grad(ours.sum(), z)
    require_close(grad, -x.sin() * 2 * z)


def test_a_loss_of_output_and_jacobian_of_one_graph() -> None:
    model = smooth_net(3, 2, 4)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = model(x)
    ours = gradlib.per_sample_jacobian_from_graph(y, x, create_graph=True)
    loss = ours.square().sum() + y.square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    theirs = cast(Any, vmap(jacrev(model)))(x)
    other = theirs.square().sum() + model(x).square().sum()
    others = torch.autograd.grad(other, list(model.parameters()))
    for grad, other_grad in zip(grads, others, strict=True):
        require_close(grad, other_grad)


def test_without_create_graph_nothing_flows() -> None:
    model = smooth_net(3, 2, 4)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert not gradlib.per_sample_jacobian(model, x).requires_grad
    by_name = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    assert not any(it.requires_grad for it in by_name.values())
