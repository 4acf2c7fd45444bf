"""The inputs and own parameters of a replayed call, and the gradients they get."""

from typing import Any

from torch import Tensor, nn

from gradlib.opaque import keep_opaque
from gradlib.private.modules import own_parameters
from gradlib.recording.attributes import Change, Copies
from gradlib.recording.flow import Key
from gradlib.recording.go_back import take_share
from gradlib.recording.places import input_name
from gradlib.recording.trace import CallTrace
from gradlib.tree import Tree
from gradlib.values import came_from, clone, keep


class Leaves:
    """The leaves of a replayed call: what it is differentiated with respect to.

    Attributes:
        every: The leaves, by place among the inputs or by name.
        given: What the call is given for those that are inputs, by place.
    """

    def __init__(self, trace: CallTrace) -> None:
        """Begin with none of those that `trace` tells of."""
        self._trace = trace
        self._not_asked = trace.never_asked()
        self.every: dict[Key, Tensor] = {}
        self.given: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}  # by id of the leaf
        self._versions: dict[str, int] = {}  # of own parameters, as the call began

    def take_parameters(self, module: nn.Module) -> None:
        """Have a pass take the shares of the called module's own parameters."""
        own = own_parameters(module)
        for name in self._trace.parameters:
            parameter = own.get(name)
            if parameter is not None and name not in self._not_asked:
                # Under a checkpoint it may have required no grad at first.
                parameter.requires_grad_()
                if all(parameter is not it for it in self.every.values()):
                    take_share(self._shares, parameter, parameter)
                self.every[name] = parameter

    def copied_arguments(
        self, change: Change, copies: Copies
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments: the module may overwrite these.

        Args:
            change: Maps a recorded tensor to the one to use.
            copies: The copies of what stood in attributes, to which some are added.
        """
        trace = self._trace
        as_parameter = trace.passed_parameters()
        made: dict[int, tuple[Tensor, Tensor]] = {}  # the leaf, and what is given
        filled: list[Any] = []
        for place, kept in enumerate(trace.inputs.leaves):
            if not isinstance(kept, Tensor):
                module = trace.given_modules.get(place)
                filled.append(keep_opaque(kept) if module is None else module)
                continue
            if place in as_parameter:
                leaf = given = self.every[as_parameter[place]]
            elif id(kept) in made:
                leaf, given = made[id(kept)]
            else:
                leaf = given = keep(change(kept)).to(came_from(kept))
                if place not in self._not_asked:
                    leaf.requires_grad_()
                    given = clone(leaf)
                    take_share(self._shares, leaf, given)
                made[id(kept)] = leaf, given
            if (original := trace.held_inputs.get(place)) is not None:
                copies.know_given(original, given)
            filled.append(given)
            if place not in self._not_asked:
                self.every[place], self.given[place] = leaf, given
        return Tree(filled, trace.inputs.spec).build()

    def note_versions(self) -> None:
        """Note what `written` compares with, as the call begins."""
        own = self._trace.parameters
        self._versions = {it: self.every[it]._version for it in own if it in self.every}

    def forget_shares(self) -> None:
        """Begin anew, after passes that the call itself has run, as for forces."""
        self._shares.clear()

    def shares(self) -> dict[Key, Tensor | None]:
        """Return the gradient that each leaf got."""
        return {key: self._shares.get(id(leaf)) for key, leaf in self.every.items()}

    def overwritten(self) -> tuple[str, ...]:
        """Return the names of the inputs that the call has overwritten: ``args[0]``."""
        return tuple(
            input_name(self._trace, place)
            for place, given in self.given.items()
            if given._version
        )

    def written(self) -> tuple[str, ...]:
        """Return the own parameters to which the call wrote, unseen by autograd."""
        return tuple(
            name
            for name, version in self._versions.items()
            if self.every[name]._version != version
        )
