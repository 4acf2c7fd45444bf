"""Whether samples influence each other, and through which module."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import (
    _BatchNorm,  # pyright: ignore[reportPrivateUsage] (the base of them all)
)
from torch.nn.modules.module import register_module_forward_hook

from gradlib.errors import CoupledSamplesError, NoSuchWayError
from gradlib.jacobian.arguments import input_path
from gradlib.jacobian.cannot_go_back import refuse
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.differences import Caller, tensors_of
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, every_pair, first_coupled
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.repeatable import (
    ALIKE,
    REPEATS,
    alike,
    close_for,
    not_repeatable,
)
from gradlib.selection import modules_of
from gradlib.tree import tensors_in
from gradlib.wording import with_article

FEW_SAMPLES = 4
"""With at most this many samples, each pair of them is checked."""


def require_own_samples(
    caller: Caller, graph: Graph, points: Mapping[int, Tensor]
) -> Look:
    """Raise where the output of a sample depends on an input of another one.

    One VJP from a random half of the samples must be zero in the other half. For inputs
    that the Jacobian is with respect to that is enough: other coupling shows in its
    slopes. Where there are few samples, those that influence each other may all be in
    one half, as two views each of two things, so each pair is checked. Where torch
    cannot go back to an input that is not asked for, calls with other samples tell.

    Returns:
        The VJP, with a gradient for each of the graph's points.

    Raises:
        CoupledSamplesError: Samples are coupled.
        NoSuchWayError: torch cannot go back to an input that is asked for.
    """
    half = caller.chance.half(graph.batch)
    shared = caller.arguments.shared
    own = {place: point for place, point in points.items() if not shared[place]}
    asked = {id(point) for point in graph.points}
    may_go_back = True
    try:
        look = _look(caller, graph, own, half)
    except NoSuchWayError:  # that is no error for an input that is not asked for
        may_go_back = False
        own = {place: point for place, point in own.items() if id(point) in asked}
        look = _look(caller, graph, own, half)
    number = look.coupled(half, len(own))
    if number is not None:
        place = list(own)[number]
        raise coupled(caller, half, input_path(caller.arguments.inputs, place))
    others = [
        point
        for point in own.values()
        if id(point) not in asked or graph.batch <= FEW_SAMPLES
    ]
    require_no_pair(caller, graph.roots, others)
    if graph.batch > 1 and not (own and may_go_back):
        _require_same_beside_others(caller)
    return Look(look.vectors, look.grads[len(own) :])


def _look(
    caller: Caller, graph: Graph, own: Mapping[int, Tensor], half: Tensor
) -> Look:
    """Return the VJP from a half of the samples, to some inputs and the graph's points.

    Raises:
        NoSuchWayError: torch cannot go back to one of them.
    """
    ends = [*own.values(), *graph.points]
    try:
        return Look.at(caller.chance, graph.roots, ends, half)
    except RuntimeError as error:
        refuse(error)


def require_no_pair(
    caller: Caller, roots: Sequence[Tensor], points: Sequence[Tensor]
) -> None:
    """Raise where the output of any sample depends on an input of any other.

    Raises:
        CoupledSamplesError: Samples are coupled.
    """
    try:
        pair = first_coupled(caller.chance, roots, points)
    except RuntimeError as error:  # torch cannot go back to one of them
        if is_out_of_memory(error):
            raise
        _require_same_beside_others(caller)
        return
    if pair:
        raise coupled(caller, pair[1], "the input")


def require_own_rows(graph: Graph) -> None:
    """Raise where a sample's output leads to an input of another sample.

    There is no function to call again, so the error names no module.

    Raises:
        CoupledSamplesError: Samples are coupled.
    """
    pair = first_coupled(Chance(), graph.roots, graph.points)
    if pair:
        raise CoupledSamplesError(
            f"The samples are not independent: the output of one depends on "
            f"{graph.names[pair[0]]} of another, so there is no dY/dX of each sample. "
            "per_sample_jacobian(fn, x), which can call fn again, says where; "
            "check=False gives for each sample the sum over all samples' outputs."
        )


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


WITHIN_SAMPLES = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Modules that take a single sample too, whose first axis then looks like the batch."""

BATCHED_SEQUENCE = 3
"""How many axes a batch of sequences has: batch, steps and features."""


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
        if _same(given, other_given, half) and not _same(made, other_made, half):
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


def _require_same_beside_others(caller: Caller) -> None:
    """Raise where outputs change with other samples, by calls alone.

    That is for inputs that are integers, or that torch cannot go back to. Each sample
    stays in its place, which may decide what is drawn for it.
    """
    try:
        alone = beside(caller, None)
    except Exception:  # it cannot run in float64
        caller = caller.in_float()
        alone = beside(caller, None)
    for part in every_pair(caller.arguments.batch):
        among = beside(caller, part)
        if not _same(alone, among, part, close_for(caller)):
            _require_again(caller, None, alone)
            _require_again(caller, part, among)
            raise coupled(caller, part, "the input")


def _require_again(caller: Caller, half: Tensor | None, outputs: list[Tensor]) -> None:
    """Raise where the very same call gives other outputs."""
    close = close_for(caller)
    if not all(alike(beside(caller, half), outputs, close) for _ in range(REPEATS)):
        raise not_repeatable()


def _same(a: list[Tensor], b: list[Tensor], half: Tensor, close: float = ALIKE) -> bool:
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
