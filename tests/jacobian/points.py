"""Points to take Jacobians at, and the Jacobian of each sample alone."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

ROWS = ("reverse", "loop", "auto")
"""The modes that no operation refuses."""


def points(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same numbers on every device, near to no step of what is cut."""
    drawn = torch.randn(*shape, dtype=dtype, device="cpu")
    return drawn.to(torch.get_default_device())


def alone(fn: Callable[..., Any], x: Tensor) -> Tensor:
    """Return the Jacobian of each sample alone, by torch."""
    blocks: list[Tensor] = []
    for row in x.detach().split(1):
        block = torch.autograd.functional.jacobian(lambda x: fn(x.clone()), row.clone())
        block = cast(Tensor, block)
        blocks.append(block.squeeze(block.dim() - x.dim()).squeeze(0))
    return torch.stack(blocks)


def require_close(ours: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.shape == reference.shape
    apart = (ours.double() - reference.double()).abs().max()
    assert apart <= tolerance * reference.double().abs().max()


def only_as(dtype: torch.dtype, fn: Function) -> Function:
    def narrow(x: Tensor) -> Tensor:
        if x.dtype != dtype:
            raise TypeError(f"{dtype} only")
        return fn(x)

    return narrow
