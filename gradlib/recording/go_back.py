"""The backward pass through a call that is computed again."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradlib.edges import edge_of, edges_behind, leaves_at, nodes_behind
from gradlib.tree import tensors_in

CHECKPOINT = "CheckpointFunctionBackward"
"""The name of the node of a checkpoint of the reentrant kind."""


def go_back(roots: list[tuple[Tensor, Tensor]], leaves: list[Tensor]) -> None:
    """Run a pass that leaves no gradient behind.

    Args:
        roots: What it begins at, each with its cotangent.
        leaves: Where it goes, to hooks that are set there.
    """
    if not roots or not leaves:
        return
    outputs, grads = zip(*roots, strict=True)
    if _has_reentrant_checkpoint(outputs):  # it refuses autograd.grad
        with _grads_of_others_kept(outputs):
            # What was computed outside of the model is still to be gone back through.
            torch.autograd.backward(outputs, grads, retain_graph=True)
    else:
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)


@contextmanager
def _grads_of_others_kept(outputs: Iterable[Tensor]) -> Generator[None]:
    """Leave the ``.grad`` of what checkpoints use as it is.

    Their passes add to all leaves behind them, and those outside of the model are no
    copies. Which these are shows as a checkpoint computes again. Hooks that would run
    once something was added are left out.

    Args:
        outputs: What one goes back from.
    """
    before: dict[int, tuple[Any, Tensor | None, list[Any]]] = {}
    watched: dict[Any, Callable[..., Any]] = {}  # nodes of checkpoints

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
            if type(node).__name__ == CHECKPOINT and node not in watched:
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


def _has_reentrant_checkpoint(outputs: Iterable[Tensor]) -> bool:
    return CHECKPOINT in {type(node).__name__ for node in nodes_behind(outputs)}
