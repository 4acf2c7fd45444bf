"""Rows that go together give the Jacobian that they give one by one, in float64."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.edges import nodes_behind
from gradlib.jacobian import planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.compute import compute
from gradlib.jacobian.fast.door import find_in_graph
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked import stacked
from gradlib.jacobian.fast.stacked.rules import RULES
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.graph_of_tensors import of_tensors
from gradlib.jacobian.run import run
from gradlib.random_state import seed_all

from .lines import double
from .operations import (
    ALONE,
    FUSES_RMS_NORM,
    ON_CPU,
    UNSEEN,
    Block,
    Function,
    Net,
    Own,
    V,
    W,
    by_rows,
    graph_of,
    half_of_it,
    looks_asked,
    of_a_gpu,
    written_into,
)


@pytest.fixture(autouse=True)
def _few_rows_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacked, "ROWS", 1)
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)  # for a GPU too


def found_for(graph: Graph, chunk: int = 3) -> stacked.Stacked | None:
    """Look for the way, with so many rows at once."""
    return stacked.find_stacked(
        graph, replace(planning.make(graph, "reverse", "auto", None), chunk=chunk)
    )


def require_same(graph: Graph, chunk: int = 3) -> None:
    """Fail unless rows that go together are what they are one by one."""
    found = found_for(graph, chunk)
    assert found is not None
    made, truth = found.blocks(graph)[0, 0], by_rows(graph)
    assert made.shape == truth.shape
    error = (made - truth).abs().max() / truth.abs().max().clamp(min=1e-3)
    assert error <= 1e-12


def double_like(*shape: int) -> Tensor:
    """Return weights, the same at every call."""
    return torch.arange(math.prod(shape)).double().sin().view(shape)


def _shared(x: Tensor, first: int) -> Tensor:
    y, z = x.sin(), x.cos()
    part = y[:, 1:2]
    both = y + z
    return part + both if first else both + part


MORE: dict[str, Function] = {
    "convolution": lambda x: F.conv1d(x, double_like(6, 4, 3), V[0, :1].expand(6)),
    "convolution of one channel": lambda x: F.conv2d(
        x[:, None], double_like(2, 1, 2, 3), stride=(2, 1), padding=1, dilation=(1, 2)
    ),
    "convolution in groups": lambda x: F.conv1d(
        x, double_like(4, 2, 3), padding="same", groups=2
    ),
    "transposed convolution": lambda x: F.conv_transpose2d(
        x[:, None], double_like(1, 3, 2, 2), stride=2, output_padding=1
    ),
    "group norm": lambda x: F.group_norm(x.sin(), 2, W[0], W[1]),
    "group norm, plain": lambda x: F.group_norm(x[:, :, None], 4),
    "pooled": lambda x: F.adaptive_avg_pool2d(x[:, None].sin(), 1),
    "largest": lambda x: x.sin().amax(1) + x.amin(-1) + x.max(1)[0] + x.sin().min(2)[0],
    "largest of all, kept": lambda x: x * x.sin().amax((1, 2), keepdim=True),
    "smallest of several that are equal": lambda x: x.relu().amin(1),
    "norms": lambda x: x.norm(dim=1) + torch.linalg.vector_norm(x.sin(), 3, 2),
    "normalized": lambda x: F.normalize(x.sin(), dim=1) + F.normalize(x, 1, -1),
    "log of a sum": lambda x: x.sin().logsumexp((1, 2)),
    "running sums": lambda x: x.cumsum(1) * x.sin().cumsum(-1),
    "running sums of samples": lambda x: x.sin().cumsum(0) - x.amax(0),
    "samples mixed": lambda x: x.sin() - x.sin().mean(0),
    "samples for tokens": lambda x: x.transpose(0, 1).sin(),
    "samples multiplied": lambda x: (x.reshape(4, 16) @ x.reshape(4, 16).T) @ W,
    "samples shifted": lambda x: torch.cat([x[1:], x[:1]]),
    "parts of one": lambda x: x.sin()[:, 1] + x.sin()[:, 1] * x[:, 2],
    "parts over each other": lambda x: (lambda y: y[:, :3] + y[:, 1:] * y[:, :1])(
        x.sin()
    ),
    "parts that are all": lambda x: (lambda y: y * torch.cat([y[:, 2:], y[:, :2]], 1))(
        x.sin()
    ),
    "parts with a hole": lambda x: (lambda y: y[:, :2] * y[:, 1:3])(x.sin()),
    "parts of two dimensions": lambda x: (lambda y: y[:, :2] * y[:, :, :2].mT)(x.sin()),
    "every second, twice": lambda x: (lambda y: y[:, ::2] * y[:, ::2].exp())(x.sin()),
    "parts in another order": lambda x: torch.stack(
        [it.sin() * V[0] for it in reversed(x.exp().unbind(1))], 1
    ),
    "tokens in front": lambda x: (lambda a, b: a * b.exp())(
        *x.exp().unflatten(1, (2, 2)).transpose(0, 1).unbind(0)
    ),
    "a part of what others share": lambda x: _shared(x, 0),
    "a part of what others share, first": lambda x: _shared(x, 1),
    "one matrix for all": lambda x: double_like(3, 4) @ torch.cat([x.sin()] * 8, 2),
    "steps": lambda x: x[..., ::2].exp(),
    "the same twice": lambda x: (lambda y: (y + y) * y)(x.sin()),
    "the input twice": lambda x: x + x * x,
    "a number for all": lambda x: x * x.mean((1, 2), keepdim=True),
    "a number for each": lambda x: (
        x * x.detach().sum((1, 2), keepdim=True).expand_as(x)
    ),
}


@pytest.mark.parametrize("chunk", [2, 5, 10**6])
@pytest.mark.parametrize("name", [*ALONE, *MORE])
def test_an_operation(name: str, chunk: int) -> None:
    seed_all(len(name))
    require_same(graph_of((ALONE | MORE)[name], double(4, 4, 4)), chunk)


def test_every_rule_is_among_them() -> None:
    seen: set[str] = set()
    for fn in (*ALONE.values(), *MORE.values()):
        seen |= {
            node.name() for node in nodes_behind(graph_of(fn, double(4, 4, 4)).roots)
        }
    assert set(RULES) - seen == UNSEEN


@pytest.mark.parametrize("seed", range(20))
def test_a_random_net(seed: int) -> None:
    chance = random.Random(seed)
    seed_all(seed)
    samples, tokens = chance.choice([(4, 4), (1, 3), (2, 1), (3, 5), (8, 2)])
    width = 4 if samples == tokens else chance.choice([4, 12])
    net = Net(width, chance.choice([1, 2, 4]), tokens, chance).double()
    net.requires_grad_(chance.random() < 0.5)
    graph = graph_of(net, double(samples, tokens, width))
    require_same(graph, chance.choice([2, 7, 100]))


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_a_classifier_whose_padding_is_said_in_a_word(argnums: Any) -> None:
    seed_all(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding="valid"), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding="valid"), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )
    x = torch.randn(4, 3, 12, 12)
    found = gradlib.per_sample_jacobian(net, x, argnums=argnums)
    truth = gradlib.per_sample_jacobian(net, x, argnums=argnums, mode="loop")
    torch.testing.assert_close(found, truth)


class Images(nn.Module):
    """A residual net of images, up and down again."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        width, bias = chance.choice([2, 4]), chance.random() < 0.5
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=bias)
        self.norm = nn.GroupNorm(chance.choice([1, 2]), width, affine=bias)
        self.down = nn.Conv2d(width, width, 2, stride=2, groups=2)
        self.settled = nn.BatchNorm2d(width).eval()
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.act = chance.choice([F.relu, F.silu, torch.tanh])
        self.last = chance.choice(["image", "mean", "flat"])

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.first(x)))
        y = y + self.up(self.act(self.settled(self.down(y))))
        match self.last:
            case "mean":
                return y.mean((2, 3))
            case "flat":
                return y.flatten(1)[:, ::5]
        return y.sum(1, keepdim=True) + x


@pytest.mark.parametrize("seed", range(20))
def test_a_random_net_of_images(seed: int) -> None:
    chance = random.Random(seed)
    seed_all(seed)
    net = Images(chance).double().requires_grad_(chance.random() < 0.5)
    graph = graph_of(net, double(chance.choice([1, 3]), 1, 4, 6))
    require_same(graph, chance.choice([2, 7, 100]))


@pytest.mark.parametrize("chunk", [3, 7])  # fewer than there are keys, and more
@pytest.mark.parametrize("parts", ["q", "k", "v", "qk", "qv", "kv"])
def test_attention_some_of_which_was_there_before(parts: str, chunk: int) -> None:
    def fn(x: Tensor) -> Tensor:
        there = double_like(4, 1, 4, 4)
        q, k, v = (x[:, None] if it in parts else there for it in "qkv")
        return F.scaled_dot_product_attention(q, k, v)

    require_same(graph_of(fn, double(4, 4, 4)), chunk)


UNKNOWN: dict[str, Function] = {
    "all to one": lambda x: x.sin() + x.sum(),
    "samples turned": lambda x: x.flip(0),
    "picked": lambda x: x[:, [0, 2]],
    "batch norm that learns": lambda x: F.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ),
    "written into": written_into,
    "somebody's own": lambda x: Own.apply(x),
    "dtypes": lambda x: x.float().sin().double(),
    "a weight from the input": lambda x: F.conv1d(x, x.sin()),
    "single numbers": lambda x: torch.stack([it.exp() * it[0, 0].sum(0) for it in x]),
    "probabilities of one": lambda x: torch.stack(
        [it.exp() * it[0, 0].softmax(0) for it in x]
    ),
    "a norm's weight from the input": lambda x: F.layer_norm(x, [4], x[0, 0].sin()),
    "a norm's bias from the input": lambda x: F.group_norm(x, 2, None, x[0, 0].sin()),
    "an RMS norm's weight from the input": lambda x: torch.ops.aten._fused_rms_norm(
        x, [4], x[0, 0].sin(), None
    )[0],
    "a checkpoint": lambda x: cast(Any, checkpoint)(torch.sin, x, use_reentrant=False),
    "many scores": lambda x: F.scaled_dot_product_attention(
        x.view(4, 1, 16, 1), x.view(4, 1, 16, 1), x.view(4, 1, 16, 1)
    ),
    "a mean besides": lambda x: torch.mul(
        *torch.native_group_norm(x.sin(), None, None, 4, 4, 4, 4, 1e-5)[:2]
    ),
    "a mask from the input": lambda x: of_a_gpu(
        *(x[:, None], x[:, None], x[:, None]), x[:, None].sin()
    ),
    "random attention": lambda x: of_a_gpu(
        x[:, None], x[:, None], x[:, None], dropout_p=0.1
    ),
}


SEES_HOOKS = torch.__version__ >= "2.10"
NO_HOOKS_SEEN = "torch before 2.10 does not say that what a node has saved has hooks"


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_to_others(name: str) -> None:
    if name in ("random attention", "many scores") and not ON_CPU:
        pytest.skip("a CPU's kernels: others have none in float64, or want few calls")
    if name == "a checkpoint" and not SEES_HOOKS:
        pytest.skip(NO_HOOKS_SEEN)
    if "an RMS norm" in name and not FUSES_RMS_NORM:
        pytest.skip("this torch has no node of its own for an RMS norm")
    seed_all(0)
    assert found_for(graph_of(UNKNOWN[name], double(4, 4, 4))) is None


def test_parts_of_unknown_size_are_left_to_others() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cat([W.expand(4, 4, 4), V.expand(4, 4, 4), x], 1)

    assert found_for(graph_of(fn, double(4, 4, 4))) is None


def test_autocast_is_left_to_others() -> None:
    assert found_for(graph_of(half_of_it, torch.randn(4, 4, 4))) is None


def test_narrow_dtypes_are_left_to_others() -> None:
    x = torch.randn(4, 4, 4, dtype=torch.bfloat16)
    assert found_for(graph_of(torch.sin, x)) is None


def test_few_rows_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "ROWS", 17)
    graph = graph_of(torch.sin, double(4, 4, 4))
    assert found_for(graph) is None
    monkeypatch.setattr(stacked, "ROWS", 16)
    assert found_for(graph) is not None
    assert found_for(graph, chunk=1) is None


def test_few_rows_are_taken_where_vmap_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "ROWS", 10**6)
    for name in ("convolution", *["attention"] * ON_CPU):  # a GPU has other kernels
        require_same(graph_of((ALONE | MORE)[name], double(4, 4, 4)))
    assert found_for(graph_of(ALONE["linear"], double(4, 4, 4))) is None


def test_what_was_asked_for_is_taken() -> None:
    graph = graph_of(torch.sin, double(4, 4, 4))
    for mode in ("forward", "loop"):
        assert (
            stacked.find_stacked(graph, planning.make(graph, mode, "auto", None))
            is None
        )


def test_what_a_node_has_saved_may_be_overwritten() -> None:
    weight = W.clone()
    graph = graph_of(lambda x: F.linear(x, weight), double(4, 4, 4))
    weight.zero_()
    plan = planning.make(graph, "reverse", "auto", None)
    assert find_in_graph(graph, plan) is None


def test_weights_are_read_at_every_call() -> None:
    seed_all(0)
    layer = nn.Linear(4, 4).double()
    x = double(2, 3, 4)
    require_same(graph_of(layer, x))
    with torch.no_grad():
        layer.weight.data.mul_(2)
    require_same(graph_of(layer, x))


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return two outputs of two inputs, of which each depends on one more than once."""
    z = F.linear(x, W).tanh()
    return z * y, (x[:, :2] + z[:, 2:]).softmax(-1)


def test_several_inputs_and_outputs() -> None:
    seed_all(0)
    graph, _ = run(read(several, (double(3, 4, 4), double(3, 4, 4)), (0, 1), 0))
    found = found_for(graph)
    assert found is not None
    truth = compute(graph, planning.make(graph, "loop", "auto", None), may_change=False)
    made = found.blocks(graph)
    assert made.keys() == truth.keys()
    for block, tensor in made.items():
        torch.testing.assert_close(tensor, truth[block], rtol=1e-12, atol=1e-12)


def test_an_input_that_is_computed_from_another() -> None:
    x = double(3, 8).requires_grad_()
    h = x.sin()
    graph, _ = of_tensors(h.exp(), (x, h))
    assert found_for(graph) is None
    jacobians = gradlib.per_sample_jacobian_from_graph(h.exp(), (x, h))
    torch.testing.assert_close(jacobians[1], torch.diag_embed(h.exp()).detach())


def test_it_writes_into_what_it_is_given() -> None:
    graph = graph_of(ALONE["attention"], double(4, 4, 4))
    found = found_for(graph)
    assert found is not None
    out = torch.full(graph.shape(0, 0), math.nan, dtype=torch.float64)
    made = found.blocks(graph, {(0, 0): out})
    assert made[0, 0] is out
    assert torch.equal(out, found.blocks(graph)[0, 0])


def test_the_result_has_memory_of_its_own() -> None:
    # Of a sum both inputs have the same gradient.
    graph, _ = run(read(torch.add, (double(3, 4), double(3, 4)), (0, 1), 0))
    found = found_for(graph, chunk=100)
    assert found is not None
    made = found.blocks(graph)
    made[0, 0].zero_()
    assert made[0, 1].count_nonzero() == 12


def _doubled(grads: Any, *_: Any) -> Any:
    """Stand for a hook that changes gradients, of a tensor or of a node."""
    if isinstance(grads, tuple):
        return tuple(map(_doubled, grads))
    return grads if grads is None else 2 * grads


HOOKS: dict[str, Callable[[Tensor], object]] = {
    "of a tensor": lambda y: y.register_hook(_doubled),
    "of a node": lambda y: cast(Any, y.grad_fn).register_hook(_doubled),
    "before a node": lambda y: cast(Any, y.grad_fn).register_prehook(_doubled),
    "that stops gradients": lambda y: cast(Any, y.grad_fn).register_hook(
        lambda *_: (None,)
    ),
    "that is not linear": lambda y: y.register_hook(lambda grad: grad * grad),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_inside_is_heard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        HOOKS[name](y)
        return y.tanh()

    monkeypatch.setattr("gradlib.jacobian.fast.door.find_structured", _nothing)
    x = double(4, 4, 4)
    assert found_for(graph_of(fn, x)) is not None, "a hook is not seen there"
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    assert not torch.allclose(truth, _unhooked(x))
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def _unhooked(x: Tensor) -> Tensor:
    return gradlib.per_sample_jacobian(lambda x: x.sin().tanh(), x, check=False)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_of_a_module_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the old kind leaves no sign in the graph either."""
    monkeypatch.setattr("gradlib.jacobian.fast.door.find_structured", _nothing)
    model, x = Block(4, 2, random.Random(0)).double(), double(2, 3, 4)
    cast(Any, model).register_backward_hook(lambda _, grads, __: _doubled(grads))
    found = gradlib.per_sample_jacobian(model, x, check=False)
    truth = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("check", "proven", "fn"),
    [
        (False, False, lambda x: x.sin().tanh()),
        (True, True, lambda x: x.sin().tanh()),
        (False, True, lambda x: (x - x[:, :1]).sqrt()),  # which is steep at 0
    ],
)
def test_what_is_proven(
    check: bool, proven: bool, fn: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a hook rows take autograd's steps: a pass would only say so again."""
    monkeypatch.setattr("gradlib.jacobian.fast.door.find_structured", _nothing)
    asked = looks_asked(monkeypatch)
    gradlib.per_sample_jacobian(fn, double(4, 4, 4).abs(), check=check)
    assert len(asked) == (proven or not ON_CPU)


@pytest.mark.skipif(not SEES_HOOKS, reason=NO_HOOKS_SEEN)
def test_a_checkpoint_is_computed_again_once_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def part(x: Tensor) -> Tensor:
        calls.append(1)
        return F.linear(x, W).tanh().softmax(-1)

    def fn(x: Tensor) -> Tensor:
        return cast(Any, checkpoint)(part, x, use_reentrant=False)

    x = double(4, 4, 4)
    gradlib.per_sample_jacobian(fn, x, check=False)
    with_all = len(calls)
    monkeypatch.setattr("gradlib.jacobian.compute.find_in_graph", _nothing)
    calls.clear()
    gradlib.per_sample_jacobian(fn, x, check=False)
    assert with_all == len(calls) == 2


def _nothing(*_: Any) -> None:
    return None


@pytest.mark.parametrize("check", [False, True])
def test_a_block_as_a_whole(check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_all(0)
    monkeypatch.setattr("gradlib.jacobian.fast.door.find_structured", _nothing)
    block = Block(4, 2, random.Random(0)).double()
    x = double(3, 5, 4)
    plan = gradlib.plan_jacobian(block, x, check=check)
    assert plan.mode == "stacked"
    assert plan.counts["stacked"] == plan.counts["reverse"] == 20
    truth = gradlib.per_sample_jacobian(block, x, mode="loop", check=False)
    found = gradlib.per_sample_jacobian(block, x, check=check)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    out = torch.empty_like(truth).mT.contiguous().mT
    assert gradlib.per_sample_jacobian(block, x, out=out, check=check) is out
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)


IN_STEPS = "a GPU takes attention in float64 in steps"


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        pytest.param(
            *("attention", "query"),
            marks=pytest.mark.skipif(not ON_CPU, reason=IN_STEPS),
        ),
        ("linear without bias", "mat2"),
        ("linear", "mat2"),
    ],
)
def test_an_operation_that_says_nothing_is_left_to_others(
    name: str, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(ALONE[name], double(4, 4, 4))
    assert found_for(graph) is not None
    saved = Operation.saved
    monkeypatch.setattr(
        Operation, "saved", lambda op, it: None if it == unknown else saved(op, it)
    )
    assert found_for(graph) is None


@pytest.mark.skipif(not ON_CPU, reason=IN_STEPS)
def test_scores_of_attention_count() -> None:
    graph = graph_of(ALONE["causal attention"], double(4, 4, 4))
    found = found_for(graph)
    assert found is not None
    scores = 4 * 4 * 3 * 8  # samples, queries, keys, bytes
    each = planning.make(graph, "reverse", "auto", None).pass_bytes
    assert found.vector_bytes == each + scores
    gradients = sum(form.bytes for form in graph.drawing.forms.values())
    assert found.slope_bytes == gradients + 2 * scores
