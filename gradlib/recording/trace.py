"""What the recorder writes down of a block and its calls; `call` presents it."""

import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradlib.errors import NotStorableError
from gradlib.recording.flow import Flow, Grads, Key, Left, less, whole
from gradlib.recording.history import History
from gradlib.recording.world import World
from gradlib.tree import Tree
from gradlib.values import Transfers

GRADIENTS = ("grad_input", "grad_output", "param_grads")
FIELDS = ("args", "output", *GRADIENTS)
"""What `keep` may name; kwargs are kept with args, and totals with their shares."""

NOT_CHOSEN = "record(..., modules=...) left it out"
"""Why a module was not recorded: the user's `modules` did not choose it."""


@dataclass(slots=True)
class Block:
    """What all calls of one block have in common."""

    fields: frozenset[str]  # those of `FIELDS` that were kept
    # torch's number of each backward pass that reached a call -> ours.
    numbers: dict[int, int]
    # Our numbers of the passes with create_graph=True: later ones may go through what
    # these made.
    with_graph: set[int] = field(default_factory=set[int])
    # torch's numbers of the passes with is_grads_batched: they cannot be kept.
    batched: set[int] = field(default_factory=set[int])
    captured: set[int] = field(default_factory=set[int])  # and those in a CUDA graph
    history: History | None = None  # without it no call can be replayed
    # The modules that were not recorded, and why.
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    # By our number of a pass: the moment of the call inside of which it ran, or -1, and
    # the moment at which it ended, or, if it raised, began.
    happened: dict[int, tuple[int, int]] = field(
        default_factory=dict[int, tuple[int, int]]
    )
    # Our numbers of the passes that raised, or still run.
    unfinished: set[int] = field(default_factory=set[int])
    # By our number of a pass: the autocast it ran under, by device type.
    autocast: dict[int, dict[str, torch.dtype]] = field(
        default_factory=dict[int, dict[str, torch.dtype]]
    )
    # How many hooks others had set in this process: by forward, when it ended, and by
    # our number of a pass, when it began.
    hooks_at_end: dict[int, int] = field(default_factory=dict[int, int])
    hooks_at_pass: dict[int, int] = field(default_factory=dict[int, int])
    # The dtypes in which autocast computed inside calls; they may return another.
    cast_to: set[torch.dtype] = field(default_factory=set[torch.dtype])
    # Whether the results of the user's `reduce` were kept instead of tensors.
    is_reduced: bool = False
    copies: Transfers = field(default_factory=Transfers)  # of kept tensors, under way
    # How many `numbers` there were, and their inverse then: ours -> torch's.
    _inverse: tuple[int, dict[int, list[int]]] = field(init=False, default=(0, {}))

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Tell ``copy`` and ``pickle`` how to make it anew.

        Raises:
            NotStorableError: It can be replayed, and so belongs to its model.
        """
        if self.history is not None:
            raise NotStorableError(
                "A recording that can be replayed belongs to its model, so it cannot "
                "be pickled or copied. Write it with recording.save(path), and read it "
                "with gradlib.load_recording(path)."
            )
        return object.__reduce_ex__(self, protocol)

    def ended(self, number: int) -> int:
        """Return the moment at which a pass ended, by our number; 0 if unknown."""
        return self.happened.get(number, (-1, 0))[1]

    def torch_numbers(self, number: int) -> Sequence[int]:
        """Return torch's numbers of a pass: several if checkpoints ran some inside."""
        if len(self.numbers) > self._inverse[0]:
            numbers = self.numbers.copy()  # another thread may add to it
            inverse: dict[int, list[int]] = {}
            for torch_number, ours in numbers.items():
                inverse.setdefault(ours, []).append(torch_number)
            self._inverse = len(numbers), inverse
        return self._inverse[1].get(number, ())

    def was_hooked_between(self, forward: int, number: int) -> bool:
        """Tell whether others set hooks after a forward and before a pass began."""
        at_end = self.hooks_at_end.get(forward)
        return at_end is not None and self.hooks_at_pass.get(number, 0) > at_end


BATCHED_PASS = "a pass with is_grads_batched"
"""What a message calls the passes that have no number."""

NO_INPUTS = Tree.of(((), dict[str, Any]()))


class CallTrace:
    """One call of one module."""

    # Most calls need few of these, so the class holds the defaults.
    caller = -1  # the moment of the call that made it; -1 if outermost
    forward = 0
    inputs = NO_INPUTS  # of (args, kwargs)
    output: Tree | None = None
    parameters: Sequence[str] = ()  # the names of its module's own
    # The tensor inputs and own parameters that require no grad.
    idle: Sequence[Key] = ()
    # The tensor outputs that require no grad, where other outputs do.
    idle_outputs: Sequence[int] = ()
    # The inputs and outputs of classes that are not opened: no tensor in them is seen.
    closed_inputs: Sequence[int] = ()
    closed_outputs: Sequence[int] = ()
    # Several where a checkpoint computed the call again, inside a backward pass.
    flows: Sequence[Flow] = ()
    # The numbers of the reentrant checkpoints that compute it again.
    checkpoints: Set[int] = frozenset[int]()
    # torch's number of the pass in which a checkpoint computed it again.
    recomputed_in: int | None = None
    returned: Sequence[Key] = ()  # inputs and own parameters it returned as they were
    # The dtypes in which autograd sums the gradients of several uses of a leaf's cast;
    # the recorder, or a replay, sums them in the leaf's dtype.
    summed_in: Set[Any] = frozenset[Any]()
    # What a replay needs; None where too little was kept.
    module: nn.Module | None = None
    world: World | None = None
    # The inputs that are modules of the model, by place.
    given_modules: Mapping[int, nn.Module] = MappingProxyType({})
    # The inputs that stood in an attribute too, by place.
    held_inputs: Mapping[int, weakref.ref[Tensor]] = MappingProxyType({})
    # Where no state was kept: whether its module holds weights or buffers.
    holds_state = False
    # In a loaded recording: which weights and buffers had NaN or inf, as the function
    # `nonfinite_state` gives it.
    nonfinite_state: Mapping[str, int] | None = None
    calls_others = False
    has_tangents = False  # whether tangents of its outputs have a graph
    hooks_inside = False  # whether autograd hooks of others were set while it ran
    # Whether a leaf's share is taken at its cast, which other calls may use too under
    # autocast: so it is from before the cast's backward.
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
        """Return the leaves of the output; none if the call has not returned."""
        return self.output.leaves if self.output else []

    def leaves(self) -> list[Any]:
        """Return the leaves of the inputs and of the output."""
        return [*self.inputs.leaves, *self.output_leaves()]

    def never_asked(self) -> set[Key]:
        """Return the keys of what required no grad, not even in a recomputation."""
        return set(self.idle).difference(*(flow.shares for flow in self.flows))

    def passed_parameters(self) -> dict[int, str]:
        """Return the name of each input that is an own parameter too."""
        found: dict[int, str] = {}
        for flow in self.flows:
            names = {id(grads): key for key, grads in flow.shares.items()}
            for key, grads in flow.shares.items():
                name = names[id(grads)]  # both have one share; parameters come last
                if isinstance(key, int) and isinstance(name, str):
                    found[key] = name
        return found

    def passes(self) -> list[int]:
        """Return our numbers of the backward passes that reached the call."""
        surely = {
            it
            for flow in self.flows
            for grads in (
                *flow.gathered("outputs").values(),
                flow.gone_through,
                flow.missed,
            )
            for it in grads
        }
        perhaps = {
            it for flow in self.flows for grads in flow.shares.values() for it in grads
        }
        numbers = self.block.numbers
        found = {numbers[it] for it in surely}
        others = {numbers[it] for it in perhaps} - found
        return sorted(found | {it for it in others if self.given("shares", it)})

    def graph_before(self, number: int) -> str | None:
        """Name an earlier pass with create_graph=True, if there was one.

        A pass inside another ends first, and the outer one may go on through its graph,
        as where a checkpoint computes forces again.
        """
        ended = self.block.ended(number)
        for it in self.passes():
            is_before = it < number or self.block.ended(it) < ended
            if it in self.block.with_graph and is_before:
                return f"pass {it}"
        return BATCHED_PASS if self.is_behind_batched(number) else None

    def is_behind_batched(self, number: int) -> bool:
        """Tell whether a batched pass with create_graph=True came before a pass."""
        behind = [flow.behind_batched for flow in self.flows]
        return any(it is not None and it <= number for it in behind)

    def has_missed(self, number: int) -> bool:
        """Tell whether a pass went through what the call put elsewhere, unseen."""
        asked = self.block.torch_numbers(number)
        return any(it in flow.missed for flow in self.flows for it in asked)

    def given(self, gathered: str, number: int) -> set[Key]:
        """Return the keys that got a gradient in one backward pass."""
        return self._reached(gathered, number) - self._dropped(gathered, number)

    def _reached(self, gathered: str, number: int) -> set[Key]:
        asked = self.block.torch_numbers(number)
        return {
            key
            for flow in self.flows
            for key, grads in flow.gathered(gathered).items()
            if any(torch_number in grads for torch_number in asked)
        }

    def _dropped(self, gathered: str, number: int) -> set[Key]:
        """Return the keys whose share a pass computed and then dropped.

        The backward of a custom Function computes a gradient for each of its inputs,
        also in a pass that was asked for other gradients only.
        """
        if gathered != "shares":
            return set()
        hooked = {key for flow in self.flows for key in flow.totals}
        return hooked - self._reached("totals", number)

    def gradients(self, gathered: str, number: int) -> dict[Key, Any]:
        """Return the gradients of one field of `Flow` in one backward pass."""
        asked = self.block.torch_numbers(number)
        dropped = self._dropped(gathered, number)
        wholes: dict[Key, Any] = {}
        for key, several in self._gathered(gathered).items():
            found = [[grads[it] for it in asked if it in grads] for grads in several]
            parts = [it for it in found if it]
            if gathered == "totals":
                del parts[1:]  # a checkpoint's copy of a tensor hands on the same total
            if parts and key not in dropped:
                wholes[key] = whole([*chain.from_iterable(parts)])
        self.block.copies.wait()
        return wholes

    def arrived(self, number: int) -> dict[Key | Left, Any]:
        """Return the gradients that came from outside of the call in one backward pass.

        They came to its outputs, and to the tensors that it left in its module.
        """
        found: dict[Key | Left, Any] = {**self.gradients("outputs", number)}
        asked = self.block.torch_numbers(number)
        seen: set[int] = set()
        for flow in self.flows:
            for key, (grads, own) in flow.alone.items():
                found.pop(key, None)
                if id(grads) in seen:  # the tensor stands in another place too
                    continue
                seen.add(id(grads))
                parts = [less(grads[it], own.get(it)) for it in asked if it in grads]
                if (grad := whole([it for it in parts if it is not None])) is not None:
                    found[key] = grad
        return found

    def _gathered(self, gathered: str) -> dict[Key, list[Grads]]:
        """Return what all computations gathered, by key; a shared total only once."""
        found: dict[Key, list[Grads]] = {}
        for flow in self.flows:
            for key, grads in flow.gathered(gathered).items():
                several = found.setdefault(key, [])
                if not any(grads is known for known in several):
                    several.append(grads)
        return found
