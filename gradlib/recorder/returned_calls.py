"""Calls that have returned, and the hooks on the part of the graph that each made."""

import threading
from collections import defaultdict

from gradlib.private.modes import grad_is_enabled
from gradlib.private.nodes import sequence_number
from gradlib.private.passes import backward_pass_id
from gradlib.recorder.elsewhere import Elsewhere
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
        self._elsewhere = Elsewhere(nodes)
        self._threads = threads
        self._waiting: list[Frame] = []
        self._hooking = threading.RLock()
        self.add = self._waiting.append
        self.add_all = self._waiting.extend

    def hook(self) -> None:
        """Hook the nodes that compute gradients of the calls' inputs and parameters.

        Calls of torch's own modules wait for this until the forward ends. It is done at
        once when a module returns that may have begun a backward pass.
        """
        with self._hooking:
            returned = self._waiting.copy()
            del self._waiting[: len(returned)]
            for graph in {frame.graph for frame in returned}:
                graph.walk()
            by_pass = defaultdict[int | None, Receivers](lambda: defaultdict(list))
            for frame in returned:
                ends = frame.find_receivers(by_pass[frame.within])
                self._elsewhere.add(frame, ends)
            # If a backward pass now runs, another thread may have made the nodes.
            thread = threading.get_ident() if backward_pass_id() == -1 else 0
            for within, by_node in by_pass.items():
                for node, receivers in by_node.items():
                    self._nodes.hook(node, receivers, within, thread)

    def hook_for_pass(self) -> bool:
        """Hook what a pass goes through in the calls, as it first reaches one.

        Returns:
            Whether it goes through what a call put elsewhere.
        """
        self.hook()
        return self._elsewhere.hook()

    def look_for_others(self, stack: list[Frame], frame: Frame) -> None:
        """Give calls graphs of their own where another thread made nodes inside them.

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
        """Note the calls in which the running pass makes nodes in another thread.

        A pass with ``create_graph=True`` through a GPU's tensors does. The graph of the
        calls that have returned is walked before the pass goes on.
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
