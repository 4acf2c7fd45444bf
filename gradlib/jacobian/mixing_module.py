"""The error for samples that influence each other, with the module that mixes them."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import (
    _BatchNorm,  # pyright: ignore[reportPrivateUsage] (the base of them all)
)
from torch.nn.modules.module import register_module_forward_hook

from gradlib.errors import CoupledSamplesError
from gradlib.jacobian.differences import Caller, tensors_of
from gradlib.jacobian.repeatable import ALIKE
from gradlib.selection import modules_of
from gradlib.tree import tensors_in
from gradlib.wording import with_article

WITHIN_SAMPLES = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Modules that take a single sample too, whose first axis then looks like the batch."""

BATCHED_SEQUENCE = 3
"""How many axes a batch of sequences has: batch, steps and features."""


def coupled(caller: Caller, half: Tensor, name: str) -> CoupledSamplesError:
    """Return the error, which names the first module that couples samples."""
    module = _first_module(caller, half)
    where = "" if module is None else f" The first module that mixes them is {module}."
    fix = (
        "Take out of fn what looks at the whole batch. A batch of one has no other "
        "sample to mix with, but then fn is another function."
    )
    given = [it for it in caller.arguments.inputs.leaves if isinstance(it, Tensor)]
    lacks_batch = all(it.dim() == 1 for it in given)
    if lacks_batch or (module is not None and module.kind in WITHIN_SAMPLES):
        fix += " A single sample is passed as a batch of one: x[None]."
    if module is not None and module.fix:
        fix = module.fix
    return CoupledSamplesError(
        f"The samples are not independent: the output of one depends on {name} of "
        f"another, so there is no dY/dX of each sample.{where} {fix} check=False "
        "gives, for each sample, the sum over all samples' outputs."
    )


@dataclass(frozen=True)
class _Found:
    name: str
    kind: str
    fix: str

    def __str__(self) -> str:
        kind = with_article(self.kind)
        return f'"{self.name}", {kind}' if self.name else kind


def _first_module(caller: Caller, half: Tensor) -> _Found | None:
    """Return the first module whose outputs, unlike its inputs, mix the samples."""
    try:
        as_it_was, beside_others = (_recorded(caller, it) for it in (None, half))
    except Exception:  # it cannot run in float64, so the module stays unknown
        return None
    fn = caller.arguments.fn
    names: dict[nn.Module, str] = {}
    if isinstance(fn, nn.Module):
        names = {module: name for name, module in modules_of(fn).items()}
    for (module, given, made), (_, other_given, other_made) in zip(
        as_it_was, beside_others, strict=False
    ):
        if are_same(given, other_given, half) and not are_same(made, other_made, half):
            return _Found(
                names.get(module, ""), type(module).__name__, _fix(module, given)
            )
    return None


def _fix(module: nn.Module, given: list[Tensor]) -> str:
    """Return advice for a batch on axis 1 or a batch norm, or ``""``."""
    is_batched = bool(given) and given[0].dim() == BATCHED_SEQUENCE
    if is_batched and getattr(module, "batch_first", None) is False:
        return (
            "It has batch_first=False, which puts the batch on axis 1: make it with "
            "batch_first=True, or move the axis in fn."
        )
    if not isinstance(module, _BatchNorm):
        return ""
    other = "or use GroupNorm or LayerNorm in its place."
    if module.running_mean is None:
        return (
            "It keeps no running statistics, so .eval() does not help: make it with "
            f"track_running_stats=True, train, and call .eval(), {other}"
        )
    if not module.training:
        return ""
    return f"Call .eval() on the model, so that it uses its running statistics, {other}"


_Seen = tuple[nn.Module, list[Tensor], list[Tensor]]


def _recorded(caller: Caller, half: Tensor | None) -> list[_Seen]:
    """Return the inputs and outputs of each module call, in the order they end."""
    seen: list[_Seen] = []
    here = threading.get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == here:  # other threads may run modules too
            seen.append((module, _values(args), _values(output)))

    handle = register_module_forward_hook(hook)
    try:
        beside(caller, half)
    finally:
        handle.remove()
    return seen


def beside(caller: Caller, half: Tensor | None) -> list[Tensor]:
    """Return the outputs with the samples outside `half` replaced by some inside."""
    if half is None:
        return tensors_of(caller.at())
    order = torch.arange(len(half), device="cpu")
    ours, others = order[half], int((~half).sum())
    order[~half] = ours.repeat(others)[:others]
    return tensors_of(caller.at(order=order))


def are_same(
    a: list[Tensor], b: list[Tensor], half: Tensor, close: float = ALIKE
) -> bool:
    """Tell whether tensors of two calls are the same for the samples in `half`."""
    return all(
        not _has_samples(x, half)
        or torch.allclose(
            x[half.to(x.device)], y[half.to(x.device)], close, close, equal_nan=True
        )
        for x, y in zip(a, b, strict=False)
    )


def _has_samples(tensor: Tensor, half: Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) == len(half)


def _values(structure: object) -> list[Tensor]:
    return [it.detach().clone() for it in tensors_in(structure)]
