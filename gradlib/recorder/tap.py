"""The hook of a tensor, which keeps the gradient of all its uses together."""

import weakref
from typing import Any

from torch import Tensor

from gradlib.private.hooks import hooks_of
from gradlib.private.nodes import sequence_number
from gradlib.private.passes import (
    backward_pass_id,
    current_node,
    gradients_have_values,
)
from gradlib.recorder.attached import Attached, kept_from_compile
from gradlib.recorder.pass_numbers import PassNumbers
from gradlib.recorder.second_order import Part
from gradlib.recording.flow import Grads
from gradlib.values import Keep

NO_NUMBER = 2**64 - 1
"""The sequence number of a node that adds to a leaf's ``.grad``: it is not counted."""


class Tap:
    """The hook of a tensor: it keeps the gradient of the tensor, all uses together."""

    __slots__ = (
        "attached",
        "grads",
        "hooks",
        "keep",
        "maker",
        "number",
        "numbered",
        "part",
        "reaches_call",
        "within",
    )
    __torch_unserializable__ = True  # or torch warns when the tensor is pickled

    def __init__(
        self,
        numbered: PassNumbers,
        attached: Attached,
        tensor: Tensor,
        grads: Grads,
        keep: Keep,
        within: int | None = None,
        part: Part | None = None,
        reaches_call: bool = False,
    ) -> None:
        """Hook a tensor.

        Args:
            numbered: The passes of the block.
            attached: The hooks of the block.
            tensor: The tensor.
            grads: Where the gradient is gathered.
            keep: Returns what to keep of the gradient.
            within: The pass in which a checkpoint made the tensor, if one did.
            part: Returns the part of the gradient to keep; without it, all is kept.
            reaches_call: Whether a pass through the tensor has reached a call.
        """
        self.within = within
        self.part = part
        self.reaches_call = reaches_call
        self.numbered = numbered
        self.attached = attached
        self.grads = grads
        self.keep = keep
        node = tensor.grad_fn
        # The number of the node that made it. After detach_() the tensor still has its
        # hooks, but is another one.
        self.maker = NO_NUMBER if node is None else sequence_number(node)
        self.number = tensor.output_nr  # which of its node's outputs the tensor is
        hooks = hooks_of(tensor)
        # All hooks of the tensor, in order: gone with it and all graphs through it.
        self.hooks = weakref.ref(hooks)
        attached.on_tensors.append(self)
        hooks[self] = self  # last, as an interrupt may come in between

    @kept_from_compile
    def __call__(self, grad: Tensor | None) -> None:
        """Keep `grad`, the gradient in the running pass, or a part of it."""
        if grad is None:  # as a backward may return
            return
        node = current_node()
        if node is not None and sequence_number(node) != self.maker:
            return
        hooks, running = self.hooks() or {}, backward_pass_id()
        if (  # the common case: the only hook, in a pass that has reached a call
            running in self.numbered.numbers and len(hooks) == 1 and self.part is None
        ):
            self.grads[running] = self.keep(grad)
            return
        meant: Tensor | None = grad
        if self.part is not None:
            meant = self.part(grad) if gradients_have_values() else None
        # Hooks set after ours: since ours was put last, or in this pass by one before.
        others_follow = len(hooks) > 1 and next(reversed(hooks)) is not self
        if meant is not None and self.take(meant) and others_follow:
            self._take_again()

    def take(self, grad: Tensor) -> bool:
        """Keep a gradient in the running pass; tell whether the pass can be kept."""
        running, numbered = backward_pass_id(), self.numbered
        if running not in numbered.numbers and not numbered.admits(
            running, self.within, reaches_call=self.reaches_call
        ):
            return False
        self.grads[running] = self.keep(grad)
        return True

    def is_on(self, tensor: Tensor) -> bool:
        """Tell whether the hook is set on `tensor`."""
        hooks = self.hooks()
        return hooks is tensor._backward_hooks and hooks is not None and self in hooks

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
        """Take the gradient again after the tensor's later hooks, which may change it.

        A pre-hook of the tensor's node gets the result just before the node runs.
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
        self.attached.remember(handle)
