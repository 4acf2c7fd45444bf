"""The graph of a Jacobian is that of its arguments, and of nothing else."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gradlib
from gradlib import (
    DetachedPathError,
    JacobianArgumentError,
    NotDifferentiableArgumentError,
)
from gradlib.edges import edge_of

from .four_samples import MODES, diagonal
from .four_samples import x as x  # a fixture


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_one_tensor_as_two_inputs(x: Tensor, create_graph: bool, check: bool) -> None:
    x.requires_grad_()
    how: dict[str, Any] = {"create_graph": create_graph, "check": check}
    assert torch.equal(gradlib.per_sample_jacobian(torch.mul, x, x, **how), diagonal(x))
    found = gradlib.per_sample_jacobian(torch.mul, x, 2 * x, **how)
    assert torch.equal(found, diagonal(2 * x))


def test_an_input_that_is_also_in_the_closure(x: Tensor) -> None:
    x.requires_grad_()
    found = gradlib.per_sample_jacobian(
        lambda it: it * x, x, create_graph=True, check=False
    )
    assert torch.equal(found, diagonal(x))


def test_an_input_made_of_the_parameters(x: Tensor) -> None:
    model = nn.Linear(3, 3).double()
    made = model(x)
    expected = gradlib.per_sample_jacobian(model, made.detach(), argnums="parameters")
    for check in (True, False):
        found = gradlib.per_sample_jacobian(
            model, made, argnums="parameters", check=check
        )
        assert torch.equal(found["weight"], expected["weight"])
    with pytest.raises(JacobianArgumentError, match=r"inputs\[0\] was computed from"):
        gradlib.per_sample_jacobian(
            model, made, argnums="parameters", create_graph=True
        )


def test_hooks_on_what_is_differentiated_for_change_nothing(x: Tensor) -> None:
    model = nn.Linear(3, 2).double()
    expected = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    model.weight.register_hook(lambda grad: grad / 2)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    assert torch.equal(found, expected)
    model(x).sum().backward()  # the hook is there again
    weight = model.weight.grad
    assert weight is not None
    assert torch.allclose(weight, expected.sum((0, 1)) / 2)


@pytest.mark.cpu  # a GPU takes so few rows in one pass
def test_hooks_inside_are_in_the_rows_and_never_in_columns_alone(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    first, last = nn.Linear(3, 32).double(), nn.Linear(32, 64).double()

    def clipped(x: Tensor) -> Tensor:
        h = first(x)
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return last(h.tanh())

    rows = gradlib.per_sample_jacobian(clipped, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(clipped, x, check=False)
    assert gradlib.plan_jacobian(clipped, x).mode in ("pushed", "forward")
    assert torch.equal(auto, rows)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(clipped, x)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_of_no_entries(mode: Any) -> None:
    found = gradlib.per_sample_jacobian(
        lambda x: x.sum(1) + 1, torch.ones(3, 0), mode=mode
    )
    assert found.shape == (3, 0)


def test_a_split_where_slopes_are_nan() -> None:
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0], [1.0, 1.0]])

    def fn(x: Tensor) -> Tensor:
        return torch.where(x > 0, x.sqrt(), 0.0)

    rows = gradlib.per_sample_jacobian(fn, x, mode="loop")
    assert rows.isnan().any()
    found = gradlib.per_sample_jacobian(fn, x, mode="split")
    torch.testing.assert_close(found, rows, equal_nan=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_plan_of_a_compiled_module(
    backend: str, recwarn: pytest.WarningsRecorder
) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    compiled, x = torch.compile(model, backend=backend), torch.randn(5, 3)
    assert gradlib.plan_jacobian(compiled, x, mode="reverse").counts["reverse"] == 4
    torch.testing.assert_close(
        gradlib.per_sample_jacobian(compiled, x), gradlib.per_sample_jacobian(model, x)
    )
    assert not [it for it in recwarn if "global hooks" in str(it.message)]


def test_a_check_takes_what_a_function_brings_along_to_float64(x: Tensor) -> None:
    weight, seen = torch.randn(2, 3), list[torch.dtype]()

    def fn(x: Tensor) -> Tensor:
        y = torch.mm(weight, x.mT).mT
        seen.append(y.dtype)
        return y.sin()

    gradlib.per_sample_jacobian(fn, x.float())
    assert seen == [torch.float32, torch.float64, torch.float64]


def test_a_complex_tensor_inside_is_no_place_to_split() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)

    def filtered(x: Tensor) -> Tensor:
        h = torch.fft.rfft(x)[:, :4]
        return torch.fft.irfft(h * torch.arange(1.0, 5.0), n=64)

    expected = gradlib.per_sample_jacobian(filtered, x, mode="loop")
    assert torch.allclose(gradlib.per_sample_jacobian(filtered, x), expected)


class Marked(Tensor):
    """A tensor of somebody's own class, whose views have a node of their own."""


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "loop"])
def test_inputs_of_a_class_of_their_own(x: Tensor, mode: str, check: bool) -> None:
    given = x.as_subclass(Marked)
    found = gradlib.per_sample_jacobian(
        lambda x: x.sin(), given, mode=mode, check=check
    )
    assert torch.allclose(found.as_subclass(Tensor), diagonal(x.cos()))


def test_where_autograd_records_no_view_it_is_said() -> None:
    leaf = torch.ones(2, requires_grad=True)
    below: Any = torch._C._AutoDispatchBelowAutograd
    with below(), pytest.raises(NotDifferentiableArgumentError, match=r"shape \[2\]"):
        edge_of(leaf)


def test_inside_of_torch_func_it_is_refused_by_name(x: Tensor) -> None:
    def inside(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian(torch.sin, x).sum()

    def planned(x: Tensor) -> Tensor:
        return x * gradlib.plan_jacobian(torch.sin, x).chunk

    def by_graph(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian_from_graph(x.sin(), x)

    for fn in (inside, planned, by_graph):
        for transform in (torch.func.grad, torch.func.vmap):
            with pytest.raises(JacobianArgumentError, match=r"inside of torch\.func"):
                cast(Any, transform)(fn)(x)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "While make_fx traces no number can be read"),
        ({"mode": "split", "check": False}, "While make_fx traces"),
        ({"tracing_mode": "fake"}, "in a mode of fake tensors"),
        ({"tracing_mode": "symbolic", "check": False}, "in a mode of fake tensors"),
    ],
)
def test_what_make_fx_cannot_trace_is_refused_by_name(
    x: Tensor, how: dict[str, Any], said: str
) -> None:
    tracing, trace = how.pop("tracing_mode", "real"), cast(Any, make_fx)
    with pytest.raises(JacobianArgumentError, match=said):
        trace(
            lambda x: gradlib.per_sample_jacobian(torch.sin, x, **how),
            tracing_mode=tracing,
        )(x)


def make_fx_takes_generators() -> bool:
    """Tell whether this torch traces random numbers of a generator; 2.8 does not."""

    def drawn(x: Tensor) -> Tensor:
        made = torch.Generator("cpu")
        return x + torch.randn(3, generator=made, device="cpu")

    try:
        cast(Any, make_fx)(drawn)(torch.ones(3, device="cpu"))
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("mode", ["auto", "reverse", "loop", "forward"])
def test_what_make_fx_traces_holds_for_other_numbers(x: Tensor, mode: str) -> None:
    if mode == "forward" and not make_fx_takes_generators():
        pytest.skip("its columns are held against a random VJP, which is not traced")

    def traced(x: Tensor) -> Tensor:
        return gradlib.per_sample_jacobian(torch.sin, x, mode=mode, check=False)

    found = cast(Any, make_fx)(traced)(x)(x + 1)
    assert torch.allclose(found, diagonal((x + 1).cos()))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients_of_it(mode: str) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def jacobian(x: Tensor, weight: Tensor) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            return last(torch.tanh(F.linear(x, weight)))

        return gradlib.per_sample_jacobian(
            fn, x, mode=mode, create_graph=True, check=False
        )

    assert torch.autograd.gradcheck(jacobian, (x, first.weight))
    assert torch.autograd.gradgradcheck(jacobian, (x, first.weight))


class _Forces(nn.Module):
    """It differentiates its output for an input that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        energy = self.energy(x) * scale
        if not x.requires_grad:
            return {"energy": energy}
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "force": -slope}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_inputs_that_are_not_asked_for_keep_requiring_grad(
    check: bool, create_graph: bool
) -> None:
    torch.manual_seed(0)
    model = _Forces().double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(5, 1, dtype=torch.float64)
    for argnums in (1, "parameters"):
        found = gradlib.per_sample_jacobian(
            model,
            x,
            scale,
            argnums=argnums,
            check=check,
            create_graph=create_graph,
        )
        assert [*found] == ["energy", "force"]
        plan = gradlib.plan_jacobian(model, x, scale, argnums=argnums)
        assert plan.shapes[-1][:2] == (5, 3)
    assert x.grad is None


class _Residual(nn.Module):
    """It differentiates for one of its inputs, which need not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        u = self.net(torch.cat([x, t], 1)).sin()
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("argnums", [1, "parameters"])
def test_a_plan_calls_as_the_checked_call_does(argnums: int | str) -> None:
    x, t = torch.rand(5, 1), torch.rand(5, 1)
    found: Any = gradlib.per_sample_jacobian(_Residual(), x, t, argnums=argnums)
    blocks = [found] if argnums == 1 else found.values()
    plan = gradlib.plan_jacobian(_Residual(), x, t, argnums=argnums)
    assert [*plan.shapes] == [it.shape for it in blocks]


class Adjoint(torch.autograd.Function):
    """A step of an equation whose backward calls the module again."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(y, *parameters)
        return y + f(y) / 8

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            slopes = torch.autograd.grad(ctx.f(y), [y, *parameters], grads[0] / 8)
        return None, grads[0] + slopes[0], *slopes[1:]


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, Adjoint).apply(self.f, x, *self.f.parameters())


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_a_backward_that_calls_modules(argnums: Any) -> None:
    """To count what they multiply, torch would set hooks that it forbids there."""
    model, x = Steps(), torch.randn(5, 4)
    plan = gradlib.plan_jacobian(model, x, argnums=argnums)
    assert plan.mode == "reverse"
    assert plan.work["reverse"] > 0
    gradlib.per_sample_jacobian(model, x, argnums=argnums)


def test_a_plan_makes_what_is_lazy() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double(), torch.randn(5, 3)
    plan = gradlib.plan_jacobian(model, x.double())
    assert [*plan.shapes] == [(5, 4, 3)]
    found = gradlib.per_sample_jacobian(model, x.double())
    reference = gradlib.per_sample_jacobian(model, x.double(), mode="loop", check=False)
    torch.testing.assert_close(found, reference)
