"""Code that does more than to name layers happens once, on the way through a graph."""

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib import IndependentOutputError

from .lines import Net, double, make, require_same
from .test_chain import chain

Function = Callable[[Tensor], Tensor]

COUNTS = 0


def _counts(net: Net, x: Tensor) -> Tensor:
    global COUNTS
    COUNTS += 1
    return net(x)


def _keeps(net: Net, x: Tensor) -> Tensor:
    net.seen.append(x)
    return net(x)


def _sets(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net(x)


def _sets_by_name(net: Net, x: Tensor) -> Tensor:
    net.calls = 7
    return net(x)


def _sets_a_slot(net: Net, x: Tensor) -> Tensor:
    net.inner.real = 7  # pyright: ignore (any name)
    return net(x)


def _prints(net: Net, x: Tensor) -> Tensor:
    print("called")
    return net(x)


def _without_graph(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
    return net.second(h + 0 * net.first(x))


def _hooked(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.requires_grad:
        h.register_hook(lambda grad: 2 * grad)
    return net.second(h)


def _caught(net: Net, x: Tensor) -> Tensor:
    try:
        x = net.third(x) * 2
    except Exception:
        x = net.third(x)
    return x


def _caught_bare(net: Net, x: Tensor) -> Tensor:
    try:
        x = x.softmax(1)
    except:  # noqa: E722 (that is what is tested)
        x = net.first(x)
        return net.second(x)
    return x


def _last_is_plain(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
        if layer is not net.layers[-1]:
            x = torch.relu(x)
    return x


def _compares_lists(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.sizes == [4, 6] else net.third(x)


def _compares_modules(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.third == net.third else net.third(x)


def _has_many(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.seen else net.third(x)


def _matches_shape(net: Net, x: Tensor) -> Tensor:
    match x.shape:
        case (_, _):
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _matches_list(net: Net, x: Tensor) -> Tensor:
    match net.sizes:
        case [_, *_]:
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _matches_class(net: Net, x: Tensor) -> Tensor:
    match net.slope:
        case float():
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _walks(net: Net) -> Iterator[Function]:
    net.calls += 1
    yield torch.relu


def _generates(net: Net, x: Tensor) -> Tensor:
    for act in _walks(net):
        x = act(x)
    return net.third(x)


def _expresses(net: Net, x: Tensor) -> Tensor:
    for layer in (it for it in net.plain):
        x = layer(x)
    return x


def _returns_a_function(net: Net, x: Tensor) -> Tensor:
    def made() -> Function:
        def act(x: Tensor) -> Tensor:
            global COUNTS
            COUNTS += 1
            return torch.relu(x)

        return act

    return net.third(made()(x))


def _scales_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h *= 2
    return net.second(h)


def _grows(net: Net, x: Tensor) -> Tensor:
    while x.size(0) < 20:
        x = torch.flatten(x, 0)
    return net.third(x.view(5, 4))


def _after_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.relu_()
    return net.second(h)


def _default(net: Net, x: Tensor, seen: list[int] = [1]) -> Tensor:  # noqa: B006 (it is tested)
    seen.append(1)
    return net(x) if len(seen) < 3 else net.third(x)


def _named_as_a_builtin(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if abs(4) > 0 else net.third(x)


abs: Any = math.sin  # noqa: A001 (that is what is tested)

PRESERVED: dict[str, Any] = {"memory_format": torch.preserve_format}

NOT_FOUND: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a global": _counts,
    "a list": _keeps,
    "an attribute": _sets,
    "an attribute that is set": _sets_by_name,
    "an attribute that stand-ins have": _sets_a_slot,
    "printing": _prints,
    "without a graph": _without_graph,
    "a hook": _hooked,
    "an error": _caught,
    "any error": _caught_bare,
    "the same object": _last_is_plain,
    "equal lists": _compares_lists,
    "equal modules": _compares_modules,
    "equal parts of lists": lambda net, x: (
        net.third(torch.relu(x)) if net.sizes[:1] == [4] else net.third(x)
    ),
    "a list that may be empty": _has_many,
    "in place, by another name": _after_in_place,
    "the kind of a shape": _matches_shape,
    "the kind of a list": _matches_list,
    "the kind of a number": _matches_class,
    "a generator": _generates,
    "an expression that generates": _expresses,
    "a function made on the way": _returns_a_function,
    "more and more samples": _grows,
    "times a number, in place": _scales_in_place,
    "no base": lambda net, x: net.third(torch.relu(x) if x._base is None else x),
    "no number": lambda net, x: net.third(x) + 1e39,
    "a default": _default,
    "a property": lambda net, x: net.head(x),
    "twice": lambda net, x: net.third(x) if net.third(x).relu_ else x,
    "detached": lambda net, x: net.second(net.first(x).detach() + 0 * net.first(x)),
    "the samples' axis squeezed": lambda net, x: net.single(x).squeeze(0),
    "several axes squeezed": lambda net, x: net.third(x).squeeze(),
    "a cast": lambda net, x: net.third(x.float().double()),
    "a cast with a layout": lambda net, x: net.third(x.double(**PRESERVED)),
    "another method": lambda net, x: net.third(x).softmax(1).cumsum(1),
    "a softmax over samples": lambda net, x: net.third(x).softmax(0),
    "a softmax in the middle": lambda net, x: net.third(F.softmax(net.third(x), 1)),
    "a softmax in another dtype": lambda net, x: F.softmax(
        net.third(x), 1, dtype=torch.float32
    ).double(),
    "a softmax before a function": lambda net, x: net.third(x).softmax(-1).tanh(),
    "a softmax with a number": lambda net, x: net.third(x).log_softmax(1) * 2,
    "a weight in front": lambda net, x: (net.third.weight @ x.mT).mT,
    "a layer that is not known": lambda net, x: net.third(net.unknown(x)),
    "another batch": lambda net, x: net.third(x.reshape(1, -1).reshape(5, -1)),
    "a flat batch": lambda net, x: net.third(torch.flatten(x).view(-1, 4)),
    "a class": lambda net, x: net.third(x) if x.__class__ is Tensor else x,
    "text": lambda net, x: net.third(x) if f"{x}" else x,
    "repeated text": lambda net, x: net.third(x) if repr(x) else x,
    "a number of another kind": lambda net, x: net.third(x * True),
    "a power of another kind": lambda net, x: net.third(x).sigmoid() ** 2.5,
    "no power": lambda net, x: net.third(x) ** 0,
    "over a number of another kind": lambda net, x: net.third(True / (x + 9)),
    "numbers stacked as samples": lambda _, x: torch.stack(
        [x[:, 0], x[:, 1], x[:, 2], x[:, 3], x[:, 0]]
    ),
    "an axis after vectors": lambda net, x: net.third(x).unsqueeze(-1),
    "a remainder": lambda net, x: net.third(x) % 2,
    "every other output": lambda net, x: net.third(x)[:, ::2],
    "an output squeezed in the middle": lambda net, x: net.third(
        net.single(x).squeeze(-1)[:, None].repeat(1, 4)
    ),
    "a truth": lambda net, x: net.third(x) if net.third else x,
    "samples": lambda net, x: net.third(torch.stack([*iter(x)])),
    "a builtin that is another": _named_as_a_builtin,
    "no layer": lambda _, x: x.clone(),
    "a method that is no layer": lambda net, x: (
        net.third(x) if len(net.sizes) == 2 and net.sizes.count(4) else x
    ),
    "the module itself": lambda net, x: net.third(x) if net.forward.__self__ else x,
    "random": lambda net, x: net.third(F.dropout(x, 1.0)),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_code_that_does_something_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net, of = make(), NOT_FOUND[name]
    x = double(5, 4)
    state, inner = dict(vars(net), seen=[]), dict(vars(net.inner))
    count, default = COUNTS, list(_default.__defaults__[0])  # pyright: ignore (it has some)

    def fn(x: Tensor) -> Tensor:
        return of(net, x)

    assert chain(fn, x) is None
    assert (vars(net), vars(net.inner)) == (state, inner)
    assert (count, default) == (COUNTS, _default.__defaults__[0])  # pyright: ignore (the same)
    assert capsys.readouterr().out == ""
    if name != "a default":  # that one does something else each time
        require_same(fn, x)


def test_variables_of_an_outer_function() -> None:
    net, x, calls = make(), double(5, 4), 0

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return net(x)

    assert chain(fn, x) is None
    assert calls == 0
    gradlib.per_sample_jacobian(fn, x, check=False)
    assert calls == 1


class NoGraph(Net):
    """Autograd sees nothing of it."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_channels_that_are_taken_or_averaged() -> None:
    layer, x = nn.Conv2d(2, 3, 2).double(), double(5, 2, 4, 4)
    fns: list[Function] = [
        lambda x: layer(x)[:, :2],
        lambda x: layer(x).mean(1, keepdim=True).flatten(1),
    ]
    for fn in fns:
        assert chain(fn, x) is None
        require_same(fn, x)


def test_a_property_comes_before_what_a_module_holds() -> None:
    net, x = make(), double(5, 4)
    vars(net)["head"] = net.single

    def fn(x: Tensor) -> Tensor:
        return net.head(x)

    assert chain(fn, x) is None
    require_same(fn, x)


def test_a_shape_that_does_not_fit_ends_it() -> None:
    half = nn.Linear(8, 4).double()

    def fn(x: Tensor) -> Tensor:
        while x.shape[1] > 2:
            x = torch.relu(half(x))
        return x

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradlib.per_sample_jacobian(fn, double(5, 8))


def test_a_bias_that_does_not_fit() -> None:
    for bias in (torch.zeros(4), torch.zeros(3).double(), torch.zeros(4, 1).double()):
        first = nn.Linear(4, 4).double()
        first.bias = nn.Parameter(bias)
        assert (
            chain(nn.Sequential(first, nn.Linear(4, 3).double()), double(5, 4)) is None
        )


def test_code_that_returns_something_else() -> None:
    net, x = make(), double(4, 4)
    assert chain(lambda _: net.third.weight, x) is None
    with pytest.raises(IndependentOutputError):
        gradlib.per_sample_jacobian(lambda _: net.third.weight, x)


def test_what_torch_refuses() -> None:
    net, x = make(), double(5, 4)
    weight, everything, functions = (
        cast(Any, it) for it in (net.third.weight, torch, F)
    )
    fns: list[Function] = [
        lambda x: net.single(x).squeeze(True),
        lambda x: x @ weight.t(0),
        nn.Sequential(net.first, net),
        lambda x: net.single(x)[:, 0.0],
        lambda x: net.third(everything.relu(x, True)),
        lambda x: net.third(F.dropout(x, 2.0, training=False)),
        lambda x: net.third(x.view(3, -1)),
        lambda x: net.second(x),
        lambda x: net.third(x, x),
        lambda x: net.third(x, input=x),
        lambda x: net.third(functions.gelu(x, "tanh")),
        lambda x: net.third(functions.hardtanh(x, -1, maximum=2)),
        lambda x: net.third(x) if x.size(0, 1) else x,  # pyright: ignore (wrong)
        lambda x: net.third(x.pow(n=2)),  # pyright: ignore (wrong)
        lambda x: net.third(x) + 2**70,
        lambda x: net.third(x.chunk(True, 1)[0]),
        lambda x: net.third(x) if not x.split(-1, 1) else x,
        lambda x: torch.cat((net.third(x), x), True),
        lambda x: everything.cat(reversed([net.third(x), x]), 1),
    ]
    for fn in fns:
        assert chain(fn, x) is None
        with pytest.raises(
            (RuntimeError, TypeError, ValueError, IndexError, OverflowError)
        ):
            fn(x)


def test_a_forward_without_a_graph_is_refused() -> None:
    net, x = NoGraph().double().eval(), double(5, 4)
    assert chain(net, x) is None
    with pytest.raises(gradlib.IndependentOutputError):
        gradlib.per_sample_jacobian(net, x)
