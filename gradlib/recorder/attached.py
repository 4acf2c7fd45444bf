"""The hooks that a block has set on tensors and on graph nodes."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

from gradlib.private.compiling import never_compiled
from gradlib.private.hooks import hooks_set

# How many hooks torch has set for us in this process. In a list, as each change of a
# class attribute would drop what Python has cached of that class.
_SET_BY_US = [0]

kept_from_compile = partial(
    never_compiled,
    because="gradlib.record sees each module call and gradient, so it cannot record "
    "what is compiled with fullgraph=True, as torch.export does with strict=True",
)
"""Keeps torch.compile out of a function that records."""


class Attached:
    """The hooks of a block, each forgotten when its tensor or node is gone."""

    def __init__(self) -> None:
        """Begin with none."""
        self.on_tensors: list[Any] = []  # each a `Tap`
        self.on_nodes: list[Any] = []  # the handles that torch gives
        self._many = 0  # above how many hooks `let_go` looks for those that are gone
        self._by_others = -1  # what `set_by_others` returned last
        self._lock = threading.RLock()
        self._is_at_it = False

    def remember(self, handle: Any) -> None:
        """Remember a hook that was set on a node."""
        self.on_nodes.append(handle)
        _SET_BY_US[0] += 1

    def set_by_others(self) -> int:
        """Return how many hooks torch has set in this process, other than ours."""
        return hooks_set() - _SET_BY_US[0]

    def are_last(self) -> None:
        """Note that our hooks come after all that are set by now."""
        self._by_others = self.set_by_others()

    def be_last(self) -> None:
        """Put our hooks after the hooks set since, which may change gradients."""
        before = self._by_others
        self.are_last()
        if self._by_others == before:
            return
        for handle in self.on_nodes:
            hooks = handle.hooks_dict_ref()
            if hooks and next(reversed(hooks)) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)
        for hook in self.on_tensors:
            hook.be_last()

    @contextmanager
    def alone(self) -> Generator[bool]:
        """Keep other threads out, and tell whether this thread is not inside already.

        It is inside if a signal handler that calls the model has interrupted it. What
        is left out then is done the next time.
        """
        with self._lock:
            is_alone, self._is_at_it = not self._is_at_it, True
            try:
                yield is_alone
            finally:
                self._is_at_it = not is_alone

    def let_go(self) -> None:
        """Forget the hooks whose tensor or node is gone, if there may be many.

        So a step late in a block costs no more than an early one.
        """
        if len(self.on_nodes) + len(self.on_tensors) <= self._many:
            return
        handles, hooks = self.on_nodes.copy(), self.on_tensors.copy()
        self.on_nodes[: len(handles)] = filter(_HOOKS_OF_NODE, handles)
        self.on_tensors[: len(hooks)] = filter(_HOOKS_OF_TENSOR, hooks)
        # Where most are alive, as when many forwards wait for one backward pass, the
        # next look comes when their number has doubled.
        before = len(handles) + len(hooks)
        after = len(self.on_nodes) + len(self.on_tensors)
        self._many = 2 * after if 2 * after > before else 0

    def remove(self) -> None:
        """Remove every hook that is still there."""
        for hook in filter(_HOOKS_OF_TENSOR, self.on_tensors):
            hook.remove()
        for handle in filter(_HOOKS_OF_NODE, self.on_nodes):
            handle.remove()
        self.on_tensors.clear()
        self.on_nodes.clear()


_HOOKS_OF_NODE, _HOOKS_OF_TENSOR = methodcaller("hooks_dict_ref"), methodcaller("hooks")
