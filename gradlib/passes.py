"""What autograd calls while a backward pass runs: each gradient goes where it belongs.

The hooks only keep what they are given, and never change it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradlib.private import backward_pass_id, current_node, hook_tensor
from gradlib.trace import Grads, Sum, whole
from gradlib.values import Keep, keep

Part: TypeAlias = Callable[[Tensor], Tensor | None]
"""What is meant of a gradient; ``None`` for nothing of it."""

Receiver: TypeAlias = tuple[int, Grads, Part | None]
"""Which of the gradients a node computes goes where; without `Part` all of it."""


class Tap:
    """Where the gradient of a hooked tensor goes."""

    __slots__ = (
        "grads",
        "hook",
        "hooks",
        "keep",
        "number",
        "part",
        "reaches_call",
        "within",
    )

    def __init__(
        self,
        grads: Grads,
        number: int,
        keep: Keep,
        *,
        reaches_call: bool = False,
        within: int | None = None,
    ) -> None:
        """Say what is meant.

        Args:
            grads: Where the gradient goes.
            number: Which of its node's outputs the tensor is.
            keep: Gives what to keep of the gradient.
            reaches_call: Whether a pass that comes through it has reached a call.
            within: The pass in which a checkpoint made the tensor.
        """
        self.grads = grads
        self.number = number
        self.keep = keep
        self.reaches_call = reaches_call
        self.within = within
        self.part: Part | None = None  # what is meant of the gradient, if not all
        # Set when the tensor is hooked; `hooks` are all of its own, in their order.
        self.hook: Callable[[Tensor], None]
        self.hooks: dict[Any, Any]


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
        self._keep = keep
        self.keep_total = keep_total
        self._reduces = reduces
        self._expected: Counter[int] = Counter()  # parts, by id of where they go
        self._open: list[Grads] = []  # of which more parts may come
        self._of_parameters: list[Grads] = []
        self._inner: list[dict[int, Tensor]] = []
        # torch's number of each pass that reached a call -> ours, from 0 as they began.
        self.numbers: dict[int, int] = {}
        self._taps: list[Tap] = []
        self._handles: list[RemovableHandle] = []

    def hook_tensor(self, tensor: Tensor, tap: Tap) -> None:
        """Take the gradient of `tensor` as it is now, all its uses together."""
        tap.hook = partial(self._on_tensor, tap)
        tap.hooks = hook_tensor(tensor, tap.hook)
        self._taps.append(tap)

    def hook_parameter(self, parameter: nn.Parameter, grads: Grads) -> None:
        """Take the gradient of a parameter, all its uses together.

        A pass may give it in parts: a checkpoint of the reentrant kind runs passes
        inside the pass. All of them are complete in `finish`.
        """
        tap = Tap(grads, 0, self._keep)
        if self._reduces:
            tap.keep = self._sum_up
            self._of_parameters.append(grads)
        self.hook_tensor(parameter, tap)

    def _sum_up(self, grad: Tensor) -> Sum:
        return Sum(keep(grad), 0, self._keep)

    def hook_node(
        self, node: Node, receivers: list[Receiver], within: int | None
    ) -> None:
        """Take what `node` computes: shares of gradients, which may come in parts."""
        if self._reduces:
            self._expected.update(id(grads) for _, grads, _ in receivers)
        hook = partial(self._on_node, receivers, within)
        self._handles.append(node.register_hook(hook))

    def hook_inner(self, nodes: Iterable[tuple[Node, int]]) -> dict[int, Tensor]:
        """Add up what nodes give to one tensor, each with which of its gradients.

        Returns:
            The sum for each pass, by torch's number.
        """
        sums: dict[int, Tensor] = {}
        for node, entry in nodes:
            hook = partial(_add_entry, sums, entry)
            self._handles.append(node.register_hook(hook))
        self._inner.append(sums)
        return sums

    def remove_hooks(self) -> None:
        """Remove every hook, and reduce what is still open."""
        for tap in self._taps:
            tap.hooks.pop(tap.hook, None)
        for handle in self._handles:
            handle.remove()
        self._taps.clear()
        self._handles.clear()
        self.finish()

    def finish(self) -> None:
        """Reduce what is still open: no pass runs, so nothing more will come."""
        for grads in self._open + self._of_parameters:
            sums = {key: part for key, part in grads.items() if isinstance(part, Sum)}
            for number in {self.numbers.get(key) for key in sums}:
                same = [key for key in sums if self.numbers.get(key) == number]
                kept = whole([grads.pop(key) for key in same])
                if number is not None:
                    grads[same[0]] = kept
        for sums in self._inner:
            sums.clear()
        self._open.clear()

    def _reached(self, running: int, within: int | None) -> None:
        """Number a pass when it first reaches a call.

        A checkpoint of the reentrant kind runs a pass of its own inside the pass that
        recomputes, which `within` names: the two are one.
        """
        if within is None or within == running:
            self.numbers[running] = len(set(self.numbers.values()))
        else:
            if within not in self.numbers:
                self._reached(within, None)
            self.numbers[running] = self.numbers[within]

    def _on_node(
        self,
        receivers: list[Receiver],
        within: int | None,
        grads_in: tuple[Tensor | None, ...],
        _grads_out: tuple[Tensor | None, ...],
    ) -> None:
        running = backward_pass_id()
        if running not in self.numbers:
            self._reached(running, within)
        for entry, grads, part in receivers:
            grad = grads_in[entry]
            if grad is not None and part is not None:
                grad = part(grad)
            if grad is None:
                continue
            if self._reduces:
                self._add(grads, running, grad, self._expected[id(grads)])
            elif running in grads:
                grads[running] = grads[running] + grad.detach()
            else:
                grads[running] = self._keep(grad)

    def _on_tensor(self, tap: Tap, grad: Tensor) -> None:
        running = backward_pass_id()
        meant = grad if tap.part is None else tap.part(grad)
        if meant is None:
            return
        if tap.reaches_call and running not in self.numbers:
            self._reached(running, tap.within)
        tap.grads[running] = tap.keep(meant)
        if next(reversed(tap.hooks)) is not tap.hook:
            self._take_again(tap)

    def _take_again(self, tap: Tap) -> None:
        """Take a gradient anew when the hooks that follow ours have had it too.

        They may change it. Its node gets what they return, just before it runs.
        """
        node = current_node()
        if node is None:
            return

        def take(gathered: tuple[Tensor | None, ...]) -> None:
            handle.remove()
            grad = gathered[tap.number]
            meant = grad if grad is None or tap.part is None else tap.part(grad)
            if meant is not None:
                tap.grads[backward_pass_id()] = tap.keep(meant)

        handle = cast(Any, node).register_prehook(take)
        self._handles.append(handle)

    def _add(self, grads: Grads, running: int, grad: Tensor, parts: int) -> None:
        """Add a part, and reduce the sum when the last of `parts` has come."""
        known = grads.get(running)
        if known is None:
            known = grads[running] = Sum(keep(grad), parts, self._keep)
            if parts > 1:
                self._open.append(grads)
        else:
            known.total = known.total + grad.detach()
        known.missing -= 1
        if known.missing == 0:
            grads[running] = whole([known])


def _add_entry(
    sums: dict[int, Tensor],
    entry: int,
    grads_in: tuple[Tensor | None, ...],
    _grads_out: tuple[Tensor | None, ...],
) -> None:
    grad, running = grads_in[entry], backward_pass_id()
    if grad is not None:
        sums[running] = sums[running] + grad if running in sums else keep(grad)
