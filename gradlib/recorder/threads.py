"""What each thread runs of a recorded model, and for which call in another thread.

Each thread numbers the nodes that it makes by its own count. So where several work on
one call, the numbers do not tell which call made a node.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter

from torch import nn
from torch.autograd.graph import Node

from gradlib.private.modules import modules_in, own_parameters
from gradlib.private.passes import pass_began_here
from gradlib.recorder.forward_values import Value, Values
from gradlib.recorder.frame import Frame
from gradlib.recorder.hooked import Hooked
from gradlib.recorder.left import LeftValues
from gradlib.recorder.value_hooks import Views
from gradlib.recording.left_behind import nodes_left_in
from gradlib.recording.trace import CallTrace
from gradlib.values import Keep


class Threads:
    """The threads that call modules of the model."""

    def __init__(self, keep: Keep) -> None:
        """Begin with this one.

        Args:
            keep: Returns what to keep of arguments and outputs.
        """
        # The calls that each runs. A new thread may get the number of one that ended.
        self._stacks: dict[int, list[Frame]] = {}
        self.now = Running(keep, self._stacks, itertools.count())

    def are_several(self) -> bool:
        """Tell whether other threads than this one have called a module."""
        return len(self._stacks) > 1

    def call_elsewhere(self, hooked: Hooked) -> CallTrace | None:
        """Return the call in another thread that this thread does a part of, if any.

        It is a call of a module that holds the one called here. Numbers, which each
        thread counts for itself, do not tell which nodes such a call makes.
        """
        stacks = self._stacks.copy().values()  # the other threads go on
        if len(stacks) == 1:
            return None
        every = [frame for stack in stacks for frame in stack.copy()]
        found = [frame for frame in every if frame.hooked.holds(hooked.module)]
        for frame in found:
            frame.has_threads = True
        last = max(found, key=_MOMENT, default=None)
        # Several threads may run the outer module, each with threads that work for it.
        is_known = last and set(found) <= _around(last, every)
        return last.call if last and is_known else None

    def stacks_elsewhere(self) -> list[list[Frame]]:
        """Return the running calls of each thread that may have begun the running pass.

        None where this thread began it: then calls made meanwhile are its own.
        """
        stacks = [stack for stack in self._stacks.copy().values() if stack]
        return [] if not stacks or pass_began_here() else stacks


class Running(threading.local):
    """The forward that runs in a thread."""

    def __init__(
        self, keep: Keep, stacks: dict[int, list[Frame]], threads: Iterator[int]
    ) -> None:
        """Begin with nothing, in each thread that asks.

        Args:
            keep: Returns what to keep of arguments and outputs.
            stacks: The running calls of each thread, to which this one's are added.
            threads: Counts the threads.
        """
        self.stack: list[Frame] = []
        stacks[threading.get_ident()] = self.stack
        self.number = next(threads)  # how many there were before this one
        self.values = Values(keep)  # the tensors met
        self.views: Views = []
        self.handed_on: list[tuple[Frame, Value]] = []  # the views that calls returned
        self.closed: list[Frame] = []  # calls that returned an object not opened
        self.left: LeftValues = {}

    def end_forward(self) -> None:
        """Let go of what only the forward needed."""
        self.values.clear()
        self.views.clear()
        self.handed_on.clear()
        self.closed.clear()
        self.left.clear()


_MOMENT: Callable[[Frame], int] = attrgetter("call.moment")


def nodes_in(module: nn.Module) -> list[Node]:
    """Return the nodes of tensors that a module, or one inside it, holds."""
    left = [it for each in modules_in(module) for it in nodes_left_in(each, ())]
    return [*left, *computed_parameters(module)]


def computed_parameters(module: nn.Module) -> list[Node]:
    """Return the nodes of computed parameters, as functional_call() may put in."""
    return [
        parameter.grad_fn
        for each in modules_in(module)
        for parameter in own_parameters(each).values()
        if parameter is not None and parameter.grad_fn is not None
    ]


def _around(frame: Frame, every: list[Frame]) -> set[Frame]:
    """Return a call and those around it, of all that run."""
    by_moment = {it.call.moment: it for it in every}
    found: set[Frame] = set()
    around: Frame | None = frame
    while around is not None and around not in found:
        found.add(around)
        around = by_moment.get(around.call.caller)
    return found
