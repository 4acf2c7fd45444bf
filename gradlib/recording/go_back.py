"""The backward pass through a replayed call."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor

from gradlib.edges import (
    edge_of,
    edges_behind,
    has_reentrant_checkpoint,
    leaves_at,
)
from gradlib.private.hooks import hook_tensor
from gradlib.private.nodes import is_reentrant_checkpoint
from gradlib.private.passes import backward_in_modes, grad_in_modes
from gradlib.tree import tensors_in
from gradlib.values import keep


def go_back(
    roots: list[tuple[Tensor, Tensor]], leaves: list[Tensor], *, with_graph: bool
) -> None:
    """Run a backward pass that leaves no ``.grad`` behind.

    Args:
        roots: The outputs at which it begins, each with its gradient.
        leaves: The tensors to which it goes; their hooks take the gradients.
        with_graph: Whether to run it with ``create_graph=True``, for which torch has
            other kernels, as those of an LSTM: they round differently.
    """
    if not roots or not leaves:
        return
    outputs, grads = zip(*roots, strict=True)
    if has_reentrant_checkpoint(outputs):  # it refuses autograd.grad
        with _grads_of_others_kept(outputs):
            # The user may yet go back through what was computed outside of the model.
            backward_in_modes(outputs, grads)
    else:
        grad_in_modes(outputs, leaves, grads, create_graph=with_graph)


@contextmanager
def _grads_of_others_kept(outputs: Iterable[Tensor]) -> Generator[None]:
    """Leave the ``.grad`` of the leaves that reentrant checkpoints use as it was.

    A checkpoint's own pass adds to all leaves behind it, and leaves outside of the
    model are no copies. They are found as the checkpoint computes again. Their
    post-accumulate-grad hooks do not run.
    """
    before: dict[int, tuple[Any, Tensor | None, list[Any]]] = {}
    watched: dict[Any, Callable[..., Any]] = {}  # a checkpoint's node -> its function

    def watch(outputs: Iterable[Tensor]) -> None:
        edges = [*edges_behind(map(edge_of, outputs))]
        leaf: Any
        for leaf in leaves_at(edges):
            if id(leaf) not in before:
                hooks: dict[int, Any] = leaf._post_accumulate_grad_hooks or {}
                before[id(leaf)] = leaf, leaf.grad, [*hooks.items()]
                leaf.grad = None
                hooks.clear()
        node: Any
        for node in dict.fromkeys(node for node, _ in edges):
            if is_reentrant_checkpoint(node) and node not in watched:
                watched[node] = node.run_function
                node.run_function = partial(again, node.run_function)

    def again(run: Callable[..., Any], *args: Any) -> Any:
        found = run(*args)
        watch(it for it in tensors_in(found) if it.requires_grad)
        return found

    try:
        watch(outputs)
        yield
    finally:
        for node, run in watched.items():  # some were made outside of the call
            node.run_function = run
        for leaf, grad, items in before.values():
            leaf.grad = grad
            if items:
                leaf._post_accumulate_grad_hooks.update(items)


def take_share(shares: dict[int, Tensor], leaf: Tensor, given: Tensor) -> None:
    """Have a pass take the gradient of `given`, before its other hooks, as a share.

    It comes in parts where a reentrant checkpoint runs a pass inside the pass.

    Args:
        shares: Where it puts the share, by id of the leaf.
        leaf: The leaf to which the share belongs.
        given: The leaf, or the copy of it that a call was given.
    """
    # The hook does not hold the leaf: the graph of what was returned leads to it, in a
    # cycle that the garbage collector does not see.
    hook_tensor(given, partial(_add_share, shares, id(leaf)))


def _add_share(shares: dict[int, Tensor], leaf: int, grad: Tensor | None) -> None:
    if grad is not None:
        known = shares.get(leaf)
        shares[leaf] = keep(grad) if known is None else known + keep(grad)


@contextmanager
def without_hooks_of_others(tensors: Iterable[Tensor], since: int) -> Generator[None]:
    """Remove the hooks of some tensors for one pass, except those that take shares.

    The recorded gradient of an output is what its hooks had made of it. An output may
    be no copy: then its hooks are put back, for later passes.

    Args:
        tensors: The tensors.
        since: How many hooks torch had set before the call: later ones are the replay's
            and are not put back.
    """
    every: list[dict[Any, Any]] = [cast(Any, it)._backward_hooks for it in tensors]
    before = [(hooks, dict(hooks)) for hooks in every if hooks]
    try:
        for hooks, items in before:
            for key, hook in items.items():
                if not (isinstance(hook, partial) and hook.func is _add_share):
                    hooks.pop(key, None)
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(
                (key, hook)
                for key, hook in items.items()
                if not (isinstance(key, int) and key >= since)
            )
