"""The autograd graph of one call of a module, by names."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from itertools import accumulate, takewhile
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import Edge, edge_of, edges_of
from gradlib.hook_reports.first_tensor import first_node
from gradlib.hook_reports.tensor_names import EndAt, NamedEnd, Names, tell_places_apart
from gradlib.hook_reports.trial import Trial, differentiable, requires_grad
from gradlib.tree import Tree
from gradlib.wording import counted

MOST_NODES, MOST_ROWS = 14, 6
"""How many nodes a picture shows at most, and in how many rows."""

Key: TypeAlias = tuple[str, int | str]
"""An ``"output"`` or ``"node"`` and its number, an ``"input"`` or ``"parameter"`` and
its name, what is ``"outside"`` of the module and an id, `MORE` or `BEYOND`."""

MORE: Key = ("more", 0)
"""All nodes that a picture does not show, except those that are `BEYOND`."""

BEYOND: Key = ("more", 1)
"""The nodes behind the old hook's node, where that node itself is behind `MORE`."""


class Stream(NamedTuple):
    """Where a gradient flows.

    Attributes:
        start: Where it comes from: an output, or a node.
        slot: The index of that node's input whose gradient it is.
        end: Where it goes; ``None`` where nothing needs it.
        number: The index of the output of the node at `end` whose gradient it is.
    """

    start: Key
    slot: int
    end: Key | None
    number: int


@dataclass(frozen=True)
class CallGraph:
    """What gradients flow through, from the outputs of a call to its inputs.

    Attributes:
        texts: What is at each key, in words.
        flows: Where gradients flow.
        last: The node of the first output, ``None`` where that is outside of the call.
        arguments: For each positional argument, its key, whether or not a gradient
            reaches it, and 0; if a forward pre-hook computed it, the key of its node,
            and the index of the node's output.
        results: The key of each output at the top level, if a gradient flows from it.
    """

    texts: Mapping[Key, str]
    flows: tuple[Stream, ...]
    last: Key | None
    arguments: tuple[tuple[Key, int], ...]
    results: tuple[Key | None, ...]


def read(trial: Trial, names: Names, arguments: Sequence[tuple[str, Any]]) -> CallGraph:
    """Run a trial forward, and read the graph of its call."""
    output, edges = _run(trial)
    outputs = differentiable(output)
    starts = {("output", i): edge_of(it) for i, it in outputs.items()}
    end_at = names.ends(trial)
    nodes, ends = _behind([node for node, _ in starts.values()], end_at)
    last, near = first_node(output), _near(nodes)
    keys: dict[Node, Key] = dict.fromkeys(nodes, MORE)
    if last in keys and last not in near:
        keys |= dict.fromkeys(_behind([last], end_at)[0], BEYOND)
        near.append(last)
    keys |= {node: ("node", i) for i, node in enumerate(near)}
    keys |= {node: _key_of(node, end) for node, end in ends.items()}
    given: list[Key] = [("input", name) for name, _ in arguments]
    flows = [Stream(key, 0, keys[node], i) for key, (node, i) in starts.items()]
    flows += _near_flows(near, keys)
    flows += _far_flows(keys, {flow.end for flow in flows}, given)
    texts: dict[Key, str] = {
        key: counted(count, "more node")
        for key, count in Counter(keys[node] for node in nodes).items()
    }
    texts |= {("input", name): _text(name, it) for name, it in arguments}
    for node, (_, name, tensor) in ends.items():
        texts[keys[node]] = name if tensor is None else _text(name, tensor)
    texts |= {keys[node]: name_of(node) for node in near}
    for i, it in outputs.items():
        texts["output", i] = _text(f"output{output.path(i)}", it)
    return CallGraph(
        texts,
        tuple(flows),
        keys[last] if last in nodes else None,
        tuple(map(partial(_place, keys), edges, given)),
        tuple(_results(output)),
    )


def _run(trial: Trial) -> tuple[Tree, list[Edge | None]]:
    """Return the output, and where the gradient of each positional argument flows."""
    tell_places_apart(trial)  # as a full hook does
    edges: list[Edge | None] = []

    def note(_module: object, args: tuple[Any, ...]) -> None:
        if not edges:  # a module may call itself
            edges.extend(edge_of(it) if requires_grad(it) else None for it in args)

    trial.module.register_forward_pre_hook(note)  # after those that change arguments
    return trial.run(backward=False), edges


def name_of(node: Node) -> str:
    """Return what torch calls a node."""
    return node.name().removeprefix("torch::autograd::")


def _behind(
    starts: Iterable[Node], end_at: EndAt
) -> tuple[list[Node], dict[Node, NamedEnd]]:
    """Return the nodes of a call, and those at which it ends, each with its tensor."""
    nodes: dict[Node, None] = {}
    ends: dict[Node, NamedEnd] = {}
    stack = [*starts]
    while stack:
        node = stack.pop()
        if node in nodes or node in ends:
            continue
        if end := end_at(node):
            ends[node] = end
        else:
            nodes[node] = None
            stack += [before for before, _ in edges_of(node)]
    return [*nodes], ends


def _near(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes to show: those that are nearest to the outputs.

    A single further node is shown too, as "1 more node" takes no less room.
    """
    row = dict.fromkeys(nodes, 0)
    behind = {
        node: [it for it, _ in node.next_functions if it in row] for node in nodes
    }
    for node in reversed([*TopologicalSorter(behind).static_order()]):
        for before in behind[node]:
            row[before] = max(row[before], row[node] + 1)
    rows = [[it for it in nodes if row[it] == i] for i in range(MOST_ROWS)]
    counts = accumulate(map(len, rows))
    first, *others = zip(rows, counts, strict=True)
    near = [first, *takewhile(lambda it: it[1] <= MOST_NODES, others)]
    shown = [node for nodes_of_row, _ in near for node in nodes_of_row]
    return [*nodes] if len(nodes) == len(shown) + 1 else shown


def _near_flows(near: Iterable[Node], keys: Mapping[Node, Key]) -> Iterator[Stream]:
    for node in near:
        for slot, (before, number) in enumerate(node.next_functions):
            yield Stream(keys[node], slot, before and keys[before], number)


def _far_flows(
    keys: Mapping[Node, Key], shown: Collection[Key | None], given: Sequence[Key]
) -> list[Stream]:
    """Return the flows from nodes that are not shown to what is shown.

    The inputs in `given`, the positional ones, come in their order.
    """
    found = dict.fromkeys(
        Stream(keys[node], 0, keys[before], number)
        for node in keys
        if keys[node] in (MORE, BEYOND)
        for before, number in node.next_functions
        if before and keys[before] != keys[node]
        if keys[before][0] != "parameter" or keys[before] in shown
    )
    order: dict[Key | None, int] = {key: i for i, key in enumerate(given)}
    return sorted(found, key=lambda flow: order.get(flow.end, -1))


def _place(keys: Mapping[Node, Key], edge: Edge | None, own: Key) -> tuple[Key, int]:
    """Return where an argument's gradient arrives; its own key, if nowhere shown."""
    key = own if edge is None else keys.get(edge[0], own)
    if edge is None or key in (own, MORE, BEYOND):
        return own, 0
    return key, edge[1]


def _key_of(node: Node, end: NamedEnd) -> Key:
    # Tensors outside share one name, so the id of the node tells them apart.
    return end.kind, id(node) if end.kind == "outside" else end.name


def _results(output: Tree) -> Iterator[Key | None]:
    # By place: one tensor may be in several places, and have an entry for each.
    at = {path: place for place, path in enumerate(output.spec.paths())}
    is_tuple = isinstance(output.build(), tuple)
    paths = [(i,) for i in range(output.spec.num_children)] if is_tuple else [()]
    tensors = differentiable(output)
    for place in map(at.get, paths):
        yield None if place not in tensors else ("output", place)


def _text(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        return f"{name} {list(value.shape)}"
    return f"{name}: {type(value).__name__}"
