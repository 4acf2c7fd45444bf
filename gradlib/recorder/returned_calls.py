"""Calls that have returned, and what of the graph hands gradients to what they got."""

import threading
from collections import defaultdict

from gradlib.private.modes import grad_is_enabled
from gradlib.private.nodes import sequence_number
from gradlib.private.passes import backward_pass_id
from gradlib.recorder.frame import Frame, Receivers
from gradlib.recorder.node_hooks import NodeHooks
from gradlib.recorder.threads import Threads, computed_parameters, nodes_in


class ReturnedCalls:
    """The calls that have returned and whose part of the graph is not hooked yet."""

    def __init__(self, nodes: NodeHooks, threads: Threads) -> None:
        """Begin with none.

        Args:
            nodes: Hooks nodes.
            threads: The threads that call modules.
        """
        self._nodes = nodes
        self._threads = threads
        self._waiting: list[Frame] = []
        self._hooking = threading.RLock()
        self.add = self._waiting.append
        self.add_all = self._waiting.extend

    def hook(self) -> None:
        """Hook what hands gradients to inputs and parameters of the calls.

        At the return of a module that may have a pass begin; those of torch's own wait,
        and are hooked together when the forward ends.
        """
        with self._hooking:
            returned = self._waiting.copy()
            del self._waiting[: len(returned)]
            for graph in {frame.graph for frame in returned}:
                graph.walk()
            found = defaultdict[int | None, Receivers](lambda: defaultdict(list))
            for frame in returned:
                frame.find_receivers(found[frame.within])
            # Where a pass has it done, another thread may have made the nodes.
            thread = threading.get_ident() if backward_pass_id() == -1 else 0
            for within, by_node in found.items():
                for node, receivers in by_node.items():
                    self._nodes.hook(node, receivers, within, thread)

    def look_for_others(self, stack: list[Frame], frame: Frame) -> None:
        """Have calls stand alone where another thread has made nodes in one.

        Args:
            stack: The calls around the one that returns.
            frame: That call.
        """
        graph = frame.graph
        with self._hooking:
            if not graph.may_be_mixed() or not graph.find_mixed(nodes_in(frame.module)):
                return
            for it in (*self._waiting, frame):
                if it.graph is graph:
                    it.older = computed_parameters(it.module)
                    it.stand_alone()
        for it in stack:
            it.has_threads, it.older = True, computed_parameters(it.module)

    def note_who_makes_nodes(self) -> None:
        """Have calls stand alone if a pass inside makes nodes in another thread.

        That is one with ``create_graph=True`` through a GPU's tensors. What the calls
        made that have returned is walked before the pass goes on.
        """
        if not grad_is_enabled():
            return
        for stack in self._threads.stacks_elsewhere():
            if stack[-1].graph.is_mixed:
                continue
            self.hook()
            for frame in stack:
                older = [
                    node
                    for node in nodes_in(frame.module)
                    if sequence_number(node) < frame.since
                ]
                frame.has_threads, frame.older, frame.graph.is_mixed = True, older, True
