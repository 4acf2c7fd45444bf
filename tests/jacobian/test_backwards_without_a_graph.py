"""Backwards that have no graph of their own: rows go through them, no loss does."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import NoSuchWayError
from gradlib.random_state import seed_all

from .points import ROWS, alone, points, require_close

Function = Callable[[Tensor], Tensor]


class OnceOnly(torch.autograd.Function):
    """Doubles; its backward says that it has no graph of its own."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    backward: Any = staticmethod(
        torch.autograd.function.once_differentiable(lambda _ctx, grad: 2 * grad)
    )


class ByNumpy(torch.autograd.Function):
    """Doubles; its backward has no graph of its own, and does not say so."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return torch.from_numpy(2 * grads[0].detach().cpu().numpy()).to(grads[0])


class TooMany(torch.autograd.Function):
    """Doubles; its backward gives a gradient for an input that is not there."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        del ctx
        return 2 * grads[0], grads[0]


def reentrant(x: Tensor) -> Any:
    return checkpoint(torch.sin, x, use_reentrant=True)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize(
    ("function", "said"), [(reentrant, "reentrant kind"), (TooMany.apply, "incorrect")]
)
def test_what_cannot_go_back_is_refused_in_our_words(
    function: Any, said: str, create_graph: bool, check: bool
) -> None:
    options: Any = {"create_graph": create_graph, "check": check}
    with pytest.raises(NoSuchWayError, match=said):
        gradlib.per_sample_jacobian(function, points(3, 4), **options)
    x = points(3, 4).requires_grad_()
    with pytest.raises(NoSuchWayError, match=said):
        gradlib.per_sample_jacobian_from_graph(function(x), x, **options)


class Calls(nn.Module):
    """A module of one function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_a_backward_that_nothing_can_flow_through_is_named() -> None:
    """What torch advises, to detach what is handed to NumPy, would make it wrong."""

    class Doubles(torch.autograd.Function):
        forward: Any = staticmethod(lambda _, x: 2 * x)
        backward: Any = staticmethod(lambda _, g: torch.from_numpy(2 * g.numpy()))

    double: Any = Doubles.apply
    x = torch.randn(4, 3, device="cpu")
    with pytest.raises(NoSuchWayError, match=r'\.numpy\(\).* mode="reverse"'):
        gradlib.per_sample_jacobian(double, x, mode="forward")
    found = gradlib.per_sample_jacobian(double, x)
    torch.testing.assert_close(found, 2 * torch.eye(3, device="cpu").expand(4, 3, 3))


class InFloat(torch.autograd.Function):
    """Squares; it has no float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64")
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_without_float64_the_graph_of_a_backward_is_believed() -> None:
    x = torch.randn(4, 3)
    ours = gradlib.per_sample_jacobian(
        cast(Any, InFloat.apply), x.requires_grad_(), create_graph=True
    )
    (grad,) = torch.autograd.grad(ours.sum(), x)
    torch.testing.assert_close(grad, torch.full_like(x, 2))


WITHOUT_A_GRAPH: dict[str, Function] = {
    "once differentiable": cast(Any, OnceOnly.apply),
    "NumPy": cast(Any, ByNumpy.apply),
    "once differentiable, and another way": lambda x: x + cast(Any, OnceOnly.apply)(x),
    "NumPy, and another way": lambda x: x + cast(Any, ByNumpy.apply)(x),
    "once differentiable, deep": lambda x: (
        x.tanh() + cast(Any, OnceOnly.apply)(x)
    ).sin(),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_rows_through_a_backward_without_a_graph(
    name: str, mode: str, check: bool
) -> None:
    fn, x = WITHOUT_A_GRAPH[name], points(4, 3)
    ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    require_close(ours, alone(fn, x))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["forward", "split"])
@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_columns_through_a_backward_without_a_graph(
    name: str, mode: str, check: bool
) -> None:
    fn, x = WITHOUT_A_GRAPH[name], points(4, 3)
    try:
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    except NoSuchWayError:
        return
    require_close(ours, alone(fn, x))


@pytest.mark.cpu  # a GPU takes so few rows in one pass
@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_columns_are_not_chosen_through_somebodys_backward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    widen = nn.Linear(3, 40).double()
    plan = gradlib.plan_jacobian(
        lambda x: widen(WITHOUT_A_GRAPH[name](x)), points(4, 3)
    )
    assert plan.mode == "reverse"
    assert "may have no graph of its own" in str(plan)


@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_columns_without_a_graph_beside_integers(name: str) -> None:
    ids = torch.tensor([0, 1, 2, 0])
    with pytest.raises(NoSuchWayError, match='Use mode="reverse"'):
        gradlib.per_sample_jacobian(
            lambda x, ids: WITHOUT_A_GRAPH[name](x) * (ids[:, None] + 1),
            *(points(4, 3), ids),
            mode="forward",
        )


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", [*ROWS, "forward", "split"])
def test_a_loss_of_a_jacobian_through_a_backward_marked_once_differentiable(
    mode: Any, argnums: Any
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), Calls(cast(Any, OnceOnly.apply))).double()
    with pytest.raises(NoSuchWayError, match="OnceOnlyBackward, whose"):
        gradlib.per_sample_jacobian(
            model, points(4, 3), argnums=argnums, mode=mode, create_graph=True
        )


class Cubes(torch.autograd.Function):
    """Cubes, and divides by its second input, in whatever way its backward is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor, how: Function) -> Tensor:
        ctx.save_for_backward(x, by)
        ctx.how = how
        return x**3 / by

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, by = ctx.saved_tensors
        # A divisor that counts as a constant gets zeros, which need no graph.
        return ctx.how(3 * x**2 / by * grads[0]), torch.zeros_like(by), None


def cubed(x: Tensor, how: Function) -> Tensor:
    by = torch.full((), 2.0, dtype=x.dtype, requires_grad=True)
    return cast(Any, Cubes.apply)(x, by, how)


CUBED: dict[str, Callable[[Tensor, Function], Tensor]] = {
    "all": cubed,
    "inside": lambda x, how: (cubed(x.sin(), how) * x).exp(),
    "beside others": lambda x, how: x.sin() + cubed(x, how),
}


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", CUBED)
def test_a_loss_of_a_jacobian_through_a_backward_without_a_graph(
    name: str, mode: Any
) -> None:
    x = points(4, 3)

    def jacobian(how: Function, **options: Any) -> Tensor:
        return gradlib.per_sample_jacobian(
            lambda x: CUBED[name](x, how), x, mode=mode, create_graph=True, **options
        )

    right = jacobian(lambda grad: grad)
    with pytest.raises(NoSuchWayError, match=r"backward of CubesBackward, which"):
        jacobian(Tensor.detach)
    require_close(jacobian(Tensor.detach, check=False).detach(), right.detach())
    assert right.requires_grad
    x.requires_grad_()
    y = CUBED[name](x, Tensor.detach)
    with pytest.raises(NoSuchWayError, match=r"backward of CubesBackward, which"):
        gradlib.per_sample_jacobian_from_graph(y, x, create_graph=True)
    gradlib.per_sample_jacobian_from_graph(y, x)


class Swish(torch.autograd.Function):
    """Swish, with a graph that is right or wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how, ctx.slope = how, slope_of_swish(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(ctx.how != "no_grad"):
            slope = slope_of_swish(x)
        slope = {"detached": slope.detach(), "saved": ctx.slope}.get(ctx.how, slope)
        return grads[0] * slope, None


def slope_of_swish(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s + x * s * (1 - s)


class Swishes(nn.Module):
    """Beside a ReLU, which has kinks wherever one goes."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(cast(Any, Swish.apply)(x, self.how)))
        return self.last(cast(Any, Swish.apply)(y, self.how))


@pytest.mark.parametrize("width", [8, 512])
@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("how", ["right", "no_grad", "detached", "saved"])
def test_a_loss_of_a_jacobian_through_a_backward_with_a_wrong_graph(
    how: str, argnums: Any, width: int
) -> None:
    """It is there, by what the backward gets, and does not lead to the slope."""
    for seed in range(6):
        seed_all(seed)
        model, x = Swishes(how, width), torch.randn(5, 3)
        ask = partial(gradlib.per_sample_jacobian, model, x, argnums=argnums)
        ask()
        ask(create_graph=True, check=False)
        refused = pytest.raises(NoSuchWayError, match="backward of SwishBackward")
        with nullcontext() if how == "right" else refused:
            ask(create_graph=True)


class OfOthers(nn.Module):
    """What torch, or its author, takes for constant beside a backward of one's own."""

    def __init__(self) -> None:
        super().__init__()
        a = torch.randn(4, 4)
        self.w = nn.Parameter(torch.randn(4, 4))
        self.whole = nn.Parameter(a @ a.T + torch.eye(4))
        self.table = nn.Embedding(5, 4, padding_idx=0)
        nn.init.normal_(self.table.weight)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.turned = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        y = cast(Any, Swish.apply)(x, "right")
        y = self.normed(y) @ (self.w / self.w.detach().norm())
        y = y @ torch.linalg.cholesky(self.whole) * self.table(i)
        y = y * (self.w[0] + (self.w[0].round() - self.w[0]).detach())
        turned: Tensor = torch.fft.irfft(torch.fft.rfft(y) * self.turned, n=4)
        return turned.tanh()


def test_what_is_constant_on_purpose_is_not_blamed_on_a_backward() -> None:
    for seed in range(4):
        seed_all(seed)
        ids = torch.tensor([0, 1, 2, 0, 4])
        gradlib.per_sample_jacobian(
            OfOthers(), torch.randn(5, 4), ids, create_graph=True
        )


class Clamps(torch.autograd.Function):
    """Clamps, by a backward of its own: a mask, which changes at two kinks only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


def test_a_loss_of_a_jacobian_through_a_backward_with_kinks() -> None:
    clamp: Any = Clamps.apply
    for dtype in (torch.float32, torch.float64):
        for seed in range(8):
            x = torch.randn(50, 3, generator=torch.Generator("cpu").manual_seed(seed))
            gradlib.per_sample_jacobian(
                lambda x: clamp(3 * x.sin()).exp(), x.to(dtype), create_graph=True
            )


def test_a_loss_of_a_jacobian_beside_a_backward_marked_once_differentiable() -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)
    beside = cast(Any, OnceOnly.apply)(weight)
    ours = gradlib.per_sample_jacobian(
        lambda x: beside * x.sin(), points(4, 3), create_graph=True
    )
    ours.sum().backward()
    assert weight.grad is not None
