"""Calls the function again, in float64, and leaves everything as it was.

During a call its modules have copies of their parameters, buffers and other attributes,
and torch's generators start in the state that they had for the first call.
"""

from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradlib.double import wider
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.generators import RandomState
from gradlib.jacobian.lifted import Lifted
from gradlib.jacobian.own_state import copied, own_state
from gradlib.opaque import is_tensor
from gradlib.private.compiling import run_eagerly
from gradlib.tree import Tree

Steps: TypeAlias = Sequence[tuple[float, Mapping[int | str, Tensor]]]
"""How far to move, and along what: inputs by their place, parameters by their name."""


@dataclass
class Called:
    """The result of a call of the function.

    Attributes:
        outputs: Its outputs.
        leaves: The inputs, by place, and parameters, by name, that it was called with
            and that gradients can be taken of.
        lifted: What was noted during the call.
        again: Gives the function's modules the state of that call. A backward pass
            through its graph may call them, as that of a checkpoint does.
    """

    outputs: Tree
    leaves: dict[int | str, Tensor]
    lifted: Lifted
    again: Callable[[], AbstractContextManager[object]]

    def without_graph(self) -> "Called":
        """Return the same with detached outputs, to free the memory of the graph."""
        leaves = self.outputs.leaves
        values = [it.detach() if is_tensor(it) else it for it in leaves]
        return Called(Tree(values, self.outputs.spec), {}, self.lifted, nullcontext)


def call_again(
    arguments: Arguments,
    random: RandomState,
    moves: Steps,
    *,
    order: Tensor | None,
    double: bool,
    graph: bool,
    watched: bool = True,
    times: int = 1,
    widened: MutableMapping[Tensor, Tensor],
) -> Called:
    """Call the function, with inputs and parameters moved a little.

    Args:
        arguments: The call.
        random: The states of torch's generators to start from.
        moves: How far inputs and parameters move, and along what.
        order: The numbers of the samples to call with, ``(batch,)``; ``None`` for all
            in their order.
        double: Whether to compute everything in float64.
        graph: Whether autograd records the call. The inputs require grad as in the
            first call either way, for functions that ask.
        watched: Whether, without `double`, calls of torch are watched for generators
            passed to them. Watching may change which function is called, as where one
            of torch.nn.functional was replaced.
        times: How often in a row; each call has the module state of the one before.
        widened: Each parameter in its wider dtype, kept for the next calls, as making
            it takes as long as many calls. Parameters of modules that the function
            itself makes are dropped after each call.
    """
    change = _doubled if double else copied
    leaves: dict[int | str, Tensor] = {}
    lifted = Lifted(random.own)
    seeing = lifted if double else random.own if watched else nullcontext()
    named = leaves if graph else None
    parameter_of = _moved_parameters(arguments, moves, change, widened, named)

    @contextmanager
    def as_called() -> Generator[None]:
        widening = Lifted(random.own) if double else nullcontext()
        with run_eagerly(), own_state(arguments.fn, change, parameter_of), widening:
            yield

    with (
        torch.set_grad_enabled(graph),
        run_eagerly(),
        own_state(arguments.fn, change, parameter_of),
    ):
        returned: Any = None
        for _ in range(times):
            given = _given(arguments, moves, order, change)
            if graph:
                for place, it in given.items():
                    if it.requires_grad:
                        leaves[place] = it
                        given[place] = it.clone()
            random.set()
            every = dict(enumerate(arguments.inputs.leaves)) | given
            args = arguments.inputs.filled(every)
            with seeing:
                returned = arguments.fn(*args)
        outputs = Tree.of(returned)
    return Called(outputs, leaves, lifted, as_called)


def _moved_parameters(
    arguments: Arguments,
    moves: Steps,
    change: Callable[[Tensor], Tensor],
    widened: MutableMapping[Tensor, Tensor],
    named: dict[int | str, Tensor] | None,
) -> Callable[[nn.Parameter], nn.Parameter]:
    """Return a function from a parameter to its stand-in, which it notes in `named`."""
    names: dict[int, str] = {}
    asks = named is not None or arguments.of_parameters
    if asks and isinstance(arguments.fn, nn.Module):
        names = {id(it): name for name, it in arguments.fn.named_parameters()}
    made_of: dict[int, nn.Parameter] = {}

    def own_value(original: Tensor, name: str | None) -> Tensor:
        if name is not None and any(name in along for _, along in moves):
            return change(original)
        value = widened.get(original)
        if value is None or value._version:  # an earlier call has written to it
            value = widened[original] = change(original)
        return value

    def parameter_of(original: nn.Parameter) -> nn.Parameter:
        if id(original) not in made_of:
            name = names.get(id(original))
            value = own_value(original, name)
            if name is not None:
                _move(value, moves, name)
            made_of[id(original)] = nn.Parameter(value, original.requires_grad)
            if name is not None and named is not None:
                named[name] = made_of[id(original)]
        return made_of[id(original)]

    return parameter_of


def _given(
    arguments: Arguments,
    moves: Steps,
    order: Tensor | None,
    change: Callable[[Tensor], Tensor],
) -> dict[int, Tensor]:
    """Return the stand-in of each input that is a tensor, by place."""
    given: dict[int, Tensor] = {}
    tracked = arguments.tracked()
    for place, leaf in enumerate(arguments.inputs.leaves):
        if is_tensor(leaf):
            made = change(leaf)
            if order is not None and not arguments.shared[place]:
                made = made[order.to(made.device)]
            _move(made, moves, place)
            given[place] = made.requires_grad_(place in tracked)
    return given


def _move(
    value: Tensor,
    moves: Steps,
    key: int | str,
) -> None:
    for length, along in moves:
        if key in along:
            value.add_(along[key], alpha=length)


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wider(tensor.dtype), copy=True)
