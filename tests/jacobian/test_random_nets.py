"""The Jacobian of any net is that of each sample alone, whichever way it is computed.

The reference is torch.autograd.functional.jacobian of one sample after the other, in
float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradlib
from gradlib import NoSuchWayError
from gradlib.random_state import seed_all

from .samples_alone import MODES, alone, require_close, smooth_net

Spec = tuple[Any, ...]
"""A layer, as its name and sizes."""

Change = Callable[[Any], Any]
"""Gives a module or tensor another dtype."""

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
        seed_all(self.seed)
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
        seed_all(self.seed + 1)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, "auto"])
def test_no_mode_refuses_a_chain(mode: str, chunk: int | str) -> None:
    model, x = smooth_net(5, 4, 2, 4, 6), torch.randn(3, 5, dtype=torch.float64)
    ours = gradlib.per_sample_jacobian(model, x, mode=mode, chunk_size=chunk)
    [[reference]] = alone(model, x)
    require_close(ours, reference)
