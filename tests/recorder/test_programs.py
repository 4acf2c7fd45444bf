"""Whole programs as people write them, against ``retain_grad`` on an unhooked copy.

Each module of the copy gets copies of its inputs, whose gradients are its share.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.testing import assert_close

import gradlib

Run: TypeAlias = Callable[[Any, Any], None]


def given(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def tensors(structure: Any) -> Iterator[Tensor]:
    """Return the tensors of a structure that require grad."""
    for leaf in optree.tree_leaves(structure):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield leaf


def watched(model: nn.Module, run: Run, data: Any) -> dict[str, list[Any]]:
    """Run a program, and return the inputs and outputs of each call."""
    calls: defaultdict[str, list[Any]] = defaultdict(list)
    open_calls: list[Any] = []
    alike: Any = optree.tree_map

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf = leaf.clone()
            leaf.retain_grad()
        return leaf

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        open_calls.append(alike(copied, (args, kwargs)))
        return open_calls[-1]

    for name, module in model.named_modules():

        def after(
            _module: nn.Module, _args: object, output: Any, name: str = name
        ) -> None:
            for tensor in tensors(output):
                tensor.retain_grad()
            calls[name].append((open_calls.pop(), output))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    run(model, data)
    return calls


def simple(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def learns_in_the_pass(model: nn.Module, x: Tensor) -> None:
    def learn(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * cast(Tensor, parameter.grad)

    hooks = [it.register_post_accumulate_grad_hook(learn) for it in model.parameters()]
    for _ in range(2):
        simple(model, x)
    for hook in hooks:
        hook.remove()


def of_some_leaves(model: Any, x: Tensor) -> None:
    model(x).sum().backward(inputs=[model[0].weight])


def saved_elsewhere(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().sum()
    loss.backward()


def climbs_first(model: nn.Module, x: Tensor) -> None:
    """Take a step of sharpness-aware minimization."""
    simple(model, x)
    with torch.no_grad():
        steps = [0.1 * cast(Tensor, it.grad) for it in model.parameters()]
        for parameter, step in zip(model.parameters(), steps, strict=True):
            parameter += step
    simple(model, x)
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), steps, strict=True):
            parameter -= step


def in_two_graphs(model: Any, x: Tensor) -> None:
    hidden = model[0](x)
    leaf = hidden.detach().requires_grad_()
    model[2](model[1](leaf)).square().sum().backward()
    hidden.backward(leaf.grad)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes = nn.Linear(3, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return z + (nearest - z).detach(), F.mse_loss(nearest, z.detach())


def both(model: nn.Module, x: Tensor) -> None:
    output, loss = model(x)
    (output.square().sum() + loss).backward()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    linear = nn.Linear(3, 3)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return nn.Sequential(linear, nn.Tanh())


def with_one_weight(model: nn.Module, x: Tensor) -> None:
    with parametrize.cached():
        (model(x).sum() + model(model(x)).sum()).backward()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(self.inner(x)) @ self.weight).abs()


class SomeOutputs(torch.autograd.Function):
    """Has outputs without a gradient, and asks for None in place of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(x, w)
        return x * w, x - w, positive

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG004 (torch's form)
        product, difference, _ = grads
        assert product is None
        return difference, -difference.sum(0)


class OneOutput(nn.Module):
    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return SomeOutputs.apply(x, self.w)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(3, 3), OneOutput.Function()

    def forward(self, x: Tensor) -> Tensor:
        _, difference, positive = self.function(self.inner(x))
        return difference * positive


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        made = torch.zeros(len(x), 8)
        made[:, :4] = y
        made[:, 4:] = self.b(y[:, :2])
        made[:, 0] *= 2
        return made


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):  # some get no row
            row, place = (chosen == i).nonzero(as_tuple=True)
            made.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return made


class WeightDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear: Any = nn.Linear(3, 3)
        self.raw = nn.Parameter(self.linear.weight.detach().clone())
        del self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight = F.dropout(self.raw, 0.5)
        return self.linear(x)


class Hypernet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.target = nn.Linear(3, 9), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head(x.mean(0)).view(3, 3)
        return torch.func.functional_call(self.target, {"weight": weight}, (x,))


class Grouped(nn.Module):
    """Attention in which several queries share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = nn.RMSNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        heads = (2, 5, 2, 2)
        q = self.q(x).view(2, 5, 4, 2).transpose(1, 2)
        k, v = (it.view(heads).transpose(1, 2) for it in self.kv(x).chunk(2, -1))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return made.transpose(1, 2).flatten(2)


@dataclass
class Program:
    make: Callable[[], nn.Module]
    run: Run = simple
    shape: tuple[int, ...] = (4, 3)


PROGRAMS = {
    "an optimizer in the backward pass": Program(chain, learns_in_the_pass),
    "backward(inputs=...)": Program(chain, of_some_leaves),
    "save_on_cpu": Program(chain, saved_elsewhere),
    "sharpness-aware minimization": Program(chain, climbs_first),
    "a graph in two parts": Program(chain, in_two_graphs),
    "an expanded input": Program(chain, lambda m, x: simple(m, x.expand(4, 3)), (1, 3)),
    "vector quantization": Program(Quantized, both),
    "a cached parametrization": Program(symmetric, with_one_weight),
    "complex numbers": Program(Spectral),
    "a function with outputs not asked for": Program(OneOutput),
    "slices that are assigned": Program(Slices),
    "a mixture of experts": Program(Experts),
    "a weight that is dropped": Program(WeightDrop),
    "a hypernetwork": Program(Hypernet),
    "grouped attention": Program(Grouped, shape=(2, 5, 8)),
    "an encoder": Program(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        shape=(2, 3, 4),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str) -> None:
    torch.manual_seed(0)
    program = PROGRAMS[name]
    model = program.make()
    plain, bare = copy.deepcopy(model), copy.deepcopy(model)
    x = given(*program.shape)
    same, also = (x.detach().clone().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    with gradlib.record(model) as recording:
        program.run(model, x)
    torch.manual_seed(1)
    program.run(bare, also)
    assert_close(x.grad, also.grad)
    pairs = list(zip(model.parameters(), bare.parameters(), strict=True))
    assert_close([a.grad for a, _ in pairs], [b.grad for _, b in pairs])
    torch.manual_seed(1)
    expected = watched(plain, program.run, same)

    assert len(recording) == sum(map(len, expected.values()))
    for key, calls in expected.items():
        for call, (inputs, output) in zip(recording.calls(key), calls, strict=True):
            (pass_,) = call.passes
            args, kwargs = pass_.grad_input, pass_.grad_kwargs
            assert_shares((args, kwargs), inputs, (call.args, call.kwargs))
            assert_shares(pass_.grad_output, output, call.output)
    used = [(call.name, key) for call in recording for key in call.param_grads]
    owned = dict(bare.named_parameters())
    for owner, key in dict.fromkeys(used):
        parameter = owned.get(f"{owner}.{key}".removeprefix("."))
        found = [call.param_grads[key] for call in recording.calls(owner)]
        if parameter is not None and parameter.grad is not None:
            assert_close(sum(found), parameter.grad)
    assert recording.verify().ok


def assert_shares(found: Any, tensors_given: Any, recorded: Any) -> None:
    """Compare all gradients in order; None counts as zeros."""
    leaves: Any = optree.tree_leaves
    grads_found = leaves(found, none_is_leaf=True)
    wanted = [
        it.grad if isinstance(it, Tensor) and it.requires_grad else None
        for it in leaves(tensors_given, none_is_leaf=True)
    ]
    assert len(grads_found) == len(wanted) == len(leaves(recorded, none_is_leaf=True))
    for a, b in zip(grads_found, wanted, strict=True):
        if a is None or b is None:
            assert all(it is None or not it.any() for it in (a, b))
        else:
            assert_close(a, b)
