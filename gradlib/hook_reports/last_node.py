"""The last node of a call, on which the old hook sits, and what would change it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import nn
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.hook_reports.call_graph import name_of
from gradlib.hook_reports.first_tensor import first_node, first_tensor
from gradlib.hook_reports.tensor_names import EndAt
from gradlib.hook_reports.trial import Trial
from gradlib.private.modules import own_parameters
from gradlib.tree import Tree


class Way(NamedTuple):
    """Where the gradient of one input of the last node's operation flows, in the copy.

    Attributes:
        edge: Where it flows, ``None`` where none is needed.
        end: The name of the tensor at which it ends, ``None`` where the module itself
            has computed that tensor.
        laid_out: If the input is only another layout of a tensor, as the transpose of a
            weight is, where that tensor's gradient flows; else `edge`.
        laid_out_end: The name of the tensor at which that gradient ends.
    """

    edge: Edge | None
    end: str | None
    laid_out: Edge | None
    laid_out_end: str | None


@dataclass(frozen=True)
class LastNode:
    """The node of the first output tensor.

    Where the module returns a tensor as it was, that node is outside of the module, and
    a stand-in takes its place in the copy.

    Attributes:
        name: torch's name for the node, ``""`` where there is none.
        inputs: One name for each input of its operation: that of the tensor at which
            the gradient ends, or else of the node that the gradient flows to.
        ways: Where the gradient of each input flows. A stand-in has one.
        returned: The name of the tensor that the module returns as it was, if it does;
            then the node is outside of the module.
    """

    name: str = ""
    inputs: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()
    returned: str | None = None


def last_node(trial: Trial, end_at: EndAt) -> LastNode:
    """Return the last node of a trial."""
    node = first_node(trial.seen)
    if node is None:
        return LastNode()
    ways = tuple(_way(it and (it, i), end_at) for it, i in node.next_functions)
    maker = trial.stands_for.get(node)
    if maker is None:
        inputs = tuple(it.end or _name(it.edge and it.edge[0]) for it in ways)
        return LastNode(name_of(node), inputs, ways)
    inputs = tuple(_name(it) for it, _ in maker.next_functions)
    return LastNode(name_of(maker), inputs, ways, _end_name(node, end_at))


def _way(edge: Edge | None, end_at: EndAt) -> Way:
    source = _source(edge)
    ends = [_end_name(it and it[0], end_at) for it in (edge, source)]
    return Way(edge, ends[0], source, ends[1])


_LAYS_OUT = re.compile(
    "(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|Alias"
    r"|ToCopy)Backward\d+"
)
"""Nodes of operations that change neither a value nor how often it is used."""


def _source(edge: Edge | None) -> Edge | None:
    """Return where the gradient flows past all nodes that only change a layout."""
    while edge is not None and _LAYS_OUT.fullmatch(edge[0].name()):
        node, number = edge[0].next_functions[0]
        edge = None if node is None else (node, number)
    return edge


class Variant(NamedTuple):
    """A change that often changes the last node, and what then becomes of the hook.

    Attributes:
        words: The change, in words.
        node: The node that the old hook then sits on.
        first: What torch finds as it looks for the tensor of that node.
    """

    words: str
    node: Node | None
    first: object


def variants(module: nn.Module, inputs: Tree) -> Iterator[Variant]:
    """Try what often changes the last node, without what makes the module raise."""
    bias = Trial(module, inputs)
    if own_parameters(bias.module).get("bias") is not None:
        cast(Any, bias.module).bias = None
        yield from _tried("Without bias", lambda: bias)
    yield from _tried(
        "With one more leading dimension",
        lambda: Trial(module, inputs, lambda it: it.unsqueeze(0)),
    )
    mode = "eval" if module.training else "training"
    yield from _tried(f"In {mode} mode", lambda: _switched(module, inputs))


def _switched(module: nn.Module, inputs: Tree) -> Trial:
    trial = Trial(module, inputs)
    trial.module.train(not module.training)
    return trial


def _tried(words: str, made: Callable[[], Trial]) -> Iterator[Variant]:
    try:
        trial = made()
        trial.run(backward=False)
    except Exception:
        return  # the module does not accept that
    node = first_node(trial.seen)
    node = node and trial.stands_for.get(node, node)
    yield Variant(words, node, first_tensor(trial.seen.build()))


def _end_name(node: Node | None, end_at: EndAt) -> str | None:
    end = node and end_at(node)
    return end and end.name


def _name(node: Node | None) -> str:
    return name_of(node) if node else "-"
