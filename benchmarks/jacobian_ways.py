"""The ways people compute a Jacobian for every sample today, and gradlib's.

Each takes a network and a batch and returns ``(batch, *out, *in)``, as a view or not.
"""

# Where the others are installed, their imports are no errors to ignore.
# pyright: reportUnnecessaryTypeIgnoreComment=false

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev, jvp, vmap

import gradlib
from benchmarks.names import (
    BATCHED,
    JACFWD,
    JACREV,
    JACREV_OF_SUM,
    LOOP,
    OURS,
    OURS_CHECKED,
    OURS_IN_A_FUNCTION,
    OURS_IN_A_LOSS,
    OURS_IN_OTHER_CODE,
    OURS_IN_OTHER_CODE_CHECKED,
    OURS_OUT,
    REPLICATED,
    UNIT_JVPS,
)

MOST = 2**32
"""The most bytes a way may inherently need; one that needs more is left out."""

Compute = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute it.

    Attributes:
        name: What the table calls it.
        prepare: Returns the call to time, for a network, its batch and the result's
            shape.
        needs: Returns the bytes it needs at least, for the batch and that shape.
        against: The way by whose time its own is divided.
        passes: Returns its number of successive passes, for the same as `needs`.
    """

    name: str
    prepare: Callable[[nn.Module, Tensor, torch.Size], Callable[[], Tensor]]
    needs: Callable[[Tensor, torch.Size], int] = lambda _x, shape: 4 * shape.numel()
    against: str = OURS
    passes: Callable[[Tensor, torch.Size], int] = lambda _x, _shape: 1


def every_way() -> list[Way]:
    """Return all ways, gradlib's first."""
    return [
        _plain(OURS, partial(gradlib.per_sample_jacobian, check=False)),
        _plain(OURS_CHECKED, gradlib.per_sample_jacobian),
        Way(OURS_OUT, _with_out),
        _plain(OURS_IN_A_FUNCTION, _in_a_function),
        _plain(OURS_IN_OTHER_CODE, _in_other_code),
        _plain(OURS_IN_OTHER_CODE_CHECKED, partial(_in_other_code, check=True)),
        Way(
            "functional.jacobian, diagonal",
            lambda model, x, _: lambda: functional_diagonal(model, x),
            lambda x, shape: 4 * shape.numel() * len(x),
            passes=lambda x, shape: shape.numel() // x[0].numel(),
        ),
        _plain(LOOP, loop),
        _plain(BATCHED, grads_batched),
        _plain(JACREV, jacrev_of_each),
        Way(
            JACFWD,
            lambda model, x, _: lambda: vmap(jacfwd(_single(model)))(x),
            # A few tangents for each entry of the input, each as large as the input.
            lambda x, _: 32 * x.numel() * x[0].numel(),
        ),
        _plain(JACREV_OF_SUM, jacrev_of_sum),
        Way(
            REPLICATED,
            lambda model, x, _: lambda: replicate(model, x),
            lambda x, shape: 40 * x.numel() * (shape.numel() // x.numel()),
        ),
        Way(
            UNIT_JVPS,
            lambda model, x, _: lambda: unit_jvps(model, x),
            passes=lambda x, _shape: x[0].numel(),
        ),
        _plain("TorchJD", torchjd),
        _in_a_loss(
            OURS_IN_A_LOSS,
            partial(gradlib.per_sample_jacobian, check=False, create_graph=True),
        ),
        _in_a_loss(f"{LOOP}, in a loss", partial(loop, create_graph=True)),
        _in_a_loss(f"{BATCHED}, in a loss", partial(grads_batched, create_graph=True)),
        _in_a_loss(f"{JACREV}, in a loss", jacrev_of_each),
        _in_a_loss(f"{JACREV_OF_SUM}, in a loss", jacrev_of_sum),
    ]


def serious() -> list[Way]:
    """Return the ways that are the fastest somewhere, gradlib's first."""
    names = (
        OURS,
        LOOP,
        BATCHED,
        JACREV,
        JACFWD,
        JACREV_OF_SUM,
        REPLICATED,
        UNIT_JVPS,
    )
    return [it for it in every_way() if it.name in names]


def serious_and_checked() -> list[Way]:
    """Return the same ways, and gradlib's with its check."""
    return serious() + [it for it in every_way() if it.name == OURS_CHECKED]


def functional_diagonal(model: nn.Module, x: Tensor) -> Tensor:
    """Compute dY/dX of all pairs of samples, and keep each sample's with itself."""
    full = torch.autograd.functional.jacobian(model, x, vectorize=False)
    assert isinstance(full, Tensor)
    outs = full.dim() - x.dim() - 1
    return full.diagonal(dim1=0, dim2=1 + outs).movedim(-1, 0)


def loop(model: nn.Module, x: Tensor, create_graph: bool = False) -> Tensor:
    """Run one backward pass for each entry of the output."""
    x = x.detach().requires_grad_()
    y = model(x)
    flat = y.flatten(1)
    rows = [
        torch.autograd.grad(
            flat[:, i].sum(), x, retain_graph=True, create_graph=create_graph
        )[0]
        for i in range(flat.shape[1])
    ]
    return torch.stack(rows, 1).view(*y.shape, *x.shape[1:])


def grads_batched(model: nn.Module, x: Tensor, create_graph: bool = False) -> Tensor:
    """Run one batched backward pass: a unit vector for each entry of the output."""
    x = x.detach().requires_grad_()
    y = model(x)
    flat = y.flatten(1)
    count = flat.shape[1]
    v = torch.eye(count, dtype=y.dtype, device=y.device)
    v = v[:, None].expand(count, *flat.shape)
    (rows,) = torch.autograd.grad(
        flat, x, v, is_grads_batched=True, create_graph=create_graph
    )
    return rows.movedim(0, 1).reshape(*y.shape, *x.shape[1:])


def jacrev_of_each(model: nn.Module, x: Tensor) -> Tensor:
    """Differentiate a function of one sample, mapped over the batch."""
    return vmap(jacrev(_single(model)))(x)


def jacrev_of_sum(model: nn.Module, x: Tensor) -> Tensor:
    """Differentiate the sum over the batch: only a sample's own part is not zero."""
    rows = jacrev(lambda it: model(it).sum(0))(x)  # (*out, batch, *in)
    assert isinstance(rows, Tensor)
    return rows.movedim(rows.dim() - x.dim(), 0)


def replicate(model: nn.Module, x: Tensor) -> Tensor:
    """Call the network with a copy of the batch for each entry of the output."""
    with torch.no_grad():
        shape = model(x[:1]).shape[1:]
    count = shape.numel()
    copies = x.detach().repeat_interleave(count, 0).requires_grad_()
    y = model(copies).flatten(1)
    v = torch.eye(count, dtype=y.dtype, device=y.device).repeat(len(x), 1)
    (rows,) = torch.autograd.grad(y, copies, v)
    return rows.view(len(x), *shape, *x.shape[1:])


def unit_jvps(model: nn.Module, x: Tensor) -> Tensor:
    """Call the network once for each entry of the input, with a unit tangent."""
    flat = x.flatten(1)
    columns: list[Tensor] = []
    for i in range(flat.shape[1]):
        u = torch.zeros_like(flat)
        u[:, i] = 1
        columns.append(jvp(model, (x,), (u.view_as(x),))[1])
    return torch.stack(columns, -1).view(*columns[0].shape, *x.shape[1:])


def torchjd(model: nn.Module, x: Tensor) -> Tensor:
    """Differentiate the sum over the batch with TorchJD."""
    from torchjd.autojac import jac  # pyright: ignore (not a dependency)

    x = x.detach().requires_grad_()
    y = model(x)
    (rows,) = jac([y.sum(0)], [x])
    return rows.movedim(rows.dim() - x.dim(), 0)


def _plain(name: str, compute: Compute) -> Way:
    return Way(name, lambda model, x, _: lambda: compute(model, x))


def _in_a_loss(name: str, compute: Compute) -> Way:
    """Return a way whose result goes into a loss, with gradients for the weights."""

    def prepare(model: nn.Module, x: Tensor, _: torch.Size) -> Callable[[], Tensor]:
        trained = deepcopy(model).requires_grad_(True)
        parameters = list(trained.parameters())

        def step() -> Tensor:
            found = compute(trained, x)
            loss = found.square().sum()
            torch.autograd.grad(loss, parameters, allow_unused=True)
            return found.detach()

        return step

    return Way(name, prepare, against=OURS_IN_A_LOSS)


def _in_a_function(model: nn.Module, x: Tensor) -> Tensor:
    """Call gradlib with a function that calls the network."""
    return gradlib.per_sample_jacobian(lambda x: model(x), x, check=False)


def _in_other_code(model: nn.Module, x: Tensor, *, check: bool = False) -> Tensor:
    """Call gradlib with other code, whose layers show only when they have run."""
    calls = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return model(x)

    return gradlib.per_sample_jacobian(fn, x, check=check)


def _with_out(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    return lambda: gradlib.per_sample_jacobian(model, x, out=out, check=False)


def _single(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda sample: model(sample[None])[0]
