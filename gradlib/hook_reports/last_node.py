"""The last node of a call, on which the old hook sits, and what would change it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import nn
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.hook_reports.first_tensor import first_node, first_tensor
from gradlib.hook_reports.graph import name_of
from gradlib.hook_reports.tensor_names import EndAt
from gradlib.hook_reports.trial import Trial
from gradlib.private.modules import own_parameters
from gradlib.tree import Tree


@dataclass(frozen=True)
class LastNode:
    """The node of the first output tensor.

    Where the module returns a tensor as it was, that is a node outside of the module.
    In the copy a stand-in is in its place.

    Attributes:
        name: What torch calls it, ``""`` where there is none.
        inputs: One name for each input of its operation: that of what the gradient
            ends at, or else of the node it flows to.
        edges: Where the gradient of each input flows, ``None`` where none is needed.
            In the copy, as `ends` is.
        ends: The name of what each gradient ends at, ``None`` where the module has
            computed that itself.
        laid_out: Where the gradient flows of what each input only lays out anew, as the
            transpose of a weight does.
        laid_out_ends: The names of what ends there, as `ends` are.
        returned: What the tensor is called that the module returns as it was, if it
            does; then the node is outside of it.
    """

    name: str = ""
    inputs: tuple[str, ...] = ()
    edges: tuple[Edge | None, ...] = ()
    ends: tuple[str | None, ...] = ()
    laid_out: tuple[Edge | None, ...] = ()
    laid_out_ends: tuple[str | None, ...] = ()
    returned: str | None = None


def last_node(trial: Trial, end_at: EndAt) -> LastNode:
    """Return the last node of a trial.

    Args:
        trial: The copy that has run.
        end_at: Tells the tensor whose gradient a node takes on.
    """
    node = first_node(trial.seen)
    if node is None:
        return LastNode()
    before = [it for it, _ in node.next_functions]
    edges = tuple(None if it is None else (it, i) for it, i in node.next_functions)
    ends = tuple(_end_name(it, end_at) for it in before)
    laid_out = tuple(map(_source, edges))
    further = tuple(_end_name(it and it[0], end_at) for it in laid_out)
    maker = trial.stands_for.get(node)
    if maker is None:
        pairs = zip(before, ends, strict=True)
        inputs = tuple(end or _name(it) for it, end in pairs)
        return LastNode(name_of(node), inputs, edges, ends, laid_out, further)
    inputs = tuple(_name(it) for it, _ in maker.next_functions)
    returned = _end_name(node, end_at)
    return LastNode(name_of(maker), inputs, edges, ends, laid_out, further, returned)


_LAYS_OUT = re.compile(
    "(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|Alias"
    r"|ToCopy)Backward\d+"
)
"""The nodes of operations that change no value, and no number of uses of one."""


def _source(edge: Edge | None) -> Edge | None:
    """Return where the gradient flows of what nodes in a row only lay out anew."""
    while edge is not None and _LAYS_OUT.fullmatch(edge[0].name()):
        node, number = edge[0].next_functions[0]
        edge = None if node is None else (node, number)
    return edge


class Variant(NamedTuple):
    """What often changes the last node, and what then becomes of the old hook.

    Attributes:
        words: What is changed.
        node: The node that the hook then sits on.
        first: What torch comes to as it looks for the tensor of that node.
    """

    words: str
    node: Node | None
    first: object


def variants(module: nn.Module, inputs: Tree) -> Iterator[Variant]:
    """Try what often changes the last node: what the module does not take is no way."""
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
        return  # the module does not take that
    node = first_node(trial.seen)
    node = node and trial.stands_for.get(node, node)
    yield Variant(words, node, first_tensor(trial.seen.build()))


def _end_name(node: Node | None, end_at: EndAt) -> str | None:
    end = node and end_at(node)
    return end and end.name


def _name(node: Node | None) -> str:
    return name_of(node) if node else "-"
