"""The Jacobian of any net is that of each sample alone, whichever way it is computed.

The reference is torch.autograd.functional.jacobian of one sample after the other, in
float64.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils.parametrizations import spectral_norm

import gradlib
from gradlib import (
    CoupledSamplesError,
    GradlibError,
    JacobianArgumentError,
    NoSuchWayError,
    NotDifferentiableDtypeError,
    NotPerSampleError,
    progress,
)

Spec = tuple[Any, ...]
"""A layer, as its name and sizes."""

Change = Callable[[Any], Any]
"""Gives a module or tensor another dtype."""

MODES = ("reverse", "forward", "split", "loop", "auto")
MAY_REFUSE = ("forward", "split")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 0.15}

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "sine": torch.sin,
    "square": torch.square,
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "relu in place": lambda x: F.relu(x * 1, inplace=True),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
}
SMOOTH = ("tanh", "sigmoid", "gelu", "softplus", "sine", "silu")


class Residual(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Concat(nn.Module):
    def __init__(self, *branches: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.branches = branches
        self.kept = nn.ModuleList([it for it in branches if isinstance(it, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Attention(nn.Module):
    """Attention over tokens: torch's own kernel, or written out."""

    def __init__(self, width: int, *, fused: bool) -> None:
        super().__init__()
        self.heads = nn.Linear(width, 3 * width)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x).chunk(3, -1)
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value)
        return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value


class LSTM(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.LSTM(width, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Chain(nn.Module):
    """What nn.Sequential is, also of functions."""

    def __init__(self, *parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = parts
        self.kept = nn.ModuleList([it for it in parts if isinstance(it, nn.Module)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Pointwise(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def weighted(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sin(x @ weight) + x[..., :1]


def built(specs: Sequence[Spec], to: Change) -> list[Callable[[Tensor], Tensor]]:
    return [layer(spec, to) for spec in specs]


def layer(spec: Spec, to: Change) -> Callable[[Tensor], Tensor]:
    name, *sizes = spec
    match name:
        case "pointwise":
            return POINTWISE[sizes[0]]
        case "function":
            return weighted(to(torch.randn(*sizes, dtype=torch.float64)))
        case "residual":
            return Residual(Chain(*built(sizes, to)))
        case "concat":
            return Concat(*(Chain(*built(branch, to)) for branch in sizes))
        case "sequential":
            parts = [Pointwise(it) for it in built(sizes, to)]
            return nn.Sequential(*parts)
        case _:
            return to(MODULES[name](*sizes).to(torch.float64))


MODULES: dict[str, Callable[..., nn.Module]] = {
    "linear": nn.Linear,
    "layer_norm": nn.LayerNorm,
    "group_norm": nn.GroupNorm,
    "conv1d": lambda c, d: nn.Conv1d(c, d, 3, padding=1),
    "conv2d": lambda c, d: nn.Conv2d(c, d, 2),
    "flatten": nn.Flatten,
    "unflatten": lambda *sizes: nn.Unflatten(1, sizes),
    "attention": lambda width, fused: Attention(width, fused=fused),
    "lstm": LSTM,
}


@dataclass(frozen=True)
class Net:
    """A drawn net: it prints as what it is made of."""

    shape: tuple[int, ...]
    specs: list[Spec]
    seed: int
    as_function: bool

    def made(self, dtype: torch.dtype, *, widened: bool = False) -> Callable[..., Any]:
        """Return it with weights of a dtype, or with those widened to float64."""
        torch.manual_seed(self.seed)
        parts = built(
            self.specs,
            lambda it: it.to(dtype).to(torch.float64) if widened else it.to(dtype),
        )
        if not self.as_function:
            return Chain(*parts)

        def function(x: Tensor) -> Tensor:
            for part in parts:
                x = part(x)
            return x

        return function

    def inputs(self, batch: int, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(self.seed + 1)
        return torch.randn(batch, *self.shape, dtype=torch.float64).to(dtype)


Draw = Callable[[st.SearchStrategy[Any]], Any]


def draw_layer(
    draw: Draw, shape: tuple[int, ...], smooth: bool, depth: int
) -> tuple[Spec, tuple[int, ...]]:
    """Draw a layer that takes ``(batch, *shape)``, and the shape that it gives."""
    size, last = shape[0], shape[-1]
    kinds = ["pointwise", "pointwise", *KINDS[len(shape)]]
    if torch.Size(shape).numel() >= (8 if smooth else 4):  # of two, noise alone is left
        kinds += ["layer_norm", "group_norm"] if len(shape) > 1 else ["layer_norm"]
    if depth:
        kinds += ["residual", "concat", "sequential"]
    kind = draw(st.sampled_from(kinds))
    wide = draw(st.integers(2, 4))
    match kind:
        case "pointwise":
            names = SMOOTH if smooth else tuple(POINTWISE)
            return (kind, draw(st.sampled_from(names))), shape
        case "linear" | "lstm":
            return (kind, last, wide), (*shape[:-1], wide)
        case "function" | "attention":
            more = draw(st.booleans()) if kind == "attention" else last
            return (kind, last, more), shape
        case "layer_norm":
            return (kind, list(shape)), shape
        case "group_norm":
            return (kind, 1, size), shape
        case "conv1d":
            return (kind, size, wide), (wide, last)
        case "conv2d":
            smaller = tuple(it - 1 for it in shape[1:])
            return (kind, size, wide), (wide, *smaller)
        case "flatten":
            return (kind,), (torch.Size(shape).numel(),)
        case "unflatten":
            made = (2, size // 2) if size % 2 == 0 else (1, size)
            return (kind, *made), made
        case "sequential":
            inner, made = draw_layers(draw, shape, smooth, depth - 1)
            return (kind, *inner), made
        case "residual":
            return (kind, *draw_keeping(draw, shape, smooth)), shape
        case _:
            both = (draw_keeping(draw, shape, smooth) for _ in range(2))
            return (kind, *both), (2 * size, *shape[1:])


KINDS = {
    1: ["linear", "linear", "function", "unflatten"],
    2: ["linear", "function", "conv1d", "attention", "lstm", "flatten"],
    3: ["conv2d", "conv2d", "conv2d", "flatten"],
}


def draw_layers(
    draw: Draw, shape: tuple[int, ...], smooth: bool, depth: int
) -> tuple[list[Spec], tuple[int, ...]]:
    specs: list[Spec] = []
    for _ in range(draw(st.integers(2, 4))):
        if torch.Size(shape).numel() > 24 or shape[-1] < 2:
            break
        spec, shape = draw_layer(draw, shape, smooth, depth)
        specs.append(spec)
    return specs, shape


def draw_keeping(draw: Draw, shape: tuple[int, ...], smooth: bool) -> list[Spec]:
    """Draw layers that give the shape that they take."""
    specs, made = draw_layers(draw, shape, smooth, 0)
    return (
        specs if made == shape else [("pointwise", "tanh"), ("linear", *shape[-1:] * 2)]
    )


@st.composite
def nets(draw: Draw, smooth: bool) -> Net:
    shape = draw(st.sampled_from([(3,), (4,), (2, 3), (3, 4), (2, 3, 3), (1, 4, 3)]))
    specs, _ = draw_layers(draw, shape, smooth, 2)
    return Net(shape, specs, draw(st.integers(0, 99)), draw(st.booleans()))


def alone(
    fn: Callable[..., Any], *inputs: Tensor, shared: Sequence[int] = ()
) -> list[list[Tensor]]:
    """Return the Jacobian of each output by each input, each sample alone."""
    own = [x for i, x in enumerate(inputs) if i not in shared]
    samples: list[list[list[Tensor]]] = []
    for n in range(len(own[0])):
        ours = tuple(
            x.detach().clone() if i in shared else x.detach()[n : n + 1].clone()
            for i, x in enumerate(inputs)
        )

        def copied(*given: Tensor) -> Any:  # it may overwrite what it is given
            return fn(*(it.clone() for it in given))

        found = cast(Any, torch.autograd.functional.jacobian(copied, ours))
        rows = found if isinstance(found[0], tuple) else [found]
        samples.append(
            [
                [
                    block[0]
                    if i in shared  # else (1, *out, 1, *in)
                    else block.squeeze(block.dim() - ours[i].dim()).squeeze(0)
                    for i, block in enumerate(row)
                ]
                for row in rows
            ]
        )
    return [
        [torch.stack(blocks) for blocks in zip(*rows, strict=True)]
        for rows in zip(*samples, strict=True)
    ]


def require_close(ours: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    """Hold two tensors together, relative to the largest entry."""
    assert ours.shape == reference.shape
    apart = (ours.detach().double() - reference.detach().double()).abs()
    largest = reference.detach().abs().double()
    if largest.numel():
        assert apart.max() <= tolerance * largest.max()


settings.register_profile(
    "same nets each time",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
EXAMPLES = settings(settings.get_profile("same nets each time"), max_examples=14)


WAYS: list[tuple[str, torch.dtype]] = [*product((*MODES, "from graph"), TOLERANCE)]


# On a GPU torch calls cuDNN for bfloat16, and does not lay the weights as that wants.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")
@pytest.mark.parametrize(("mode", "dtype"), WAYS, ids=str)
def test_every_net_has_the_jacobian_of_each_sample_alone(
    mode: str, dtype: torch.dtype
) -> None:
    refused: list[bool] = []

    @seed(WAYS.index((mode, dtype)))  # other nets for each
    @EXAMPLES
    @given(
        net=nets(smooth=dtype == torch.bfloat16),
        batch=st.sampled_from([1, 2, 5]),
        chunk=st.sampled_from([1, 3, "auto"]),
    )
    def holds(net: Net, batch: int, chunk: int | str) -> None:
        fn, x = net.made(dtype), net.inputs(batch, dtype)
        try:
            if mode == "from graph":
                x.requires_grad_()
                y = fn(x.clone())
                ours = gradlib.per_sample_jacobian_from_graph(y, x)
            else:
                ours = gradlib.per_sample_jacobian(fn, x, mode=mode, chunk_size=chunk)
        except NoSuchWayError:
            assert mode in MAY_REFUSE
            refused.append(True)
            return
        refused.append(False)
        assert ours.dtype == dtype
        assert not ours.requires_grad
        [[reference]] = alone(net.made(dtype, widened=True), x.double())
        require_close(ours, reference, TOLERANCE[dtype])

    holds()
    assert refused.count(False) > refused.count(True)


def smooth_net(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A chain whose narrowest tensor is a place to split at."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_no_mode_refuses_a_chain(mode: str, chunk: int | str) -> None:
    model, x = smooth_net(5, 4, 2, 4, 6), torch.randn(3, 5, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, mode=mode, chunk_size=chunk)
    [[reference]] = alone(model, x)
    require_close(ours, reference)


# What is asked for.


def product_of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return torch.sin(x)[:, :, None] * y.square()[:, None] + z[:, None, :2]


def three() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x, y, z = (torch.randn(4, n, dtype=torch.float64) for n in (3, 2, 5))
    return x, y, z


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("argnums", [(0, 1, 2), (2, 0), (1,), (-1, 0)])
def test_a_tuple_of_inputs(argnums: tuple[int, ...], mode: str) -> None:
    inputs = three()
    try:
        ours = gradlib.per_sample_jacobian(
            product_of_three, *inputs, argnums=argnums, mode=mode
        )
    except NoSuchWayError:
        assert mode == "split"  # nothing is passed by all
        return
    assert type(ours) is tuple
    [blocks] = alone(product_of_three, *inputs)
    for block, number in zip(ours, argnums, strict=True):
        require_close(block, blocks[number])


@pytest.mark.parametrize("number", [0, 1, 2, -1])
def test_one_input_of_several(number: int) -> None:
    inputs = three()
    ours = gradlib.per_sample_jacobian(product_of_three, *inputs, argnums=number)
    [blocks] = alone(product_of_three, *inputs)
    require_close(ours, blocks[number])


@dataclass
class Both:
    mean: Tensor
    rest: Any


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_nested_inputs_and_outputs(mode: str) -> None:
    x, y, z = three()

    def flat(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return product_of_three(x, y, z), (x.sum(1) * y[:, 0]).exp(), z @ z.new_ones(5)

    def nested(state: dict[str, Any], other: Both) -> Both:
        first, second, third = flat(state["x"], state["deep"][0], other.mean)
        return Both(first, {"a": (second, None), "b": Named(third, first)})

    ours = gradlib.per_sample_jacobian(
        nested, {"x": x, "deep": [y, 3]}, Both(z, "left as it is"),
        argnums=(0, 1), mode=mode,
    )  # fmt: skip
    first, second, third = alone(flat, x, y, z)
    assert type(ours) is Both
    assert list(ours.rest) == ["a", "b"]
    assert type(ours.rest["b"]) is Named
    assert ours.rest["a"][1] is None
    found = (ours.mean, ours.rest["a"][0], ours.rest["b"].x, ours.rest["b"].y)
    for made, blocks in zip(found, (first, second, third, first), strict=True):
        assert type(made) is tuple
        assert list(made[0]) == ["x", "deep"]
        assert type(made[0]["deep"]) is list
        assert made[0]["deep"][1] is None
        assert type(made[1]) is Both
        assert made[1].rest is None
        parts = (made[0]["x"], made[0]["deep"][0], made[1].mean)
        for part, block in zip(parts, blocks, strict=True):
            require_close(part, block)


def test_nested_tensors_that_are_there_already() -> None:
    x, y, z = (it.requires_grad_() for it in three())
    outputs = {"a": product_of_three(x, y, z), "b": [x.sum(1) + y[:, 0] + z[:, 0]]}
    ours = gradlib.per_sample_jacobian_from_graph(outputs, {"x": x, "rest": (y, z)})
    first, second = alone(
        lambda x, y, z: (product_of_three(x, y, z), x.sum(1) + y[:, 0] + z[:, 0]),
        x,
        y,
        z,
    )
    for made, blocks in ((ours["a"], first), (ours["b"][0], second)):
        parts = (made["x"], *made["rest"])
        for part, block in zip(parts, blocks, strict=True):
            require_close(part, block)
    outputs["a"].sum().backward()  # the graph is still there
    assert x.grad is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0)])
def test_an_input_that_all_samples_share(
    argnums: int | tuple[int, ...], mode: str
) -> None:
    x, _, _ = three()
    torch.manual_seed(2)
    weight = torch.randn(3, 2, dtype=torch.float64)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * weight.sum().cos()

    def call() -> Any:
        return gradlib.per_sample_jacobian(
            fn, x, weight, argnums=argnums, in_dims=(0, None), mode=mode
        )

    if mode == "split" and argnums != 0:
        with pytest.raises(NoSuchWayError):
            call()
        return
    [blocks] = alone(fn, x, weight, shared=[1])
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    ours = call()
    for i, number in enumerate(numbers):
        part = ours[i] if isinstance(argnums, tuple) else ours
        require_close(part, blocks[number])


@pytest.mark.parametrize("argnums", [0, (0, 1), (1, 0)])
def test_a_split_of_several_inputs(argnums: int | tuple[int, ...]) -> None:
    x, y, _ = three()
    last = torch.randn(2, 6, dtype=torch.float64)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(x[:, :2] * y).sin() @ last).exp()

    ours = gradlib.per_sample_jacobian(fn, x, y, argnums=argnums, mode="split")
    [blocks] = alone(fn, x, y)
    numbers = argnums if isinstance(argnums, tuple) else (argnums,)
    for i, number in enumerate(numbers):
        require_close(ours[i] if isinstance(argnums, tuple) else ours, blocks[number])


def test_a_split_that_cannot_be_says_why() -> None:
    x, y, _ = three()
    weight = torch.ones(3, 2, dtype=torch.float64)

    def split(fn: Callable[..., Any], *inputs: Tensor, **how: Any) -> None:
        with pytest.raises(NoSuchWayError) as planned:
            gradlib.plan_jacobian(fn, *inputs, mode="split", **how)
        with pytest.raises(NoSuchWayError, match=re.escape(str(planned.value))):
            gradlib.per_sample_jacobian(fn, *inputs, mode="split", **how)
        raise planned.value

    with pytest.raises(NoSuchWayError, match="fn has 2 outputs"):
        split(lambda x: (x.sin(), x.cos()), x)
    with pytest.raises(NoSuchWayError, match="all samples share"):
        split(torch.matmul, x, weight, argnums=1, in_dims=(0, None))
    with pytest.raises(NoSuchWayError, match="no tensor inside that all pass"):
        split(lambda x, y: x[:, :2] * y, x, y, argnums=(0, 1))


def test_in_dims_may_be_nested_as_the_inputs_are() -> None:
    x, y, _ = three()
    shared = torch.full((3,), 0.5, dtype=torch.float64)

    def fn(state: dict[str, Tensor], y: Tensor) -> Tensor:
        return (state["x"] * state["shared"]).sin() @ y.new_ones(3, 2) * y

    ours = gradlib.per_sample_jacobian(
        fn, {"x": x, "shared": shared}, y, in_dims=({"x": 0, "shared": None}, 0)
    )
    [[by_x, by_shared, _]] = alone(
        lambda x, shared, y: fn({"x": x, "shared": shared}, y),
        x, shared, y, shared=[1],
    )  # fmt: skip
    require_close(ours["x"], by_x)
    require_close(ours["shared"], by_shared)


def by_vmap(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the Jacobian by the parameters, as torch.func computes it."""

    def one(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row[None],))[0]

    asked = {name: it.detach() for name, it in model.named_parameters()}
    return cast(Any, vmap(jacrev(one), (None, 0))(asked, x))


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_parameters(mode: str, chunk: int | str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.GELU(), nn.Flatten(), nn.Linear(6, 2)
    ).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(
        model, x, argnums="parameters", mode=mode, chunk_size=chunk
    )
    theirs = by_vmap(model, x)
    assert list(ours) == list(theirs)
    for name, block in ours.items():
        require_close(block, theirs[name])


def test_parameters_of_a_narrow_net_and_a_frozen_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 9)).double()
    model[0].requires_grad_(False)
    x = torch.randn(3, 1, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    assert list(ours) == ["2.weight", "2.bias"]
    for name, block in ours.items():
        require_close(block, by_vmap(model, x)[name])


def test_parameters_that_are_tied_or_unused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, dtype=torch.float64)
            self.second = nn.Linear(3, 3, dtype=torch.float64)
            self.second.weight = self.first.weight
            self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    theirs = by_vmap(model, x)
    assert list(ours) == list(theirs)
    for name, block in ours.items():
        require_close(block, theirs[name])
    assert not ours["unused"].any()


# Forms of inputs and outputs.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_number_for_each_sample(batch: int, mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(batch, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(lambda x: x.sin().prod(1), x, mode=mode)
    assert ours.shape == (batch, 3)
    require_close(ours, alone(lambda x: x.sin().prod(1), x)[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_one_number_from_one_number(mode: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    ours = gradlib.per_sample_jacobian(torch.square, x, mode=mode)
    assert torch.equal(ours, 2 * x)


@pytest.mark.parametrize("mode", MODES)
def test_no_sample_at_all(mode: str) -> None:
    model, x = smooth_net(3, 4, 2), torch.zeros(0, 3, dtype=torch.float64)
    try:
        ours = gradlib.per_sample_jacobian(model, x, mode=mode)
    except NoSuchWayError:
        assert mode == "split"
        return
    assert ours.shape == (0, 2, 3)
    assert ours.dtype == torch.float64


def test_no_sample_at_all_and_parameters() -> None:
    model, x = smooth_net(3, 4, 2), torch.zeros(0, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    for name, parameter in model.named_parameters():
        assert ours[name].shape == (0, 2, *parameter.shape)


@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_no_entries(mode: str) -> None:
    x = torch.zeros(3, 0)
    assert gradlib.per_sample_jacobian(torch.sin, x, mode=mode).shape == (3, 0, 0)
    weight = torch.ones(2, 0)
    nothing = gradlib.per_sample_jacobian(lambda x: F.linear(x, weight), x, mode=mode)
    assert nothing.shape == (3, 2, 0)


def test_inputs_that_are_integers_or_no_tensors_are_passed_on() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, dtype=torch.float64)
    x, ids = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 3, 1, 3])

    def fn(x: Tensor, ids: Tensor, name: str, factor: float) -> Tensor:
        assert name == "name"
        return torch.sin(table(ids) * x) * factor

    ours = gradlib.per_sample_jacobian(fn, x, ids, "name", 2.0)
    slope = 2 * torch.cos(table(ids) * x) * table(ids)
    require_close(ours, torch.diag_embed(slope))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("place", [0, 1])
def test_integers_and_complex_numbers_are_refused_by_name(
    place: int, dtype: torch.dtype
) -> None:
    inputs = [torch.ones(2, 3), torch.ones(2, 3)]
    inputs[place] = inputs[place].to(dtype)
    with pytest.raises(NotDifferentiableDtypeError) as caught:
        gradlib.per_sample_jacobian(lambda x, y: x * y, *inputs, argnums=place)
    assert f"inputs[{place}] has dtype {dtype}, shape [2, 3]" in str(caught.value)


def test_only_an_integer_beside_others_is_to_be_left_out() -> None:
    embedding, tokens, scale = nn.Embedding(5, 3), torch.ones(2).long(), torch.ones(2)
    with pytest.raises(NotDifferentiableDtypeError, match=r"argnums=.parameters."):
        gradlib.per_sample_jacobian(embedding, tokens)
    with pytest.raises(NotDifferentiableDtypeError, match="Leave it out of argnums"):
        gradlib.per_sample_jacobian(lambda _, x: x, tokens, scale)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("inside", "outside"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32)],
)
def test_the_dtype_is_that_of_the_input(
    inside: torch.dtype, outside: torch.dtype, mode: str, check: bool
) -> None:
    model, x = smooth_net(5, 2, 4, dtype=inside), torch.randn(3, 5, dtype=outside)

    def fn(x: Tensor) -> Tensor:
        return model(x.to(inside))

    ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    assert ours.dtype == outside
    require_close(ours, alone(fn, x)[0][0], 1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("mode", ["reverse", "loop", "forward"])
@pytest.mark.parametrize("size", [(0, 4), (3, 0)])
def test_chunks_of_what_has_no_entries(size: Any, mode: Any, chunk: int) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * torch.ones(3)

    x = torch.randn(size)
    found = gradlib.per_sample_jacobian(fn, x, mode=mode, chunk_size=chunk)
    assert found.shape == (size[0], 3, size[1])


@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
def test_numbers_of_one_byte_are_refused_by_name(mode: Any) -> None:
    x = torch.ones(2, 3).to(torch.float8_e4m3fn)
    with pytest.raises(
        NotDifferentiableDtypeError, match=r"inputs.0. has dtype.*float8"
    ):
        gradlib.per_sample_jacobian(lambda x: x.float() * 2, x, mode=mode)


@pytest.mark.parametrize("make", [Tensor.to_sparse, lambda x: x.to("meta")])
def test_what_is_not_dense_is_refused_by_name(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(NotDifferentiableDtypeError, match=r"inputs.1. is sparse, nest"):
        gradlib.per_sample_jacobian(torch.mul, x, make(x), argnums=1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_outputs_of_integers_and_complex_numbers_are_refused_by_name(
    dtype: torch.dtype,
) -> None:
    with pytest.raises(NotDifferentiableDtypeError) as caught:
        gradlib.per_sample_jacobian(
            lambda x: {"a": x, "b": x.to(dtype)}, torch.ones(2, 3)
        )
    assert f"output['b'] has dtype {dtype}" in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_complex_tensor_inside_is_no_matter(check: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * 2).real

    x = torch.randn(2, 3, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(fn, x, check=check)
    require_close(ours, 2 * torch.eye(3, dtype=torch.float64).expand(2, 3, 3))


def test_a_parameter_of_complex_numbers_is_refused_by_name() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.phase).real

    with pytest.raises(NotDifferentiableDtypeError, match="phase has dtype"):
        gradlib.per_sample_jacobian(Complex(), torch.ones(2, 3), argnums="parameters")


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a mean over the batch": lambda x: x.mean(),
    "the batch last": lambda x: x.mT,
    "a number": lambda x: x.sum().item(),
    "nothing": lambda _: None,
    "a string beside it": lambda x: (x, "name"),
}


@pytest.mark.parametrize("fn", OUTPUTS.values(), ids=list(OUTPUTS))
def test_outputs_that_are_not_one_row_for_each_sample(
    fn: Callable[[Tensor], Any],
) -> None:
    with pytest.raises(NotPerSampleError):
        gradlib.per_sample_jacobian(fn, torch.ones(2, 3))


def test_an_output_whose_batch_comes_later_is_to_be_moved() -> None:
    lstm, x = nn.LSTM(3, 5, batch_first=True), torch.ones(4, 7, 3)
    with pytest.raises(NotPerSampleError, match=r"output.1..0..movedim.1, 0."):
        gradlib.per_sample_jacobian(lstm, x)
    jacobian = gradlib.per_sample_jacobian(lambda x: lstm(x)[1][0].movedim(1, 0), x)
    assert jacobian.shape == (4, 1, 5, 7, 3)


def test_what_is_there_already_and_has_no_row_for_each_sample_is_named() -> None:
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(NotPerSampleError, match=r"inputs.1. has .*with in_dims"):
        gradlib.per_sample_jacobian_from_graph(x * w, (x, w))


X = torch.ones(2, 3)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "fn is a tensor": (lambda: gradlib.per_sample_jacobian(cast(Any, X), X), "fn"),
    "no inputs": (lambda: gradlib.per_sample_jacobian(torch.sin), "no inputs"),
    "inputs of lists": (
        lambda: gradlib.per_sample_jacobian(torch.sin, [1.0, 2.0]),
        "no tensor among the inputs, which hold float",
    ),
    "argnums of nothing": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=()),
        "argnums is ()",
    ),
    "argnums beyond": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=1),
        "argnums is 1: .* here only 0",
    ),
    "a class": (
        lambda: gradlib.per_sample_jacobian(nn.ReLU, X),
        r"class ReLU, .* ReLU\(...\)",
    ),
    "argnums twice": (
        lambda: gradlib.per_sample_jacobian(torch.add, X, X, argnums=(0, -2)),
        "argnums",
    ),
    "argnums is a bool": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums=True),
        "argnums",
    ),
    "argnums is another word": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums="weights"),
        "argnums",
    ),
    "parameters of a function": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, argnums="parameters"),
        "needs fn to be a module, not sin",
    ),
    "parameters of none": (
        lambda: gradlib.per_sample_jacobian(nn.ReLU(), X, argnums="parameters"),
        "No parameter",
    ),
    "argnums without a tensor": (
        lambda: gradlib.per_sample_jacobian(torch.mul, X, 2.0, argnums=1),
        r"inputs\[1\]",
    ),
    "in_dims of another axis": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=1),
        "in_dims",
    ),
    "in_dims too many": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=(0, 0)),
        r"in_dims must be .* \(1 here\); it is \(0, 0\)",
    ),
    "in_dims nested otherwise": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=({"x": 0},)),
        r"in_dims is \(\{'x': 0\},\), which is not nested as the inputs are\. It has",
    ),
    "nothing has samples": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, in_dims=None),
        "in_dims",
    ),
    "samples disagree": (
        lambda: gradlib.per_sample_jacobian(torch.add, X, torch.ones(1, 3)),
        r"inputs\[0\] has 2, inputs\[1\] has 1",
    ),
    "a single number": (
        lambda: gradlib.per_sample_jacobian(torch.sin, torch.tensor(1.0)),
        r"inputs\[0\]",
    ),
    "no such mode": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, mode="fast"),
        "mode",
    ),
    "chunk_size 0": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, chunk_size=0),
        "chunk_size",
    ),
    "max_bytes is a float": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, max_bytes=cast(Any, 1e9)),
        "max_bytes",
    ),
    "out nested otherwise": (
        lambda: gradlib.per_sample_jacobian(torch.sin, X, out=[torch.empty(2, 3, 3)]),
        r"out has out\[0\], and the result one tensor: out must",
    ),
    "out and a graph": (
        lambda: gradlib.per_sample_jacobian(
            torch.sin, X, out=torch.empty(2, 3, 3), create_graph=True
        ),
        "create_graph",
    ),
    "no tensor that is there already": (
        lambda: gradlib.per_sample_jacobian_from_graph(X.sin(), "x"),
        "inputs must be a tensor, or hold some; it is 'x'",
    ),
    "tensors without a graph": (
        lambda: gradlib.per_sample_jacobian_from_graph(X.sin(), X),
        "requires_grad",
    ),
}


@pytest.mark.parametrize(("call", "named"), WRONG.values(), ids=list(WRONG))
def test_wrong_arguments_are_named(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(JacobianArgumentError, match=named):
        call()


# out=


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strided", [False, True])
def test_out_is_written(strided: bool, mode: str) -> None:
    model, x = smooth_net(5, 3, 2, 4), torch.randn(3, 5, dtype=torch.float64)
    out = torch.full((3, 4, 5), torch.nan, dtype=torch.float64)
    if strided:
        out = torch.full((5, 4, 2, 3), torch.nan, dtype=torch.float64)[:, :, 1].mT
        out = out.permute(1, 2, 0)
        assert out.shape == (3, 4, 5)
        assert not out.is_contiguous()
    ours = gradlib.per_sample_jacobian(model, x, out=out, mode=mode)
    assert ours is out
    require_close(out, alone(model, x)[0][0])


def test_out_is_nested_as_the_result_is() -> None:
    x, y, _ = three()

    def fn(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"a": x.sin(), "b": x[:, :2] * y}

    ours = gradlib.per_sample_jacobian(fn, x, y, argnums=(0, 1))
    out = {
        name: tuple(torch.full_like(it, torch.nan) for it in blocks)
        for name, blocks in ours.items()
    }
    assert gradlib.per_sample_jacobian(fn, x, y, argnums=(0, 1), out=out) is out
    for name, blocks in ours.items():
        for ours_, written in zip(blocks, out[name], strict=True):
            assert torch.equal(ours_, written)


def test_out_of_what_has_no_entries() -> None:
    x = torch.randn(3, 2)
    out = torch.empty(3, 2, 2), torch.empty(3, 0, 2)
    assert gradlib.per_sample_jacobian(lambda x: (x.sin(), x[:, :0]), x, out=out) is out
    assert torch.equal(out[0], torch.diag_embed(x.cos()))


def test_out_for_tensors_that_are_there_already() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    out = torch.empty(3, 2, 2)
    assert gradlib.per_sample_jacobian_from_graph(x.sin(), x, out=out) is out
    assert torch.equal(out, torch.diag_embed(x.detach().cos()))


BAD_OUT: dict[str, Callable[[], Any]] = {
    "shape": lambda: torch.empty(2, 9),
    "dtype": lambda: torch.empty(2, 3, 3, dtype=torch.float64),
    "device": lambda: torch.empty(2, 3, 3, device="meta"),
    "nesting": lambda: (torch.empty(2, 3, 3),),
    "no tensor": lambda: numpy.empty((2, 3, 3)),
    "requires grad": lambda: torch.empty(2, 3, 3, requires_grad=True),
    "expanded": lambda: torch.empty(1, 3, 3).expand(2, 3, 3),
    "overlapping": lambda: torch.empty(9).as_strided((2, 3, 3), (1, 1, 1)),
    "overlapping in one entry": lambda: torch.empty(17).as_strided(
        (2, 3, 3), (8, 3, 1)
    ),
    "sparse": lambda: torch.zeros(2, 3, 3).to_sparse(),
}


@pytest.mark.parametrize("fn", [torch.sin, nn.Linear(3, 3)])
@pytest.mark.parametrize("make", BAD_OUT.values(), ids=list(BAD_OUT))
def test_out_that_does_not_fit(make: Callable[[], Any], fn: Any) -> None:
    with pytest.raises(JacobianArgumentError, match="out"):
        gradlib.per_sample_jacobian(fn, X, out=make())


def test_out_that_is_an_input() -> None:
    x = torch.randn(2, 3)
    before = x.clone()
    for out in (x, x.view(-1).view(2, 3)):
        with pytest.raises(JacobianArgumentError, match=r"shares memory with inputs"):
            gradlib.per_sample_jacobian(lambda x: (x * 2).sum(1), x, out=out)
    assert torch.equal(x, before)


def test_out_that_is_a_parameter() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    out = model.weight.detach().view(1, 2, 3)
    with pytest.raises(JacobianArgumentError, match="shares memory with weight"):
        gradlib.per_sample_jacobian(model, torch.ones(1, 3), out=out)
    assert torch.equal(model.weight, before)


def test_out_that_is_an_input_that_is_there_already() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    before = x.detach().clone()
    y = (x * 2).sum(1)
    with pytest.raises(JacobianArgumentError, match="shares memory"):
        gradlib.per_sample_jacobian_from_graph(y, x, out=x.detach())
    assert torch.equal(x, before)


def test_out_twice_in_the_same_memory() -> None:
    one = torch.empty(2, 3, 3)
    with pytest.raises(JacobianArgumentError, match="memory"):
        gradlib.per_sample_jacobian(torch.mul, X, X + 1, argnums=(0, 1), out=(one, one))


def test_out_in_parts_of_one_tensor() -> None:
    both = torch.empty(2, 2, 3, 3)
    gradlib.per_sample_jacobian(
        torch.mul, X, X + 1, argnums=(0, 1), out=(both[0], both[1])
    )
    assert torch.equal(both[0], torch.diag_embed(X + 1))
    assert torch.equal(both[1], torch.diag_embed(X))


# What is called, and what is left.


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_forwards(mode: str, argnums: int | str) -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = smooth_net(3, 2, 4)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return self.inner(x)

    model, x = Counted(), torch.randn(4, 3, dtype=torch.float64)
    if (mode, argnums) == ("split", "parameters"):
        return
    gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums, check=False)
    assert calls == [4]
    calls.clear()
    gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums, check=True)
    assert calls == [4, 4, 4]
    calls.clear()
    gradlib.plan_jacobian(model, x, mode=mode, argnums=argnums)
    assert calls == [4]


class Everything(nn.Module):
    """What a call changes: statistics, random states, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(3, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.seen: list[float] = []
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.total += 1
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def everything(*, train: bool) -> Everything:
    torch.manual_seed(0)
    model = Everything()
    model(torch.randn(8, 3)).sum().backward()  # statistics and .grad
    model.train(train)
    model.drop.train()
    model.first.register_forward_hook(lambda *_: None)
    model.last.register_full_backward_pre_hook(lambda *_: None)
    return model


def seeds(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def values(model: nn.Module) -> list[Any]:
    """Return all that two models made alike have in common, and the random states."""
    found: list[Any] = []
    for tensor in (*model.parameters(), *model.buffers()):
        found += [tensor.detach().clone(), tensor.requires_grad]
        found.append(None if tensor.grad is None else tensor.grad.clone())
    for module in model.modules():
        found += [module.training, list(vars(module))]
        found += [
            value[:] if isinstance(value, list) else value
            for name, value in vars(module).items()
            if not name.startswith("_") and not callable(value)
        ]
    numpys: Any = numpy.random.get_state()
    return [*found, torch.get_rng_state(), random.getstate(), *map(str, numpys)]


def identities(model: nn.Module) -> list[Any]:
    """Return which objects a model consists of: tensors, gradients, hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    found: list[Any] = [id(it) for it in tensors] + [id(it.grad) for it in tensors]
    for module in model.modules():
        for name, value in vars(module).items():
            found.append((name, id(value)) if isinstance(value, dict) else name)
            if isinstance(value, dict):
                found.append([(key, id(it)) for key, it in value.items()])
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@pytest.mark.usefixtures("_random_states_kept")
@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_left_as_one_forward_leaves_it(
    mode: str, check: bool, argnums: int | str
) -> None:
    if (mode, argnums) == ("split", "parameters"):
        return
    model, other = everything(train=False), everything(train=False)
    x = torch.randn(5, 3)
    before = identities(model)
    seeds(1)
    gradlib.per_sample_jacobian(model, x, mode=mode, check=check, argnums=argnums)
    after = values(model)
    assert identities(model) == before
    seeds(1)
    other(x)
    assert same(after, values(other))
    assert model.calls == other.calls == 2


@pytest.mark.usefixtures("_random_states_kept")
def test_a_plan_changes_nothing() -> None:
    model, x = everything(train=True), torch.randn(5, 3)
    seeds(1)
    before = values(model), identities(model)
    gradlib.plan_jacobian(model, x)
    gradlib.plan_jacobian(model, x, argnums="parameters")
    assert same(values(model), before[0])
    assert identities(model) == before[1]


def test_a_plan_names_some_of_many_outputs() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x.sin()[:, :size] for size in range(1, 6)]

    shown = str(gradlib.plan_jacobian(fn, torch.randn(4, 6)))
    assert "[4, 1, 6], [4, 2, 6], [4, 3, 6] and 2 more" in " ".join(shown.split())


@pytest.mark.parametrize("check", [True, False])
def test_running_statistics_change_once(check: bool) -> None:
    model, once = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    if check:
        with pytest.raises(CoupledSamplesError):
            gradlib.per_sample_jacobian(model, x)
    else:
        gradlib.per_sample_jacobian(model, x, check=False)
    once(x)
    assert model.num_batches_tracked == 1
    for ours, theirs in zip(model.buffers(), once.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_are_left_as_they_were() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    x.sin().sum().backward()
    before, grad = x.detach().clone(), x.grad
    ours = gradlib.per_sample_jacobian(lambda x: x.mul_(2).sin(), x)
    assert torch.equal(x, before)
    assert x.grad is grad
    assert x.requires_grad
    assert x.is_leaf
    assert not ours.requires_grad


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inside_no_grad(context: Callable[[], Any]) -> None:
    model = smooth_net(3, 2, 4)
    x = torch.randn(4, 3, dtype=torch.float64)
    reference = gradlib.per_sample_jacobian(model, x)
    with context():
        torch.testing.assert_close(gradlib.per_sample_jacobian(model, x), reference)
        found = gradlib.per_sample_jacobian(model, x.clone())
        torch.testing.assert_close(found, reference)
        assert not found.is_inference()


# Progress.


def test_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    x = torch.randn(3, 4)
    quiet = gradlib.per_sample_jacobian(torch.sin, x, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    gradlib.per_sample_jacobian(torch.sin, x, mode="loop")
    assert capsys.readouterr().err == ""
    shown = gradlib.per_sample_jacobian(torch.sin, x, mode="loop", progress=True)
    told = capsys.readouterr().err
    assert told.startswith(
        "\rJacobian: 25%\rJacobian: 50%\rJacobian: 75%\rJacobian: 100%"
    )
    assert told.endswith(" \r")
    assert torch.equal(quiet, shown)


# create_graph=True.


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


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_the_jacobian(mode: str, argnums: int | str) -> None:
    if (mode, argnums) == ("split", "parameters"):
        return
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


def test_every_error_is_ours() -> None:
    for call, _ in WRONG.values():
        with pytest.raises(GradlibError):
            call()
