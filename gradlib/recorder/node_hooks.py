"""The hooks of graph nodes: each adds what its node computes to gradients of calls."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.modes import grad_is_enabled
from gradlib.private.nodes import next_sequence_number
from gradlib.private.passes import backward_pass_id, current_node
from gradlib.recorder.attached import Attached, kept_from_compile
from gradlib.recorder.pass_numbers import PassNumbers
from gradlib.recorder.second_order import Receiver, gives_back, made_by
from gradlib.recorder.sums import Sums
from gradlib.recording.flow import Flow
from gradlib.values import Keep


class NodeHooks:
    """Hooks the nodes of a block, to gather what they compute for its calls."""

    def __init__(
        self, numbered: PassNumbers, attached: Attached, sums: Sums, keep: Keep
    ) -> None:
        """Begin with no node hooked.

        Args:
            numbered: The passes of the block.
            attached: The hooks of the block.
            sums: The gradients of the block that come in parts.
            keep: Returns what to keep of a gradient.
        """
        self.numbered = numbered
        self.sums = sums
        self.keep = keep
        self._attached = attached

    def hook(
        self,
        node: Node,
        receivers: list[Receiver],
        within: int | None,
        thread: int = 0,
    ) -> None:
        """Take what `node` computes: shares of gradients, which may come in parts.

        Args:
            node: The node.
            receivers: What receives the gradients that it computes.
            within: The pass in which a checkpoint made the node, if one did.
            thread: The thread that made the node, 0 if unknown.
        """
        hook = NodeHook(self, receivers, within, thread)
        self._remember(node.register_hook(hook), receivers)

    def _remember(self, handle: Any, receivers: Sequence[Receiver] = ()) -> None:
        self.sums.expect(receivers)
        self._attached.remember(handle)

    def hook_way_back(
        self, grad: Tensor, grads_out: Iterable[Tensor | None], flow: Flow
    ) -> None:
        """Note later passes through a gradient made with ``create_graph=True``.

        Args:
            grad: The gradient.
            grads_out: The gradients it was computed from: a pass that goes only through
                these does not concern the call.
            flow: The flow of the call.
        """
        node = grad.grad_fn
        if node is None or any(
            it is not None and it.grad_fn is node for it in grads_out
        ):
            return

        def note(*_: object) -> None:
            running = backward_pass_id()
            if running in self.numbered.numbers or self.numbered.admits(running, None):
                flow.gone_through |= {running}

        self._remember(node.register_hook(note))

    def follow(
        self,
        hook: "NodeHook",
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Hook the nodes that a pass with ``create_graph=True`` makes, for later ones.

        Args:
            hook: The hook of the node that the pass has just gone through.
            grads_in: The gradients that the node has computed.
            grads_out: The gradients they were computed from.
        """
        node = current_node()
        if node is None:
            return
        if gives_back(node, grads_in, grads_out):
            for *_, flow in hook.receivers:
                flow.gave_back = True
        made: dict[Node, list[Receiver]] = {}
        here = threading.get_ident()
        known = hook.known if hook.thread == here else None
        for maker, to in made_by(node, hook.receivers, grads_in, grads_out, known):
            made.setdefault(maker, []).append(to)
        # Each pass meets a copy that the forward has saved, but it is hooked only once.
        hook.known = next_sequence_number() - 1
        for maker, receivers in made.items():
            self._hook_for_more(maker, receivers, here)

    def _hook_for_more(self, node: Any, receivers: list[Receiver], thread: int) -> None:
        """Take what `node` computes, except what another hook of ours takes already."""
        hook = NodeHook(self, [], None, thread)
        handle = node.register_hook(hook)
        known = {
            (entry, id(grads))
            for other in handle.hooks_dict_ref().values()
            if isinstance(other, NodeHook)
            for entry, grads, *_ in other.receivers
        }
        hook.receivers = [it for it in receivers if (it[0], id(it[1])) not in known]
        self._remember(handle, hook.receivers)
        if not hook.receivers:
            handle.remove()

    def note_batched(self, flows: Iterable[Flow]) -> None:
        """Note the calls that a pass with is_grads_batched reaches, if it has a graph.

        Later passes may go through that graph.
        """
        if not grad_is_enabled():
            return
        behind = len(set(self.numbered.numbers.values()))
        for flow in flows:
            if flow.behind_batched is None:
                flow.behind_batched = behind


class NodeHook:
    """The hook of a graph node: it adds what the node computes to the gradients."""

    __slots__ = ("block_hooks", "known", "numbered", "receivers", "thread", "within")

    def __init__(
        self,
        block_hooks: NodeHooks,
        receivers: list[Receiver],
        within: int | None,
        thread: int,
    ) -> None:
        """Say where the node's gradients go; for the arguments see `NodeHooks.hook`."""
        self.known = 0  # autograd's sequence number when `follow` last ran for it
        self.thread = thread
        self.block_hooks = block_hooks
        self.numbered = block_hooks.numbered
        self.receivers = receivers
        self.within = within

    @kept_from_compile
    def __call__(
        self,
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Keep what each receiver gets of `grads_in` in the running pass."""
        block_hooks, numbered, running = (
            self.block_hooks,
            self.numbered,
            backward_pass_id(),
        )
        if running not in numbered.numbers and not numbered.admits(
            running, self.within
        ):
            block_hooks.note_batched(flow for *_, flow in self.receivers)
            return
        keep_share = block_hooks.keep
        with_graph, cannot_add = numbered.with_graph, block_hooks.sums.cannot_add
        if with_graph and grad_is_enabled():
            block_hooks.follow(self, grads_in, grads_out)
        for entry, grads, part, flow in self.receivers:
            grad = grads_in[entry]
            if grad is None:
                continue
            if with_graph:
                block_hooks.hook_way_back(grad, grads_out, flow)
            if part is not None and (grad := part(grad)) is None:
                continue
            if cannot_add or running in grads:
                block_hooks.sums.add(grads, running, grad)
            else:
                grads[running] = keep_share(grad)
