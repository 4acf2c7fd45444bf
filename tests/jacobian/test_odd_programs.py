"""Programs that other ways to a Jacobian stumble over."""

import copy
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import CoupledSamplesError, NoSuchWayError

from .points import ROWS, alone, points, require_close


class OldStyle(torch.autograd.Function):
    """Cubes: forward(ctx, ...), without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


class WithHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.inner.register_full_backward_hook(lambda *_: None)
        self.inner.register_full_backward_pre_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def branching(x: Tensor) -> Tensor:
    h = x.sin()
    for _ in range(3):
        h = h * 2 if h.abs().sum() < 1e3 else h / 2
    return h


def item_in_a_condition(x: Tensor) -> Tensor:
    return x.square() if x.abs().max().item() < 100 else x


def with_nonzero(x: Tensor) -> Tensor:
    out = x.square()
    sample, place = (x > 0).nonzero(as_tuple=True)
    return out.index_put((sample, place), x[sample, place].sin())


def with_a_mask(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[x > 0] = x[x > 0] ** 3
    return out


def written_into_zeros(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        out[:, i] = x[:, : i + 1].sin().sum(1)
    return out


def overwriting(x: Tensor) -> Tensor:
    x.mul_(2).add_(1)
    x[:, 0] = x[:, 1].clone()
    return x.sin()


def gradient_inside(x: Tensor) -> Tensor:
    """A force: minus the gradient of an energy."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        energy = (x.square().sum(1) ** 2).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


def clamped_without_grad(x: Tensor) -> Tensor:
    y = 3 * x.sin()
    return y if torch.is_grad_enabled() else y.clamp(0, 1)


def rounded_without_grad(x: Tensor) -> Tensor:
    y = 3 * x.sin()
    return y if torch.is_grad_enabled() else (100 * y).int() / 100


def classes_without_grad(x: Tensor) -> Tensor:
    return x.sin() if torch.is_grad_enabled() else x.argmax(1)


def classes_unless_it_requires_grad(x: Tensor) -> Tensor:
    return x.sin() if x.requires_grad else x.argmax(1)


def with_a_force_if_it_requires_grad(x: Tensor) -> Tensor:
    y = x.sin()
    if x.requires_grad:
        y = y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return y


def with_func_inside(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: row.sin().prod()))(x)


def checkpointed(x: Tensor) -> Tensor:
    weight = torch.eye(3, dtype=x.dtype) + 0.5
    inner = checkpoint(lambda x: (x @ weight).tanh(), x, use_reentrant=False)
    return cast(Tensor, inner).square()


class Both(nn.Module):
    """An LSTM over tokens; only what it says at last counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][:, -1]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def attending(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x, x, is_causal=True)


PROGRAMS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...]]] = {
    "custom Function of the old form": (lambda: OldStyle.apply, (3,)),
    "full backward hooks": (WithHooks, (3,)),
    "control flow by values": (lambda: branching, (3,)),
    "item in a condition": (lambda: item_in_a_condition, (3,)),
    "nonzero": (lambda: with_nonzero, (3,)),
    "a mask": (lambda: with_a_mask, (3,)),
    "writes into zeros": (lambda: written_into_zeros, (3,)),
    "overwrites its input": (lambda: overwriting, (3,)),
    "scaled_dot_product_attention": (lambda: attending, (3, 4)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        (3, 4),
    ),
    "TransformerEncoderLayer in evaluation": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        (3, 4),
    ),
    "MultiheadAttention": (Heads, (3, 4)),
    "LSTM": (Both, (5, 3)),
    "checkpoint": (lambda: checkpointed, (3,)),
    "weight_norm": (lambda: weight_norm(nn.Linear(3, 2)), (3,)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(3, 2)).eval(), (3,)),
    "a gradient inside": (lambda: gradient_inside, (3,)),
    "torch.func inside": (lambda: with_func_inside, (3,)),
    "clamps without grad": (lambda: clamped_without_grad, (3,)),
    "rounds without grad": (lambda: rounded_without_grad, (3,)),
    "gives classes without grad": (lambda: classes_without_grad, (3,)),
    "looks at requires_grad": (lambda: classes_unless_it_requires_grad, (3,)),
    "a gradient if it requires grad": (lambda: with_a_force_if_it_requires_grad, (3,)),
    "cumprod": (lambda: lambda x: x.cumprod(1), (3,)),
    "sort": (lambda: lambda x: x.sort(1).values, (4,)),
    "interpolate": (lambda: lambda x: F.interpolate(x, scale_factor=2), (1, 3)),
    "max_pool2d": (lambda: nn.MaxPool2d(2), (1, 4, 4)),
    "a solved equation": (
        lambda: lambda x: torch.linalg.solve(x @ x.mT + torch.eye(2), x),
        (2, 2),
    ),
}


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_other_ways_stumble_over(name: str, mode: str) -> None:
    make, shape = PROGRAMS[name]
    fn = make()
    if isinstance(fn, nn.Module):
        fn = fn.double()
    x = points(4, *shape)
    before = x.clone()
    ours = gradlib.per_sample_jacobian(fn, x, mode=mode)
    assert torch.equal(x, before)
    assert not x.requires_grad
    require_close(ours, alone(fn, x))


@pytest.mark.parametrize("mode", ["forward", "split"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_other_modes_give_the_same_or_refuse(name: str, mode: str) -> None:
    make, shape = PROGRAMS[name]
    fn = make()
    if isinstance(fn, nn.Module):
        fn = fn.double()
    x = points(4, *shape)
    try:
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode)
    except NoSuchWayError:
        return
    require_close(ours, alone(fn, x), 1e-11)


def test_the_same_inputs_require_grad_in_every_call() -> None:
    seen: set[tuple[bool, ...]] = set()

    def fn(x: Tensor, y: Tensor, scale: Tensor, known: Tensor) -> Tensor:
        seen.add(tuple(it.requires_grad for it in (x, y, scale, known)))
        return (x.relu() + y.sin()) * scale * known

    x, y = points(4, 3), points(4, 3)
    x[0] = 0  # a kink, which is looked at once more
    known = points(3).requires_grad_()
    gradlib.per_sample_jacobian(fn, x, y, points(3), known, in_dims=(0, 0, None, None))
    assert seen == {(True, True, False, True)}


def test_other_outputs_in_float64() -> None:
    def fn(x: Tensor) -> Any:
        return (x.sin(), x) if x.dtype == torch.float64 else x.sin()

    x = points(4, 3, dtype=torch.float32)
    require_close(gradlib.per_sample_jacobian(fn, x), alone(torch.sin, x), 1e-6)
    with pytest.warns(UserWarning, match=r"in float64, which that takes, fn returned"):
        gradlib.per_sample_jacobian(fn, x.bfloat16())


def test_a_refusal_quotes_torch_in_a_sentence_of_its_own() -> None:
    with pytest.raises(NoSuchWayError, match=r"is not implemented\. Use mode="):
        gradlib.per_sample_jacobian(
            lambda x, y: F.multi_margin_loss(x, y, reduction="none"),
            torch.randn(3, 4),
            torch.tensor([0, 1, 3]),
            mode="forward",
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # may change
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_inside_are_refused(layout: torch.layout, check: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        rows: Any = [row.sin() for row in x]
        nested = torch.nested.as_nested_tensor(rows, layout=layout)
        return torch.nested.to_padded_tensor(nested, 0.0)

    for call in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
        with pytest.raises(NoSuchWayError, match=r"to_padded_tensor"):
            call(fn, torch.randn(3, 4), mode="loop", check=check)


def test_a_parameter_that_is_frozen_in_the_call_is_named() -> None:
    class Freezes(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            cast(nn.Module, self[0]).requires_grad_(False)
            return super().forward(input)

    model = Freezes(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    with pytest.raises(
        gradlib.JacobianArgumentError, match=r"froze 0\.weight, 0\.bias in"
    ):
        gradlib.per_sample_jacobian(model, points(4, 3), argnums="parameters")
    found = gradlib.per_sample_jacobian(model, points(4, 3), argnums="parameters")
    assert set(found) == {"2.weight", "2.bias"}


def test_what_was_made_in_inference_mode_is_named() -> None:
    x = points(4, 3)
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
        factor = torch.ones(4, 3).double()
    for fn in (model, lambda x: model(x) * 2):
        with pytest.raises(gradlib.JacobianArgumentError, match=r"0\.weight"):
            gradlib.per_sample_jacobian(fn, x, mode="loop")
    for ask in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
        with pytest.raises(gradlib.JacobianArgumentError, match="with a tensor made"):
            ask(lambda x: (x * factor).sin(), x)
    usual = copy.deepcopy(model)  # as the message says
    found = gradlib.per_sample_jacobian(usual, x, mode="loop")
    require_close(found, alone(usual, x))


def test_hooks_see_a_backward_pass() -> None:
    model, seen = WithHooks().double(), list[int]()
    model.inner.register_full_backward_hook(lambda *_: seen.append(1))
    gradlib.per_sample_jacobian(model, points(4, 3), mode="loop", check=False)
    assert len(seen) == 2


def test_a_reentrant_checkpoint_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(torch.sin, x, use_reentrant=True))

    for mode in ROWS:
        with pytest.raises(NoSuchWayError, match="use_reentrant=False"):
            gradlib.per_sample_jacobian(fn, points(4, 3), mode=mode)
    with pytest.raises(NoSuchWayError, match="use_reentrant=False"):
        gradlib.plan_jacobian(fn, points(4, 3))


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_the_check_goes_around_what_torch_cannot_go_back_through(mode: str) -> None:
    def fn(x: Tensor, z: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(torch.sin, x, use_reentrant=True)) * z

    x, z = torch.randn(3, 2), torch.randn(3, 2)
    found = gradlib.per_sample_jacobian(fn, x, z, argnums=1, mode=mode)
    torch.testing.assert_close(found, x.sin().diag_embed())
    with pytest.raises(CoupledSamplesError, match="the input of another"):
        gradlib.per_sample_jacobian(
            lambda x, z: fn(x, z) + x.mean(0), x, z, argnums=1, mode=mode
        )


def test_a_model_that_overwrites_what_it_computed_of_its_input() -> None:
    model = nn.Sequential(nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    weights = torch.eye(2)[:, :, None] * x.sigmoid()[:, None, None]
    torch.testing.assert_close(found["2.weight"], weights)
    with pytest.raises(NoSuchWayError, match="modified by an inplace operation"):
        gradlib.per_sample_jacobian(model, x)


def test_such_a_model_at_a_kink() -> None:
    model = nn.Sequential(
        nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(3, 2), nn.ReLU()
    )
    for it in model.parameters():
        nn.init.zeros_(it)
    x = torch.randn(4, 3)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    assert not found["2.weight"].any()


def test_what_was_overwritten_cannot_be_gone_back_through() -> None:
    def fn(x: Tensor) -> Tensor:
        h = 2 * x
        y = h.sin()
        h.add_(1)
        return y

    for ask in (gradlib.plan_jacobian, gradlib.per_sample_jacobian):
        with pytest.raises(NoSuchWayError, match="modified by an inplace operation"):
            ask(fn, points(4, 3))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(3),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "group norm": lambda: nn.GroupNorm(1, 3),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_a_norm_has_saved_and_torch_refuses_to_read(name: str) -> None:
    norm = NORMS[name]().double()

    def fn(x: Tensor) -> Tensor:
        h = 2 * x
        y = norm(h).sin()
        h.add_(1)
        return y

    for ask in (gradlib.plan_jacobian, gradlib.per_sample_jacobian):
        with pytest.raises(NoSuchWayError, match="modified by an inplace operation"):
            ask(fn, points(4, 3))
    x = points(4, 3).requires_grad_()
    y = norm(x)
    y.sum().backward()
    with pytest.raises(NoSuchWayError, match="a second time"):
        gradlib.per_sample_jacobian_from_graph(y, x)


@pytest.mark.cpu  # a GPU may save a copy of an input that has its channels last
def test_what_the_weights_of_a_norm_need_and_torch_refuses_to_read() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(1, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            h = 1 * x
            y = self.norm(h).sin()
            h.add_(1)
            return y

    norm, x = Overwriting(), points(4, 3, 2, 2)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        with pytest.raises(NoSuchWayError, match="modified by an inplace operation"):
            gradlib.per_sample_jacobian(norm, given, argnums="parameters")


@pytest.mark.parametrize("mode", [*ROWS, "forward", "split"])
@pytest.mark.parametrize("check", [True, False])
def test_dropout_has_one_mask_for_each_sample(check: bool, mode: str) -> None:
    masks: list[Tensor] = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).exp()
            dropped = self.drop(h)
            masks.append((dropped / h).detach())
            return self.last(dropped)

    model, x = Seen().double(), points(6, 3)
    ours = gradlib.per_sample_jacobian(model, x, mode=mode, check=check)
    mask, h = masks[0], model.first(x).exp()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert len(mask.unique(dim=0)) > 1
    inner = (mask * h)[:, :, None] * model.first.weight
    require_close(ours, (model.last.weight @ inner).detach())


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (
        lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)),
        (3,),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()),
        (1, 5, 5),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        (3, 8),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Tanh()), (3,)),
    "LSTM": (Both, (4, 3)),
}


# On a GPU torch calls cuDNN for bfloat16, and does not lay the weights as that wants.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_nets_in_narrow_dtypes_pass(name: str, dtype: torch.dtype) -> None:
    make, shape = NETS[name]
    model = make().to(dtype)
    ours = gradlib.per_sample_jacobian(model, points(4, *shape, dtype=dtype))
    assert ours.dtype == dtype
    assert ours.any()
    by_name = gradlib.per_sample_jacobian(
        model, points(4, *shape, dtype=dtype), argnums="parameters"
    )
    for key, parameter in model.named_parameters():
        assert by_name[key].dtype == dtype
        assert by_name[key].shape[2:][-parameter.dim() :] == parameter.shape


NESTED_FOR: dict[str, Any] = {
    "a function": torch.sin,
    "a layer": nn.Linear(3, 2),
    "a small net": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "a transformer": nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("fn", NESTED_FOR.values(), ids=NESTED_FOR.keys())
def test_a_nested_tensor_of_strided_parts(fn: Any) -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    with pytest.raises(gradlib.JacobianArgumentError, match="is a nested tensor"):
        gradlib.per_sample_jacobian(fn, x)


class Shrinks(nn.Linear):
    """Writes to its weight at each call."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(input).sin()


def test_a_weight_that_each_call_overwrites_is_as_it_was_for_the_next() -> None:
    model, x = Shrinks(3, 2).double(), points(4, 3)
    before = model.weight.detach().clone()
    ours = gradlib.per_sample_jacobian(model, x)
    halved = nn.Linear(3, 2).double()
    halved.load_state_dict({"weight": before / 2, "bias": model.bias.detach()})
    require_close(ours, alone(lambda x: halved(x).sin(), x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # may change
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_beside_the_way_are_no_matter(layout: torch.layout) -> None:
    rows = [torch.ones(it, 3, requires_grad=True) for it in (2, 4)]

    def fn(x: Tensor) -> Tensor:
        nested: Any = torch.nested.as_nested_tensor(rows, layout=layout)
        return x.sin() + torch.nested.to_padded_tensor(nested.cos(), 0.0).sum()

    x = torch.randn(3, 4)
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    torch.testing.assert_close(found, x.cos().diag_embed())


def test_a_warning_that_was_shown_is_not_shown_again() -> None:
    def fn(x: Tensor) -> Tensor:
        warnings.warn("said once", stacklevel=1)
        return x.sin().cumsum(1)

    # Modules that torch loads in its first batched pass set filters of their own.
    gradlib.per_sample_jacobian(lambda x: x.sin().cumsum(1), points(3, 4), check=False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            gradlib.per_sample_jacobian(fn, torch.randn(3, 4), check=False)
    assert [str(it.message) for it in shown] == ["said once"]


def from_graph(fn: Callable[[Tensor], Tensor], x: Tensor, max_bytes: int) -> Any:
    x = x.detach().requires_grad_()
    return gradlib.per_sample_jacobian_from_graph(fn(x), x, max_bytes=max_bytes)


@pytest.mark.parametrize(
    "way", [gradlib.per_sample_jacobian, gradlib.plan_jacobian, from_graph]
)
def test_a_jacobian_in_a_compiled_function(way: Callable[..., Any]) -> None:
    def step(fn: nn.Module, x: Tensor) -> str:
        return str(way(fn, x, max_bytes=2**20))  # a plan shows it, or what is free

    fn, x = nn.Sequential(nn.Linear(3, 4), nn.GELU()).double(), points(5, 3)
    torch.compiler.reset()
    assert torch.compile(step, backend="eager")(fn, x) == step(fn, x)


def of_what_is_gone() -> Any:
    return weakref.proxy(nn.ReLU())


@pytest.mark.parametrize("made", [of_what_is_gone, partial(MagicMock, spec=nn.Module)])
def test_what_stands_for_something_else(made: Callable[[], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["trainer"] = made()

        def forward(self, x: Tensor, _given: object) -> Tensor:
            return x.sin()

    x = points(5, 3)
    jacobian = gradlib.per_sample_jacobian(Model(), x, made(), in_dims=(0, None))
    require_close(jacobian, alone(torch.sin, x))
