"""What the recorder writes down, flat; `call` gives it its form."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradlib.errors import NotStorableError
from gradlib.private.modes import unseen
from gradlib.recording.state import History, World
from gradlib.tree import Tree
from gradlib.values import Transfers

Grads: TypeAlias = dict[int, Any]
"""What was kept of a tensor's gradients, by torch's number of the backward pass."""

Key: TypeAlias = int | str
"""A position among the flat inputs or outputs, or the name of an own parameter."""

GRADIENTS = ("grad_input", "grad_output", "param_grads")
FIELDS = ("args", "output", *GRADIENTS)
"""What can be kept of a call; its kwargs and the totals travel with theirs."""

NOT_CHOSEN = "record(..., modules=...) left it out"
"""Why a module was not recorded of which nobody asked to see calls."""


@dataclass(slots=True)
class Sum:
    """A gradient of which parts may be missing, and what to keep of the whole."""

    total: Tensor
    missing: int
    keep: Callable[[Tensor], Any]


def whole(parts: Sequence[Any]) -> Any:
    """Return what is kept of a gradient that came in `parts`; ``None`` for none."""
    if not parts:
        return None
    with unseen():
        if isinstance(parts[0], Sum):
            return parts[0].keep(reduce(add, (part.total for part in parts)))
        return reduce(add, parts)


class Flow:
    """Where the gradients of one computation of a call are gathered.

    What requires no grad has no entry.
    """

    # torch's numbers of passes through what another gave with create_graph=True.
    gone_through: Set[int] = frozenset[int]()
    # The first of our numbers after a pass with is_grads_batched that had
    # create_graph=True; it has no number itself.
    behind_batched: int | None = None
    # Whether its backward returned what it had saved, in one with create_graph=True.
    gave_back = False
    # torch's numbers of passes that had reached a tensor before the call returned it:
    # one inside the call, or one before a leaf was returned once more.
    earlier: Set[int] = frozenset[int]()

    def __init__(self) -> None:
        """Begin with nothing asked."""
        self.shares: dict[Key, Grads] = {}
        self.totals: dict[Key, Grads] = {}
        self.outputs: dict[Key, Grads] = {}

    def gathered(self, what: str) -> dict[Key, Grads]:
        """Return what one of its fields has gathered since the call returned."""
        found: dict[Key, Grads] = getattr(self, what)
        if what == "totals" or not self.earlier:
            return found
        return {
            key: {it: grad for it, grad in grads.items() if it not in self.earlier}
            for key, grads in found.items()
        }


@dataclass(slots=True)
class Block:
    """What all calls of one block have in common."""

    fields: frozenset[str]  # what was kept
    # torch's number of each backward pass that reached a call -> ours.
    numbers: dict[int, int]
    # Our numbers of the passes with create_graph=True: others may go through them.
    with_graph: set[int] = field(default_factory=set[int])
    # torch's numbers of the passes with is_grads_batched: they cannot be kept.
    batched: set[int] = field(default_factory=set[int])
    history: History | None = None  # without it no call can be computed again
    # The modules that were not recorded, and why.
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    # By our number of a pass: the moment of the call that it ran inside of, or -1, and
    # the one at which it ended; of one that raised, at which it began.
    happened: dict[int, tuple[int, int]] = field(
        default_factory=dict[int, tuple[int, int]]
    )
    unfinished: set[int] = field(default_factory=set[int])  # our numbers: they raised
    # By our number of a pass: the autocast it ran under, by device type.
    autocast: dict[int, dict[str, torch.dtype]] = field(
        default_factory=dict[int, dict[str, torch.dtype]]
    )
    # What autocast computed in, in calls: they may have returned it in another dtype.
    cast_to: set[torch.dtype] = field(default_factory=set[torch.dtype])
    # Whether what was kept is what somebody's function gave, for each tensor.
    is_reduced: bool = False
    copies: Transfers = field(default_factory=Transfers)  # of what is kept, under way
    # How many of `numbers` there were, and the other way around: ours -> torch's.
    _inverse: tuple[int, dict[int, list[int]]] = field(init=False, default=(0, {}))

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Tell ``copy`` and ``pickle`` how to make it anew.

        Raises:
            NotStorableError: It has the history of a model that lives on here.
        """
        if self.history is not None:
            raise NotStorableError(
                "A recording that can be replayed belongs to its model, so it cannot "
                "be pickled or copied. Write it with recording.save(path), and read it "
                "with gradlib.load_recording(path)."
            )
        return object.__reduce_ex__(self, protocol)

    def ended(self, number: int) -> int:
        """Return the moment at which a pass ended, by our number; 0 if that is lost."""
        return self.happened.get(number, (-1, 0))[1]

    def torch_numbers(self, number: int) -> Sequence[int]:
        """Return torch's numbers of one of our passes: several if it ran others."""
        if len(self.numbers) > self._inverse[0]:
            numbers = self.numbers.copy()  # another thread may add to it
            inverse: dict[int, list[int]] = {}
            for torch_number, ours in numbers.items():
                inverse.setdefault(ours, []).append(torch_number)
            self._inverse = len(numbers), inverse
        return self._inverse[1].get(number, ())


BATCHED_PASS = "a pass with is_grads_batched"
"""What has no number."""

NO_INPUTS = Tree.of_call((), {})


class CallTrace:
    """One call of one module."""

    # Most calls need few of these, so what they share stands in the class.
    caller = -1  # the moment of the call that made it; -1 if outermost
    forward = 0
    inputs = NO_INPUTS  # of (args, kwargs)
    output: Tree | None = None
    parameters: Sequence[str] = ()  # its own
    # The inputs that are tensors, and own parameters, that require no grad.
    idle: Sequence[Key] = ()
    # The outputs that are tensors and require no grad, where others do.
    idle_outputs: Sequence[int] = ()
    # The inputs and outputs in which no tensor is seen: their classes are not opened.
    closed_inputs: Sequence[int] = ()
    closed_outputs: Sequence[int] = ()
    # Several where a checkpoint computed the call again, inside a backward pass.
    flows: Sequence[Flow] = ()
    # Our numbers of the reentrant checkpoints that compute it again.
    checkpoints: Set[int] = frozenset[int]()
    recomputed_in: int | None = None  # torch's number of the pass that did
    returned: Sequence[Key] = ()  # inputs and own parameters it returned as they were
    # The dtypes in which autograd sums up what several uses of a leaf's cast got; we
    # do, or a replay does, in that of the leaf.
    summed_in: Set[Any] = frozenset[Any]()
    # What it takes to compute it again; None where too little was kept.
    module: nn.Module | None = None
    world: World | None = None
    # The modules of the model that it was given, by their place among the inputs.
    given_modules: Mapping[int, nn.Module] = MappingProxyType({})
    # Where no state was kept: whether there are weights or buffers in its module.
    holds_state = False
    # In a recording that was loaded: which of these had NaN or inf, as
    # `nonfinite_state` gives it.
    nonfinite_state: Mapping[str, int] | None = None
    calls_others = False
    has_tangents = False  # whether what it returned had any, made in a graph
    hooks_inside = False  # whether somebody set hooks of autograd's while it ran
    # Whether its shares are from before what casts a leaf: autocast does so for others.
    passes_over_casts = False
    no_pass_because = ""

    def __init__(
        self, block: Block, name: str, index: int, module_type: str, moment: int
    ) -> None:
        """Begin with what is known when the call begins."""
        self.block = block
        self.name = name
        self.index = index
        self.module_type = module_type
        self.moment = moment  # it grows from call to call

    def output_leaves(self) -> list[Any]:
        """Return the leaves of what it returned: none if it has not."""
        return self.output.leaves if self.output else []

    def leaves(self) -> list[Any]:
        """Return those of what it was given, and of what it returned."""
        return [*self.inputs.leaves, *self.output_leaves()]

    def passes(self) -> list[int]:
        """Return our numbers of the backward passes that reached the call."""
        surely = {
            it
            for flow in self.flows
            for grads in (*flow.gathered("outputs").values(), flow.gone_through)
            for it in grads
        }
        perhaps = {
            it
            for flow in self.flows
            for grads in flow.shares.values()
            for it in grads
            if it not in surely
        }
        numbers = self.block.numbers
        found = {numbers[it] for it in surely}
        others = {numbers[it] for it in perhaps} - found
        return sorted(found | {it for it in others if self.given("shares", it)})

    def graph_before(self, number: int) -> str | None:
        """Return which pass had create_graph=True before one, in words, if any had.

        One that runs inside of another ends first, and the other may go on through its
        graph, as where a checkpoint computes forces again.
        """
        ended = self.block.ended(number)
        for it in self.passes():
            is_before = it < number or self.block.ended(it) < ended
            if it in self.block.with_graph and is_before:
                return f"pass {it}"
        return BATCHED_PASS if self.is_behind_batched(number) else None

    def is_behind_batched(self, number: int) -> bool:
        """Tell whether a batched pass had create_graph=True before another."""
        behind = [flow.behind_batched for flow in self.flows]
        return any(it is not None and it <= number for it in behind)

    def given(self, gathered: str, number: int) -> set[Key]:
        """Return what got a gradient in one backward pass."""
        dropped = self._dropped(number) if gathered == "shares" else set[Key]()
        return self._reached(gathered, number) - dropped

    def _reached(self, gathered: str, number: int) -> set[Key]:
        asked = self.block.torch_numbers(number)
        return {
            key
            for flow in self.flows
            for key, grads in flow.gathered(gathered).items()
            if any(torch_number in grads for torch_number in asked)
        }

    def _dropped(self, number: int) -> set[Key]:
        """Return that of which a pass has dropped what it computed.

        The backward of somebody's Function computes a gradient for each of its inputs,
        also in a pass that was asked for those of others.
        """
        hooked = {key for flow in self.flows for key in flow.totals}
        return hooked - self._reached("totals", number)

    def gradients(self, gathered: str, number: int) -> dict[Key, Any]:
        """Return the gradients of one field of `Flow` in one backward pass."""
        asked = self.block.torch_numbers(number)
        found: dict[Key, list[Any]] = {}
        for key, several in self._gathered(gathered).items():
            for grads in several:
                parts = [grads[it] for it in asked if it in grads]
                if not parts:
                    continue
                found.setdefault(key, []).extend(parts)
                if gathered == "totals":
                    break  # what a checkpoint makes of a tensor hands on the same
        if gathered == "shares":
            for key in self._dropped(number):
                found.pop(key, None)
        wholes = {key: whole(parts) for key, parts in found.items()}
        self.block.copies.wait()
        return wholes

    def _gathered(self, gathered: str) -> dict[Key, list[Grads]]:
        """Return what the computations have gathered: a parameter's total is shared."""
        found: dict[Key, list[Grads]] = {}
        for flow in self.flows:
            for key, grads in flow.gathered(gathered).items():
                several = found.setdefault(key, [])
                if not any(grads is known for known in several):
                    several.append(grads)
        return found
