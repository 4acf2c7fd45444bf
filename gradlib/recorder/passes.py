"""What autograd calls while a backward pass runs: each gradient goes where it belongs.

The hooks only keep what they are given, and never change it.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.module_hook import nothing
from gradlib.private.compiling import never_compiled
from gradlib.private.hooks import hook_tensor, hooks_set
from gradlib.private.modes import grad_is_enabled
from gradlib.private.nodes import next_sequence_number, sequence_number
from gradlib.private.passes import (
    backward_pass_id,
    current_node,
    gradients_are_batched,
    when_pass_ends,
)
from gradlib.recorder.checkpoints import goes_on_with_pass
from gradlib.recorder.second_order import Part, Receiver, gives_back, made_by, made_to
from gradlib.recorder.sums import Sums
from gradlib.recording.trace import Flow, Grads
from gradlib.values import Keep, keep

# How many hooks torch has set for us, in this process. As an attribute of a class each
# change of it would have Python look up anew what that class has.
_SET_BY_US = [0]

kept_from_compile = partial(
    never_compiled,
    because="gradlib.record sees each module call and gradient, so it cannot record "
    "what is compiled with fullgraph=True",
)
"""Keeps torch.compile out of a function that records."""

NO_NUMBER = 2**64 - 1
"""The sequence number of what has none: a node that adds to a leaf's ``.grad``."""

Inner: TypeAlias = tuple[Tensor, Tensor | None]
"""What a call itself gives to one of its outputs: the sum, and what came, if it came
at once."""


class Tap:
    """The hook of a tensor: it keeps the gradient of the tensor, all uses together."""

    __slots__ = (
        "grads",
        "hooks",
        "keep",
        "maker",
        "number",
        "part",
        "passes",
        "reaches_call",
        "within",
    )
    __torch_unserializable__ = True  # or torch warns when the tensor is pickled

    def __init__(
        self,
        passes: "Passes",
        tensor: Tensor,
        grads: Grads,
        keep: Keep,
        within: int | None = None,
        part: Part | None = None,
        reaches_call: bool = False,
    ) -> None:
        """Hook a tensor.

        Args:
            passes: The passes of the block.
            tensor: The tensor.
            grads: Where the gradient goes.
            keep: Gives what to keep of the gradient.
            within: The pass in which a checkpoint made the tensor.
            part: What is meant of the gradient, if not all.
            reaches_call: Whether a pass that comes through it has reached a call.
        """
        self.within = within
        self.part = part
        self.reaches_call = reaches_call
        self.passes = passes
        self.grads = grads
        self.keep = keep
        node = tensor.grad_fn
        # Of the node that has made it. After detach_() it keeps its hooks, and is
        # another tensor.
        self.maker = NO_NUMBER if node is None else sequence_number(node)
        self.number = tensor.output_nr  # which of its node's outputs the tensor is
        # All of the tensor, in their order; gone with it and the graphs through it.
        self.hooks = weakref.ref(hook_tensor(tensor, self))

    @kept_from_compile
    def __call__(self, grad: Tensor | None) -> None:
        """Keep what is meant of `grad`, the gradient in the running pass."""
        if grad is None:  # of a backward that gives nothing
            return
        node = current_node()
        if node is not None and sequence_number(node) != self.maker:
            return
        hooks, running = self.hooks() or {}, backward_pass_id()
        if (  # as most are: alone, and in a pass that has reached a call
            running in self.passes.numbers and len(hooks) == 1 and self.part is None
        ):
            self.grads[running] = self.keep(grad)
            return
        meant: Tensor | None = grad
        if self.part is not None:
            meant = None if gradients_are_batched() else self.part(grad)
        # Somebody has hooked it since, or a hook before ours did, in this pass.
        others_follow = len(hooks) > 1 and next(reversed(hooks)) is not self
        if meant is not None and self.take(meant) and others_follow:
            self._take_again()

    def is_on(self, tensor: Tensor) -> bool:
        """Tell whether it is set on `tensor`."""
        hooks = self.hooks()
        return hooks is tensor._backward_hooks and hooks is not None and self in hooks

    def take(self, grad: Tensor) -> bool:
        """Keep a gradient in the running pass, and tell whether that could be."""
        running, passes = backward_pass_id(), self.passes
        if running not in passes.numbers and not passes.admits(
            running, self.within, reaches_call=self.reaches_call
        ):
            return False
        self.grads[running] = self.keep(grad)
        return True

    def be_last(self) -> None:
        """Have the other hooks of the tensor run first."""
        hooks = self.hooks()
        if hooks and len(hooks) > 1 and self in hooks:
            hooks[self] = hooks.pop(self)

    def remove(self) -> None:
        """Take the hook from its tensor."""
        hooks = self.hooks()
        if hooks:
            hooks.pop(self, None)

    def _take_again(self) -> None:
        """Take the gradient anew when the hooks that follow have had it too.

        They may change it. Its node gets what they return, just before it runs.
        """
        node: Any = current_node()
        if node is None:
            return

        def take(gathered: tuple[Tensor | None, ...]) -> None:
            handle.remove()
            grad = gathered[self.number]
            if grad is not None and self.part is not None:
                grad = self.part(grad)
            if grad is not None:
                self.grads[backward_pass_id()] = self.keep(grad)

        handle = node.register_prehook(take)
        self.passes.remember(handle)


class NodeHook:
    """The hook of a graph node: it adds what the node computes to where it belongs."""

    __slots__ = ("known", "passes", "receivers", "thread", "within")

    def __init__(
        self,
        passes: "Passes",
        receivers: list[Receiver],
        within: int | None,
        thread: int,
    ) -> None:
        """Say where the node's gradients go.

        Args:
            passes: The passes of the block.
            receivers: Which of them goes where.
            within: The pass in which a checkpoint made the node.
            thread: The one that made it, or 0.
        """
        self.known = 0  # autograd's sequence number when it was followed last
        self.thread = thread
        self.passes = passes
        self.receivers = receivers
        self.within = within

    @kept_from_compile
    def __call__(
        self,
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Keep the parts of `grads_in` in the running pass."""
        passes, running = self.passes, backward_pass_id()
        if running not in passes.numbers and not passes.admits(running, self.within):
            passes.note_batched(self.receivers)
            return
        keep_share = passes.keep
        with_graph, reduces = passes.with_graph, passes.reduces
        if with_graph and grad_is_enabled():
            passes.follow(self, grads_in, grads_out)
        for entry, grads, part, flow in self.receivers:
            grad = grads_in[entry]
            if grad is None:
                continue
            if with_graph:
                passes.hook_way_back(grad, grads_out, flow)
            if part is not None and (grad := part(grad)) is None:
                continue
            if reduces or running in grads:
                passes.sums.add(grads, running, grad)
            else:
                grads[running] = keep_share(grad)


class InnerHook:
    """The hook of a node by which a call makes one output of another."""

    __slots__ = ("entry", "hook_other", "sums")

    def __init__(
        self,
        sums: dict[int, Inner],
        entry: int,
        hook_other: Callable[[Node, int, dict[int, Inner]], None],
    ) -> None:
        """Say which of the node's gradients is added to which sums.

        Args:
            sums: By torch's number of the pass.
            entry: Which of the gradients.
            hook_other: Hooks another node, for an entry of it.
        """
        self.sums = sums
        self.entry = entry
        self.hook_other = hook_other

    @kept_from_compile
    def __call__(
        self,
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Add it, and follow what a pass with ``create_graph=True`` makes of it."""
        grad, running = grads_in[self.entry], backward_pass_id()
        if grad is not None:
            known = self.sums.get(running)
            both = (known[0] + grad, None) if known else (keep(grad), grad)
            self.sums[running] = both
        node = current_node() if grad_is_enabled() else None
        if node is not None:
            for maker, number in made_to(node, self.entry, grads_in, grads_out):
                self.hook_other(maker, number, self.sums)

    def is_like(self, other: "InnerHook") -> bool:
        """Tell whether another does the same."""
        return other.sums is self.sums and other.entry == self.entry


class Passes:
    """The backward passes of a block, and the hooks that gather their gradients."""

    def __init__(self, keep: Keep, keep_total: Keep, *, reduces: bool) -> None:
        """Begin with no pass seen.

        Args:
            keep: Gives what to keep of a gradient.
            keep_total: The same for all that reaches an input or output.
            reduces: Whether that is nothing one could add to. Then a gradient that
                comes in parts is kept when the last one has come.
        """
        self.keep = keep
        self.keep_total = keep_total
        self.reduces = reduces
        # torch's number of each pass that reached a call -> ours, from 0 as they began.
        self.numbers: dict[int, int] = {}
        self.with_graph: set[int] = set()  # our numbers of those with create_graph=True
        self.batched: set[int] = set()  # torch's numbers of those that are not kept
        self.handles: list[Any] = []
        # Called as a pass meets a hook that does not know it yet, as it first reaches a
        # call, and then with its number.
        self.when_met: Callable[[], None] = nothing
        self.when_reached: Callable[[], None] = nothing
        self.when_numbered: Callable[[int], None] = nothing
        self._count = itertools.count()  # which gives no two threads the same
        self._running: set[int] = set()  # torch's numbers of those that may go on
        self._taps: list[Tap] = []
        self.sums = Sums(keep, reduces=reduces)
        self._inner: list[dict[int, Inner]] = []
        self._finishing = threading.RLock()
        self._is_finishing = False
        self._many = 0  # from how many hooks on some are let go of
        self._by_others = -1  # and how many others have, at the last look

    def hook_tensor(
        self,
        tensor: Tensor,
        grads: Grads,
        within: int | None,
        *,
        part: Part | None = None,
        is_output: bool = False,
    ) -> Tap:
        """Take the gradient of `tensor` as it is now, all its uses together.

        Args:
            tensor: The tensor.
            grads: Where the gradient goes.
            within: The pass in which a checkpoint made the tensor.
            part: What is meant of the gradient, if not all.
            is_output: Whether a call returned it, so that a pass that comes through it
                has reached a call.

        Returns:
            The hook.
        """
        tap = Tap(self, tensor, grads, self.keep_total, within, part, is_output)
        self._taps.append(tap)
        return tap

    def hook_parameter(self, parameter: nn.Parameter, grads: Grads) -> Tap:
        """Take the gradient of a parameter, all its uses together.

        A pass may give it in parts: a checkpoint of the reentrant kind runs passes
        inside the pass. All of them are complete in `finish`.

        Returns:
            The hook.
        """
        keep = self.keep
        if self.reduces:
            keep = partial(self.sums.begin, grads)
        tap = Tap(self, parameter, grads, keep)
        self._taps.append(tap)
        return tap

    def hook_node(
        self,
        node: Node,
        receivers: list[Receiver],
        within: int | None,
        thread: int = 0,
    ) -> None:
        """Take what `node` computes: shares of gradients, which may come in parts."""
        hook = NodeHook(self, receivers, within, thread)
        self.remember(node.register_hook(hook), receivers)

    def remember(self, handle: Any, receivers: Sequence[Receiver] = ()) -> None:
        """Take note of a hook that was set on a node."""
        self.sums.expect(receivers)
        self.handles.append(handle)
        _SET_BY_US[0] += 1

    def _hook_for_more(self, node: Any, receivers: list[Receiver], thread: int) -> None:
        """Take what `node` computes, less what hooks of it take already."""
        hook = NodeHook(self, [], None, thread)
        handle = node.register_hook(hook)
        known = {
            (entry, id(grads))
            for it in handle.hooks_dict_ref().values()
            if isinstance(it, NodeHook)
            for entry, grads, *_ in it.receivers
        }
        hook.receivers = [it for it in receivers if (it[0], id(it[1])) not in known]
        self.remember(handle, hook.receivers)
        if not hook.receivers:
            handle.remove()

    def hook_way_back(
        self, grad: Tensor, grads_out: Iterable[Tensor | None], flow: Flow
    ) -> None:
        """Note who goes through what a pass with ``create_graph=True`` has computed.

        Args:
            grad: What it has computed.
            grads_out: From what. Who goes through these alone has nothing to do with
                the call.
            flow: Of the call.
        """
        node = grad.grad_fn
        if node is None or any(
            it is not None and it.grad_fn is node for it in grads_out
        ):
            return

        def note(*_: object) -> None:
            running = backward_pass_id()
            if running in self.numbers or self.admits(running, None):
                flow.gone_through |= {running}

        self.remember(node.register_hook(note))

    def follow(
        self,
        hook: NodeHook,
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Hook what a pass with ``create_graph=True`` makes in calls, for later ones.

        Args:
            hook: Of the node that it has just gone through.
            grads_in: What that has computed.
            grads_out: From what.
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
        for maker, it in made_by(node, hook.receivers, grads_in, grads_out, known):
            made.setdefault(maker, []).append(it)
        # A copy that the forward has saved is there for each pass, and hooked once.
        hook.known = next_sequence_number() - 1
        for maker, its in made.items():
            self._hook_for_more(maker, its, here)

    def note_batched(self, receivers: list[Receiver]) -> None:
        """Note which calls a pass with is_grads_batched has reached, if it has a graph.

        Later ones may go through that.
        """
        if not grad_is_enabled():
            return
        behind = len(set(self.numbers.values()))
        for *_, flow in receivers:
            if flow.behind_batched is None:
                flow.behind_batched = behind

    def hook_overwriting(self, nodes: Iterable[Node], tap: Tap, part: Part) -> None:
        """Add what flows through nodes that overwrote a view to what its hook takes.

        Args:
            nodes: They hand it to the view's base, as the first of their gradients.
            tap: The hook of the view, for its uses before that.
            part: Which part of the base's gradient the view's is.
        """
        tap.keep = partial(self.sums.added, self.keep_total, tap.grads)

        def take(
            grads_in: tuple[Tensor | None, ...], _grads_out: tuple[Tensor | None, ...]
        ) -> None:
            grad = None if grads_in[0] is None else part(grads_in[0])
            if grad is not None:
                tap.take(grad)

        for node in nodes:
            self.remember(node.register_hook(take))

    def hook_inner(self, nodes: Iterable[tuple[Node, int]]) -> dict[int, Inner]:
        """Add up what nodes give to one tensor, each with which of its gradients.

        Returns:
            The sum for each pass, by torch's number.
        """
        sums: dict[int, Inner] = {}
        for node, entry in nodes:
            self._hook_inner(node, entry, sums)
        self._inner.append(sums)
        return sums

    def _hook_inner(self, node: Any, entry: int, sums: dict[int, Inner]) -> None:
        """Add up what a node gives, unless that is done already."""
        hook = InnerHook(sums, entry, self._hook_inner)
        handle = node.register_hook(hook)
        known = [*handle.hooks_dict_ref().values()][:-1]
        self.remember(handle)
        if any(isinstance(it, InnerHook) and it.is_like(hook) for it in known):
            handle.remove()

    def remove_hooks(self) -> None:
        """Remove every hook, and reduce what is still open."""
        for tap in filter(_HOOKS_OF_TENSOR, self._taps):
            tap.remove()
        for handle in filter(_HOOKS_OF_NODE, self.handles):
            handle.remove()
        self._taps.clear()
        self.handles.clear()
        # Circles would keep all until they are collected.
        self.when_met = self.when_reached = self.when_numbered = nothing
        self._running.clear()  # of one that raised nobody hears
        self.finish()

    def finish(self) -> None:
        """Reduce what is still open of passes that have ended: nothing more will come.

        One may go on in another thread. Hooks whose tensor or node is gone are let go
        of: a step late in a block costs no more than an early one.
        """
        with self._alone() as is_alone:
            if not is_alone:
                return
            going_on = {self.numbers[running] for running in self._running.copy()}
            self.sums.finish(self.numbers, going_on)
            if not going_on:
                for sums in self._inner:
                    sums.clear()
            self._let_go()

    @contextmanager
    def _alone(self) -> Generator[bool]:
        """Keep other threads out, and tell whether nobody is at it in this one.

        Somebody is who was interrupted: a handler of signals may call the model. What
        is left out then is done the next time.
        """
        with self._finishing:
            is_alone, self._is_finishing = not self._is_finishing, True
            try:
                yield is_alone
            finally:
                self._is_finishing = not is_alone

    def _let_go(self) -> None:
        if len(self.handles) + len(self._taps) <= self._many:
            return
        handles, taps = self.handles.copy(), self._taps.copy()
        self.handles[: len(handles)] = filter(_HOOKS_OF_NODE, handles)
        self._taps[: len(taps)] = filter(_HOOKS_OF_TENSOR, taps)
        # Where most live on, as those of forwards that wait for one backward pass, the
        # next look is when they have doubled.
        before, after = len(handles) + len(taps), len(self.handles) + len(self._taps)
        self._many = 2 * after if 2 * after > before else 0

    def admits(
        self, running: int, within: int | None, *, reaches_call: bool = True
    ) -> bool:
        """Number a pass when it first reaches a call; tell whether it can be kept.

        The tensors of a batched pass stand for others while ``is_grads_batched`` or
        torch.func computes, and are nothing after it.
        """
        self.when_met()
        if gradients_are_batched():
            if reaches_call:
                self.batched.add(running)
            return False
        if reaches_call:
            self.reached(running, within)
        return True

    def reached(self, running: int, within: int | None) -> None:
        """Number a pass when it first reaches a call.

        A checkpoint of the reentrant kind runs a pass of its own inside the pass that
        recomputes, which `within` names: the two are one. Any other inside of it, as
        one for forces, is one of its own.
        """
        self.when_reached()
        with self._alone() as is_alone:
            if is_alone:
                self._let_go()
        self._be_last()
        if within is None or within == running or not goes_on_with_pass():
            number = self.numbers[running] = next(self._count)
            self.when_numbered(number)
            if self.reduces or self._inner:
                self._running.add(running)
                when_pass_ends(partial(self._running.discard, running))
            if grad_is_enabled():
                self.with_graph.add(number)
        else:
            if within not in self.numbers:
                self.reached(within, None)
            self.numbers[running] = self.numbers[within]

    def are_last(self) -> None:
        """Take it that nobody has set a hook that ours do not come after."""
        self._by_others = self.set_by_others()

    def set_by_others(self) -> int:
        """Return how many hooks torch has set for others in this process."""
        return hooks_set() - _SET_BY_US[0]

    def _be_last(self) -> None:
        """Put our hooks after those set since: these may change gradients."""
        before = self._by_others
        self.are_last()
        if self._by_others == before:
            return
        for handle in self.handles:
            hooks = handle.hooks_dict_ref()
            if hooks and next(reversed(hooks)) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)
        for tap in self._taps:
            tap.be_last()


_HOOKS_OF_NODE, _HOOKS_OF_TENSOR = methodcaller("hooks_dict_ref"), methodcaller("hooks")
