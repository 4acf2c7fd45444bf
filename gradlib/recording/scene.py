"""A call's module and arguments, as they were when it began, to run it again.

The module itself is called, in the state that it had.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from gradlib.edges import edge_of, edges_behind, leaves_at
from gradlib.errors import CannotReplayError
from gradlib.module_hook import AHEAD, nothing
from gradlib.opaque import is_tensor
from gradlib.private.hooks import (
    BACKWARD_PRE_HOOKS_OF,
    backward_pre_hooks,
    forward_pre_hooks,
    hooks_set,
)
from gradlib.private.modules import modules_in, own_parameters
from gradlib.recording.attributes import Change, Copies
from gradlib.recording.flow import ARGUMENT, Key, Left
from gradlib.recording.go_back import go_back, without_hooks_of_others
from gradlib.recording.history import History
from gradlib.recording.leaves import Leaves
from gradlib.recording.left_behind import left_in, left_in_arguments
from gradlib.recording.past_state import PastState
from gradlib.recording.replayable import explained, label
from gradlib.recording.trace import CallTrace
from gradlib.recording.world import World, autocast_set_to
from gradlib.tree import Tree
from gradlib.values import keep
from gradlib.wording import listed


class Scene:
    """A call that is run again, and the state of the model that it met.

    Attributes:
        leaves: The inputs and own parameters of the call.
    """

    def __init__(
        self, trace: CallTrace, history: History, world: World, change: Change
    ) -> None:
        """Set nothing yet.

        Args:
            trace: The call.
            history: The model's history.
            world: What the call began in.
            change: Maps a recorded tensor to the one to use.
        """
        self._trace = trace
        self._module = cast(nn.Module, trace.module)
        self._history = history
        self._world = world
        self._change = change
        self._copies = Copies(change)  # of attributes
        self._state = PastState(trace, history, change, self._copies)
        self.leaves = Leaves(trace)
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._passed: tuple[Any, ...] = ()  # the same, though a hook may change a dict
        self._now: dict[str, Tensor | None] = {}  # own parameters, which copies replace
        self._undo: Callable[[], None] = nothing  # removes the hook that gives inputs
        self._returned: object = None  # what the module returned last
        self._hooks_set = 0  # how many torch had set before the module was called

    @contextmanager
    def set(self) -> Generator[None]:
        """Give the module, and those that it may call, the state that they had."""
        self._now = dict(own_parameters(self._module))
        with self._state.set():
            self.leaves.take_parameters(self._module)
            self._arguments = self.leaves.copied_arguments(self._change, self._copies)
            self._state.set_attributes()
            yield

    def run(self) -> Tree:
        """Call the module, and return its output."""
        args, kwargs = self._arguments
        self._passed = *args, *kwargs.values()
        self.leaves.note_versions()
        self._give_arguments()
        # They run last, as the recorder's do. For backward hooks torch makes other
        # tensors of the output after that.
        self._module.register_forward_pre_hook(self._begins)
        self._module.register_forward_hook(self._returns)
        vars(self._module)[BACKWARD_PRE_HOOKS_OF] = self._pre_hooks
        self._hooks_set = hooks_set()
        with (
            self._world.in_force(),
            explained(self._trace, "Computing {} again"),
        ):
            # Not the class's own __call__: the recorded values have its changes.
            return Tree.of(nn.Module.__call__(self._module, *args, **kwargs))

    def pull(
        self,
        output: Tree,
        left: Mapping[Left, Tensor],
        grads: Mapping[Key | Left, Tensor],
        number: int,
    ) -> dict[Key, Tensor | None]:
        """Return the gradients of the inputs and own parameters.

        Args:
            output: What the call returned.
            left: What it left in attributes and buffers, as `left` gives it.
            grads: The gradients of the output's tensors, by place, and of these.
            number: Our number of the pass.
        """
        block = self._trace.block
        autocast = block.autocast.get(number, {})
        with_graph = number in block.with_graph
        self.leaves.forget_shares()
        returned = Tree.of(self._returned).leaves
        # A tensor returned twice has one gradient. It is copied, as hooks and backwards
        # may write over it.
        ends = [
            (place, id(returned[place]), it) for place, it in enumerate(output.leaves)
        ]
        ends += [(key, id(it), it) for key, it in left.items()]
        roots = {
            of: (leaf, keep(grad).to(leaf.device, leaf.dtype))
            for key, of, leaf in ends
            if (grad := grads.get(key)) is not None
        }
        tensors = [it for it in (*returned, *left.values()) if is_tensor(it)]
        with (
            without_hooks_of_others(tensors, self._hooks_set),
            autocast_set_to(autocast),
            explained(self._trace, "Computing the gradients of {} again"),
        ):
            leaves = list(self.leaves.every.values())
            go_back(list(roots.values()), leaves, with_graph=with_graph)
        return self.leaves.shares()

    def left(self) -> dict[Left, Tensor]:
        """Return the tensors that the call made and left, and did not return."""
        found: dict[Left, Tensor] = {
            (module, name, place): tensor
            for module in modules_in(self._module)
            for name, place, tensor in left_in(module)
        }
        for place, tensor in left_in_arguments(self._passed):
            found[self._module, ARGUMENT, place] = tensor
        returned = {id(leaf) for leaf in Tree.of(self._returned).leaves}
        given = {id(it) for it in self.leaves.given.values()}
        return {
            key: it
            for key, it in found.items()
            if it._version or not (id(it) in given or it in self._copies)
            if id(it) not in returned
        }

    def require_copies(self, tensors: Iterable[Tensor]) -> None:
        """Raise if the call has used an own parameter itself, and not the copy.

        Args:
            tensors: What the call returned and left behind.
        """
        edges = edges_behind(edge_of(it) for it in tensors if it.grad_fn is not None)
        met = {id(leaf) for leaf in leaves_at(edges)}
        own = self._now.items()
        used = [name for name, it in own if id(it) in met and name in self.leaves.every]
        if used:
            raise CannotReplayError(
                f"{label(self._trace)} takes {listed(used)} not only from its module: "
                "a closure, an object of another class or the like holds it too, and "
                "there a replay cannot put the weights of that moment."
            )

    def _give_arguments(self) -> None:
        """Give the call the recorded arguments, at the place of the recorder's hook.

        The hooks before that had made them what they are: global ones, and those of the
        module that were put before the recorder's in that forward.
        """
        self._undo = self._module.register_forward_pre_hook(
            self._give, prepend=True, with_kwargs=True
        ).remove
        hooks = self._history.hooks(self._module, self._trace.moment)
        own = forward_pre_hooks(self._module)
        for key in [*own][hooks[AHEAD] : 0 : -1]:
            own.move_to_end(key, last=False)

    def _give(self, *_: object) -> Any:
        return self._arguments

    def _pre_hooks(self) -> list[Callable[..., None]]:
        # The recorded gradient is what these had made of it. Stand-ins are needed: with
        # any set, torch makes other tensors of the module's inputs and outputs.
        return [nothing for _ in backward_pre_hooks(self._module)]

    def _begins(self, *_: object) -> None:
        # If the module calls itself, those calls have all of its hooks.
        vars(self._module).pop(BACKWARD_PRE_HOOKS_OF, None)
        self._undo()

    def _returns(self, _module: nn.Module, _args: object, output: object) -> None:
        # If the module calls itself, it is the outermost call that returns last.
        self._returned = output
