"""Paths that autograd does not see are named, and no others, also in float32 alone."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import DetachedPathError, NoSuchWayError
from gradlib.jacobian import per_sample
from gradlib.random_state import seed_all

from .points import alone, only_as, points, require_close

Function = Callable[[Tensor], Tensor]


def test_a_jacobian_that_is_not_autograds_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Differences and autograd agree; what was computed is something else.

    Row by row is what autograd gives, and what is left where other ways are wrong.
    """
    real: Any = per_sample.compute

    def wrong(graph: Any, plan: Any, **options: Any) -> Any:
        blocks = real(graph, plan, **options)
        for block in blocks.values():
            block[0, 0] *= 1 if plan.mode == "loop" else -1
        return blocks

    x = points(3, 4)
    right = gradlib.per_sample_jacobian(torch.sin, x)
    monkeypatch.setattr(per_sample, "compute", wrong)
    said = 'not what a backward pass gives.* Use mode="loop"'
    with pytest.raises(NoSuchWayError, match=said):
        gradlib.per_sample_jacobian(torch.sin, x, mode="reverse")
    assert torch.equal(gradlib.per_sample_jacobian(torch.sin, x), right)


class Kernel(torch.autograd.Function):
    """Stands for one that is written for float32, and has a wrong backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.slope * grads[0] * x.exp(), None


@pytest.mark.parametrize("slope", [1.0, 0.93, 1.09])
@pytest.mark.parametrize("seed", range(4))
def test_where_float64_is_not_to_be_had_a_twentieth_is_seen(
    slope: float, seed: int
) -> None:
    seed_all(seed)

    def fn(x: Tensor) -> Any:
        return Kernel.apply(x, slope)

    with nullcontext() if slope == 1 else pytest.raises(gradlib.DetachedPathError):
        gradlib.per_sample_jacobian(fn, points(5, 6, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(4))
def test_nets_for_float32_alone_leave_no_doubt(seed: int) -> None:
    seed_all(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU()
    )

    def fn(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        y: Tensor = model(x)
        return y

    gradlib.per_sample_jacobian(fn, torch.randn(8, 1, 5, 5))  # or it would warn


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


class WrongFactor(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return 3 * grads[0]


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.cos()
    return x * factor


def by_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(numpy.sin(x.detach().double().cpu().numpy())).to(x)


def one_way_only(x: Tensor) -> Tensor:
    return torch.cat([x.sin(), x.detach().cos() + 0 * x], 1)


CUT: dict[str, Callable[..., Any]] = {
    "an integer cast before a split": lambda x: (
        x.sin()
        + (lambda whole, parts: torch.cat(parts, 1) * whole * 0.1)(
            (10 * x).long(), x.detach().cos().split(1, 1)
        )
    ),
    "detach": lambda x: x * x.detach().sin(),
    "data": lambda x: x * x.data.sin(),
    "no_grad": under_no_grad,
    "NumPy": by_numpy,
    "an integer cast": lambda x: x.sin() + (10 * x).long() * 0.1,
    "an integer cast and a product": lambda x: x * (3 * x).int(),
    "integers put where an index says": lambda x: (
        x.sin() + (x * 0).scatter(1, (x > 0).long(), (10 * x).long().to(x) / 10)
    ),
    "integers computed from a cast": lambda x: x.sin() + (1 - (10 * x).long()) * 0.1,
    "item": lambda x: (
        x * torch.stack([r.sum().sin() * 0 + r[0].item() for r in x])[:, None]
    ),
    "tolist": lambda x: x + torch.tensor(x.tolist(), dtype=x.dtype).sin(),
    "a weight cut": lambda x: torch.softmax(x.detach(), 1) * x,
    "half of the outputs": one_way_only,
    "a wrong backward": lambda x: x + cast(Any, WrongFactor.apply)(x),
    "straight through": lambda x: cast(Any, StraightThrough.apply)(5 * x),
    "straight through by detach": lambda x: x.sin() + (5 * x - x.sin()).detach(),
    "the sign of a step": lambda x: x.sin() + (x.tanh() - x).detach(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUT)
def test_a_cut_path_is_seen(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(CUT[name], points(4, 3, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 4), (16, 64), (64, 256)])
@pytest.mark.parametrize("levels", [1, 10, 127])
def test_rounding_of_many_entries_is_seen(shape: tuple[int, int], levels: int) -> None:
    """One of many steps over an edge wherever a difference is taken."""

    def straight(x: Tensor) -> Tensor:
        return x + ((levels * x).round() / levels - x).detach()

    x = points(*shape, dtype=torch.float32)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(straight, x)
    ours = gradlib.per_sample_jacobian(straight, x, check=False)
    assert torch.equal(ours, torch.eye(shape[1]).expand(shape[0], -1, -1))


@pytest.mark.parametrize("name", CUT)
def test_a_cut_path_of_one_sample_is_seen(name: str) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(CUT[name], points(1, 3))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("detach", r"and fn uses \.detach\(\) in test_cut_paths\.py:\d+;"),
        ("a wrong backward", r"such as \.detach\(\), .*; a backward of your own"),
    ],
)
def test_what_cuts_a_path_is_named(name: str, hint: str) -> None:
    with pytest.raises(DetachedPathError, match=f"Something cuts a path, {hint}"):
        gradlib.per_sample_jacobian(CUT[name], points(4, 3))


def test_a_cut_path_beside_what_changes_where_autograd_records() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * x.detach().sin() + torch.is_grad_enabled()

    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(fn, points(4, 3))


def test_a_hook_of_all_modules_is_named() -> None:
    def doubled(_module: Any, given: Any, _got: Any) -> Any:
        return tuple(2 * it for it in given)

    handle = register_module_full_backward_hook(doubled)
    try:
        with pytest.raises(DetachedPathError, match="the backward hook of all modules"):
            gradlib.per_sample_jacobian(nn.Softmin(1), points(4, 3))
    finally:
        handle.remove()


def test_an_output_that_is_there_with_grad_alone_is_looked_at() -> None:
    def fn(x: Tensor) -> Any:
        y = x.sin()
        return (y, y * y.detach()) if torch.is_grad_enabled() else y

    with pytest.raises(DetachedPathError, match=r"output\[1\] changes"):
        gradlib.per_sample_jacobian(fn, points(4, 3))


def doubled(gradient: Tensor) -> Tensor:
    return 2 * gradient


def with_a_hook(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(doubled)
    return y + x


def hooked(layer: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    model[layer].register_full_backward_pre_hook(lambda _, grads: (2 * grads[0],))
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hooked(1), r'the backward hook of "1", a Tanh, may change gradients'),
        (lambda: hooked(1)[1], r"the backward hook of the Tanh may change gradients"),
        (lambda: with_a_hook, r"; a hook that fn has set may change gradients; or"),
        (lambda: CUT["detach"], r"; a hook may change gradients; or"),
    ],
)
def test_hooks_that_may_change_gradients_are_named(
    make: Callable[[], Function], said: str
) -> None:
    with pytest.raises(DetachedPathError, match=said):
        gradlib.per_sample_jacobian(make(), points(4, 3))


@pytest.mark.parametrize(
    ("batch", "said"),
    [(1, "(sample 0)"), (3, "(samples 0, 1, 2)"), (5, "(samples 0, 1, 2 and 2 more)")],
)
def test_some_of_the_samples_of_a_cut_path_are_listed(batch: int, said: str) -> None:
    with pytest.raises(DetachedPathError) as caught:
        gradlib.per_sample_jacobian(CUT["detach"], points(batch, 3))
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", ["reverse", "forward", "split", "loop"])
def test_a_cut_path_is_seen_in_every_mode(mode: str) -> None:
    with pytest.raises(DetachedPathError, match=r"\.detach\(\) in test_cut_paths"):
        gradlib.per_sample_jacobian(CUT["detach"], points(4, 3), mode=mode)


class Gated(nn.Module):
    """A net with a gate that no gradient goes through."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8, dtype=dtype)
        self.last = nn.Linear(8, 2, dtype=dtype)
        self.cut = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gate = torch.sigmoid(3 * (h.detach() if self.cut else h))
        return self.last(h * gate)


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cut_path_inside_a_module(dtype: torch.dtype, argnums: int | str) -> None:
    model, x = Gated(dtype), points(5, 3, dtype=dtype)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(model, x, argnums=argnums)
    model.cut = False
    gradlib.per_sample_jacobian(model, x, argnums=argnums)


def test_a_cut_path_of_a_single_sample_of_many() -> None:
    def fn(x: Tensor) -> Tensor:
        kept = torch.tensor([True] * 7 + [False], device=x.device)[:, None]
        return torch.where(kept, x.sin(), x * x.detach().cos())

    with pytest.raises(DetachedPathError, match="sample 7"):
        gradlib.per_sample_jacobian(fn, points(8, 3))


def test_a_cut_path_hides_along_no_direction() -> None:
    """One sample has one slope, which may be the same with the path and without."""
    for seed in range(30):
        torch.manual_seed(seed)
        x, seen, cut = points(3, 1, 2).unbind()
        cut = 0.05 * cut * seen.norm() / cut.norm()
        with pytest.raises(DetachedPathError):
            gradlib.per_sample_jacobian(
                lambda x, a=seen, b=cut: (x * a + x.detach() * b).sum(1), x
            )


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_a_cut_path_from_what_is_zero_is_seen(rest: float) -> None:
    def cut(x: Tensor) -> Tensor:
        return x.sin() + x[:, :1].detach()

    x = torch.full((4, 3), rest)
    x[:, 0] = 0
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(cut, x)


def test_without_check_a_cut_path_is_let_be() -> None:
    x = points(4, 3)
    ours = gradlib.per_sample_jacobian(CUT["detach"], x, check=False)
    require_close(ours, torch.diag_embed(x.sin()))


def logged(x: Tensor) -> Tensor:
    logging.getLogger(__name__).debug("mean %s", x.detach().mean().item())
    logging.getLogger(__name__).debug("all %s", x.detach().double().cpu().numpy().sum())
    return x.sin()


def taking_the_largest(x: Tensor) -> Tensor:
    return x.gather(1, x.detach().argmax(1, keepdim=True))


def shifted(x: Tensor) -> Tensor:
    top = x.detach().amax(1, keepdim=True)
    return (x - top).exp().sum(1).log() + top[:, 0]


def table(x: Tensor) -> Tensor:
    return torch.arange(1, 28).view(9, 3).to(x)


def rows(x: Tensor) -> Tensor:
    return x.long().sum(1) % 9


def places(x: Tensor) -> Tensor:
    return (10 * x.double()).long().abs() % 9


HARMLESS: dict[str, Function] = {
    "log-sum-exp": shifted,
    "logging": logged,
    "argmax as an index": taking_the_largest,
    "argmax as an integer index": lambda x: x[torch.arange(len(x)), x.argmax(1).long()],
    "a row of a table": lambda x: x * table(x)[rows(x)],
    "a row by index_select": lambda x: x * table(x).index_select(0, rows(x)),
    "a condition on integers": lambda x: torch.where(x.long() > 0, x.sin(), x.cos()),
    "an embedding of integers": lambda x: x * F.embedding(rows(x), table(x)),
    "a bag of rows": lambda x: x * F.embedding_bag(rows(x)[:, None], table(x)),
    "added where an index says": lambda x: torch.zeros(
        (len(x), 9), dtype=x.dtype
    ).scatter_add(1, places(x), x),
    "added there in place": lambda x: x.new_zeros(len(x), 9).scatter_add_(
        1, places(x), x
    ),
    "put where an index says": lambda x: x.new_zeros(len(x), 9).scatter(
        1, places(x), x.sin()
    ),
    "the largest at an index": lambda x: x.new_zeros(len(x), 9).scatter_reduce(
        1, places(x), x.sin(), "amax", include_self=False
    ),
    "put by an index": lambda x: (x * 0).index_put(
        (torch.arange(len(x)), x.long()[:, 0].abs() % 3), x.sin()[:, 1]
    ),
    "one hot": lambda x: x * F.one_hot(rows(x) % 3, 3).to(x),
    "a class": lambda x: F.cross_entropy(x, rows(x) % 3, reduction="none"),
    "a class, by its logarithms": lambda x: F.nll_loss(
        x.sin(), rows(x) % 3, reduction="none"
    ),
    "a detached condition": lambda x: torch.where(x.detach() > 0.1, x.sin(), x.cos()),
    "a mask of a detached value": lambda x: x * (x.detach() > 0),
    "normalised and undone": lambda x: (x / x.detach().norm()) * x.detach().norm(),
    "integers that do not depend": lambda x: x * torch.arange(3).long().to(x),
    "a count": lambda x: x.sin() * x.shape[1],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_detach_that_changes_nothing(name: str, dtype: torch.dtype) -> None:
    fn, x = HARMLESS[name], points(4, 3, dtype=dtype)
    ours = gradlib.per_sample_jacobian(fn, x)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}
    require_close(ours, alone(fn, x.double()), tolerance[dtype])


def dead(x: Tensor) -> Tensor:
    return F.relu(x - 100)


ZEROS: dict[str, Function] = {
    "dead ReLU": dead,
    "times zero": lambda x: x * 0,
    "a power of zero": lambda x: x**0,
    "saturated": lambda x: torch.clamp(x, 50, 60),
    "a constant part": lambda x: torch.cat([x * 0, x.new_ones(len(x), 2)], 1),
    "a whole number": lambda x: x.round(),
    "the sign": lambda x: x.sign(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZEROS)
def test_true_zeros_pass(name: str, dtype: torch.dtype) -> None:
    x = points(4, 3, dtype=dtype)
    assert not gradlib.per_sample_jacobian(ZEROS[name], x).any()


def at_kinks(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0.0, 0, 1], [2, 2, 2], [-1, 0, 0.5]], dtype=dtype)


KINKS: dict[str, Function] = {
    "relu": F.relu,
    "abs": torch.abs,
    "leaky_relu": F.leaky_relu,
    "hardtanh": lambda x: F.hardtanh(x, -1, 2),
    "the largest": lambda x: x.amax(1),
    "the largest by index": lambda x: x.max(1).values,
    "the larger of two": lambda x: torch.maximum(x[:, 0], x[:, 1]),
    "sorted": lambda x: x.sort(1).values,
    "max_pool1d": lambda x: F.max_pool1d(x[:, None], 3)[:, 0],
    "median": lambda x: x.median(1).values,
    "relu of differences": lambda x: F.relu(x[:, :1] - x) + x.sin(),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x * 0 + 1, reduction="none"),
    "a deep one": lambda x: F.relu(F.relu(x) - 1).abs() + x,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINKS)
def test_kinks_and_ties_pass(name: str, dtype: torch.dtype) -> None:
    fn, x = KINKS[name], at_kinks(dtype)
    ours = gradlib.per_sample_jacobian(fn, x)
    require_close(ours, alone(fn, x), 0.01)


class Checkpointed(nn.Module):
    """A net whose biases are zero, so that inputs of zero lie on every kink."""

    def __init__(self, act: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 16), nn.Linear(16, 16)])
        for layer in self.layers:
            nn.init.zeros_(cast(nn.Linear, layer).bias)
        self.last, self.act = nn.Linear(16, 2), act

    def inner(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return self.act(second(first(x).relu()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("seed", range(4))
def test_kinks_and_ties_inside_a_checkpoint_pass(seed: int, argnums: Any) -> None:
    """Its backward calls modules, which must have the weights of the call it is of."""
    for act in (
        torch.abs,
        lambda x: x.relu() + (50 * x).sin(),
        lambda x: torch.maximum(x, x.roll(1, -1)),
        lambda x: (30 * x).tanh(),
        lambda x: x.softmax(1, dtype=torch.float32).to(x.dtype) + x.abs().float(),
    ):
        torch.manual_seed(seed)
        net, x = Checkpointed(act), torch.randn(6, 3)
        x[2:4] = 0
        gradlib.per_sample_jacobian(net, x, argnums=argnums)


class Adjoint(torch.autograd.Function):
    """Goes backwards through one Euler step, from where the step came to."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 0.5 * module(x)
        ctx.module = module
        ctx.save_for_backward(y, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, *weights = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            change = 0.5 * ctx.module(y)
        back, *to_weights = torch.autograd.grad(change, [y, *weights], grads[0])
        return None, grads[0] + back, *to_weights


class Stepped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return cast(Any, Adjoint.apply)(self.rate, x, *self.rate.parameters())


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_a_backward_that_calls_modules_may_be_wrong(argnums: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(DetachedPathError, match="a backward of your own may be wrong"):
        gradlib.per_sample_jacobian(Stepped(), torch.randn(5, 3), argnums=argnums)


def test_kinks_beside_the_point_take_a_pair_of_calls_more() -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return F.relu(x - 1) + x.square(), x[:, :0]

    x = torch.full((4, 8), 1 + 5e-7)  # nearer than a step, and no kink itself
    ours, _ = gradlib.per_sample_jacobian(fn, x)
    assert len(calls) == 5
    require_close(ours, torch.diag_embed(1 + 2 * x), 1e-6)


def test_kinks_at_the_point_are_first_looked_at_from_beside_it() -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return F.relu(x - 1) + x.square(), x[:, :0]

    gradlib.per_sample_jacobian(fn, torch.ones(4, 8))
    assert len(calls) == 17  # with a look at the point before, nine more


@pytest.mark.parametrize("size", [1e-120, 1e-170, 1e-250])
def test_a_cut_path_of_slopes_whose_squares_are_zero_is_seen(size: float) -> None:
    x = points(3, 4)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: size * (x.sin() + x.detach().cos()), x)
    found = gradlib.per_sample_jacobian(lambda x: size * x.sin().cumsum(1), x)
    assert found.count_nonzero() == 3 * 10


def test_a_large_constant_hides_no_cut_path_from_a_shorter_step() -> None:
    def cut(x: Tensor) -> Tensor:
        return x.sin() + (x / 30).detach() + 7e5

    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(cut, torch.ones(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", KINKS)
def test_a_cut_path_at_a_kink_is_seen(name: str) -> None:
    fn = KINKS[name]
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(
            lambda x: fn(x) * (x.sum(1) + 0.3).detach().sin().reshape(
                -1, *[1] * (fn(x).dim() - 1)
            ) + fn(x),
            at_kinks(torch.float64),
        )  # fmt: skip


def test_a_function_of_float32_alone_is_checked_in_it() -> None:
    x = points(4, 3, dtype=torch.float32)
    for fn in (torch.sin, F.relu, *(ZEROS[it] for it in ("dead ReLU", "times zero"))):
        gradlib.per_sample_jacobian(only_as(torch.float32, fn), x)
    for name in ("detach", "no_grad", "a wrong backward"):
        with pytest.raises(DetachedPathError):
            gradlib.per_sample_jacobian(only_as(torch.float32, CUT[name]), x)


def test_what_was_not_checked_is_said() -> None:
    x = points(4, 3, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="did not look for cut paths") as said:
        gradlib.per_sample_jacobian(only_as(torch.bfloat16, torch.sin), x)
    assert said[0].filename == __file__


@pytest.mark.cpu  # a GPU forgets the padding, and that is said
def test_means_that_are_right_are_not_named() -> None:
    images = points(3, 2, 4, 4).to(memory_format=torch.channels_last)

    def fn(x: Tensor) -> Tensor:
        means = F.avg_pool2d(x.to(memory_format=torch.channels_last), 2, padding=1)
        return means * x.detach().sum((1, 2, 3), keepdim=True)

    with pytest.raises(DetachedPathError, match="Something cuts a path") as caught:
        gradlib.per_sample_jacobian(fn, images)
    assert "padding" not in str(caught.value)


@pytest.mark.cpu  # with other draws, as of a GPU, another step may leave its domain
def test_a_cut_path_where_a_function_ends_is_in_doubt() -> None:
    x = torch.full((2, 3), 0.9999, dtype=torch.float64)
    with pytest.warns(UserWarning, match="cannot tell whether output changes"):
        gradlib.per_sample_jacobian(lambda x: (2 * x - x.detach()).asin(), x)


def test_a_constant_beside_a_jump_has_no_slope() -> None:
    """There autograd follows nothing."""

    def fn(x: Tensor) -> Tensor:
        return 2 * x if x.max() <= 0 else torch.zeros_like(x)

    x = torch.zeros(3, 1, dtype=torch.float64)
    require_close(gradlib.per_sample_jacobian(fn, x), alone(fn, x))


def test_a_constant_may_be_written_into_memory_of_ones_own() -> None:
    factor, memory = torch.randn(3), torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        torch.mul(factor, 2, out=memory.zero_())
        return x.sin() * memory

    x = points(4, 3, dtype=torch.float32)
    require_close(gradlib.per_sample_jacobian(fn, x), alone(fn, x), 1e-6)
    assert torch.equal(memory, 2 * factor)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: fn(x) + x.detach() * memory, x)


def test_a_folder_of_ones_own_may_be_called_torch() -> None:
    space: dict[str, Any] = {}
    code = "def fn(x):\n    return x * x.detach()"
    exec(compile(code, "/somebody/torch/gradlib/jacobian/own.py", "exec"), space)
    with pytest.raises(DetachedPathError, match=r"\.detach\(\) in own\.py:2"):
        gradlib.per_sample_jacobian(space["fn"], points(4, 3))


class GivenOnlyData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.part, x, use_reentrant=True)
        return self.last(hidden.tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_given_only_data_is_among_the_causes() -> None:
    torch.manual_seed(0)
    with pytest.raises(DetachedPathError, match="use_reentrant=True that is given onl"):
        gradlib.per_sample_jacobian(
            GivenOnlyData(), points(5, 3).float(), argnums="parameters"
        )
