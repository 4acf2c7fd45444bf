"""Calling the function again, in float64, and leaving everything as it was.

The modules it calls get copies of their parameters, buffers and other attributes while
it runs, and torch's generators begin where they did for the first call.
"""

import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from gradlib.double import Double, in_double, wider
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.generators import Met, RandomState
from gradlib.module_hook import without_ours
from gradlib.private import (
    BUFFERS,
    FORWARD_HOOKS,
    PARAMETERS,
    never_compiled,
    no_function_modes,
    own_buffers,
    own_parameters,
    run_eagerly,
)
from gradlib.recording.attributes import Copies, attributes
from gradlib.tree import Tree, tensors_in
from gradlib.values import keep, same_values


@dataclass
class Called:
    """What a call of the function gave.

    Attributes:
        outputs: Its outputs.
        leaves: The tensors it was called with that can be differentiated for: by
            place the inputs, by name the parameters.
        lifted: What was seen meanwhile.
    """

    outputs: Tree
    leaves: dict[int | str, Tensor]
    lifted: "Lifted"


def call_again(
    arguments: Arguments,
    random: RandomState,
    moves: Sequence[tuple[float, Mapping[int | str, Tensor]]],
    *,
    order: Tensor | None = None,
    double: bool = True,
    graph: bool = True,
    widened: dict[int, Tensor] | None = None,
) -> Called:
    """Call the function, with inputs and parameters moved a little.

    Args:
        arguments: The call.
        random: Where torch's generators stand when it begins.
        moves: How far inputs, by place, and parameters, by name, go along what.
        order: Which samples it is called with, ``(batch,)``; ``None`` for all as they
            are.
        double: Whether everything is computed in float64.
        graph: Whether autograd records it.
        widened: The parameters in that dtype, by their ids, for the next calls too: to
            make them takes as long as many a call.
    """
    change = _doubled if double else _copied
    leaves: dict[int | str, Tensor] = {}
    given: list[Any] = list(arguments.inputs.leaves)
    lifted = Lifted(random.own)
    names: dict[int, str] = {}
    if isinstance(arguments.fn, nn.Module):
        names = {id(it): name for name, it in arguments.fn.named_parameters()}
    made_of: dict[int, nn.Parameter] = {}

    def own_value(original: Tensor, name: str | None) -> Tensor:
        if widened is None or any(name in along for _, along in moves):
            return change(original)
        value = widened.get(id(original))
        if value is None or value._version:  # an earlier call has written to it
            value = widened[id(original)] = change(original)
        return value

    def parameter_of(original: nn.Parameter) -> nn.Parameter:
        if id(original) not in made_of:
            name = names.get(id(original))
            value = own_value(original, name)
            if name is not None:
                _move(value, moves, name)
            made_of[id(original)] = nn.Parameter(value, original.requires_grad)
            if name is not None and graph:
                leaves[name] = made_of[id(original)]
        return made_of[id(original)]

    with (
        torch.set_grad_enabled(graph),
        run_eagerly(),
        _own_state(arguments.fn, change, parameter_of),
    ):
        for place, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                made = change(leaf)
                if order is not None and not arguments.shared[place]:
                    made = made[order.to(made.device)]
                _move(made, moves, place)
                if graph and made.is_floating_point():
                    leaves[place] = made.requires_grad_()
                    made = made.clone()
                given[place] = made
        random.set()
        args = Tree(given, arguments.inputs.spec).build()
        if double:
            with in_double(lifted):
                outputs = Tree.of(arguments.fn(*args))
        else:
            with random.own:
                outputs = Tree.of(arguments.fn(*args))
    return Called(outputs, leaves, lifted)


def _move(
    value: Tensor,
    moves: Sequence[tuple[float, Mapping[int | str, Tensor]]],
    key: int | str,
) -> None:
    for length, along in moves:
        if key in along:
            value.add_(along[key], alpha=length)


def modules_known_to(fn: object) -> list[nn.Module]:
    """Return the modules that a function may call, without calling it."""
    known: list[object] = [fn, getattr(fn, "__self__", None)]
    if isinstance(fn, partial):
        known += [fn.func, *fn.args, *fn.keywords.values()]
    for function in list(known):
        if isinstance(function, FunctionType):
            cells = function.__closure__ or ()
            known += [it.cell_contents for it in cells if _is_filled(it)]
            names = function.__code__.co_names
            known += [function.__globals__.get(name) for name in names]
    return [it for it in known if isinstance(it, nn.Module)]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextmanager
def state_kept(fn: Callable[..., Any]) -> Generator[None]:
    """Have what a function changes in its modules forgotten."""
    written: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def kept(parameter: nn.Parameter) -> nn.Parameter:
        written[id(parameter)] = parameter, keep(parameter)
        return parameter

    try:
        with _own_state(fn, _copied, kept):
            yield
    finally:
        for parameter, value in written.values():
            if not same_values(parameter, value):
                parameter.data.copy_(value)


def _doubled(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    to = wider(tensor.dtype)
    return tensor.clone() if to == tensor.dtype else tensor.to(to)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextmanager
def _own_state(
    fn: Callable[..., Any],
    change: Callable[[Tensor], Tensor],
    parameter_of: Callable[[nn.Parameter], nn.Parameter],
) -> Generator[None]:
    """Give every module that runs a state of its own, and take it away afterwards.

    One thread after the other, and only the modules that this thread runs: those of
    another are none of ours, and what two had exchanged at once nobody could put back.
    """
    here = threading.get_ident()
    before: dict[nn.Module, dict[str, Any]] = {}
    copies = Copies(change)
    scripted: list[tuple[Tensor, Tensor]] = []

    def meet(module: nn.Module) -> None:
        if module in before:
            return
        if isinstance(module, torch.jit.ScriptModule):  # it lets nobody exchange them
            before[module] = dict(vars(module))
            buffers = cast(Any, module).buffers(recurse=False)
            scripted.extend((it, it.detach().clone()) for it in buffers)
            return
        state = vars(module)
        before[module] = dict(state)
        own = own_parameters(module).values()
        if any(it is not None and is_lazy(it) for it in own):
            del before[module]  # the first call makes it, once and for all
            return
        parameters, buffers = dict(own_parameters(module)), dict(own_buffers(module))
        for name, parameter in parameters.items():
            if parameter is not None and not is_lazy(parameter):
                parameters[name] = parameter_of(parameter)
                copies.know(parameter, cast(Tensor, parameters[name]))
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = change(buffer)
                copies.know(buffer, cast(Tensor, buffers[name]))
        state[PARAMETERS], state[BUFFERS] = parameters, buffers
        for kind in FORWARD_HOOKS:
            state[kind] = without_ours(state[kind])

    def meet_all(module: nn.Module) -> None:
        if module in before:
            return
        known = len(before)
        for inner in cast(Any, module).modules():
            meet(inner)
        for inner in list(before)[known:]:  # they may hold any of the parameters
            for name, value in attributes(inner):
                vars(inner)[name] = copies.of(value)

    def before_forward(module: nn.Module, _args: object) -> None:
        if threading.get_ident() == here:
            with no_function_modes():  # what happens here is not the function's doing
                meet_all(module)

    never_compiled(before_forward, "gradlib gives each module a state of its own")
    with _EXCHANGING, warnings.catch_warnings():  # which is not for several threads
        # torch.compile says that it meets a global hook: it is ours, and harmless.
        warnings.filterwarnings("ignore", ".*when there are global hooks", UserWarning)
        handle = register_module_forward_pre_hook(before_forward)
        try:
            for module in modules_known_to(fn):
                meet_all(module)
            yield
        finally:
            handle.remove()
            for buffer, value in scripted:
                buffer.detach().copy_(value)
            for module, state in before.items():
                vars(module).clear()
                vars(module).update(state)


_EXCHANGING = threading.RLock()


# Functions of torch after which autograd knows nothing of what becomes of a value.
_LEAVES_AUTOGRAD: dict[Any, str] = {
    Tensor.detach: ".detach()",
    Tensor.detach_: ".detach_()",
    Tensor.numpy: ".numpy()",
    Tensor.item: ".item()",
    cast(Any, Tensor).tolist: ".tolist()",
    Tensor.__float__: "float()",
    cast(Any, Tensor).__array__: "a NumPy function",
    cast(Any, Tensor.data).__get__: ".data",
}

# Where an integer says which entry is meant, and no amount.
_INDEXING = frozenset(
    {
        Tensor.__getitem__,
        Tensor.index_select,
        Tensor.gather,
        Tensor.take,
        Tensor.take_along_dim,
        torch.index_select,
        torch.gather,
        torch.take,
        torch.take_along_dim,
        torch.nn.functional.embedding,
        torch.embedding,
        Tensor.scatter,
        torch.scatter,
    }
)

_CASTS = frozenset(
    {
        *(Tensor.int, Tensor.long, Tensor.short, Tensor.char, Tensor.byte),
        *(Tensor.to, Tensor.type, Tensor.type_as),
    }
)


@dataclass
class _Cast:
    """Numbers that became integers."""

    where: str
    sums: Tensor  # of the numbers, to see whether they depend on the input
    whole: list[Tensor] = field(default_factory=list[Tensor])
    used: bool = False  # as numbers again


class Lifted(Double):
    """Widens the tensors too that a function brings along, and sees what it does."""

    def __init__(self, generators: Met) -> None:
        """Begin with nothing seen."""
        super().__init__()
        self._generators = generators
        self.left: dict[str, None] = {}  # where values left autograd
        self.casts: list[_Cast] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function with everything in float64."""
        kwargs = kwargs or {}
        self._generators.meet(kwargs)
        if func in _LEAVES_AUTOGRAD:
            self.left[f"{_LEAVES_AUTOGRAD[func]} in {_place()}"] = None
        writes = _writes(func)
        if writes or any(_is_narrow(it) for it in tensors_in((args, kwargs))):
            first, rest = args[:writes], args[writes:]
            args = (*first, *map(_lifted, rest))
            out = kwargs.get("out")
            kwargs = {name: _lifted(value) for name, value in kwargs.items()}
            if out is not None:
                kwargs["out"] = out
        result = super().__torch_function__(func, types, args, kwargs)
        self._look_for_casts(func, args, result)
        return result

    def _look_for_casts(
        self, func: Callable[..., Any], args: tuple[Any, ...], result: Any
    ) -> None:
        if not isinstance(result, Tensor):
            return
        whole = not result.dtype.is_floating_point and not result.is_complex()
        whole = whole and result.dtype != torch.bool
        if whole and func in _CASTS and args[0].is_floating_point():
            sums = args[0].detach().sum(dtype=torch.float64)
            self.casts.append(_Cast(_place(), sums, [result]))
            return
        if not self.casts or func in _INDEXING:
            return
        given = {id(it) for it in tensors_in(args)}
        for cast_ in self.casts:
            if any(id(it) in given for it in cast_.whole):
                if whole:
                    cast_.whole.append(result)
                elif result.is_floating_point():
                    cast_.used = True


def _writes(func: Callable[..., Any]) -> int:
    """Return 1 for a function that writes into its first argument, else 0."""
    name = getattr(func, "__name__", "")
    return int(name == "__setitem__" or (name.endswith("_") and name[-2:] != "__"))


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(wider(value.dtype)) if _is_narrow(value) else value
    kind = type(cast(object, value))
    return cast(Any, kind)(map(_lifted, value)) if kind in (list, tuple) else value


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _place() -> str:
    """Return the line of the function that is running: neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        file = frame.filename.replace("\\", "/")
        if not any(part in file for part in _NOT_THEIRS):
            return f"{file.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "an unknown place"


_NOT_THEIRS = ("/torch/", "/gradlib/jacobian/", "/gradlib/double.py", "/contextlib.py")
