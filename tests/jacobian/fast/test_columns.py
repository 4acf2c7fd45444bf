"""Code that takes samples apart, number by number, and puts them together again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian.fast.chains import result

from .lines import of_net
from .test_chain import chain
from .test_line import double, kept, require_same


class Net(nn.Module):
    """Layers for functions that use some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Linear(2, 2), nn.Linear(2, 2)
        self.wide, self.into = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.norm, self.single = nn.LayerNorm(2), nn.Linear(8, 1)
        self.many, self.rows = (
            nn.Parameter(torch.randn(5, 3)),
            torch.ones(5, 4).double(),
        )


def _pendulum(_: Any, x: Tensor) -> Tensor:
    q, p = x[:, :2], x[:, 2:]
    return torch.cat([p, -q.sin()], 1)


def _lorenz(_: Any, state: Tensor) -> Tensor:
    x, y, z = state[:, 0], state[:, 1], state[:, 2]
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], dim=1)


def _coupled(net: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    second = second * net.scale(first).tanh().exp() + net.shift(first)
    return torch.cat((first, second), -1)


def _of_numbers(_: Any, x: Tensor) -> Tensor:
    a, b, c, d = x.unbind(1)
    return torch.stack((a * b.sin(), d.exp() + c, a / (2 + b * b)), -1)


FOUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "two halves": _pendulum,
    "numbers": _lorenz,
    "a coupling": _coupled,
    "unbound": _of_numbers,
    "split": lambda net, x: torch.cat([net.norm(it) for it in x.split(2, 1)], 1),
    "functions": lambda _, x: torch.cat(torch.chunk(x, 3, dim=1)[::-1], dim=1),
    "other functions": lambda _, x: torch.stack(torch.unbind(x.exp(), -1)[::-1], 1),
    "one number": lambda _, x: x[:, 1],
    "the last number": lambda net, x: net.wide(x)[..., -1],
    "a number of a product": lambda net, x: (net.wide(x) * x)[:, 2].exp(),
    "a part": lambda net, x: net.scale(x[:, 1:3]),
    "a part at the end": lambda net, x: net.wide(x).tanh()[:, -3:],
    "all of it": lambda net, x: net.wide(x[:, :]),
    "twice the same": lambda net, x: torch.cat([net.shift(x[:, :2])] * 2, 1),
    "a sum beside": lambda _, x: torch.cat([x, x.exp().sum(1, keepdim=True)], 1),
    "a number beside": lambda _, x: torch.cat(
        [x.sin(), x.prod_ if 0 else x[:, 0:1]], 1
    ),
    "an axis for a number": lambda _, x: torch.cat([x, x[:, 0][:, None]], 1),
    "an axis by its name": lambda _, x: torch.cat([x[:, 3].unsqueeze(-1), x], dim=1),
    "a sum and more": lambda net, x: net.wide(x).sum(1).sin() + x[:, 0],
    "a mean over": lambda _, x: 1 / (1 + x.square().mean(1)),
    "before a single output": lambda net, x: net.single(
        torch.cat([x.sin(), x.exp()], 1)
    ),
    "features": lambda net, x: net.wide(torch.stack([x[:, 0], x[:, 0] ** 2] * 2, 1)),
    "overwritten at the end": lambda net, x: net.into(_pendulum(net, x)),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_a_chain(name: str) -> None:
    net = Net().double()
    fn, x = of_net(FOUND[name], net), double(5, 4)
    for batch in (x, x[:1], double(2000, 4), x.T.contiguous().T):
        with kept(batch, *net.parameters()):
            for _ in range(3):
                assert chain(fn, batch) is not None
                require_same(fn, batch)


@pytest.mark.parametrize("name", FOUND)
def test_a_few_samples_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "IN_CACHE", 1)
    monkeypatch.setattr(result, "MAPS_IN_CACHE", 1)
    net = Net().double()
    require_same(of_net(FOUND[name], net), double(5, 4))


def test_what_is_met_again_has_other_sizes() -> None:
    fn, net = of_net(FOUND["split"], Net().double()), Net().double()
    for count in (4, 2, 4, 6):
        if count == 2:  # there is a single part
            continue
        require_same(fn, double(3, count))
    last = of_net(lambda net, x: net.shift(x)[:, -1], net)
    for _ in range(4):
        require_same(last, double(3, 2))
    net.shift = nn.Linear(2, 5).double()
    require_same(last, double(3, 2))


def _in_a_part(_: Any, x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0].mul_(2)
    return x


def _overwritten(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    first = h[:, :2]
    net.into(first)
    return h


def _seen_overwritten(net: Any, x: Tensor) -> Tensor:
    h = net.wide(x)
    return torch.cat([net.into(h[:, :2]), h[:, 2:]], 1)


NOT_FOUND: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "samples": lambda net, x: torch.cat([x[:2], net.wide(x[2:])]),
    "a sample": lambda _, x: x * x[0],
    "entries of a sample": lambda _, x: x[:1, 1:] * x[:, :3],
    "every other": lambda net, x: net.scale(x[:, ::2]),
    "backwards": lambda _, x: x.flip(1)[:, :3],
    "by a list": lambda net, x: net.scale(x[:, [0, 3]]),
    "by a tensor": lambda net, x: net.scale(x[:, torch.tensor([0, 3])]),
    "by a mask": lambda net, x: net.scale(x[:, torch.arange(4) % 2 == 0]),
    "numbers as a vector": lambda net, x: (
        (x[:, 0] @ net.many)[None].expand(5, -1) * x[:, :3]
    ),
    "a part that is dropped": lambda _, x: x.chunk(2, 1)[0],
    "in a part": _in_a_part,
    "a part overwritten": _overwritten,
    "a part overwritten, and seen": _seen_overwritten,
    "along the batch": lambda net, x: torch.cat([x, net.wide(x)], 0)[5:],
    "stacked vectors": lambda net, x: torch.stack([x, net.wide(x)], 1),
    "stacked in front": lambda _, x: torch.stack([x[:, 0], x[:, 1]]).T,
    "of other sizes": lambda _, x: torch.cat(x.split([1, 3], 1)[::-1], 1),
    "broadcast numbers": lambda _, x: x * x[:, :1],
    "an outer product": lambda _, x: x[:, 0][:, None] * x[:, 1:],
    "numbers and an axis": lambda _, x: x[:, 0] * x[:, 1:2] + 0 * x[:, 0],
    "of one alone": lambda net, x: torch.cat([net.wide(x)], 1),
    "a tensor from outside": lambda net, x: torch.cat([x, net.rows], 1),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_else_code_does(name: str) -> None:
    net = Net().double().requires_grad_(False)
    fn, x = of_net(NOT_FOUND[name], net), double(5, 4)
    if name == "numbers and an axis":  # of five samples, it gives five numbers each
        with pytest.raises(gradlib.GradlibError):
            gradlib.per_sample_jacobian(fn, x)
        return
    for _ in range(3):
        assert chain(fn, x) is None
        require_same(fn, x)


def test_what_torch_refuses() -> None:
    twice: Any = {"dim": 1}
    functions: list[Any] = [
        lambda x: x[:, 4],
        lambda x: torch.cat([x[:, 0], x], 1),
        lambda x: torch.stack([x[:, 0], x[:, :1]], 1),
        lambda x: x[:, True + 6],
        lambda x: x.chunk(0, 1)[0],
        lambda x: x[:, 0].unsqueeze(5),
        lambda x: x[:, 0].squeeze(1),
        lambda x: x.chunk(1, 1, **twice)[0],
        lambda x: x[:, 0].unsqueeze(),
    ]
    for fn in functions:
        with pytest.raises((RuntimeError, IndexError, TypeError)):
            fn(double(3, 4))
        with pytest.raises((RuntimeError, IndexError, TypeError)):
            gradlib.per_sample_jacobian(fn, double(3, 4))


def test_numbers_that_meet_again_have_no_axis() -> None:
    net = Net().double()

    def of(net: Any, x: Tensor) -> Tensor:
        a, b = net.shift(x[:, :2]).unbind(1)
        c = a * b
        return a + c

    fn = of_net(of, net)
    for _ in range(3):
        assert chain(fn, double(5, 4)) is not None
        require_same(fn, double(5, 4))


def test_as_many_numbers_as_a_matrix_takes() -> None:
    """A vector of numbers, one of each sample, times a matrix: it mixes samples."""
    net = Net().double()
    net.square = nn.Parameter(double(4, 4))
    fn = of_net(lambda net, x: x.sum(1) @ net.square, net)
    for _ in range(3):
        assert chain(fn, double(4, 4)) is None
        with pytest.raises(gradlib.CoupledSamplesError):
            gradlib.per_sample_jacobian(fn, double(4, 4))


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one of several, overwritten": lambda net, x: net.wide(x).chunk(1, 1)[0].relu_(),
    "and split": lambda net, x: net.into(net.wide(x).split(7, 1)[0]),
    "and unbound": lambda net, x: net.into(net.wide(x).sum(1, True).unbind(1)[0]),
    "what another way goes on from": lambda net, x: _overwritten_on_one_way(net, x),
    "one of several, added to": lambda net, x: _added_to_a_part(net, x),
    "what is saved": lambda net, x: _product_with_an_overwritten(net, x),
    "what is saved, for nothing": lambda net, x: _product_then_overwritten(net, x),
}


def _overwritten_on_one_way(net: Any, x: Tensor) -> Tensor:
    a = net.wide(x)
    return net.wide(a) * net.wide(net.into(a))


def _added_to_a_part(net: Any, x: Tensor) -> Tensor:
    a = net.wide(x).chunk(1, 1)[0]
    a += net.wide(x.exp())
    return a


def _product_with_an_overwritten(net: Any, x: Tensor) -> Tensor:
    a = net.wide(x)
    c = a.sin()
    a += net.wide(x.exp())
    return c * a


def _product_then_overwritten(net: Any, x: Tensor) -> Tensor:
    a, b = net.wide(x), net.wide(x.exp())
    c = a.sin() * b
    a += b
    return c


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_does_not_go_back_through(name: str) -> None:
    fn = of_net(REFUSED[name], Net().double())
    for mode in ("auto", "loop"):
        with pytest.raises((gradlib.GradlibError, RuntimeError)):
            gradlib.per_sample_jacobian(fn, double(5, 4), mode=mode, check=False)


def test_the_result_is_no_memory_of_a_weight() -> None:
    wide, one = nn.Linear(8, 3), nn.Linear(1, 1)
    functions: list[tuple[Any, Tensor]] = [
        (lambda x: wide((x - 3).flatten(1)), torch.randn(1, 4, 2)),
        (lambda x: wide((x - 3).flatten(1)), torch.randn(1, 1, 4, 2)),
        (lambda x: one(x.sum(1, True)), torch.randn(1, 1)),
        (lambda x: wide(x + 1), torch.randn(1, 8)),
    ]
    for fn, x in functions:
        with kept(*wide.parameters(), *one.parameters()):
            gradlib.per_sample_jacobian(fn, x).zero_()


def test_a_graph_where_none_is_made_around() -> None:
    layer = nn.Linear(3, 4).double()
    functions: list[tuple[Any, Tensor]] = [
        (lambda x: (layer(x) * layer(x).sin()).sum(1), double(5, 3)),
        (lambda x: layer(x.flatten(1)).tanh(), double(5, 3, 1)),
    ]
    for fn, x in functions:
        with torch.no_grad():
            made = gradlib.per_sample_jacobian(fn, x, create_graph=True)
        (grad,) = torch.autograd.grad(made.square().sum(), layer.weight)
        assert grad.abs().sum() > 0


def test_gradients_flow_through_them() -> None:
    net: Any = Net().double()
    x = double(3, 4).requires_grad_()
    for of in (_coupled, _lorenz, FOUND["a part"]):
        fn = of_net(of, net)
        found: list[tuple[Tensor | None, ...]] = []
        for mode in ("auto", "loop"):
            made = gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=True)
            loss = made.sin().sum() + 0 * net.scale.weight.sum()
            found.append(
                torch.autograd.grad(loss, (x, net.scale.weight), allow_unused=True)
            )
        torch.testing.assert_close(*found)
