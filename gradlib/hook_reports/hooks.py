"""A hook of each kind, which writes down what it receives."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from gradlib.hook_reports.first_tensor import first_node
from gradlib.hook_reports.known import kept
from gradlib.hook_reports.trial import Trial
from gradlib.selection import has_own_call
from gradlib.tree import Tree

LEGACY = "register_backward_hook"
FULL = "register_full_backward_hook"
FULL_PRE = "register_full_backward_pre_hook"
TENSOR = "Tensor.register_hook"
ACCUMULATED = "Tensor.register_post_accumulate_grad_hook"
SEVERAL = "register_multi_grad_hook"
NODE = "Node.register_hook"
NODE_PRE = "Node.register_prehook"

ON_MODULE = (LEGACY, FULL, FULL_PRE)
ON_TENSORS = (TENSOR, ACCUMULATED, SEVERAL)
ON_NODE = (NODE, NODE_PRE)
KINDS = (*ON_MODULE, *ON_TENSORS, *ON_NODE)

ON_LAST_NODE = (LEGACY, *ON_NODE)
"""The kinds that sit on the last node."""

BORDER = (FULL, FULL_PRE)
"""The kinds that sit at the border of a module."""

FIELDS = ("grad_input", "grad_output")


class Got(NamedTuple):
    """One entry that a hook got.

    Attributes:
        kind: The kind of the hook, one of `KINDS`.
        field: The tuple that it is in, ``"grad_input"`` or ``"grad_output"``; for a
            hook on tensors ``"grad"``.
        number: Its index in the tuple, or that of the hooked tensor.
        grad: The gradient.
        tensor: The name of the hooked tensor, for a hook on tensors.
    """

    kind: str
    field: str
    number: int
    grad: Tensor | None
    tensor: str = ""


GradTuple: TypeAlias = Sequence[Tensor | None]

Write: TypeAlias = Callable[[list[Got]], None]
"""Takes what a hook got; if the hook is called again, what it got last counts."""


def place(got: Got) -> str:
    """Return the place of an entry that a hook got, in words."""
    if got.kind == TENSOR:
        return f"grad of {got.tensor}"
    if got.kind == ACCUMULATED:
        return f"{got.tensor}.grad"
    return f"{'grads' if got.kind == SEVERAL else got.field}[{got.number}]"


@contextmanager
def hook_set(
    kind: str,
    trial: Trial,
    named: Callable[[Tree], Mapping[str, Tensor]],
    write: Write,
) -> Generator[Callable[[Tree], None]]:
    """Set a hook before the forward, or yield a function that sets it afterwards.

    Args:
        kind: One of `KINDS`.
        trial: The copy that is to run.
        named: Returns the tensors to hook, by name, once there is an output.
        write: Takes what the hook gets.

    Yields:
        A function to call with the output.
    """
    if kind in ON_MODULE:
        module = trial.module
        handle = getattr(module, kind)(partial(_take_of_module, kind, write))
        # A module may call itself. Once its forward pre-hooks run, torch has taken up
        # the hook of the outermost call. A __call__ of its own may make other calls
        # before that one.
        if not has_own_call(module):
            module.register_forward_pre_hook(partial(_remove, handle))
        yield lambda _: None
    elif kind in ON_NODE:
        yield lambda _: _on_node(kind, trial.seen, write)
    else:
        handles: list[RemovableHandle] = []
        try:
            yield lambda output: handles.extend(_on_tensors(kind, named(output), write))
        finally:
            # A hook on several tensors holds the nodes of leaves, which hold the
            # leaves, and these the hook: Python does not see that reference cycle.
            for handle in handles:
                handle.remove()


def _take_of_module(
    kind: str, write: Write, _module: object, *tuples: GradTuple
) -> None:
    _take_tuples(kind, write, *tuples)


def _take_tuples(kind: str, write: Write, *tuples: GradTuple) -> None:
    fields = zip(FIELDS[-len(tuples) :], tuples, strict=True)
    write(
        [
            Got(kind, field, number, None if grad is None else kept(grad))
            for field, grads in fields
            for number, grad in enumerate(grads)
        ]
    )


def _on_node(kind: str, output: Tree, write: Write) -> None:
    """Hook the node that the old hook would sit on."""
    node = first_node(output)
    if node is not None:
        method = kind.removeprefix("Node.")
        getattr(node, method)(partial(_take_tuples, kind, write))


def _on_tensors(
    kind: str, named: Mapping[str, Tensor], write: Write
) -> list[RemovableHandle]:
    """Hook tensors. A tensor whose hook is never called has ``None``."""
    received: dict[str, Tensor | None] = dict.fromkeys(named)

    def take(grads: Mapping[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            received[name] = None if grad is None else kept(grad)
        entries = enumerate(received.items())
        write([Got(kind, "grad", i, grad, name) for i, (name, grad) in entries])

    def take_all(grads: GradTuple) -> None:
        take(dict(zip(received, grads, strict=True)))

    def take_one(name: str, grad: Tensor) -> None:
        take({name: grad})

    def take_accumulated(name: str, leaf: Tensor) -> None:
        take({name: leaf.grad})

    if kind == SEVERAL:
        every = [*named.values()]
        return [register_multi_grad_hook(every, take_all)] if every else []
    method = kind.removeprefix("Tensor.")
    take_it = take_one if kind == TENSOR else take_accumulated
    handles = [getattr(it, method)(partial(take_it, of)) for of, it in named.items()]
    take({})
    return handles


def _remove(handle: RemovableHandle, *_: object) -> None:
    handle.remove()
