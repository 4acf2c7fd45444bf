"""Nets and inputs, and the Jacobian of each of several samples alone."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.random_state import seed_all

MODES = ("reverse", "forward", "split", "loop", "auto")


def alone(
    fn: Callable[..., Any], *inputs: Tensor, shared: Sequence[int] = ()
) -> list[list[Tensor]]:
    """Return the Jacobian of each output by each input, each sample alone."""
    own = [x for i, x in enumerate(inputs) if i not in shared]
    samples: list[list[list[Tensor]]] = []
    for n in range(len(own[0])):
        ours = tuple(
            x.detach().clone() if i in shared else x.detach()[n : n + 1].clone()
            for i, x in enumerate(inputs)
        )

        def copied(*given: Tensor) -> Any:  # it may overwrite what it is given
            return fn(*(it.clone() for it in given))

        found = cast(Any, torch.autograd.functional.jacobian(copied, ours))
        rows = found if isinstance(found[0], tuple) else [found]
        samples.append(
            [
                [
                    block[0]
                    if i in shared  # else (1, *out, 1, *in)
                    else block.squeeze(block.dim() - ours[i].dim()).squeeze(0)
                    for i, block in enumerate(row)
                ]
                for row in rows
            ]
        )
    return [
        [torch.stack(blocks) for blocks in zip(*rows, strict=True)]
        for rows in zip(*samples, strict=True)
    ]


def require_close(ours: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    """Hold two tensors together, relative to the largest entry."""
    assert ours.shape == reference.shape
    apart = (ours.detach().double() - reference.detach().double()).abs()
    largest = reference.detach().abs().double()
    if largest.numel():
        assert apart.max() <= tolerance * largest.max()


def smooth_net(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A chain whose narrowest tensor is a place to split at."""
    seed_all(0)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def three() -> tuple[Tensor, Tensor, Tensor]:
    seed_all(1)
    x, y, z = (torch.randn(4, n, dtype=torch.float64) for n in (3, 2, 5))
    return x, y, z


X = torch.ones(2, 3)
