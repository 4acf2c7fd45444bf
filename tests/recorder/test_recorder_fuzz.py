"""Random networks: every recorded gradient against one that autograd gives.

The reference adds a zero to each input, parameter and output of each call of an
unhooked copy. The gradient of that zero is what flowed there, in that call alone.
"""

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib

SIZE, BATCH, NETS = 4, 3, 36


class Own(nn.Module):
    """Uses a parameter of its own before, beside and after a child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(SIZE))
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.child(x * self.scale) + x


class Pair(nn.Module):
    """Takes a tensor and one by keyword, and returns a tuple in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, *, other: Tensor) -> dict[str, Any]:
        h = self.fc(x)
        return {"pair": (h * other, torch.sin(h)), "sum": x + other}


class InPlace(nn.Module):
    """Overwrites its input and uses what it was."""

    def forward(self, x: Tensor) -> Tensor:
        was = 3 * x
        return x.tanh_() + was


class Product(nn.Module):
    """One tensor in two places of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(SIZE, SIZE), nn.Bilinear(SIZE, SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x, x)


class Again(nn.Module):
    """Computes its child again in the backward pass."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.child, 1.1 * x, use_reentrant=False)


def leaf(choose: random.Random, depth: int) -> nn.Module:
    """Return a random module that maps (batch, SIZE) to the same."""
    makers = [
        lambda: nn.Linear(SIZE, SIZE),
        nn.Tanh,
        lambda: nn.SiLU(inplace=True),
        lambda: nn.Dropout(0.3, inplace=True),
        lambda: nn.BatchNorm1d(SIZE),
        lambda: nn.LayerNorm(SIZE),
        InPlace,
        Product,
    ]
    if depth < 2:
        makers += [
            lambda: Own(leaf(choose, depth + 1)),
            lambda: Again(Own(nn.Linear(SIZE, SIZE))),
            lambda: RandomNet(choose, depth + 1),
            lambda: nn.Sequential(leaf(choose, depth + 1), leaf(choose, depth + 1)),
        ]
    return choose.choice(makers)()


class RandomNet(nn.Module):
    """Calls random modules on random tensors, some twice, some without gradients."""

    def __init__(self, choose: random.Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([leaf(choose, depth) for _ in range(3)])
        self.pair = Pair()
        kinds = ["part"] * 5 + ["pair", "pair", "add", "overwrite", "quiet", "weight"]
        self.steps = [
            (choose.choice(kinds), *(choose.randrange(100) for _ in range(3)))
            for _ in range(4)
        ]

    def forward(self, x: Tensor) -> Tensor:
        pool = [x, 2 * x]
        for kind, i, j, k in self.steps:
            i %= len(pool)
            one, other = pool[i], pool[j % len(pool)]
            part = self.parts[k % len(self.parts)]
            if kind == "part":
                # What is overwritten is not used again: the sum is a new tensor.
                pool.append(part(one + 0.5 * other))
            elif kind == "pair":
                found = self.pair(one, other=other)
                pool += [*found["pair"], found["sum"]]
            elif kind == "add":
                pool.append(one + other)
            elif kind == "overwrite":
                pool.append(torch.sin(one).mul_(1.5).add_(other))
            elif kind == "quiet":
                with torch.no_grad():
                    pool.append(part(one.clone()))
            else:
                pool.append(one @ self.pair.fc.weight)
        return (pool[-1] + pool[len(pool) // 2]) * self.pair.fc.bias


Zeros = dict[tuple[int, str, Any], Tensor]


def probe(model: nn.Module) -> Zeros:
    """Add a zero to all that enters and leaves each call: by call, field and place."""
    zeros: Zeros = {}
    calls = 0
    open_calls: list[tuple[int, dict[str, Any]]] = []

    def plus_zero(call: int, field: str, place: Any, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        zero = torch.zeros_like(value, requires_grad=True)
        zeros[call, field, place] = zero
        return value + zero

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        call = calls
        calls += 1
        real = dict(module._parameters)
        open_calls.append((call, real))
        if not torch.is_grad_enabled():
            return None
        for name, parameter in real.items():
            module._parameters[name] = plus_zero(call, "param_grads", name, parameter)
        # A tensor in two places is one: both hold the same share.
        given = {("grad_input", place): arg for place, arg in enumerate(args)}
        given |= {("grad_kwargs", name): value for name, value in kwargs.items()}
        first = {id(value): key for key, value in reversed(given.items())}
        new = {key: plus_zero(call, *key, given[key]) for key in first.values()}
        put = {key: new[first[id(value)]] for key, value in given.items()}
        return (
            tuple(put["grad_input", place] for place in range(len(args))),
            {name: put["grad_kwargs", name] for name in kwargs},
        )

    def after(module: nn.Module, _args: Any, output: Any) -> Any:
        call, real = open_calls.pop()
        module._parameters.update(real)
        if not torch.is_grad_enabled():
            return None
        if isinstance(output, dict):
            first, second = output["pair"]
            return {
                "pair": (
                    plus_zero(call, "grad_output", 0, first),
                    plus_zero(call, "grad_output", 1, second),
                ),
                "sum": plus_zero(call, "grad_output", 2, output["sum"]),
            }
        return plus_zero(call, "grad_output", 0, output)

    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
    return zeros


def found_in(call: gradlib.Call, number: int, field: str, place: Any) -> Any:
    """Return what was recorded for one zero of the reference."""
    for pass_ in call.passes:
        if pass_.backward == number:
            value = getattr(pass_, field)
            if field == "grad_output" and isinstance(value, dict):
                return [*value["pair"], value["sum"]][place]
            return value[place]
    return None


def losses_of(model: nn.Module, seed: int) -> list[Tensor]:
    """Run forward, twice for some seeds, and return the losses."""
    torch.manual_seed(seed)
    x = torch.randn(BATCH, SIZE, dtype=torch.double)
    if seed % 2:
        x.requires_grad_()
    outputs = [model(i * x) for i in range(1, 2 + (seed % 3 == 0))]
    return [output.sin().sum() for output in outputs] + [
        outputs[0].square().sum() + sum(p.square().sum() for p in model.parameters())
    ]


def is_trained(model: nn.Module, seed: int) -> bool:
    """Run every backward pass, unless the net overwrites what one of them needs."""
    try:
        for loss in losses_of(model, seed):
            loss.backward(retain_graph=True)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return False
        raise
    return True


def made(seed: int) -> nn.Module:
    """Return the random net of a seed."""
    torch.manual_seed(seed)
    return RandomNet(random.Random(seed), 0).double()


def without_checkpoints(model: nn.Module) -> nn.Module:
    """Return a copy that computes nothing again, so that its calls can be counted."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Again):
            module.forward = lambda x, module=module: module.child(1.1 * x)
    return model


def compared(seed: int) -> Counter[str]:
    """Hold one net's recording against the reference, and count what was compared."""
    model = made(seed)
    reference = without_checkpoints(model)
    plain = copy.deepcopy(model)
    count: Counter[str] = Counter()
    if not is_trained(plain, seed):
        return count
    with gradlib.record(model) as recording:
        assert is_trained(model, seed)
    for (name, ours), theirs in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert_close(ours.grad, theirs.grad, rtol=0, atol=0, msg=f"{seed}: {name}")

    zeros = probe(reference)
    losses = losses_of(reference, seed)
    calls = list(recording)
    for number, loss in enumerate(losses):
        grads = torch.autograd.grad(
            loss, [*zeros.values()], retain_graph=True, allow_unused=True
        )
        for (index, field, place), grad in zip(zeros, grads, strict=True):
            found = found_in(calls[index], number, field, place)
            if found is None and (grad is None or not grad.any()):
                continue
            where = f"net {seed}, pass {number}, {calls[index]!r}: {field}[{place!r}]"
            assert found is not None, f"{where} is missing: {calls[index].note}"
            wanted = torch.zeros_like(found) if grad is None else grad
            assert_close(found, wanted, msg=lambda text, where=where: where + text)
            count[field] += 1
    return count


@pytest.mark.parametrize("part", range(3))
def test_random_networks(part: int) -> None:
    count: Counter[str] = Counter()
    for seed in range(part, NETS, 3):
        count += compared(seed)
    assert min(count[it] for it in ("grad_input", "grad_output", "param_grads")) > 50
    assert count["grad_kwargs"] > 2


def test_random_networks_reduced() -> None:
    """A reduced recording holds what the reduction makes of the full one."""
    fields = ("grad_input", "grad_input_total", "param_grads", "param_grads_total")
    for seed in range(0, NETS, 3):
        recordings: list[gradlib.Recording] = []
        for reduce in (None, torch.norm):
            model = made(seed)
            with gradlib.record(model, reduce=reduce) as recording:
                is_trained(model, seed)
            recordings.append(recording)
        for full, reduced in zip(*recordings, strict=True):
            for ours, theirs in zip(reduced.passes, full.passes, strict=True):
                for field in fields:
                    whole = _values(getattr(theirs, field))
                    expected = [it if it is None else torch.norm(it) for it in whole]
                    assert_close(_values(getattr(ours, field)), expected)


def _values(structure: tuple[Any, ...] | dict[str, Any]) -> list[Any]:
    return list(structure.values() if isinstance(structure, dict) else structure)
