"""Operations and nets that the ways in the folder `fast` are tried on."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradlib.jacobian import planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.compute import compute
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.run import run

Function = Callable[[Tensor], Tensor]

ON = torch.ones(()).device
ON_CPU = ON.type == "cpu"
NO_CUDNN = ON_CPU or not torch.backends.cudnn.is_available()


def graph_of(fn: Function, x: Tensor) -> Graph:
    """Return the graph of one call."""
    return run(read(fn, (x,), 0, 0))[0]


def by_rows(graph: Graph) -> Tensor:
    """Return the reference."""
    plan = planning.make(graph, "loop", "auto", None)
    return compute(graph, plan, may_change=False)[0, 0]


def looks_asked(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Return the list of what a backward pass goes through that proves something."""
    asked: list[Graph] = []
    at_all = Look.at_all

    def noted(graph: Graph) -> Look:
        asked.append(graph)
        return at_all(graph)

    monkeypatch.setattr(Look, "at_all", noted)
    return asked


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


def attend(
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


def attend_back(
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


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None
) -> tuple[Tensor, Tensor]:
    """What a GPU's kernel computes, and saves."""
    dims = tuple(range(-len(shape), 0))
    least = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = (x.square().mean(dims, keepdim=True) + least).rsqrt()
    return x * rstd * weight, rstd


def rms_norm_back(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor, _: Any
) -> tuple[Tensor, None]:
    """What the kernel of its backward pass computes, without the weight's gradient."""
    dims, normal, slope = tuple(range(-len(shape), 0)), x * rstd, grad * weight
    return rstd * (slope - normal * (slope * normal).mean(dims, keepdim=True)), None


def heads(x: Tensor) -> Tensor:
    """Return two heads of two features each."""
    return x.view(4, 4, 2, 2).transpose(1, 2)


def double_of_none() -> Tensor:
    """Return an empty vector, as one begins with that adds to it in a loop."""
    return torch.zeros(0, dtype=torch.float64, requires_grad=True)


SLICE: Any = torch.ops.aten.slice.Tensor
"""As TorchScript calls it, without the ends that nobody wrote."""

# Of what a sample is, ``(4, 4)``, everywhere below, with 4 samples: equal sizes must
# not be taken for equal axes.
_SEEDED = torch.Generator("cpu").manual_seed(0)  # another W might mask a whole row
W, V = (
    torch.randn(4, 4, dtype=torch.float64, generator=_SEEDED, device="cpu").to(ON)
    for _ in range(2)
)

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
    "vectors": lambda x: x.reshape(64).t().sin().view(4, 4, 4),
    "nothing in front": lambda x: torch.cat([double_of_none(), x.flatten(1)], 1),
    "permute": lambda x: (x.permute(2, 0, 1) @ W).permute(1, 2, 0) @ V,
    "matrix transpose": lambda x: (x.reshape(16, 4).t() * W[0, 0]).t().reshape(4, 4, 4),
    "select": lambda x: x[:, -1].sin() + x[:, 1],
    "unbind": lambda x: x.unbind(-1)[2] * x.unbind(-1)[-1].sin(),
    "slice": lambda x: x[:, 1:-1, ::2].sin(),
    "slice of all": lambda x: x[:4].narrow(1, 0, 4).sin(),
    "slice of a script": lambda x: SLICE(x.sin(), 1, None, 3) + SLICE(x, 1, 1),
    "split": lambda x: x.split(3, 1)[1].sin() * x.chunk(2, 2)[1].sum(2, keepdim=True),
    "split of all": lambda x: x.split(4)[0].sin(),
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
    "clamp one side": lambda x: x.clamp_min(-0.5) * x.clamp_max(0.5),
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

FUSES_RMS_NORM = torch.__version__ >= "2.9"
"""Whether an RMS norm may be one node; in torch 2.8 it is many everywhere."""

UNSEEN: set[str] = set() if ON_CPU else OF_A_CPU
"""The nodes that no operation leaves here."""
if NO_CUDNN:
    UNSEEN = UNSEEN - {"NativeBatchNormBackward0"} | {"CudnnBatchNormBackward0"}
if not FUSES_RMS_NORM:
    UNSEEN = UNSEEN | {"FusedRmsNormBackward0"}

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


def written_into(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[:, 0] = x[:, 1].sin()
    return made


class Own(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:  # pyright: ignore  # the same
        return 2 * grad


def half_of_it(x: Tensor) -> Tensor:
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        return F.linear(x, torch.ones(4, 4)).float()
