"""Which earlier calls a checkpoint computes again inside a backward pass.

A checkpoint keeps no values inside the forward: it computes them again when the
backward pass needs them. There are two kinds. The reentrant one first computes without
gradients, which then flow through the second computation. The other one makes its graph
in the first computation, and the second only restores values.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor

from gradlib.private.modes import no_dispatch_modes
from gradlib.private.passes import who_began_pass
from gradlib.recording.trace import CallTrace
from gradlib.tree import Tree

FILE = torch.utils.checkpoint.__file__


class Checkpoints:
    """The checkpoints met in a block."""

    def __init__(self, calls: Sequence[CallTrace]) -> None:
        """Begin with none; `calls` are those of the block, and grow."""
        self._calls = calls
        # The first `_looked_at` of them, by name.
        self._named: defaultdict[str, list[CallTrace]] = defaultdict(list)
        self._looked_at = 0
        # By the number of a reentrant checkpoint, the calls inside it; by that and
        # torch's number of a pass, those still to be computed again.
        self._inside: defaultdict[int, list[CallTrace]] = defaultdict(list)
        self._next: dict[tuple[int, int], Iterator[CallTrace]] = {}
        # By the number of one that is in no other, torch's number of the pass in which
        # it computes again.
        self._outermost: dict[int, int] = {}

    def meet(self, call: CallTrace, numbers: set[int]) -> None:
        """Write down the reentrant checkpoints that a call is in, by their numbers."""
        for number in numbers - call.checkpoints:
            self._inside[number].append(call)
        call.checkpoints |= numbers

    def again(self, python: FrameType, name: str, running: int) -> CallTrace | None:
        """Return the call that a reentrant checkpoint now computes again, if any.

        Args:
            python: The frame in which torch runs the checkpoint's backward.
            name: The name of the module that is called.
            running: torch's number of the backward pass.
        """
        number = _number(python)
        to_come = self._next.setdefault((number, running), iter(self._inside[number]))
        return _marked(next((it for it in to_come if it.name == name), None), running)

    def pass_around(self, python: FrameType | None, running: int) -> int:
        """Return torch's number of the outermost pass that now runs.

        Args:
            python: The frame in which torch runs a call that a reentrant checkpoint
                computes again.
            running: torch's number of the pass that computes it again.
        """
        numbers = [_number(found) for found in _frames_of(python, "backward")]
        if len(numbers) == 1:
            self._outermost[numbers[0]] = running
        return self._outermost.get(numbers[-1], running)

    def original(self, name: str, inputs: Tree, running: int) -> CallTrace | None:
        """Return the call that a checkpoint of the other kind computes again.

        It is the last one with these inputs: a pass goes through the calls backwards.
        """
        new = self._calls[self._looked_at :]
        self._looked_at += len(new)
        for call in new:
            self._named[call.name].append(call)
        last: CallTrace | None = None
        for call in reversed(self._named[name]):
            if call.recomputed_in == running:
                continue
            if _same(call.inputs, inputs):
                return _marked(call, running)
            last = last or call
        return _marked(last, running)


def _marked(call: CallTrace | None, running: int) -> CallTrace | None:
    """Write down in which pass a call is computed again, and return the call."""
    if call is not None:
        call.recomputed_in = running
    return call


def around_forward(python: FrameType | None) -> set[int]:
    """Return the numbers of the reentrant checkpoints whose forward runs."""
    return {_number(found) for found in _frames_of(python, "forward")}


def checkpoint_around(python: FrameType | None) -> FrameType | None:
    """Return the frame of the checkpoint that computes again, if one does."""
    return next(_frames_of(python, "backward", "unpack_hook"), None)


def is_reentrant(python: FrameType) -> bool:
    """Tell whether the checkpoint that `checkpoint_around` found is reentrant."""
    return python.f_code.co_name == "backward"


def goes_on_with_pass() -> bool:
    """Tell whether a reentrant checkpoint began the running pass, as part of another.

    If not, the forward that it computes again runs the pass, as for forces.
    """
    began = who_began_pass()
    return began is None or next(_frames_of(began, "backward"), None) is began


def _frames_of(python: FrameType | None, *names: str) -> Iterator[FrameType]:
    """Yield the frames of torch's checkpoints, the innermost first."""
    while python is not None:
        code = python.f_code
        is_one = code.co_filename == FILE and code.co_name in names
        if is_one and (code.co_name == "unpack_hook" or "ctx" in python.f_locals):
            yield python
        python = python.f_back


_ATTRIBUTE = "_gradlib_number"
_count = itertools.count()


def _number(python: FrameType) -> int:
    """Return the number of the checkpoint whose forward or backward a frame runs.

    It is an attribute of the checkpoint's node. The node's sequence number will not do:
    two threads may count the same.
    """
    node = python.f_locals["ctx"]
    number = getattr(node, _ATTRIBUTE, None)
    if number is None:
        number = next(_count)
        setattr(node, _ATTRIBUTE, number)
    return number


def _same(a: Tree, b: Tree) -> bool:
    """Tell whether two trees have the same values, as far as these were kept."""
    pairs = zip(a.leaves, b.leaves, strict=False)
    with no_dispatch_modes():  # a selective checkpoint's counts the operations
        return a.spec == b.spec and all(
            x.shape == y.shape and (x.device != y.device or torch.equal(x, y.detach()))
            for x, y in pairs
            if isinstance(x, Tensor) and isinstance(y, Tensor)
        )
