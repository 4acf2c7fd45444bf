"""One run of a module without a hook: what it got, and what it returned."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from gradlib.edges import Edge, edge_of
from gradlib.hook_reports.tensor_names import (
    Names,
    each_inner_output,
    wakened,
    with_gradients,
)
from gradlib.hook_reports.trial import Trial, requires_grad
from gradlib.recording.kept import version_of
from gradlib.tree import tensors_in


class PlainRun:
    """A trial that has run forward without a hook.

    Attributes:
        trial: The copy that has run.
        given: The positional arguments, as the forward pre-hooks left them.
        asked: Whether each of these required grad, before the module itself ran.
        keywords: The names of the keyword arguments that then hold tensors.
        output: What the module returned.
        seen: What its hooks see as output, which a ``__call__`` of its own may change.
        names_at: For each edge, the names of the tensors whose gradient flows there.
        inner: For each edge, the name of the tensor that an inner module returned.
        in_several_places: The names of the inputs that are the same tensor as another
            input, or as one of the module's.
    """

    def __init__(self, trial: Trial, names: Names) -> None:
        """Run the trial; what it raises comes through."""
        self.trial = trial
        self._names = names
        self.names_at: dict[Edge, set[str]] = defaultdict(set)
        self.inner: dict[Edge, str] = {}
        self._note_inputs()
        self._run()
        for name, tensor in (*with_gradients(trial.module), *wakened(trial, names)):
            self.names_at[edge_of(tensor)].add(name)

    def _note_inputs(self) -> None:
        """Note the names of inputs, before the module may overwrite them."""
        trial, names = self.trial, self._names
        for name, tensor in names.differentiable_inputs(trial).items():
            self.names_at[edge_of(tensor)].add(name)
        # Each tensor that is an input twice, its version, and both names.
        self._twice = [
            (it, version_of(it), pair) for it, *pair in _in_two_places(trial, names)
        ]
        own = {id(it) for _, it in with_gradients(trial.module)}
        twice = {name for *_, pair in self._twice for name in pair}
        self.in_several_places = twice | {
            names.of_input(trial.inputs, place)
            for place, it in enumerate(trial.inputs.leaves)
            if id(it) in own
        }

    def _run(self) -> None:
        """Run; note what the module got, and what inner modules returned."""
        trial = self.trial
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        asked: list[list[bool]] = []

        def take_given(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            given.append((args, kwargs))
            asked.append([requires_grad(it) for it in args])

        def take_inner(name: str, tensor: Tensor) -> None:
            self.inner[edge_of(tensor)] = name
            self.names_at[edge_of(tensor)].add(name)

        trial.module.register_forward_pre_hook(take_given, with_kwargs=True)
        each_inner_output(trial.module, take_inner)
        self.output = trial.run(backward=False)
        self.seen = trial.seen
        # A module may call itself; one with a __call__ of its own may run no pre-hook.
        self.given, kwargs = (*given, trial.given)[0]
        self.asked = (*asked, [*map(requires_grad, self.given)])[0]
        self.keywords = [key for key, value in kwargs.items() if tensors_in(value)]

    def overwritten(self) -> Iterator[list[str]]:
        """Yield the names of each two inputs that are one tensor, and overwritten."""
        for tensor, version, pair in self._twice:
            if version_of(tensor) > version:
                yield pair

    def position(self, field: str, i: int) -> tuple[str, Any]:
        """Return the name and value of the argument or output that an entry is for."""
        if field == "grad_input":
            place = self.argument_at(i)
            name = f"args[{i}]" if place is None else self._names.arguments[place]
            return name, self.given[i]
        name = "output" if self.seen is self.output else "what forward returned"
        output = self.seen.build()
        if isinstance(output, tuple):
            return f"{name}[{i}]", cast("tuple[Any, ...]", output)[i]
        return name, output

    def argument_at(self, i: int) -> int | None:
        """Return which argument of the caller the module got in a place, if any."""
        value, (args, _) = self.given[i], self.trial.given
        places = [j for j, it in enumerate(args) if it is value]
        return i if i in places else next(iter(places), None)


def _in_two_places(trial: Trial, names: Names) -> Iterator[tuple[Tensor, str, str]]:
    """Yield each input that is one tensor with an earlier one, and both names."""
    first: dict[int, str] = {}
    for place, it in enumerate(trial.inputs.leaves):
        if isinstance(it, Tensor):
            name = names.of_input(trial.inputs, place)
            other = first.setdefault(id(it), name)
            if other != name:
                yield it, other, name
