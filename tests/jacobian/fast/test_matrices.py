"""Code that multiplies by tensors which it has from outside, or sums up."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.jacobian.fast.chains import functions

from .lines import of_net
from .test_chain import chain
from .test_line import double, kept, require_same


class Net(nn.Module):
    """A module with tensors of its own, and no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(double(4, 6)), nn.Parameter(double(6))
        self.register_buffer("v", double(6, 3))
        self.v: Tensor
        self.own = double(3, 4)  # an attribute, and neither of these
        self.square = nn.Parameter(double(4, 4))
        self.vector = nn.Parameter(double(4))
        self.several = nn.Parameter(double(5, 4, 6))
        self.row = nn.Parameter(double(1, 6))
        self.short = nn.Parameter(double(4, 6).half())
        self.list = [double(4, 4), double(4, 4)]
        self.single = nn.Parameter(double(4, 1))
        self.nothing = None
        self.register_parameter("no_bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by a parameter, a buffer and another tensor."""
        return torch.tanh(x @ self.w + self.b) @ self.v @ self.own


def _in_a_loop(net: Any, x: Tensor) -> Tensor:
    for w in net.list:
        x = torch.sin(x @ w)
    return x


def _with_and_without(net: Any, x: Tensor) -> Tensor:
    h = x @ net.w
    return (h + net.b) + h


FOUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a forward": lambda net, x: net(x),
    "matmul": lambda net, x: torch.matmul(x, net.w).sigmoid(),
    "mm": lambda net, x: torch.mm(x, net.w).sigmoid(),
    "methods": lambda net, x: x.matmul(net.w).exp().mm(net.v),
    "turned": lambda net, x: (x @ net.w).relu() @ net.w.T,
    "turned by another name": lambda net, x: (x @ net.w).relu() @ net.w.mT,
    "turned by a method": lambda net, x: (x @ net.w).relu() @ net.w.t(),
    "turned twice": lambda net, x: x @ net.w.T.T,
    "linear": lambda net, x: F.linear(x, net.w.T, net.b).tanh(),
    "linear without bias": lambda net, x: F.linear(x, net.own).tanh(),
    "linear with none": lambda net, x: F.linear(x, net.own, net.no_bias).tanh(),
    "linear by names": lambda net, x: F.linear(x, weight=net.w.T, bias=net.b).tanh(),
    "a residual block": lambda net, x: x + torch.tanh(x @ net.square),
    "two ways": lambda net, x: (x @ net.square).tanh() + F.linear(x, net.square.T),
    "a list": _in_a_loop,
    "flattened": lambda net, x: torch.flatten(x, 1) @ net.w,
    "a single output": lambda net, x: (x @ net.single).squeeze(-1),
    "a sum": lambda _, x: (x**2).sum(1),
    "a sum with its axis": lambda _, x: x.exp().sum(-1, keepdim=True),
    "a sum by names": lambda net, x: (x @ net.w).sin().sum(dim=(1,), keepdim=False),
    "a function that sums": lambda net, x: torch.sum(x @ net.w, dim=[-1]),
    "a mean": lambda net, x: (x @ net.w + net.b).tanh().mean(1),
    "a mean with its axis": lambda net, x: torch.mean(x @ net.w, -1, True).sin(),
    "a product of two sums": lambda _, x: x.sum((1,), True) * x.mean(-1, keepdim=True),
    "a quadratic form": lambda net, x: (x * (x @ net.square)).sum(1),
    "a gate": lambda net, x: (F.silu(x @ net.w) * (x @ net.w + net.b)) @ net.v,
    "with the bias and without": _with_and_without,
    "a sum in the middle": lambda net, x: x.exp().sum(1, True) @ net.single.T,
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_a_chain(name: str) -> None:
    net = Net()
    fn, x = of_net(FOUND[name], net), double(5, 4)
    for _ in range(4):  # found, noted, and met again
        with kept(x, *net.parameters(), net.v, net.own, *net.list):
            assert chain(fn, x) is not None
            require_same(fn, x)
            require_same(fn, x[:1])
        with torch.no_grad():  # they are read at each call
            for it in (*net.parameters(), *net.buffers(), net.own, *net.list):
                it.mul_(1.25)
    net.w, net.v = nn.Parameter(double(4, 6)), double(6, 3)
    require_same(fn, x)
    require_same(fn, double(7, 4))


class Own(Tensor):
    """A tensor of one's own."""


def _added_in_place(net: Any, x: Tensor) -> Tensor:
    h = x @ net.w
    h += net.b
    return h.tanh()


def _dropped(net: Any, x: Tensor) -> Tensor:
    h = x @ net.w
    h + net.b  # pyright: ignore[reportUnusedExpression] (that is what is tested)
    return h


def _raised_in_place(net: Any, x: Tensor) -> Tensor:
    h = x @ net.w
    h += 1
    return h.tanh()


NOT_FOUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a matrix in front": lambda net, x: (net.w.T @ x.mT).mT,
    "x turned": lambda net, x: (x @ x.T) @ x @ net.w,
    "a vector": lambda net, x: (x @ net.vector)[:, None],
    "several matrices": lambda net, x: (x[:, None, None] @ net.several)[:, 0],
    "more axes": lambda net, x: (x[:, None] @ net.w)[:, 0],
    "a bias in a row": lambda net, x: (x @ net.w + net.row).tanh(),
    "a bias in front": lambda net, x: (net.b + x @ net.w).tanh(),
    "a bias of one for all": lambda net, x: (x @ net.w + net.single[0]).tanh(),
    "a bias that broadcasts": lambda net, x: (x @ net.single + net.vector).tanh(),
    "two biases": lambda net, x: (x @ net.w + net.b + net.b).tanh(),
    "a bias after a function": lambda net, x: (x @ net.w).tanh() + net.b,
    "in place": _added_in_place,
    "a tensor of one's own": lambda net, x: x @ net.w.as_subclass(Own).T.T,
    "another function of it": lambda net, x: x @ net.w.exp(),
    "a part of it": lambda net, x: x @ net.w[:, :2],
    "times a vector": lambda net, x: x * net.vector,
    "its size": lambda net, x: x @ net.w if net.w.shape[0] == 4 else x,
    "its entries": lambda net, x: x @ net.w if net.w[0, 0] > 9 else x.tanh(),
    "a sum over more": lambda net, x: (x @ net.w)[:, None].sum((1, 2)),
    "a sum in another dtype": lambda _, x: x.sum(1, dtype=torch.float32).double(),
    "a product that is dropped": _dropped,
    "a number in place": _raised_in_place,
    "a linear layer of a vector": lambda net, x: F.linear(x, net.vector)[:, None],
    "x times itself": lambda _, x: F.linear(x, x),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_else_code_does_with_them(name: str) -> None:
    net = Net()
    fn, x = of_net(NOT_FOUND[name], net), double(5, 4)
    for _ in range(3):
        assert chain(fn, x) is None
        require_same(fn, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "w", nn.Parameter(double(4, 6).as_subclass(Own))),
        lambda net: setattr(net, "w", nn.Parameter(double(4, 6).float())),
        lambda net: setattr(net, "b", nn.Parameter(double(5))),
        lambda net: setattr(net, "v", double(6, 3).to_sparse()),
        lambda net: setattr(net, "v", double(3, 6)),
        lambda net: setattr(net, "own", double(3, 4).to(torch.complex128)),
        lambda net: setattr(net, "own", double(3)),
    ],
)
def test_others_are_put_there(change: Callable[[Any], None]) -> None:
    net, x = Net(), double(5, 4)
    for _ in range(3):
        assert chain(net, x) is not None
    change(net)
    assert chain(net, x) is None


def test_where_the_forward_raises_so_does_it() -> None:
    net: Any = Net()
    no_bias: Any = {"bias": None}
    functions: list[Any] = [
        lambda x: x @ net.short,
        lambda x: x @ net.v,
        lambda x: torch.mm(*(x, net.w, net.b)),
        lambda x: F.linear(x, net.w.T, net.vector),
        lambda x: x.sum(3),
        lambda x: x.sum((1, 1)),
        lambda x: x.sum(range(1, 2)),
        lambda x: x.sum((1.0,)),
        lambda x: x.sum(1, keepdim=1),
        lambda x: x.sum(1).mm(net.w),
        lambda x: torch.mean(x, *[{1}]),
        lambda x: x.mm(net.w, None),
        lambda x: x.matmul(weight=net.w),
        lambda x: torch.matmul(x, net.w, **no_bias),
    ]
    for fn in functions:
        with pytest.raises((RuntimeError, IndexError, TypeError)):
            fn(double(5, 4))
        with pytest.raises((RuntimeError, IndexError, TypeError)):
            gradlib.per_sample_jacobian(fn, double(5, 4))


def test_of_more_axes_torch_takes_no_matrix_for_one() -> None:
    net, x = Net(), double(2, 3, 4)
    fn = of_net(lambda net, x: x.mm(net.w), net)
    assert chain(fn, x) is None
    with pytest.raises(RuntimeError, match="must be a matrix"):
        gradlib.per_sample_jacobian(fn, x)


REPLACED: dict[str, tuple[Any, str, Callable[[Any, Tensor], Tensor]]] = {
    "an operator": (Tensor, "__matmul__", lambda net, x: x @ net.w),
    "a method": (Tensor, "mm", lambda net, x: x.mm(net.w)),
    "a sum": (Tensor, "sum", lambda _, x: x.exp().sum(1)),
    "a function": (torch, "matmul", lambda net, x: torch.matmul(x, net.w)),
    "a linear one": (F, "linear", lambda net, x: F.linear(x, net.w.T)),
    "what turns": (Tensor, "t", lambda net, x: x @ net.own.t()),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("met_before", [False, True])
def test_somebody_has_replaced(
    name: str, met_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, what, of = REPLACED[name]
    net, x = Net(), double(5, 4)
    fn = of_net(of, net)
    for _ in range(3 * met_before):
        assert chain(fn, x) is not None
    real = getattr(where, what)
    monkeypatch.setattr(where, what, lambda *args, **kwargs: 2 * real(*args, **kwargs))
    assert chain(fn, x) is None


def test_what_the_code_does_not_use_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x, real = Net(), double(5, 4), F.linear
    fn = of_net(FOUND["matmul"], net)
    expected = gradlib.per_sample_jacobian(fn, x, mode="loop")
    monkeypatch.setattr(F, "linear", lambda *args: 2 * real(*args))
    for _ in range(3):
        torch.testing.assert_close(gradlib.per_sample_jacobian(fn, x), expected)


def test_a_matrix_may_have_a_method_of_its_own() -> None:
    net, x = Net(), double(5, 4)
    own: Any = net.own
    own.t = lambda: 3 * net.w[:, :3]
    fn = of_net(lambda net, x: x @ net.own.t(), net)
    assert chain(fn, x) is None
    require_same(fn, x)


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_have_all_digits(name: str) -> None:
    """Where products have fewer, as with bfloat16 on a CPU and TF32 on a GPU."""
    x = torch.randn(512, 64)
    fn = of_net(lambda _, x: torch.sin(getattr(x.exp(), name)(1, True)), None)
    exact = gradlib.per_sample_jacobian(fn, x.double())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = gradlib.per_sample_jacobian(fn, x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (found - exact).abs().max() < 1e-4 * exact.abs().max()


def test_what_overflows_in_the_forward_does_so_here() -> None:
    x = torch.tensor([[1.5e308, 1.2e308]], dtype=torch.float64)
    fn = of_net(lambda _, x: x.mean(1, True).sin(), None)
    assert gradlib.per_sample_jacobian(fn, x, check=False).isnan().all()


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
def test_gradients_flow_to_them(around: Callable[[], Any]) -> None:
    net, x = Net(), double(5, 4)
    tensors = [net.w, net.b, net.own.requires_grad_()]
    found: list[tuple[Tensor | None, ...]] = []
    for mode in ("auto", "loop"):
        for _ in range(3):
            with around():
                made = gradlib.per_sample_jacobian(
                    net, x, mode=mode, create_graph=True, check=False
                )
            found.append(torch.autograd.grad(made.square().sum(), tensors))
    for other in found:
        torch.testing.assert_close(other, found[-1])


def test_of_a_sum_in_inference_mode_nothing_stays() -> None:
    functions_of_x = [lambda x: x.sin().sum(1, True), lambda x: x.cos().mean(1, True)]
    for fn in functions_of_x:
        with torch.inference_mode():
            gradlib.per_sample_jacobian(fn, double(5, 11))
        x = double(5, 11).requires_grad_()
        made = gradlib.per_sample_jacobian(fn, x, create_graph=True)
        made.square().sum().backward()
        assert x.grad is not None


def test_none_of_them_is_kept() -> None:
    net = Net()
    fn, x = of_net(FOUND["a forward"], net), double(5, 4)
    for _ in range(4):
        gradlib.per_sample_jacobian(fn, x)
    gone = [weakref.ref(it) for it in (net.w, net.b, net.own)]
    del net, fn
    gc.collect()
    assert [it() for it in gone] == [None] * 3


def test_torch_has_all_that_is_known() -> None:
    for name in (*functions.MULTIPLYING, *functions.TURNING):
        assert functions.is_own(name)
