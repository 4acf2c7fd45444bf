"""Structure makes a Jacobian cheaper, never another: the loop in float64 says so."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradlib
from gradlib.jacobian import plan as plans
from gradlib.jacobian.arguments import read
from gradlib.jacobian.between import in_order
from gradlib.jacobian.compute import compute
from gradlib.jacobian.fast.structure import chunks, structured
from gradlib.jacobian.fast.structure.operation import Operation
from gradlib.jacobian.fast.structure.rules import RULES
from gradlib.jacobian.graph import Graph, run

Function = Callable[[Tensor], Tensor]

AMPLE = 10**12

ON_CPU = torch.ones(()).device.type == "cpu"


@pytest.fixture(autouse=True)
def _always_worth_it(  # pyright: ignore (pytest uses it)
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "WORTH", 0)
    monkeypatch.setattr(structured, "promises", lambda *_: True)


def found_for(graph: Graph, rows: int, room: int) -> structured.Structured | None:
    """Look for structure, where it would take so many rows otherwise."""
    otherwise = plans.make(graph, "loop", "auto", None)
    counts = otherwise.counts | {"loop": rows}
    instead = replace(otherwise, counts=counts, max_bytes=room, result_bytes=0)
    return structured.find(graph, instead)


def graph_of(fn: Function, x: Tensor) -> Graph:
    """Return the graph of one call."""
    return run(read(fn, (x,), 0, 0))[0]


def by_structure(graph: Graph) -> Tensor | None:
    """Return the Jacobian, or ``None`` where its structure is not known."""
    found = found_for(graph, AMPLE, AMPLE)
    return None if found is None else found.blocks(graph)[0, 0]


def by_rows(graph: Graph) -> Tensor:
    """Return the reference."""
    plan = plans.make(graph, "loop", "auto", None)
    return compute(graph, plan, may_change=False)[0, 0]


def require_same(fn: Function, x: Tensor, *, wrong: str = "") -> None:
    """Fail unless structure gives the same as rows."""
    graph = graph_of(fn, x)
    found, truth = by_structure(graph), by_rows(graph)
    assert found is not None, wrong
    assert found.shape == truth.shape, wrong
    error = (found - truth).abs().max() / truth.abs().max().clamp(min=1e-3)
    assert error <= 1e-12, wrong


def double(*shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def by_steps(x: Tensor) -> Tensor:
    """Attention as every device can compute it, with a node for each step."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            x[:, None], x[:, None].cos(), x[:, None].sin()
        )


def of_a_gpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **how: Any
) -> Tensor:
    """Attention with the node of the kernel that a GPU has for float32."""
    kernel: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, mask, True, **how)[0]


def _formula(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, float]:
    """Return the probabilities of attention, and the scale of the scores."""
    by = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT * by
    scores = scores if mask is None else scores + mask
    if causal:
        later = torch.ones_like(scores).triu(1).bool()
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, -1), by


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    _: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """What that kernel computes, but for the dropout, which it only notes."""
    del dropout
    p, _scale = _formula(q, k, mask, causal, scale)
    none = torch.zeros((), dtype=torch.long)
    return p @ v, q.new_zeros(q.shape[:-1]), none, none


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """What the kernel of its backward pass computes."""
    causal = others[6] if len(others) > 6 else False
    p, by = _formula(q, k, mask, causal, scale)
    slope = grad @ v.mT
    slope = p * (slope - (slope * p).sum(-1, keepdim=True)) * by
    return slope @ k, slope.mT @ q, p.mT @ grad, None


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None
) -> tuple[Tensor, Tensor]:
    """What a GPU's kernel computes, and saves."""
    dims = tuple(range(-len(shape), 0))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(dims, keepdim=True) + least).rsqrt()
    return x * rstd * weight, rstd


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor, _: Any
) -> tuple[Tensor, None]:
    """What the kernel of its backward pass computes, without the weight's gradient."""
    dims, normal, slope = tuple(range(-len(shape), 0)), x * rstd, grad * weight
    return rstd * (slope - normal * (slope * normal).mean(dims, keepdim=True)), None


@pytest.fixture(scope="module", autouse=True)
def _kernels_of_a_gpu() -> Iterator[None]:  # pyright: ignore (pytest uses it)
    """Bring a CPU the kernels that only GPUs have, in float64 too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
    library.impl("_fused_rms_norm", _rms_norm, "CPU")
    library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
    yield
    library._destroy()


def heads(x: Tensor) -> Tensor:
    """Return two heads of two features each."""
    return x.view(4, 4, 2, 2).transpose(1, 2)


# Of what a sample is, ``(4, 4)``, everywhere below, with 4 samples: equal sizes must
# not be taken for equal axes.
W, V = (torch.randn(4, 4, dtype=torch.float64) for _ in range(2))

ALONE: dict[str, Function] = {
    "add": lambda x: torch.add(x, x.sin(), alpha=3),
    "add to all": lambda x: x.sin() + x.sum(1, keepdim=True),
    "subtract": lambda x: torch.sub(x, x.sin(), alpha=3),
    "add a number": lambda x: (x + 1) - 2,
    "add a scalar": lambda x: torch.ops.aten.add.Scalar(x.sin(), 1),
    "negative": lambda x: -x.sin(),
    "reshape": lambda x: x.reshape(4, 2, 8).sin().reshape(4, 8, 2).exp(),
    "flatten batch": lambda x: (x.reshape(16, 4) @ W).view(4, 4, 4),
    "reshape alias": lambda x: torch.baddbmm(x, W.expand(4, 4, 4), x),
    "squeeze": lambda x: x.unsqueeze(1).sin().squeeze(),
    "squeeze one": lambda x: x.unsqueeze(1).sin().squeeze(1).unsqueeze(-1),
    "squeeze two": lambda x: x[:, None, :, None].sin().squeeze((1, 3)),
    "expand": lambda x: x.unsqueeze(1).expand(4, 3, 4, 4).sin(),
    "transpose": lambda x: x.transpose(1, 2) @ W,
    "samples second and back": lambda x: (x.transpose(0, 1) @ W).transpose(0, 1),
    "permute": lambda x: (x.permute(2, 0, 1) @ W).permute(1, 2, 0) @ V,
    "matrix transpose": lambda x: (x.reshape(16, 4).t() * W[0, 0]).t().reshape(4, 4, 4),
    "select": lambda x: x[:, -1].sin() + x[:, 1],
    "unbind": lambda x: x.unbind(-1)[2] * x.unbind(-1)[-1].sin(),
    "slice": lambda x: x[:, 1:-1, ::2].sin(),
    "split": lambda x: x.split(3, 1)[1].sin() * x.chunk(2, 2)[1].sum(2, keepdim=True),
    "split sizes": lambda x: x.split([1, 3], -1)[1].sin(),
    "cat": lambda x: torch.cat([x, W[:, :1].expand(4, 4, 1), x.sin()], -1),
    "stack": lambda x: torch.stack([x, x.sin()], 1),
    "mean": lambda x: x.sin().mean((1, 2)),
    "mean, kept": lambda x: x * x.sin().mean(1, keepdim=True),
    "sum": lambda x: x.sin().sum(-1),
    "linear": lambda x: F.linear(x, W, V[0]),
    "linear without bias": lambda x: F.linear(x, W),
    "by itself": lambda x: x @ x.mT @ x,
    "from itself": lambda x: torch.einsum("bij,bkj->bik", x, x.sin()),
    "beta and alpha": lambda x: torch.addmm(
        x.reshape(16, 4), x.reshape(16, 4), W, beta=0.5, alpha=2
    ).view(4, 4, 4),
    "softmax": lambda x: x.softmax(1) + x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(1) + x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, [4], W[0], W[1]),
    "layer norm of two": lambda x: F.layer_norm(x, [4, 4], W, V),
    "layer norm, plain": lambda x: F.layer_norm(x, [4]).sin(),
    "rms norm": lambda x: F.rms_norm(x, [4], W[0]),
    "batch norm in use": lambda x: F.batch_norm(
        x.sin().transpose(1, 2), W[0], W[1].abs(), W[2], W[3]
    ),
    "attention": lambda x: F.scaled_dot_product_attention(
        heads(x) @ W[:2, :2], heads(x) @ W[2:, :2], heads(x) @ V[:2, 2:]
    ),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None, :3], x[:, None, 1:].sin(), is_causal=True, scale=0.3
    ),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        x[:, None],
        x[:, None],
        x[:, None].sin(),
        attn_mask=torch.eye(4).bool() | (W > 0),
    ),
    "attention, step by step": by_steps,
    "weighted attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None].sin(), attn_mask=W
    ),
    "dropout": lambda x: F.dropout(x.sin(), 0.4, training=True),
    "own dropout": lambda x: torch.native_dropout(x.sin(), 0.4, True)[0],
    "abs": lambda x: x.abs() + x.atan() + x.cos() + x / (2 + x.sin()),
    "units": lambda x: F.elu(x) + F.gelu(x) + F.hardsigmoid(x) + F.hardswish(x),
    "more units": lambda x: (
        F.hardtanh(x) + F.leaky_relu(x) + F.logsigmoid(x) + F.mish(x)
    ),
    "smooth units": lambda x: (
        F.softplus(x) + F.silu(x) + x.sigmoid() + x.tanh() + x.relu()
    ),
    "error function": lambda x: x.erf() + x.exp() + x.expm1(),
    "roots": lambda x: (x.square() + 1).log() + (x**2 + 1).sqrt() + (x**2 + 1).rsqrt(),
    "powers": lambda x: (x**2 + 1).log1p() ** x + (x**2 + 1).reciprocal(),
    "clamp": lambda x: x.clamp(-0.5, 0.5) * (1 - x),
    "where": lambda x: torch.where(x > 0, x.sin(), x) + x.masked_fill(x > 1, 0.0),
    "its own": lambda x: x.clone() * x.detach().sin(),
    "in place": lambda x: x.clone().sin_().mul_(x).relu_(),
    "alias": lambda x: torch.ops.aten.alias(x.sin()),
    "what repeats": lambda x: x.sin().mean(1, keepdim=True).expand(4, 3, 4).sum(1),
}


OF_A_CPU = {
    "NativeBatchNormBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductEfficientAttentionBackward0",  # which it was brought
}
"""The nodes of operations for which a GPU has a kernel of its own, in float64."""

OF_A_GPU: dict[str, Function] = {
    "attention of a GPU": lambda x: of_a_gpu(
        heads(x) @ W[:2, :2], heads(x) @ W[2:, :2], heads(x) @ V[:2, 2:]
    ),
    "attention of a GPU, causal": lambda x: of_a_gpu(
        heads(x).sin(), heads(x), heads(x) @ W[:2, :2], is_causal=True, scale=0.7
    ),
    "attention of a GPU, masked": lambda x: of_a_gpu(
        x[:, None], x[:, None].cos(), x[:, None].sin(), W.masked_fill(W > 1, -math.inf)
    ),
}
if ON_CPU:
    ALONE |= OF_A_GPU


@pytest.mark.parametrize("name", ALONE)
def test_an_operation(name: str) -> None:
    torch.manual_seed(len(name))
    require_same(ALONE[name], double(4, 4, 4), wrong=name)


def test_every_rule_is_among_them() -> None:
    seen: set[str] = set()
    for fn in ALONE.values():
        seen |= {node.name() for node in in_order(graph_of(fn, double(4, 4, 4)).starts)}
    others = {"CudnnBatchNormBackward0"} if ON_CPU else OF_A_CPU
    assert set(RULES) - seen == others


class Block(nn.Module):
    """Attention and tokens by themselves, as somebody writes them."""

    def __init__(self, width: int, heads: int, chance: random.Random) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.explicit, self.causal = (
            chance.random() < 0.5 for _ in range(3)
        )
        self.act = chance.choice([F.relu, F.gelu, torch.tanh, F.silu])
        hidden = chance.choice([2, width, 2 * width])
        self.qkv = nn.Linear(width, 3 * width, bias=chance.random() < 0.5)
        self.out, self.fc1 = nn.Linear(width, width), nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def attend(self, x: Tensor) -> Tensor:
        """Return attention's output."""
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (it.reshape(shape).transpose(1, 2) for it in self.qkv(x).chunk(3, -1))
        if self.explicit:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if self.causal:
                later = torch.ones(scores.shape[-2:]).triu(1).bool()
                scores = scores.masked_fill(later, -math.inf)
            found = scores.softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, (self.attend, self.feed), strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x

    def feed(self, x: Tensor) -> Tensor:
        """Return what each token becomes."""
        return self.fc2(self.act(self.fc1(x)))


class Net(nn.Module):
    """Blocks between some first and last operation."""

    def __init__(
        self, width: int, heads: int, tokens: int, chance: random.Random
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(Block(width, heads, chance) for _ in range(chance.randint(1, 3)))
        )
        self.place = nn.Parameter(torch.randn(tokens, width))
        self.last = chance.choice(["all", "mean", "first", "turned", "narrow", "flat"])
        self.head = nn.Linear(width * tokens if self.last == "flat" else width, 3)
        self.wide = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x + self.place)
        match self.last:
            case "mean":
                return self.head(x.mean(1))
            case "first":
                return self.head(x[:, 0])
            case "turned":
                return x.transpose(1, 2)
            case "narrow":
                return self.wide(self.head(x).tanh())
            case "flat":
                return self.wide(self.head(x.flatten(1)).relu())
        return x


@pytest.mark.parametrize("seed", range(40))
def test_a_random_net(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(chunks, "CHUNK", chance.choice([2**6, 2**10, 2**14, 2**21]))
    samples, tokens = chance.choice([(4, 4), (1, 3), (2, 1), (3, 5), (8, 2)])
    width = 4 if samples == tokens else chance.choice([4, 12])
    net = Net(width, chance.choice([1, 2, 4]), tokens, chance).double()
    net.requires_grad_(chance.random() < 0.5)
    # The factors of a norm may be more than the Jacobian of few outputs.
    monkeypatch.setattr(structured, "MOST", AMPLE)
    require_same(net, double(samples, tokens, width))


def _written_into(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[:, 0] = x[:, 1].sin()
    return made


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:  # pyright: ignore  # fewer than *args
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:  # pyright: ignore  # the same
        return 2 * grad


def _half(x: Tensor) -> Tensor:
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        return F.linear(x, torch.ones(4, 4)).float()


def test_an_axis_may_be_split_after_a_sum() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).double()

    def fn(x: Tensor) -> Tensor:
        y = (x.sin() @ W).reshape(4, 2, 8)
        return layer(y) + y.tanh()

    require_same(fn, double(4, 4, 4))


UNKNOWN: dict[str, Function] = {
    "another sample": lambda x: x - x.mean(0),
    "samples turned": lambda x: x.flip(0),
    "samples for tokens": lambda x: x.transpose(0, 1).sin(),
    "samples for features": lambda x: x.transpose(0, 2) @ W,
    "samples shifted": lambda x: torch.cat([x[1:], x[:1]]),
    "samples multiplied": lambda x: (x.reshape(4, 16) @ x.reshape(4, 16).T) @ W,
    "all to one": lambda x: x.sin() + x.sum(),
    "picked": lambda x: x[:, [0, 2]],
    "gathered": lambda x: x.gather(1, torch.zeros(4, 1, 4, dtype=torch.long)),
    "batch norm that learns": lambda x: F.batch_norm(
        x.transpose(1, 2), None, None, training=True
    ),
    "written into": _written_into,
    "somebody's own": lambda x: _Own.apply(x),  # pyright: ignore  # it has no type
    "sorted": lambda x: x.sort(1).values,
    "cumulative": lambda x: x.cumsum(1),
    "dtypes": lambda x: x.float().sin().double(),
    "infinite": lambda x: F.linear(x, W * math.inf),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_to_others(name: str) -> None:
    torch.manual_seed(0)
    assert by_structure(graph_of(UNKNOWN[name], double(4, 4, 4))) is None


@pytest.mark.skipif(not ON_CPU, reason="a GPU has that kernel for float32 only")
@pytest.mark.parametrize("unknown", ["", "dropout_p", "is_causal", "query"])
def test_attention_that_is_not_the_formula_is_left_to_others(
    unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropout = 0.0 if unknown else 0.1
    graph = graph_of(lambda x: of_a_gpu(x, x, x, dropout_p=dropout), double(4, 2, 4, 4))
    saved = Operation.saved
    monkeypatch.setattr(
        Operation, "saved", lambda op, it: None if it == unknown else saved(op, it)
    )
    assert by_structure(graph) is None


def test_autocast_is_left_to_others() -> None:
    assert by_structure(graph_of(_half, torch.randn(4, 4, 4))) is None


def test_narrow_dtypes_are_left_to_others() -> None:
    x = torch.randn(4, 4, 4, dtype=torch.bfloat16)
    assert by_structure(graph_of(torch.sin, x)) is None


def test_two_dtypes_in_one_product_are_left_to_others() -> None:
    assert by_structure(graph_of(lambda x: x * W, torch.randn(4, 4, 4))) is None


def test_several_inputs_are_left_to_others() -> None:
    given = read(torch.mul, (double(2, 3), double(2, 3)), (0, 1), 0)
    assert found_for(run(given)[0], AMPLE, AMPLE) is None


def test_what_a_node_has_saved_may_be_overwritten() -> None:
    weight = W.clone()
    graph = graph_of(lambda x: F.linear(x, weight), double(4, 4, 4))
    weight.zero_()
    assert by_structure(graph) is None


def test_weights_are_read_at_every_call() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()
    x = double(2, 3, 4)
    require_same(layer, x)
    with torch.no_grad():
        layer.weight.data.mul_(2)
    require_same(layer, x)


def test_it_is_not_taken_where_it_does_not_fit() -> None:
    graph = graph_of(ALONE["attention"], double(4, 4, 4))
    found = found_for(graph, AMPLE, AMPLE)
    assert found is not None
    assert found_for(graph, AMPLE, found.bytes) is not None
    assert found_for(graph, AMPLE, found.bytes - 1) is None


def test_it_writes_into_what_it_is_given() -> None:
    graph = graph_of(ALONE["attention"], double(4, 4, 4))
    found = found_for(graph, AMPLE, AMPLE)
    assert found is not None
    out = torch.full(graph.shape(0, 0), math.nan, dtype=torch.float64)
    made = found.blocks(graph, {(0, 0): out})
    assert made[0, 0] is out
    assert torch.equal(out, found.blocks(graph)[0, 0])


def test_tokens_are_worth_it_and_rows_of_few_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    tokens = graph_of(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        torch.randn(4, 16, 32),
    )
    assert found_for(tokens, tokens.rows(0), AMPLE) is not None
    assert found_for(tokens, 1, AMPLE) is None
    flat = graph_of(nn.Linear(32, 32), torch.randn(4, 32))
    assert found_for(flat, AMPLE, AMPLE) is None


def test_a_hook_inside_is_heard() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).double()

    def hooked(x: Tensor) -> Tensor:
        y = layer(x.sin())
        y.register_hook(lambda grad: grad * grad.sign())
        return y.tanh()

    x = double(4, 4, 4)
    found = gradlib.per_sample_jacobian(hooked, x, check=False)
    truth = gradlib.per_sample_jacobian(hooked, x, mode="loop", check=False)
    assert by_structure(graph_of(hooked, x)) is not None, "a hook is not seen there"
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("check", [False, True])
def test_a_block_as_a_whole(check: bool) -> None:
    torch.manual_seed(0)
    block = Block(4, 2, random.Random(0)).double()
    x = double(3, 5, 4)
    truth = gradlib.per_sample_jacobian(block, x, mode="loop", check=False)
    found = gradlib.per_sample_jacobian(block, x, check=check)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    out = torch.empty_like(truth).mT.contiguous().mT
    assert gradlib.per_sample_jacobian(block, x, out=out, check=check) is out
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
