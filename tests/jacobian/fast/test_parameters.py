"""Passes of all samples at once make it cheaper, never another: the loop says so."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.jacobian import compute
from gradlib.jacobian.arguments import read
from gradlib.jacobian.fast.parameters import by_sample
from gradlib.jacobian.fast.parameters.by_sample import BySample
from gradlib.jacobian.fast.parameters.rules import KNOWN
from gradlib.jacobian.fast.parameters.uses import find_uses
from gradlib.jacobian.run import run
from gradlib.random_state import seed_all

from .lines import double
from .operations import NO_CUDNN

BATCH = 4


@pytest.fixture(autouse=True)
def _always_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_sample, "LEAST", 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the chunks that it was taken with, and proven, as it is."""
    chunks: list[int] = []
    tried: list[int] = []
    write: Any = BySample._write
    shortened: Any = compute._shortened

    def noted(self: BySample, blocks: Any, chunk: int) -> None:
        tried.append(chunk)
        write(self, blocks, chunk)

    def proven(*given: Any, **how: Any) -> Any:
        tried.clear()
        found = shortened(*given, **how)
        chunks.extend(tried if found is not None else [])
        return found

    monkeypatch.setattr(BySample, "_write", noted)
    monkeypatch.setattr(compute, "_shortened", proven)
    return chunks


def flat(found: Any) -> dict[str, Tensor]:
    """Return the parts of a Jacobian by name."""
    if isinstance(found, dict):
        return {
            f"{name}.{more}": tensor
            for name, inside in found.items()
            for more, tensor in flat(inside).items()
        }
    return {"": found}


def require_same(model: nn.Module, *inputs: Any, **how: Any) -> None:
    """Fail unless the Jacobian is that of the loop."""
    how = {"argnums": "parameters", "check": False} | how
    truth = flat(gradlib.per_sample_jacobian(model, *inputs, mode="loop", **how))
    found = flat(gradlib.per_sample_jacobian(model, *inputs, **how))
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
        assert error <= 1e-12, name


class Of(nn.Module):
    """A function with parameters of its own."""

    def __init__(self, fn: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn = fn
        self.weights = nn.ParameterList(double(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Return what it makes, with samples apart and entries not alike."""
        y = self.fn(x, *self.weights)
        return (y * y).sin().flatten(1).cumsum(1)[:, -3:]


# A sample is (5, 4), and also with as many tokens as there are samples.
# The mean and the variance of four channels.
MEAN, VARIANCE = torch.arange(8, dtype=torch.float64).add(1).view(2, 4)

ALONE: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, b: F.linear(x[:, 0], w, b), [(3, 4), (3,)]),
    "of tokens": (F.linear, [(3, 4), (3,)]),
    "without bias": (F.linear, [(3, 4)]),
    "product": (lambda x, w: x @ w, [(4, 3)]),
    "product of vectors": (lambda x, w: x[:, 0] @ w, [(4, 3)]),
    "scaled": (
        lambda x, b, w: torch.addmm(b, x[:, 0], w, beta=0.5, alpha=2),
        [(3,), (4, 3)],
    ),
    "one bias": (lambda x, b, w: torch.addmm(b, x[:, 0], w), [(1, 1), (4, 3)]),
    "tokens first": (
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b).transpose(0, 1),
        [(3, 4), (3,)],
    ),
    "tokens first, folded": (
        lambda x, w: (
            x.transpose(0, 1).reshape(-1, 4).mm(w).sin().view(-1, BATCH, 3)
        ).transpose(0, 1),
        [(4, 3)],
    ),
    "add": (lambda x, a, b: x + a + torch.add(b, x, alpha=3), [(5, 4), (4,)]),
    "add to one": (lambda x, a, b: (a + x[:, :1]) - b, [(5, 1), (1, 5, 4)]),
    "subtract": (lambda x, a, b: a - torch.sub(x, b, alpha=2), [(4,), (5, 1)]),
    "multiply": (lambda x, a, b: a * x * b, [(4,), (1, 5, 1)]),
    "expand": (
        lambda x, a: torch.cat([a.expand(len(x), -1, -1), x], 1),
        [(1, 1, 4)],
    ),
    "layer norm": (lambda x, w, b: F.layer_norm(x, [4], w, b), [(4,), (4,)]),
    "layer norm of all": (
        lambda x, w: F.layer_norm(x, x.shape[1:], w),
        [(5, 4)],
    ),
    "layer norm, tokens first": (
        lambda x, w, b: F.layer_norm(x.transpose(0, 1), [4], w, b).transpose(0, 1),
        [(4,), (4,)],
    ),
    "group norm": (lambda x, w, b: F.group_norm(x.mT, 2, w, b), [(4,), (4,)]),
    "group norm of vectors": (
        lambda x, w, b: F.group_norm(x[:, 0], 2, w, b),
        [(4,), (4,)],
    ),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x.mT, MEAN, VARIANCE, w, b),
        [(4,), (4,)],
    ),
    "batch norm of vectors": (
        lambda x, w, b: F.batch_norm(x[:, 0], MEAN, VARIANCE, w, b, eps=0.5),
        [(4,), (4,)],
    ),
    "embedding": (
        lambda x, w: F.embedding((3 * x[..., 0]).long().abs() % 6, w, padding_idx=1),
        [(6, 3)],
    ),
    "embedding without padding": (
        lambda x, w: F.embedding((3 * x[..., 0]).long().abs() % 6, w),
        [(6, 3)],
    ),
    "convolution": (F.conv1d, [(3, 5, 2), (3,)]),
    "convolution in steps": (
        lambda x, w: F.conv1d(x, w, stride=2, padding=1, dilation=2),
        [(3, 5, 2)],
    ),
    "convolution of images": (
        lambda x, w, b: F.conv2d(
            x[:, None].expand(-1, 2, -1, -1), w, b, (2, 1), (1, 0), (1, 2)
        ),
        [(3, 2, 2, 2), (3,)],
    ),
    "convolution by lists of one": (
        lambda x, w: F.conv2d(x[:, None], w, stride=[2], padding=[1], dilation=[2]),
        [(3, 1, 2, 2)],
    ),
    "convolution of groups": (
        lambda x, w, b: F.conv2d(
            x[:, None].expand(-1, 4, -1, -1), w, b, padding=1, groups=2
        ),
        [(6, 2, 3, 3), (6,)],
    ),
    "convolution of volumes": (
        lambda x, w: F.conv3d(x.view(-1, 1, 5, 2, 2), w, padding=(1, 0, 1)),
        [(2, 1, 3, 2, 2)],
    ),
}


@pytest.mark.parametrize("tokens", [5, BATCH])
@pytest.mark.parametrize("name", ALONE)
def test_an_operation(name: str, tokens: int, taken: list[int]) -> None:
    fn, shapes = ALONE[name]
    turned = [tuple(tokens if it == 5 else it for it in shape) for shape in shapes]
    if "volumes" in name and tokens != 5:
        return
    require_same(Of(fn, *turned), double(BATCH, tokens, 4))
    assert taken


def test_every_rule_is_among_them() -> None:
    seen: set[tuple[str, int]] = set()
    for fn, shapes in ALONE.values():
        arguments = read(Of(fn, *shapes), (double(BATCH, 5, 4),), "parameters", 0)
        uses = find_uses(run(arguments)[0])
        assert uses
        seen |= {(use.node.name(), use.index) for use in uses}
    known = {(name, index) for name, rules in KNOWN.items() for index in rules}
    # cuDNN has one more, of images, and the other is for vectors.
    unseen = {("CudnnBatchNormBackward0", index) for index in (1, 2) if NO_CUDNN}
    assert known - seen == unseen
    assert seen <= known


class Attention(nn.Module):
    """Tokens that look at each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention's output."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v))


class Placed(nn.Module):
    """Adds to each token what stands for its place."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(tokens, width))
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return self.scale * (x + self.place)


KINDS = ("linear", "norm", "attention", "place", "block")


@st.composite
def nets(draw: Any) -> tuple[nn.Module, Tensor]:
    """Draw a net of tokens or images, and what goes into it."""
    batch = draw(st.integers(2, 5))
    layers: list[nn.Module] = []
    acts = st.sampled_from([nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid])
    tokens, width = draw(st.integers(1, 5)), 4
    if draw(st.booleans()):
        for _ in range(draw(st.integers(1, 3))):
            wide = 2 * draw(st.integers(1, 3))
            kind = draw(
                st.sampled_from(["linear", "norm", "attention", "place", "block"])
            )
            if kind == "linear":
                layers += [nn.Linear(width, wide, bias=draw(st.booleans()))]
                width = wide
            elif kind == "norm":
                layers += [nn.LayerNorm(width)]
            elif kind == "attention":
                layers += [Attention(width)]
            elif kind == "block":
                first = draw(st.booleans())
                layers += [
                    nn.TransformerEncoderLayer(
                        width, 2, 6, dropout=0.0, batch_first=first
                    )
                ]
                if not first:  # then the samples are the second axis
                    layers.insert(-1, Swapped())
                    layers.append(Swapped())
            else:
                layers += [Placed(tokens, width)]
            layers.append(draw(acts)())
        x = torch.randn(batch, tokens, 4)
        layers += [nn.Flatten(), nn.Linear(tokens * width, 2)]
    else:
        channels, size = 2, 6
        for _ in range(draw(st.integers(1, 2))):
            groups = draw(st.sampled_from([1, 2]))
            more = 2 * draw(st.integers(1, 2))
            layers.append(nn.Conv2d(channels, more, 3, groups=groups, padding=1))
            channels = more
            norm = draw(st.sampled_from(["", "group", "batch"]))
            if norm == "group":
                layers.append(nn.GroupNorm(2, channels))
            elif norm == "batch":
                layers.append(nn.BatchNorm2d(channels).eval())
            layers.append(draw(acts)())
        layers += [nn.Flatten(), nn.Linear(channels * size**2, 3)]
        x = torch.randn(batch, 2, size, size)
    return nn.Sequential(*layers).double(), x.double()


class Swapped(nn.Module):
    """Swaps samples and tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return x.transpose(0, 1)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=nets(), rows=st.sampled_from([1, 2, 100]))
def test_nets_that_are_drawn(
    drawn: tuple[nn.Module, Tensor], rows: int, taken: list[int]
) -> None:
    seed_all(0)
    before = len(taken)
    with pytest.MonkeyPatch.context() as patch:
        real: Any = by_sample._found

        def with_rows(*given: Any) -> Any:
            found = real(*given)
            if found is not None:
                object.__setattr__(found, "chunk", min(rows, found.chunk))
            return found

        patch.setattr(by_sample, "_found", with_rows)
        require_same(*drawn)
    assert len(taken) > before


class Twice(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return it."""
        return self.linear(self.linear(x).tanh())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def by_frequency() -> nn.Module:
    table = nn.Embedding(5, 3, scale_grad_by_freq=True)
    return nn.Sequential(Indices(), table, nn.Flatten(), nn.Linear(9, 2))


class Indices(nn.Module):
    """Makes integers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return them."""
        return (3 * x).long().abs() % 5


class AsItIs(nn.Module):
    """Returns its weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, BATCH))

    def forward(self, _: Tensor) -> Tensor:
        """Return it."""
        return self.weight.t()


class NamedTwice(nn.Module):
    """Has two names for one weight, and says both."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.other = self.one

    def named_parameters(self, *args: Any, **how: Any) -> Any:
        """Return all names."""
        return super().named_parameters(*args, **how | {"remove_duplicate": False})

    def forward(self, x: Tensor) -> Tensor:
        """Use it once."""
        return self.other(x)


NOT_TAKEN: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "tied": tied,
    "named twice": NamedTwice,
    "as it is": AsItIs,
    "parametrised": lambda: nn.Sequential(weight_norm(nn.Linear(3, 2))),
    "by frequency": by_frequency,
    "transposed": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.ConvTranspose1d(1, 2, 2), nn.Flatten()
    ),
    "changed before": lambda: Of(lambda x, w: x @ w.tanh(), (3, 3)),
    "turned": lambda: Of(lambda x, w: x[:, None] + w.t(), (3, 3)),
    "its own output": lambda: Of(lambda x, w: x * w + w.sum(), (3,)),
    "a factor for each sample": lambda: Of(torch.mul, (BATCH, 3)),
    "a norm of all samples": lambda: Of(
        lambda x, w: F.layer_norm(x, (BATCH, 3), w), (BATCH, 3)
    ),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_it_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(BySample, "blocks", fail)
    require_same(NOT_TAKEN[name]().double(), double(BATCH, 3))


def test_it_is_not_taken_for_what_has_a_graph(taken: list[int]) -> None:
    model, x = nn.Linear(3, 2).double(), double(BATCH, 3)
    require_same(model, x, create_graph=True)
    assert not taken


def test_it_is_not_taken_under_autocast(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        gradlib.per_sample_jacobian(
            model, torch.randn(BATCH, 3), argnums="parameters", check=False
        )
    assert not taken


def test_it_is_not_taken_for_narrow_parameters(taken: list[int]) -> None:
    model, x = nn.Linear(3, 2), torch.randn(BATCH, 3)
    exact = flat(gradlib.per_sample_jacobian(model, x, argnums="parameters"))
    assert taken
    taken.clear()
    found = gradlib.per_sample_jacobian(
        model.bfloat16(), x.bfloat16(), argnums="parameters"
    )
    assert not taken
    for name, tensor in flat(found).items():
        torch.testing.assert_close(tensor.float(), exact[name], rtol=1e-2, atol=1e-2)


def test_what_was_overwritten_is_seen(taken: list[int]) -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        z = y @ w
        y.zero_()
        return z

    model, x = Of(product, (3, 2)).double(), double(BATCH, 3)
    with pytest.raises(gradlib.NoSuchWayError, match="inplace operation"):
        gradlib.per_sample_jacobian(model, x, argnums="parameters")
    assert not taken


def test_it_is_not_taken_for_one_sample(taken: list[int]) -> None:
    require_same(nn.Linear(3, 2).double(), double(1, 3))
    assert not taken


def test_some_of_a_layer_may_be_frozen(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for frozen in (model[0].weight, model[2].bias):
        frozen.requires_grad_(False)
    require_same(model, double(BATCH, 3))
    assert taken


class Several(nn.Module):
    """Has two outputs, and something that neither uses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.none = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return both."""
        return {"one": self.one(x).sin(), "two": self.two(x).sum(1)}


def test_what_is_not_used_has_zeros(taken: list[int]) -> None:
    model, x = Several().double(), double(BATCH, 3)
    require_same(model, x)
    assert taken
    out = gradlib.per_sample_jacobian(model, x, argnums="parameters")
    for block in flat(out).values():
        block.fill_(7)
    gradlib.per_sample_jacobian(model, x, argnums="parameters", out=out)
    assert not out["one"]["none.weight"].any()
    assert len(taken) == 3


def test_samples_that_influence_each_other_are_seen(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)).double()
    require_same(model, double(BATCH, 3))
    assert not taken


def test_a_batch_norm_in_training_is_not_known(taken: list[int]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    model[0].running_var.fill_(9)  # pyright: ignore (a module's attribute)
    require_same(model, double(BATCH, 3))
    assert not taken


def test_samples_elsewhere_are_seen(taken: list[int]) -> None:
    model = Of(lambda x, w: (x.flip(0) @ w).flip(0), (3, 3))
    require_same(model, double(BATCH, 3))
    assert not taken


def test_samples_that_are_hardly_coupled(taken: list[int]) -> None:
    class Coupled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore (its own name)
            h = self[0](x).tanh()
            return self[1](h + 1e-9 * h.mean(0))

    require_same(Coupled(nn.Linear(3, 4), nn.Linear(4, 2)).double(), double(BATCH, 3))
    assert not taken


@pytest.mark.parametrize("clipped", [False, True])
def test_hooks_inside(clipped: bool, taken: list[int]) -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = x @ w
        y.register_hook(lambda it: it.clamp(-0.1, 0.1) if clipped else 3 * it)
        return y.tanh() @ v

    require_same(Of(fn, (3, 4), (4, 3)), double(BATCH, 3))
    assert bool(taken) is not clipped


def test_hooks_of_a_node_are_seen(taken: list[int]) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y: Any = x @ w
        y.grad_fn.register_hook(lambda given, _: (None, 2 * given[1]))
        return y

    require_same(Of(fn, (3, 4)), double(BATCH, 3))
    assert not taken


def test_hooks_set_before_the_call_are_seen(taken: list[int]) -> None:
    """Of what a model has computed from its weights once."""
    model = Of(lambda x, _: x @ turned, (4, 3))
    turned = model.weights[0].t()
    require_same(model, double(BATCH, 3))
    assert taken, "it is known"
    taken.clear()
    turned.register_hook(lambda grad: 2 * grad)
    require_same(model, double(BATCH, 3))
    assert not taken


def test_a_backward_hook_of_a_module(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[1].register_full_backward_hook(lambda _, given, __: (2 * given[0],))
    require_same(model, double(BATCH, 3))
    assert taken


def test_hooks_of_parameters_change_nothing(taken: list[int]) -> None:
    model = nn.Linear(3, 2).double()
    model.weight.register_hook(lambda grad: 2 * grad)
    require_same(model, double(BATCH, 3))
    assert taken


class OneByOne(torch.autograd.Function):
    """Has no rule for batched values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore (the same)
        """Return the gradient."""
        assert math.isfinite(grad.sum().item())
        return 2 * ctx.saved_tensors[0] * grad


class Squared(nn.Module):
    """Squares."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it."""
        return OneByOne.apply(x)


def test_what_cannot_work_on_batched_values(taken: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), Squared(), nn.Linear(4, 2)).double()
    require_same(model, double(BATCH, 3))
    assert taken == [2, 1]


class Refusing(OneByOne):
    """Goes back from random numbers only, as a look asks it to."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient."""
        if (grad == 1).all():
            raise RuntimeError("it is refused")
        return OneByOne.backward(ctx, grad)


class Refuses(nn.Module):
    """Is refused where one pass gives a row of every sample."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the square."""
        return Refusing.apply(x)


def test_one_row_is_not_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    write: Any = BySample._write

    def noted(self: BySample, blocks: Any, chunk: int) -> None:
        tried.append(chunk)
        write(self, blocks, chunk)

    monkeypatch.setattr(BySample, "_write", noted)
    model = nn.Sequential(nn.Linear(3, 1), Refuses()).double()
    require_same(model, double(BATCH, 3))
    assert tried == [1]


def test_inside_of_a_checkpoint() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Any:
        return checkpoint(lambda: (x @ w).tanh() @ v, use_reentrant=False)

    require_same(Of(fn, (3, 4), (4, 3)), double(BATCH, 3))


def test_a_loss_of_each_sample(taken: list[int]) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y, reduction="none")

    require_same(Loss().double(), double(BATCH, 3), torch.arange(BATCH), check=True)
    assert taken == [1]


@pytest.mark.parametrize("strided", [False, True])
def test_into_memory_that_is_there(strided: bool, taken: list[int]) -> None:
    model, x = nn.Linear(3, 2).double(), double(BATCH, 3)
    out = {"weight": double(BATCH, 2, 2, 3), "bias": double(BATCH, 2, 2)}
    if strided:
        out["bias"] = double(2, 2, BATCH).movedim(2, 0)
    gradlib.per_sample_jacobian(model, x, argnums="parameters", out=out)
    truth = gradlib.per_sample_jacobian(model, x, argnums="parameters", mode="loop")
    assert all(torch.equal(out[name], it) for name, it in truth.items())
    assert bool(taken) is not strided


def test_a_plan_says_it() -> None:
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2))
    plan = gradlib.plan_jacobian(model, torch.randn(10, 3), argnums="parameters")
    assert plan.mode == "by sample"
    # Each of two rows: a pass to the inner weight's place, and both weights' products.
    assert plan.work["by sample"] == 2 * 10 * (20 * 2 + 3 * 20 + 20 * 2)
    assert plan.work["loop"] > 9 * plan.work["by sample"]


def test_without_room_it_is_not_taken(taken: list[int]) -> None:
    model, x = nn.Linear(30, 20).double(), double(BATCH, 30)
    needed = gradlib.plan_jacobian(model, x, argnums="parameters", mode="loop").bytes
    require_same(model, x, max_bytes=needed)
    assert not taken
